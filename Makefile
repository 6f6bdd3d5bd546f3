# One command for each thing; CI runs the same ones. `make` alone lists them.
# A fresh machine needs Python 3.11 or newer, make and a package index; `make setup` makes the rest, in .venv alone.

VENV    := .venv
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.setup-done
# A CUDA build of torch, with the numpy that its DTensor wants, in a place of its own; `make check-cuda TORCH_CUDA=2.9.1` takes another release.
VENV_CUDA  := .venv-cuda
TORCH_CUDA := 2.14.1
STAMP_CUDA := $(VENV_CUDA)/.torch-$(TORCH_CUDA)
# `make setup PYTHON=/path/to/python3.12` takes another one; otherwise the first of these that is new enough.
PYTHON  ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
             $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

# The tiers of CI (tests/README.md); gpu and chaos are asked for by name.
TIERS   := architecture unit property golden sim process cluster
TESTS   := $(wildcard $(TIERS:%=tests/%))
PYTEST  := $(BIN)/pytest $(TESTS)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-long test-gpu gpu-status lint format types contracts check check-torch check-cuda \
        bench bench-checkpoint clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## the virtual environment .venv with everything in it; nothing to do when it is up to date

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "stepfast needs Python 3.11 or newer and found none: install one, or say make $(or $(MAKECMDGOALS),setup) PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo "stepfast needs Python 3.11 or newer, and $(PYTHON) is not: say make $(or $(MAKECMDGOALS),setup) PYTHON=/path/to/python3" >&2; exit 1; }
	@test -x $(BIN)/pip || "$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); echo "$(PYTHON) cannot make a virtual environment: install its venv module (Debian: apt-get install python3-venv)" >&2; exit 1; }
	@echo "installing stepfast and what its checks need into $(VENV); the first time this takes minutes"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,dev]'
	@touch $@

demo: $(STAMP) ## the main job through an exception, a kill of rank 0 and a hang, against the same job without faults
	$(BIN)/python examples/demo.py

test: $(STAMP) ## the tests, exactly those of CI
	$(PYTEST) -m "not long"

test-long: $(STAMP) ## the long random schedules
	$(PYTEST) -m long

test-gpu: $(STAMP) ## what is claimed of GPUs, on those of this machine; writes gpu-report.json, without a GPU too
	$(BIN)/pytest tests/gpu

gpu-status: $(STAMP) ## docs/gpu-status.md, from the claims, the reports in docs/gpu-reports and the source
	$(BIN)/python tests/gpu_status.py > docs/gpu-status.new && mv docs/gpu-status.new docs/gpu-status.md

lint: $(STAMP) ## ruff: lint and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP) ## let ruff put the source in order
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

types: $(STAMP) ## mypy, strict
	$(BIN)/mypy

contracts: $(STAMP) ## the arrows between the rooms
	$(BIN)/lint-imports --no-logo

check: lint types contracts ## lint, types and contracts

check-torch: $(STAMP) ## the symbols of torch that we rely on, against the torch that is installed
	$(BIN)/python tests/torch_symbols.py

check-cuda: $(STAMP_CUDA) ## the same against a CUDA build, which this installs into .venv-cuda (several GB); no GPU is needed
	$(VENV_CUDA)/bin/python tests/torch_symbols.py

$(STAMP_CUDA):
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer: say make check-cuda PYTHON=/path/to/python3" >&2; exit 1; }
	@test -x $(VENV_CUDA)/bin/pip || "$(PYTHON)" -m venv $(VENV_CUDA) || { rm -rf $(VENV_CUDA); exit 1; }
	@echo "installing torch $(TORCH_CUDA) into $(VENV_CUDA): several GB, some minutes"
	$(VENV_CUDA)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile torch==$(TORCH_CUDA) numpy
	@rm -f $(VENV_CUDA)/.torch-*
	@touch $@

bench: $(STAMP) ## recovery times, beside torchrun's; what snapshots cost the loop
	$(BIN)/python bench/recovery.py
	$(BIN)/python bench/staging.py

bench-checkpoint: $(STAMP) ## what checkpoints cost the loop, beside torch's own ways; the bytes against the machine's limits
	$(BIN)/python bench/checkpoint.py

clean: ## remove caches and builds; .venv, .venv-cuda and job directories stay
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find src tests examples bench docs -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
