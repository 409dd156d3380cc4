# Everything a user or a contributor runs. `make help` lists it. Needs Python 3.11 with venv, and make; no root.

# Several targets write .venv: one at a time.
.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help demo test harness e2e cluster lint format generate requirements venv venv-dev vllm-newest wire-oldest clean

BIN := .venv/bin
ARGS ?=
MODEL = llama
RUNS ?= 30

# Real engines in tests: no network, no usage reports, one thread each, one process where the test does not say otherwise.
test harness: export HF_HUB_OFFLINE = 1
test harness: export VLLM_NO_USAGE_STATS = 1
test harness: export DO_NOT_TRACK = 1
test harness: export VLLM_LOGGING_LEVEL = WARNING
test harness: export OMP_NUM_THREADS = 1
test harness: export VLLM_CPU_OMP_THREADS_BIND = nobind
test harness: export VLLM_ENABLE_V1_MULTIPROCESSING = 0

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: venv ## a prefill and a decode engine on CPU that share a cache; prints what it saves (MODEL=gemma3, gptoss, qwen3next)
	@$(BIN)/larder demo examples/cpu-local$(if $(filter llama,$(MODEL)),,-$(MODEL)).yaml $(ARGS)

test: venv-dev vllm-newest wire-oldest ## every test, real Redis and real vLLM engines included (ARGS="-k name" for some)
	@$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

harness: export RUNS := $(RUNS)
harness: venv-dev vllm-newest ## many seeds of the connector under vLLM's scheduler, every page checked (RUNS=64 for more of them)
	@$(BIN)/python -m pytest -m harness tests/test_scheduler_harness.py tests/test_newest_vllm.py $(ARGS)

e2e: venv-dev ## the operator, the chart and real engines on a real Kubernetes of two nodes (root; 10 minutes of builds the first time)
	@e2e/run.sh $(ARGS)

cluster: venv-dev ## only bring that cluster up and load our images; e2e/cluster/run.sh kubectl get nodes, e2e/cluster/down.sh
	@e2e/up.sh
	@$(BIN)/python e2e/images.py

lint: venv-dev wire-oldest ## style, types, import rules, wire contract, generated code, stray names
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/buf lint
	$(BIN)/python tools/generate_proto.py --check
	$(BIN)/python tools/check_repository.py

format: venv-dev ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

generate: venv-dev wire-oldest ## Python code from proto/
	@$(BIN)/python tools/generate_proto.py

requirements: venv-dev ## pin requirements/*.in again (ARGS=--upgrade for newer versions)
	@tools/pin_requirements.sh $(ARGS)

venv: ## .venv with what the demo needs
	@sh tools/bootstrap.sh

venv-dev: ## .venv with what tests and lint need too
	@sh tools/bootstrap.sh --dev

vllm-newest: venv-dev ## Python source of the newest vLLM into .cache, for the tests that compare interfaces
	@$(BIN)/python tools/fetch_newest_vllm.py

wire-oldest: venv-dev ## the oldest protobuf and grpcio that engines may bring, and the generator of that age, into .cache
	@$(BIN)/python tools/fetch_wire_oldest.py

clean: ## remove .venv, models, runs and caches of this checkout
	rm -rf .venv .cache .larder models dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
