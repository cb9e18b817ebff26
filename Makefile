# Everything runs in .venv, which the first target that needs it makes. `make help` lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
# Without compiled files each of the engine's three processes compiles thousands of modules at every start.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv
INSTALLED := $(VENV)/installed
LOCKS := requirements/engine.lock requirements/dev.lock
SERIES := image/upstream.toml $(wildcard image/patches/*/*)

PORT ?= 30000
PAIR ?= qwen3
ARGS ?=
# Two engines at once: more than two cores make the suites no faster.
PYTEST := $(BIN)/pytest --numprocesses 2 --dist loadfile
# These need root and many gigabytes or minutes, and have targets of their own.
APART := --ignore tests/image/built --ignore tests/cluster
DRAFT_KV = $(if $(RATIO),--speculative-draft-kv-ratio $(RATIO)) $(if $(WINDOW),--speculative-draft-window-size $(WINDOW))

SUPPORTED := import sys, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 13))
works = $(shell $(1) -c "$(SUPPORTED)" 2>/dev/null && echo yes)
PYTHON ?= $(firstword $(foreach python,python3.11 python3.12 python3,$(if $(call works,$(python)),$(python))))
# One line for a Python that will not do, before anything is made with it.
require_python = $(if $(PYTHON),,$(error found no Python 3.11 or 3.12 with ensurepip; install one or name it: \
	PYTHON=/path/to/python3.11))$(if $(call works,$(PYTHON)),,$(error PYTHON=$(PYTHON) \
	($(shell { $(PYTHON) --version 2>&1 || true; } | head -1)) is not Python 3.11 or 3.12 with ensurepip; name another: PYTHON=python3.11))

##@ Run

.PHONY: serve
serve: install ## Serve a tiny model pair. PORT=30000 PAIR=qwen3 RATIO=0.25 WINDOW=64 ARGS="more engine options"
	@echo "== [4/4] model pair $(PAIR) and server on port $(PORT)"
	@exec $(BIN)/sglang-dflash serve --pair $(PAIR) --port $(PORT) $(DRAFT_KV) $(ARGS)

CLUSTER := PYTHONPATH=.:tests/engine:tests/chart:tests/cluster $(BIN)/python tests/cluster/cluster.py

.PHONY: cluster
cluster: install ## Start a Kubernetes cluster of one node in namespaces of its own. CLUSTER_NODE=fake CLUSTER_IMAGE=cpu CLUSTER_IMAGE_ARCHIVE=oci.tar
	@exec env $(CLUSTER) up

.PHONY: cluster-down
cluster-down: install ## End it, and see that nothing of it is left
	@exec env $(CLUSTER) down

.PHONY: cluster-shell
cluster-shell: install ## A shell in the cluster's network, with kubectl and helm
	@exec env $(CLUSTER) shell

##@ Image

# The first that can build here; the docker client alone, without buildx, cannot.
CONTAINER_TOOL ?= $(firstword $(foreach tool,docker podman buildah,$(if $(shell $(tool) $(if $(findstring docker,$(tool)),buildx) \
	version 2>/dev/null),$(tool))))
IMAGE ?= sglang-dflash
# Of the image whose SBOM is shown: gpu or cpu.
DEVICE ?= gpu
TAG = $(VERSION)$(if $(findstring cpu,$(DEVICE)),-cpu)
SBOM := /usr/share/doc/sglang-dflash/sbom.spdx.json
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
SGLANG_VERSION = $(shell sed -n '/^\[sglang\]/,/^version/s/^version = "\(.*\)"/\1/p' image/upstream.toml)
# The wheel's index or proxy may have a certificate of its own: CA_BUNDLE=/etc/ssl/certs/ca-certificates.crt
CA_BUNDLE ?=
comma := ,
build_docker := docker buildx build --load
build_podman = podman build --build-arg BUILD_ID=$(shell date +%s%N)
build_buildah = buildah bud --layers --build-arg BUILD_ID=$(shell date +%s%N)
build = $(if $(build_$(CONTAINER_TOOL)),$(build_$(CONTAINER_TOOL)),$(error CONTAINER_TOOL=$(CONTAINER_TOOL) is not \
	docker (with buildx), podman or buildah; install one or name it)) \
	$(if $(CA_BUNDLE),--secret id=ca$(comma)src=$(CA_BUNDLE)) \
	--build-arg SERIES_HASH=$$(cd image/patches/$(SGLANG_VERSION) && sha256sum $$(cat series) | sha256sum | cut -d' ' -f1) \
	--build-arg SOURCE="$$(git config --get remote.origin.url || true)" --build-arg REVISION="$$(git rev-parse HEAD)" \
	--build-arg VERSION=$(VERSION) --build-arg UPSTREAM_VERSION=$(SGLANG_VERSION) \
	--build-arg BASE_NAME="$(firstword $(subst @, ,$(1)))" --build-arg BASE_DIGEST="$(word 2,$(subst @, ,$(1)))"

.PHONY: image
image: ## Build the GPU image. BASE_IMAGE=docker.io/lmsysorg/sglang:v0.5.23-runtime@sha256:... IMAGE=sglang-dflash
	$(if $(findstring @sha256:,$(BASE_IMAGE)),,$(error BASE_IMAGE=$(BASE_IMAGE) has no digest; find it with `docker buildx \
		imagetools inspect lmsysorg/sglang:v$(SGLANG_VERSION)-runtime` and give \
		BASE_IMAGE=docker.io/lmsysorg/sglang:v$(SGLANG_VERSION)-runtime@sha256:...))
	@$(call build,$(BASE_IMAGE)) --build-arg BASE_IMAGE=$(BASE_IMAGE) --build-arg DEVICE=gpu --tag $(IMAGE):$(VERSION) .

.PHONY: image-cpu
image-cpu: ## Build the CPU image, about 12 GB. CONTAINER_TOOL=docker, podman or buildah; IMAGE=sglang-dflash
	@$(call build,docker.io/library/python:3.11-slim) --build-arg DEVICE=cpu --tag $(IMAGE):$(VERSION)-cpu .

show_sbom_docker = docker run --rm --network none --entrypoint cat $(1) $(SBOM)
show_sbom_podman = podman run --rm --network none --entrypoint cat $(1) $(SBOM)
show_sbom_buildah = container=$$(buildah from --pull-never $(1)) && { buildah run $$container -- cat $(SBOM); buildah rm $$container >&2; }

.PHONY: sbom
sbom: ## Print the SBOM (SPDX) of an image that was built. DEVICE=gpu or cpu, IMAGE=sglang-dflash
	@$(call show_sbom_$(CONTAINER_TOOL),$(IMAGE):$(TAG))

##@ Check

.PHONY: test
test: lint ## Lint, then all tests
	@exec $(PYTEST) $(APART) $(ARGS)

.PHONY: test-unit
test-unit: install ## The tests that start no engine
	@exec $(PYTEST) $(APART) --ignore tests/engine --ignore tests/chart/test_served.py --ignore tests/monitoring/test_live.py $(ARGS)

.PHONY: test-engine
test-engine: install ## The tests against the running engine
	@exec $(PYTEST) tests/engine $(ARGS)

.PHONY: accept
accept: install ## Whether a server is sound: URL=http://host:30000, or it launches tiny pairs. ARGS="--min-accept-length 3"
	@exec $(BIN)/pytest tests/accept --capture no --verbose $(if $(URL),--url $(URL)) $(ARGS)

.PHONY: test-chart
test-chart: install ## The tests of the Helm chart
	@exec $(PYTEST) tests/chart $(ARGS)

.PHONY: test-cluster
test-cluster: install ## The chart in a real cluster of one node: install, serve, upgrade, break, roll back. Needs root
	@exec $(PYTEST) tests/cluster $(ARGS)

.PHONY: test-monitoring
test-monitoring: install ## Dashboards and alerts. ARGS="--pictures docs/dashboards" draws the README's
	@exec $(PYTEST) tests/monitoring $(ARGS)

.PHONY: test-image
test-image: install ## Build the image on both bases and run it; as root, with Debian's buildah, podman, runc, debootstrap
	@exec $(BIN)/pytest tests/image/built --capture no $(ARGS)

.PHONY: bench
bench: install ## Measure speed on this machine
	@exec $(BIN)/python -m tests.bench.speed $(ARGS)

.PHONY: bench-capacity
bench-capacity: install ## What a lower draft KV ratio gives the target, and what it costs; draws build/capacity.png
	@exec $(BIN)/python -m tests.bench.capacity $(ARGS)

.PHONY: reproduce-eviction
reproduce-eviction: install ## A long request with sliding-window eviction, and its end without; draws build/eviction.png
	@exec $(BIN)/python -m tests.bench.eviction $(ARGS)

.PHONY: bench-metrics
bench-metrics: install ## What the hooks on the pools cost a decode step, and what a scrape does to one
	@exec $(BIN)/python -m tests.bench.metrics $(ARGS)

.PHONY: lint
lint: install ## Style, format and types
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

##@ Maintain

.PHONY: install
install: $(INSTALLED) ## Make .venv with the locked dependencies. PYTHON=python3.11

$(INSTALLED): pyproject.toml $(LOCKS) requirements/bootstrap.lock $(SERIES)
	$(require_python)
	@echo "== [1/4] Python environment $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip --disable-pip-version-check install --quiet --require-hashes -r requirements/bootstrap.lock
	@echo "== [2/4] dependencies (about 11 GB the first time)"
	@! test -x $(BIN)/sglang-dflash || $(BIN)/sglang-dflash patches unapply
	@$(UV) pip sync --python $(BIN)/python --require-hashes $(LOCKS)
	@$(UV) pip install --python $(BIN)/python --quiet --no-deps --no-build-isolation --editable .
	@echo "== [3/4] patches"
	@$(BIN)/sglang-dflash patches apply
	@touch $@

.PHONY: check-python
check-python:
	$(require_python)@$(PYTHON) --version

.PHONY: lock
lock: install ## Resolve the dependencies anew into requirements/*.lock, from the pin in image/upstream.toml
	@echo "sglang==$(SGLANG_VERSION)" | $(COMPILE) - --output-file requirements/engine.lock
	@$(COMPILE) --group dev --constraints requirements/engine.lock --output-file requirements/dev.lock
	@$(COMPILE) --group bootstrap --output-file requirements/bootstrap.lock
	@$(COMPILE) --group sbom --output-file requirements/sbom.lock

COMPILE := $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--custom-compile-command "make lock"

.PHONY: chart-docs
chart-docs: install ## Carry the descriptions of the chart's values.yaml to its README and schema
	@exec $(BIN)/python tests/chart/value_docs.py

.PHONY: chart-golden
chart-golden: install ## Render the chart's examples anew into tests/chart/golden
	@exec $(BIN)/python tests/chart/golden.py

.PHONY: dashboards
dashboards: install ## Make the chart's dashboards and rules from monitoring/ and values.yaml
	@exec $(BIN)/python -m monitoring

.PHONY: clean
clean: ## Remove .venv and caches of the tools; tiny pairs stay in the user's cache
	@rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info

.PHONY: help
help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^##@ / {printf "\n%s\n", substr($$0, 5)} /^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
