# The ways to run things. Every target makes `.venv` and installs into it on first use.
#
#   make PYTHON=python3.12 ...    another interpreter for a new .venv (3.11 or newer)
#   make TORCH=torch==2.12.1 ...  another torch for a new .venv (pyproject.toml has the range)

# One exact release, so that every machine tests the same one and pip is never free to take a newer.
TORCH ?= torch==2.13.0
# Of `python3` and the versioned names, the first that is 3.11 or newer.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
INTEROP := .venv-interop
INTEROP_READY := $(INTEROP)/.ready
PIP := -m pip install --quiet --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test lint unit interop slow gpu-test bench

help: ## show this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(READY) ## make .venv and install baltoro with its development tools
	@echo "ready: $(BIN)/baltoro"

$(READY): pyproject.toml
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or newer found;" \
		"install one or say make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "== installing into $(VENV) with $(PYTHON) (the first time takes a few minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python $(PIP) "$(TORCH)" --editable '.[dev]'
	@touch $@

$(INTEROP_READY): pyproject.toml tests/interop/requirements.txt
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or newer found" >&2; exit 1; }
	@echo "== installing transformers and mlx-lm into $(INTEROP)"
	@$(PYTHON) -m venv $(INTEROP)
	@$(INTEROP)/bin/python $(PIP) "$(TORCH)" --editable . -r tests/interop/requirements.txt
	@touch $@

quickstart: $(READY) ## build the nano fixture, generate from it, say what comes next
	$(BIN)/baltoro fixture runs/quickstart --preset nano
	$(BIN)/baltoro generate runs/quickstart --prompt "The quick brown fox" --max-new-tokens 32
	@echo "The weights are random, so the text is noise: this shows that the machinery runs."
	@echo "Next: $(BIN)/baltoro inspect runs/quickstart, $(BIN)/baltoro chat runs/quickstart, docs/MAP.md"

lint: $(READY) ## format, lint, types, import directions
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

unit: $(READY) ## the CPU tests, every verb end to end among them
	$(BIN)/python -m pytest

interop: $(READY) $(INTEROP_READY) ## our checkpoints in transformers and mlx-lm, in their own environment
	$(BIN)/python -m pytest -m interop tests/interop

slow: $(READY) ## the longer CPU tests
	$(BIN)/python -m pytest -m slow

test: ## everything that CI checks, on a bare clone too
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory unit
	@$(MAKE) --no-print-directory interop
	@echo "== passed: format, lint, types, import directions, CPU tests, interop"

# A machine with a GPU often brings its own torch and no way to install: its python3 is used as it is,
# and only files with such tests are read, since the others may import what is not there.
GPU_TESTS = $(shell grep -rl 'mark\.gpu' tests --include='test_*.py')
gpu-test: ## the tests that need a CUDA device
	@test -n "$(GPU_TESTS)" || { echo "error: no test is marked gpu" >&2; exit 1; }
	@if python3 -c 'import torch, pytest; assert torch.cuda.is_available()' 2>/dev/null; then \
		echo "== with this machine's own python3"; \
		PYTHONPATH=src python3 -m pytest -m gpu $(GPU_TESTS); \
	else $(MAKE) --no-print-directory setup && $(BIN)/python -m pytest -m gpu $(GPU_TESTS); fi

bench: $(INTEROP_READY) ## CPU speed against transformers, into bench/results
	$(INTEROP)/bin/python -W ignore bench/cpu_vs_transformers.py
