"""Puts the Python source of the newest released vLLM into .cache/vllm-newest, beside .venv and never in it.

Tests lay that folder over the pinned CPU build by PYTHONPATH, to see whether the connector still fits. pip downloads
the wheel that requirements/vllm-newest.txt pins and checks its hash (336 MB); only the `.py` files are unpacked
(60 MB), since its kernels need a GPU, and the wheel is removed again. Ends at once when the folder holds that version.
Called by `make vllm-newest`, with the Python of .venv.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PINNED = REPOSITORY / "requirements" / "vllm-newest.txt"
FOLDER = REPOSITORY / ".cache" / "vllm-newest"
STAMP = "larder-fetched"


def main() -> int:
    """Exit status: 1 with pip's words when the wheel can't be had or has another hash."""
    wanted = hashlib.sha256(PINNED.read_bytes() + Path(__file__).read_bytes()).hexdigest()
    stamp = FOLDER / STAMP
    if stamp.is_file() and stamp.read_text() == wanted:
        return 0
    print("fetching the source of the newest vLLM (336 MB to download, 60 MB on disk)", flush=True)
    FOLDER.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER.parent, prefix="vllm-newest-") as scratch:
        wheels = Path(scratch) / "wheels"
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
        exact = ["--no-deps", "--only-binary", ":all:", "--require-hashes"]
        if subprocess.run([*pip, *exact, "--dest", wheels, "-r", PINNED], check=False).returncode:
            print("the newest vLLM could not be fetched: see pip's words above", file=sys.stderr)
            return 1
        (wheel,) = wheels.glob("vllm-*.whl")
        source = Path(scratch) / "source"
        unpack_source(wheel, source)
        (source / STAMP).write_text(wanted)
        shutil.rmtree(FOLDER, ignore_errors=True)
        source.rename(FOLDER)
    return 0


def unpack_source(wheel: Path, folder: Path) -> None:
    """Unpack the `.py` files of a wheel; zipfile keeps every path inside `folder`."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".py")])


if __name__ == "__main__":
    sys.exit(main())
