#!/bin/bash
# Runs the tests in this folder; arguments go to pytest. Called by `make e2e`.
#
# With LARDER_E2E_KUBECONFIG or KUBECONFIG set: against that cluster (which must be empty of Larder, and find the images of
# images.py --list under LARDER_E2E_REGISTRY); tests that look into nodes are skipped. Else against the bundled cluster, which
# is brought up, and taken down afterwards unless LARDER_E2E_KEEP is set.
set -euo pipefail
cd "$(dirname "$0")/.."
given=${LARDER_E2E_KUBECONFIG:-${KUBECONFIG:-}}
if [ -n "$given" ]; then
  KUBECONFIG=$given exec .venv/bin/python -m pytest e2e "$@"
fi
[ "$(id -u)" = 0 ] || { echo "the bundled cluster needs root; or set LARDER_E2E_KUBECONFIG to a cluster of yours" >&2; exit 1; }
[ -n "${LARDER_E2E_KEEP:-}" ] || trap e2e/cluster/down.sh EXIT
e2e/up.sh
.venv/bin/python e2e/images.py
LARDER_E2E_BUNDLED=1 e2e/cluster/run.sh .venv/bin/python -m pytest e2e "$@"
