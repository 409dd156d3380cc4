"""Writes an OCI image archive for `ctr images import`, out of a folder. Called by image.sh; standard library only.

Invariant: the same content gives the same digests, whatever the files' times and owners, so that a node that has a
layer is not sent it again: blobs named in the environment variable HAVE are left out of the archive.
"""

import argparse
import hashlib
import io
import json
import os
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

MEDIA_TYPE = "application/vnd.oci.image."
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Sink(Protocol):
    """What a tar file is written to."""

    def write(self, data: bytes, /) -> int:
        """As of a binary file."""


@dataclass(frozen=True, slots=True)
class Layer:
    """An uncompressed layer: its blob digest is its diff id too."""

    digest: str
    size: int


class HashingWriter:
    """Passes on what is written, and knows its digest and size."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._hash = hashlib.sha256()
        self._size = 0

    def write(self, data: bytes) -> int:
        """As of a binary file."""
        self._hash.update(data)
        self._size += len(data)
        return self._sink.write(data)

    @property
    def layer(self) -> Layer:
        """What was written so far."""
        return Layer("sha256:" + self._hash.hexdigest(), self._size)


def main() -> None:
    """Parse the flags, write the archive."""
    options = _options()
    base_folder = Path(os.environ["E2E"]) / "base"
    present = frozenset(os.environ.get("HAVE", "").split())

    with tempfile.TemporaryFile(dir=Path(options.out).parent) as layer_file:
        top = _write_layer(layer_file, _members(options.folder, options.file))
        _write_archive(options, top, layer_file, base_folder, present)


def _write_archive(
    options: argparse.Namespace,
    top: Layer,
    layer_file: IO[bytes],
    base_folder: Path,
    present: frozenset[str],
) -> None:
    layers = [top]
    if options.base == "debian":
        base_digest = (base_folder / "layer.sha256").read_text(encoding="ascii").strip()
        base_size = (base_folder / "layer.tar").stat().st_size
        layers.insert(0, Layer("sha256:" + base_digest, base_size))

    config = _config(options, layers)
    manifest = _manifest(config, layers)
    with tarfile.open(options.out, "w") as archive:
        _add(archive, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        _add(archive, "index.json", _index(manifest, options.tag))
        _add(archive, _blob(_digest(manifest)), manifest)
        _add(archive, _blob(_digest(config)), config)
        if len(layers) == 2 and layers[0].digest not in present:
            with (base_folder / "layer.tar").open("rb") as base:
                _add_file(archive, layers[0], base)
        if top.digest not in present:
            layer_file.seek(0)
            _add_file(archive, top, layer_file)


def _options() -> argparse.Namespace:
    flags = argparse.ArgumentParser()
    flags.add_argument("-b", dest="base", default="debian", choices=["debian", "scratch"])
    flags.add_argument("-e", dest="entrypoint", type=json.loads)
    flags.add_argument("-c", dest="command", type=json.loads)
    flags.add_argument("-u", dest="user")
    flags.add_argument("-w", dest="working_dir")
    flags.add_argument("-o", dest="out", required=True)
    flags.add_argument("-f", dest="file", action="append", default=[], metavar="HOST_FILE=/path")
    flags.add_argument("-E", dest="env", action="append", default=[], metavar="KEY=VALUE")
    flags.add_argument("folder", nargs="?")
    flags.add_argument("tag")
    return flags.parse_args()


def _members(folder: str | None, files: list[str]) -> Iterator[tuple[tarfile.TarInfo, Path]]:
    """Every member of the layer with its source; parents before children, in the order of their names."""
    made: set[str] = set()
    for pair in files:
        source, _, inside = pair.partition("=")
        inside = inside.lstrip("/")
        for parent in reversed(Path(inside).parents[:-1]):
            if str(parent) not in made:
                made.add(str(parent))
                member = tarfile.TarInfo(str(parent))
                member.type = tarfile.DIRTYPE
                member.mode = 0o755
                yield member, parent
        yield _member(Path(source).resolve(), inside), Path(source)
    if folder is None:
        return
    for root, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(folders + names):
            path = Path(root) / name
            yield _member(path, os.path.relpath(path, folder)), path


def _member(path: Path, inside: str) -> tarfile.TarInfo:
    with tarfile.open(fileobj=io.BytesIO(), mode="w") as unused:
        member = unused.gettarinfo(path, inside)
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = 0
    return member


def _write_layer(out: IO[bytes], members: Iterator[tuple[tarfile.TarInfo, Path]]) -> Layer:
    writer = HashingWriter(out)
    with tarfile.open(
        fileobj=writer, mode="w|", format=tarfile.PAX_FORMAT, bufsize=1 << 20
    ) as layer:
        for member, source in members:
            if member.isreg():
                with source.open("rb") as content:
                    layer.addfile(member, content)
            else:
                layer.addfile(member)
    return writer.layer


def _config(options: argparse.Namespace, layers: list[Layer]) -> bytes:
    process = {
        "Env": [f"PATH={PATH}", *options.env],
        "Entrypoint": options.entrypoint,
        "Cmd": options.command,
        "User": options.user,
        "WorkingDir": options.working_dir,
    }
    return _json(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {key: value for key, value in process.items() if value},
            "rootfs": {"type": "layers", "diff_ids": [layer.digest for layer in layers]},
            "history": [{"created_by": "image.py"} for _ in layers],
        }
    )


def _manifest(config: bytes, layers: list[Layer]) -> bytes:
    return _json(
        {
            "schemaVersion": 2,
            "mediaType": MEDIA_TYPE + "manifest.v1+json",
            "config": {
                "mediaType": MEDIA_TYPE + "config.v1+json",
                "digest": _digest(config),
                "size": len(config),
            },
            "layers": [
                {
                    "mediaType": MEDIA_TYPE + "layer.v1.tar",
                    "digest": layer.digest,
                    "size": layer.size,
                }
                for layer in layers
            ],
        }
    )


def _index(manifest: bytes, tag: str) -> bytes:
    annotations = {"io.containerd.image.name": tag, "org.opencontainers.image.ref.name": tag}
    return _json(
        {
            "schemaVersion": 2,
            "manifests": [
                {
                    "mediaType": MEDIA_TYPE + "manifest.v1+json",
                    "digest": _digest(manifest),
                    "size": len(manifest),
                    "annotations": annotations,
                }
            ],
        }
    )


def _json(document: object) -> bytes:
    return json.dumps(document).encode()


def _digest(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


def _blob(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/")


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def _add_file(archive: tarfile.TarFile, layer: Layer, content: IO[bytes]) -> None:
    member = tarfile.TarInfo(_blob(layer.digest))
    member.size = layer.size
    archive.addfile(member, content)


if __name__ == "__main__":
    main()
