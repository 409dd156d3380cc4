"""Builds every image that the tests in this folder use, offline, and puts them into the nodes of the bundled cluster.

    e2e/images.py                 all of them; takes seconds when nothing has changed
    e2e/images.py larder payload  some of them
    e2e/images.py --list          their names

The Containerfiles of images/ are built as they are, on the bundled Debian base by its digest; those of e2e/images/
stand for what others publish. An image is kept under a key of all that went into it, and a node is sent only the blobs
that it lacks. Needs root, and cluster/build.sh to have run. Two at a time wait for each other.
"""

import argparse
import contextlib
import fcntl
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
CLUSTER = REPOSITORY / "e2e" / "cluster"
CACHE = Path(
    os.environ.get("LARDER_E2E_DIR")
    or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "larder-e2e"
)
TAG = "dev"
BASE_NAME = "localhost/debian-python"
OCI = "application/vnd.oci.image."


@dataclass(frozen=True, slots=True)
class Image:
    """One image. `inputs` are files of the repository that it copies; `trees` are what cluster/build.sh unpacked."""

    name: str
    containerfile: str
    inputs: tuple[str, ...] = ()
    trees: tuple[str, ...] = ()
    has_wheel: bool = False

    @property
    def reference(self) -> str:
        """The name in a pod."""
        return f"localhost/{self.name}:{TAG}"


IMAGES = (
    Image(
        "larder",
        "images/larder/Containerfile",
        inputs=("requirements/runtime.txt", "requirements/operator.txt"),
        has_wheel=True,
    ),
    Image(
        "larder-payload",
        "images/payload/Containerfile",
        inputs=("requirements/runtime.txt",),
        has_wheel=True,
    ),
    Image("larder-router", "images/router/Containerfile", inputs=("requirements/local.txt",)),
    Image("engine-cpu", "e2e/images/engine-cpu/Containerfile"),
    Image(
        "stand-in",
        "e2e/images/stand-in/Containerfile",
        inputs=("e2e/images/stand-in/server.py", "e2e/images/stand-in/chunks.py"),
    ),
    Image(
        "stand-in-next",
        "e2e/images/stand-in-next/Containerfile",
        inputs=("e2e/images/stand-in/server.py", "e2e/images/stand-in/chunks.py"),
    ),
    Image("redis", "e2e/images/redis/Containerfile", trees=("redis",)),
)
PAYLOAD_PYTHONS = ("3.11", "3.12", "3.13")
"""As in images/payload/Containerfile."""
WHEEL_SOURCES = ("cacheservice", "operator", "pyproject.toml", "LICENSE")


def main() -> None:
    """Build and import what the command line names."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    flags.add_argument("name", nargs="*", choices=[[], *(image.name for image in IMAGES)])
    flags.add_argument("--list", action="store_true", help="only print the images' names")
    options = flags.parse_args()
    wanted = [image for image in IMAGES if not options.name or image.name in options.name]
    if options.list:
        print("\n".join(image.reference for image in wanted))
        return
    with _only_one():
        layouts = [(image, _built(image)) for image in wanted]
        with ThreadPoolExecutor() as pool:
            for _ in pool.map(partial(_import_all, layouts), _nodes()):
                pass


@contextlib.contextmanager
def _only_one() -> Iterator[None]:
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "images.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# Building


def _built(image: Image) -> Path:
    """The image's OCI layout, built unless it is there."""
    base_digest = _base_layout()
    wheel = _wheel() if image.has_wheel else None
    layout = CACHE / "images" / f"{image.name}-{_key(image, base_digest, wheel)}"
    if layout.exists():
        return layout
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        context = Path(scratch) / "context"
        _stage(image, wheel, context)
        made = Path(scratch) / "layout"
        name = f"{BASE_NAME}@{base_digest}"
        if base_digest not in _buildah("images", "--digests", "--format", "{{.Digest}}"):
            # From an archive: for a folder, Buildah 1.28 makes the image's name of the folder's.
            with tarfile.open(Path(scratch) / "base.tar", "w", dereference=True) as archive:
                archive.add(CACHE / "images" / "base", ".")
            _buildah("pull", "--quiet", f"oci-archive:{scratch}/base.tar")
        _buildah(
            "bud", "--quiet", "--layers", "--pull-never", "--isolation", "chroot",
            "--timestamp", "0", "--volume", f"{_wheelhouse()}:/wheels:ro", "--build-arg", f"BASE={name}",
            "--build-arg", "PIP_NO_INDEX=1", "--build-arg", "PIP_FIND_LINKS=/wheels",
            "--tag", image.reference, "--file", str(REPOSITORY / image.containerfile), str(context),
        )  # fmt: skip
        # Uncompressed, so that the base stays the blob that the nodes have already.
        _buildah("push", "--quiet", "--disable-compression", image.reference, f"oci:{made}:{TAG}")
        for old in layout.parent.glob(f"{image.name}-????????????"):
            shutil.rmtree(old)
        made.rename(layout)
    _say(f"built {image.reference} in {time.monotonic() - started:.1f} s")
    return layout


def _key(image: Image, base_digest: str, wheel: Path | None) -> str:
    digest = hashlib.sha256(base_digest.encode())
    for path in (image.containerfile, *image.inputs):
        digest.update((REPOSITORY / path).read_bytes())
    for tree in image.trees:
        digest.update(str((CACHE / tree).resolve()).encode())
    if wheel is not None:
        digest.update(wheel.read_bytes())
    return digest.hexdigest()[:12]


def _stage(image: Image, wheel: Path | None, context: Path) -> None:
    """The part of the repository that the Containerfile sees: as much as it may copy."""
    for path in image.inputs:
        (context / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / path, context / path)
    context.mkdir(exist_ok=True)
    for tree in image.trees:
        shutil.copytree(CACHE / tree, context / tree, symlinks=True)
    if wheel is not None:
        (context / "dist").mkdir()
        shutil.copy(wheel, context / "dist")


def _base_layout() -> str:
    """The digest of the bundled Debian base, as an image in CACHE/images/base that buildah can pull."""
    layout = CACHE / "images" / "base"
    layer = (CACHE / "base" / "layer.tar").resolve()
    layer_digest = "sha256:" + (layer.parent / "layer.sha256").read_text(encoding="ascii").strip()
    config = _json(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {},
            "rootfs": {"type": "layers", "diff_ids": [layer_digest]},
            "history": [{"created_by": "cluster/build.sh"}],
        }
    )
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": OCI + "manifest.v1+json",
            "config": _descriptor("config.v1+json", config),
            "layers": [
                {
                    "mediaType": OCI + "layer.v1.tar",
                    "digest": layer_digest,
                    "size": layer.stat().st_size,
                }
            ],
        }
    )
    digest = _digest(manifest)
    if not _blob(layout, digest).exists():
        shutil.rmtree(layout, ignore_errors=True)
        _blob(layout, digest).parent.mkdir(parents=True)
        _blob(layout, layer_digest).symlink_to(layer)
        _blob(layout, _digest(config)).write_bytes(config)
        entry = {
            **_descriptor("manifest.v1+json", manifest),
            "annotations": {"org.opencontainers.image.ref.name": f"{BASE_NAME}:{TAG}"},
        }
        (layout / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}', encoding="ascii")
        (layout / "index.json").write_bytes(_json({"schemaVersion": 2, "manifests": [entry]}))
        _blob(layout, digest).write_bytes(manifest)
    return digest


def _wheel() -> Path:
    """Our wheel, made again when a source has changed."""
    digest = hashlib.sha256()
    for source in WHEEL_SOURCES:
        path = REPOSITORY / source
        files = [path] if path.is_file() else sorted(path.rglob("*"))
        for file in files:
            if file.is_file() and "__pycache__" not in file.parts:
                digest.update(str(file.relative_to(REPOSITORY)).encode() + b"\0")
                digest.update(file.read_bytes())
    folder = CACHE / "images" / f"wheel-{digest.hexdigest()[:12]}"
    if not folder.exists():
        for old in folder.parent.glob("wheel-*"):
            shutil.rmtree(old)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            subprocess.run(
                [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", scratch],
                cwd=REPOSITORY,
                check=True,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "SOURCE_DATE_EPOCH": "315532800"},
            )
            folder.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(scratch, folder)
    (wheel,) = folder.glob("larder-*.whl")
    return wheel


def _wheelhouse() -> Path:
    """Every wheel that an image installs, fetched once for each set of pinned lists."""
    lists = [
        REPOSITORY / "requirements" / f"{name}.txt" for name in ("runtime", "operator", "local")
    ]
    base_python = next((CACHE / "base" / "rootfs" / "usr" / "bin").glob("python3.??")).name[6:]
    pythons = sorted({base_python, *PAYLOAD_PYTHONS})
    key = hashlib.sha256(" ".join(pythons).encode() + b"".join(path.read_bytes() for path in lists))
    folder = CACHE / "images" / f"wheels-{key.hexdigest()[:12]}"
    if folder.exists():
        return folder
    _say("fetching wheels for the images")
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        made = Path(scratch) / "wheels"
        for path in lists:
            _download(path, base_python, made)
        pinned = Path(scratch) / "xxhash.txt"
        pinned.write_text(_only(lists[0].read_text(encoding="utf-8"), "xxhash"), encoding="utf-8")
        for python in pythons:
            _download(pinned, python, made)
        for old in folder.parent.glob("wheels-*"):
            shutil.rmtree(old)
        made.rename(folder)
    return folder


def _download(requirements: Path, python: str, folder: Path) -> None:
    subprocess.run(
        [
            sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
            "--no-deps", "--only-binary", ":all:", "--python-version", python, "--require-hashes",
            "-r", str(requirements), "-d", str(folder),
        ],
        check=True,
    )  # fmt: skip


def _only(requirements: str, package: str) -> str:
    """The lines of one package: its pin and its hashes."""
    lines = iter(requirements.splitlines(keepends=True))
    kept: list[str] = []
    for line in lines:
        if kept or line.startswith(f"{package}=="):
            kept.append(line)
            if not line.rstrip().endswith("\\"):
                break
    return "".join(kept)


def _buildah(subcommand: str, *arguments: str) -> str:
    """What Buildah of Debian prints: unpacked, with storage of its own, without the host's configuration and network.

    Its libraries are laid over the host's in a mount namespace, as it starts itself again without LD_LIBRARY_PATH.
    """
    tree = CACHE / "buildah"
    state = CACHE / "buildah-state"
    state.mkdir(exist_ok=True)
    policy = state / "policy.json"
    policy.write_text('{"default":[{"type":"insecureAcceptAnything"}]}', encoding="ascii")
    signatures = [] if subcommand in ("images", "rmi") else ["--signature-policy", str(policy)]
    return subprocess.run(
        [
            "unshare", "--mount", "--net", "sh", "-c",
            'mount -t overlay -o "lowerdir=$0/usr/lib:/usr/lib" overlay /usr/lib && exec "$@"',
            str(tree),
            str(tree / "usr" / "bin" / "buildah"),
            "--root", str(state / "root"), "--runroot", str(state / "run"), "--storage-driver", "overlay",
            "--registries-conf", "/dev/null",
            subcommand, *signatures, *arguments,
        ],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(state),
            "CONTAINERS_CONF": str(tree / "usr" / "share" / "containers" / "containers.conf"),
        },
    ).stdout  # fmt: skip


# Importing


def _nodes() -> list[int]:
    return sorted(int(path.name[4:]) for path in (CACHE / "run").glob("node[0-9]*"))


def _import_all(layouts: Sequence[tuple[Image, Path]], node: int) -> None:
    for image, layout in layouts:
        _import(node, image.reference, layout)


def _import(node: int, reference: str, layout: Path) -> None:
    """Send the image to a node's containerd unless it has it."""
    (entry,) = json.loads((layout / "index.json").read_bytes())["manifests"]
    listed = _in_node(node, "ctr", "-n", "k8s.io", "images", "ls", f"name=={reference}").stdout
    if entry["digest"].encode() in listed:
        return
    started = time.monotonic()
    present = set(
        _in_node(node, "ctr", "-n", "k8s.io", "content", "ls", "-q").stdout.decode().split()
    )
    entry["annotations"] = {
        "io.containerd.image.name": reference,
        "org.opencontainers.image.ref.name": reference,
    }
    with tempfile.TemporaryFile(dir=CACHE) as archive_file:
        with tarfile.open(fileobj=archive_file, mode="w") as archive:
            _add(archive, "oci-layout", (layout / "oci-layout").read_bytes())
            _add(archive, "index.json", _json({"schemaVersion": 2, "manifests": [entry]}))
            for blob in sorted((layout / "blobs" / "sha256").iterdir()):
                # A manifest and a config are sent always: an import begins with them.
                if f"sha256:{blob.name}" not in present or blob.stat().st_size < 1 << 16:
                    archive.add(blob.resolve(), f"blobs/sha256/{blob.name}")
        archive_file.seek(0)
        _in_node(
            node,
            "ctr",
            "-n",
            "k8s.io",
            "images",
            "import",
            "--digests=false",
            "-",
            stdin=archive_file,
        )
    _say(f"sent {reference} to node{node} in {time.monotonic() - started:.1f} s")


def _in_node(node: int, *command: str, stdin: object = None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [str(CLUSTER / "run.sh"), f"-{node}", *command],
        check=True,
        stdin=stdin or subprocess.DEVNULL,  # type: ignore[arg-type] # typeshed has no name for "a file"
        stdout=subprocess.PIPE,
    )


# OCI


def _json(document: object) -> bytes:
    return json.dumps(document).encode()


def _digest(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


def _blob(layout: Path, digest: str) -> Path:
    return layout / "blobs" / digest.replace(":", "/")


def _descriptor(media_type: str, content: bytes) -> dict[str, object]:
    return {"mediaType": OCI + media_type, "digest": _digest(content), "size": len(content)}


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
