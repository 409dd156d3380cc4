#!/bin/bash
# Brings up the bundled cluster as the tests in this folder want it: two nodes, vLLM and tiny models visible in every
# container, two pretended GPUs on node1, eight pretended CPUs on each, an audit log of writes. A running one is taken
# down first. Builds what is missing (about 10 minutes on the first run). Images: images.py. End: cluster/down.sh.
set -euo pipefail
repository=$(cd "$(dirname "$0")/.." && pwd)
cd "$repository"
. e2e/cluster/env.sh

e2e/cluster/build.sh
e2e/cluster/down.sh

# What .venv has but for ourselves: engines must find the connector in the payload, not here. Hard links: 6 GB in seconds.
# A folder of its own also keeps pods alive while .venv is made again.
site=$E2E/site-packages
stamp=$(cat .venv/larder-set-up-dev 2>/dev/null || cat .venv/larder-set-up-demo) || die "no .venv: run make venv-dev"
if [ "$(cat "$site/.made-from" 2>/dev/null)" != "$stamp" ]; then
  rm -rf "$site" "$site.tmp"
  cp -al .venv/lib/python3.1?/site-packages "$site.tmp" 2>/dev/null || cp -a .venv/lib/python3.1?/site-packages "$site.tmp"
  rm -rf "$site.tmp"/larder-*.dist-info "$site.tmp"/_larder.pth
  echo "$stamp" > "$site.tmp/.made-from"
  mv "$site.tmp" "$site"
  log "shared packages of .venv"
fi

# The second copy differs in nothing but its times: two pods that downloaded the same model.
models=$E2E/models
umask 022
.venv/bin/python -m cacheservice.local.model "$models/llama" --tiny llama --dtype float32
if [ ! -e "$models/llama-copy/larder-model.json" ] || ! cmp -s "$models"/llama{,-copy}/larder-model.json; then
  rm -rf "$models/llama-copy"
  cp -r "$models/llama" "$models/llama-copy"
  find "$models/llama-copy" -exec touch -d '2001-02-03' {} +
fi
chmod -R a+rX "$models"

# Reads are not logged: what a controller may not do in an unchanged world is write.
audit=$E2E/audit
rm -rf "$audit"
mkdir -p "$audit"
cat > "$audit/policy.yaml" <<'POLICY'
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- {level: None, verbs: [get, list, watch]}
- level: Metadata
POLICY

export LARDER_E2E_APISERVER_FLAGS="--audit-policy-file=/srv/audit/policy.yaml --audit-log-path=/srv/audit/audit.log"
e2e/cluster/up.sh -n 2 -c 8 -g 1:nvidia.com/gpu=2 -l 1:larder.dev/e2e=one -l 2:larder.dev/e2e=two \
  -M "$site:/srv/site-packages" -M "$models:/srv/models" -m "$audit:/srv/audit"
