"""The images of a release, one a line: what a registry for an air gap must hold. Written to charts/larder/images.txt.

    tools/chart_images.py                            prints them
    tools/chart_images.py --registry mirror:5000     prints `from to` for each, for a loop with skopeo or crane
    tools/chart_images.py --write                    writes the list (tests compare it with the chart's values)

The same rule as the chart's template larder.image: digest wins over tag, an empty tag is the appVersion.
"""

import argparse
import sys
from pathlib import Path

import yaml

CHART = Path(__file__).resolve().parent.parent / "charts" / "larder"
LIST = CHART / "images.txt"


def images(registry: str = "") -> list[str]:
    """Full references, sorted; all in `registry` when it is given."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    references = []
    for image in values["images"].values():
        name = f"{registry or image['registry']}/{image['repository']}"
        suffix = f"@{image['digest']}" if image["digest"] else f":{image['tag'] or version}"
        references.append(name + suffix)
    return sorted(references, key=lambda reference: reference.partition("/")[2])


def main() -> int:
    """Print or write the list."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--registry", default="", help="registry that the chart's global.imageRegistry will name"
    )
    parser.add_argument("--write", action="store_true", help="write charts/larder/images.txt")
    options = parser.parse_args()
    if options.write:
        LIST.write_text("".join(f"{reference}\n" for reference in images()))
        return 0
    for source, target in zip(images(), images(options.registry), strict=True):
        print(f"{source} {target}" if options.registry else source)
    return 0


if __name__ == "__main__":
    sys.exit(main())
