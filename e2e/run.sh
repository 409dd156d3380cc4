#!/bin/bash
# Runs the tests in this folder; arguments go to pytest. Called by `make e2e`.
#
# With LARDER_E2E_KUBECONFIG or KUBECONFIG set: against that cluster (which must be empty of Larder, and find the images of
# images.py --list under LARDER_E2E_REGISTRY); tests that look into nodes are skipped. Else against the bundled cluster, which
# is brought up, and taken down afterwards unless LARDER_E2E_KEEP is set. There, without arguments, two pytests run at the same
# time: the tests with stand-ins (marked `beside`), and all others, of which those of real engines wait until the first have ended.
# What the first say is shown afterwards, and last a line of each.
#
# With LARDER_E2E_AGAIN what failed is tried once more: real clusters on two busy cores are not steady to the last second. CI
# does so, one pytest after the other, each with an operator of the whole cluster. But a request that was not answered, or answered
# wrongly, is a failure for good (conftest.py notes it).
set -euo pipefail
cd "$(dirname "$0")/.."
given=${LARDER_E2E_KUBECONFIG:-${KUBECONFIG:-}}
if [ -n "$given" ]; then
  KUBECONFIG=$given exec .venv/bin/python -m pytest e2e "$@"
fi
[ "$(id -u)" = 0 ] || { echo "the bundled cluster needs root; or set LARDER_E2E_KUBECONFIG to a cluster of yours" >&2; exit 1; }
beside=
finish() {
  [ -z "$beside" ] || kill -- "-$beside" 2>/dev/null || true
  [ -n "${LARDER_E2E_KEEP:-}" ] || e2e/cluster/down.sh
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
e2e/up.sh
.venv/bin/python e2e/images.py
export LARDER_E2E_BUNDLED=1
folder=${LARDER_E2E_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/larder-e2e}
harmed=$folder/harmed
rm -f "$harmed"

# Tests have deadlines of their own, longer than after which pyproject.toml would print every stack.
pytest=(e2e/cluster/run.sh .venv/bin/python -m pytest e2e -o faulthandler_timeout=0)
failed=()
if (($#)); then
  pytest+=("$@")
  "${pytest[@]}" || failed=(all)
else
  beside_tests=(-m beside -o cache_dir=.pytest_cache/beside)
  other_tests=(-m "not beside")
  LARDER_E2E_SHARED=1 LARDER_E2E_PREFIX=${LARDER_E2E_PREFIX:-e2e}-beside \
    setsid flock -o "$folder/beside" "${pytest[@]}" "${beside_tests[@]}" > "$folder/beside.log" 2>&1 &
  beside=$!
  LARDER_E2E_BESIDE=$folder/beside "${pytest[@]}" "${other_tests[@]}" 2>&1 | tee "$folder/others.log" || failed=(others)
  wait "$beside" || failed+=(beside)
  beside=
  cat "$folder/beside.log"
  printf '\n== beside %s\n== others %s\n' "$(tail -n 1 "$folder/beside.log")" "$(tail -n 1 "$folder/others.log")"
fi
((${#failed[@]})) || exit 0
[ -n "${LARDER_E2E_AGAIN:-}" ] || exit 1
again=(--last-failed --last-failed-no-failures none)
for part in "${failed[@]}"; do
  [ ! -e "$harmed" ] || { echo "== a request was harmed in $(cat "$harmed"): nothing is tried once more"; exit 1; }
  echo "== some failed: those once more, on the same cluster. What passes now is not steady: look at it"
  case $part in
    all) "${pytest[@]}" "${again[@]}";;
    others) "${pytest[@]}" "${other_tests[@]}" "${again[@]}";;
    beside) "${pytest[@]}" "${beside_tests[@]}" "${again[@]}";;
  esac
  [ ! -e "$harmed" ] || { echo "== a request was harmed in $(cat "$harmed")"; exit 1; }
done
