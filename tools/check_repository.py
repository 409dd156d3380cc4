"""Refuses what must not be committed: names of package registries, paths of one machine, a package called operator.

Reads the files that git tracks (or would track). Exit 1 names file, line and what to write instead. Called by
`make lint`.
"""

import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent

# Spelled in pieces, as this file is read too.
REGISTRY_HOST = re.compile(
    r"\b(?:"
    + "|".join(
        name.replace("@", r"\.")
        for name in (
            "pypi@org",
            "pythonhosted@org",
            "download@pytorch@org",
            "pypi@nvidia@com",
            "proxy@golang@org",
            "sum@golang@org",
            "registry@npmjs@org",
            "deb@debian@org",
            "static@crates@io",
            r"repo1?@maven@[a-z.]+",
        )
    )
    + r")\b"
)
MACHINE_PATH = re.compile(
    r"(?<![\w.])/(?:work|root|farm|home/(?!larder/)[a-z]\w*)/[\w.]"
)  # ours: HOME in pods
EXEMPT_FROM_PATHS = {"LICENSE"}


def main() -> int:
    """Returns 0 when the tree is clean, 1 after naming each fault on stderr."""
    faults = []
    for name in _candidates():
        path = REPOSITORY / name
        if name == "operator/__init__.py":
            faults.append(f"{name}: makes a package that shadows the standard library; delete it")
        if name == "tests/__init__.py":
            faults.append(f"{name}: tests are flat files, not a package; delete it")
        if path.is_symlink() or not path.is_file():
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), start=1):
            if found := REGISTRY_HOST.search(line):
                faults.append(
                    f"{name}:{number}: names the registry {found.group()}; say what, not where from"
                )
            if name not in EXEMPT_FROM_PATHS and (found := MACHINE_PATH.search(line)):
                faults.append(
                    f"{name}:{number}: path of one machine, {found.group()}…; make it relative"
                )
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


def _candidates() -> list[str]:
    """Tracked files and untracked ones that are not ignored; without git, nothing to check."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
            cwd=REPOSITORY,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):
        print("no git here: names and paths are not checked", file=sys.stderr)
        return []
    return [name for name in listed.split("\0") if name]


if __name__ == "__main__":
    raise SystemExit(main())
