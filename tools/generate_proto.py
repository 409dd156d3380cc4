"""Generates the Python code of the wire contract: `proto/cacheservice/v1/*.proto` into `cacheservice/v1/`.

Writes `*_pb2.py`, `*_pb2.pyi` (protoc) and `*_pb2_grpc.py`, `*_pb2_grpc.pyi` (the types of stubs and servicers, from
mypy-protobuf). The result depends only on the .proto files and on two versions: grpcio-tools in
requirements/wire-oldest.txt, mypy-protobuf in requirements/dev.txt. The generator is an old one on purpose: what it
writes refuses to be imported beside a protobuf or grpcio older than itself, and engines bring their own.

    python tools/generate_proto.py            write, and remove generated files that have no .proto any more
    python tools/generate_proto.py --check    write nothing; exit 1 and name each file that differs

Called by `make generate` and, with --check, by `make lint`, after tools/fetch_wire_oldest.py.
`cacheservice/v1/__init__.py` is written by hand.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PROTO_ROOT = REPOSITORY / "proto"
PACKAGE = Path("cacheservice/v1")
GENERATOR = REPOSITORY / ".cache" / "wire-oldest"
GENERATED_SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def main() -> int:
    """Returns the exit status: 0 = written or equal, 1 = the committed code differs, 2 = protoc refused."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--check", action="store_true", help="compare with the committed code; write nothing"
    )
    check_only = parser.parse_args().check

    with tempfile.TemporaryDirectory() as folder:
        status = _run_protoc(Path(folder))
        if status:
            print(f"protoc ended with status {status}; its messages are above", file=sys.stderr)
            return 2
        fresh = {path.name: path for path in (Path(folder) / PACKAGE).iterdir()}
        committed_folder = REPOSITORY / PACKAGE
        committed = {
            path.name: path
            for path in committed_folder.glob("*_pb2*")
            if path.name.endswith(GENERATED_SUFFIXES)
        }
        different = sorted(
            name
            for name in fresh.keys() | committed.keys()
            if name not in fresh
            or name not in committed
            or fresh[name].read_bytes() != committed[name].read_bytes()
        )
        if check_only:
            for name in different:
                print(f"{PACKAGE / name} differs from what proto/ gives", file=sys.stderr)
            if different:
                print("run `make generate` and commit the result", file=sys.stderr)
            return 1 if different else 0

        committed_folder.mkdir(parents=True, exist_ok=True)
        for name in different:
            if name in fresh:
                shutil.copyfile(fresh[name], committed_folder / name)
            else:
                committed[name].unlink()
            print(f"{'wrote' if name in fresh else 'removed'} {PACKAGE / name}")
        if not different:
            print(f"{PACKAGE}: {len(fresh)} generated files are up to date")
    return 0


def _run_protoc(output: Path) -> int:
    # Of that folder only protoc itself is loaded, which is compiled into grpcio-tools: neither grpc nor protobuf.
    sys.path.insert(0, str(GENERATOR))
    from grpc_tools import protoc

    sources = sorted((PROTO_ROOT / PACKAGE).glob("*.proto"))
    if not sources:
        print(f"no .proto file in {PROTO_ROOT / PACKAGE}", file=sys.stderr)
        return 1
    # The plugin is named by path: PATH need not hold the virtual environment.
    grpc_types_plugin = Path(sys.executable).parent / "protoc-gen-mypy_grpc"
    return int(
        protoc.main(
            [
                "protoc",
                f"-I{PROTO_ROOT}",
                f"-I{GENERATOR / 'grpc_tools' / '_proto'}",
                f"--plugin=protoc-gen-mypy_grpc={grpc_types_plugin}",
                f"--python_out={output}",
                f"--pyi_out={output}",
                f"--grpc_python_out={output}",
                f"--mypy_grpc_out=quiet:{output}",
                *(str(source) for source in sources),
            ]
        )
    )


if __name__ == "__main__":
    raise SystemExit(main())
