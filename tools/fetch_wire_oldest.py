"""Puts the oldest protobuf and grpcio that engines may bring, and their generator, into .cache/wire-oldest.

`tools/generate_proto.py` generates with them, and tests/test_wire_oldest.py lays them over .venv by PYTHONPATH and runs
the client. They are never installed into .venv, where the agent runs on the newest. pip downloads what
requirements/wire-oldest.txt pins and checks the hashes (10 MB). Ends at once when the folder holds these versions.
Called by `make wire-oldest`, with the Python of .venv.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PINNED = REPOSITORY / "requirements" / "wire-oldest.txt"
FOLDER = REPOSITORY / ".cache" / "wire-oldest"
STAMP = "larder-fetched"


def main() -> int:
    """Exit status: 1 with pip's words when a wheel can't be had or has another hash."""
    wanted = hashlib.sha256(
        PINNED.read_bytes() + Path(__file__).read_bytes() + sys.version.encode()
    ).hexdigest()
    stamp = FOLDER / STAMP
    if stamp.is_file() and stamp.read_text() == wanted:
        return 0
    print("fetching the oldest protobuf and grpcio that engines may bring (10 MB)", flush=True)
    FOLDER.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER.parent, prefix="wire-oldest-") as scratch:
        installed = Path(scratch) / "installed"
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        exact = ["--no-deps", "--only-binary", ":all:", "--require-hashes"]
        if subprocess.run(
            [*pip, *exact, "--target", installed, "-r", PINNED], check=False
        ).returncode:
            print("they could not be fetched: see pip's words above", file=sys.stderr)
            return 1
        (installed / STAMP).write_text(wanted)
        shutil.rmtree(FOLDER, ignore_errors=True)
        installed.rename(FOLDER)
    return 0


if __name__ == "__main__":
    sys.exit(main())
