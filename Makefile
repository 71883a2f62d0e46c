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

DRIVERS_LOG := $(VENV)/drivers.log

SHELL := bash
.SHELLFLAGS := -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup quickstart test lint unit interop slow tools drivers gpu-test bench

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
	@echo "== installing transformers, mlx-lm, e2b and the openai clients into $(INTEROP)"
	@$(PYTHON) -m venv $(INTEROP)
	@$(INTEROP)/bin/python $(PIP) "$(TORCH)" --editable . -r tests/interop/requirements.txt
	@touch $@

# A run that was stopped goes on where it was. TOKENS=614400 is the length of the size itself, in
# another START.
START := runs/quickstart
TOKENS := 245760
# held out: not among the pictures that it trains on
PICTURE := src/baltoro/data/corpus/pictures/flower-red.png
quickstart: $(READY) ## build data, train nano on it, look at it, generate from text and a picture
	$(BIN)/baltoro data build tiny --out $(START)/data
	$(BIN)/baltoro train nano --data $(START)/data --out $(START)/run --tokens $(TOKENS) --run.eval_every 40
	$(BIN)/baltoro report $(START)/run
	$(BIN)/baltoro generate $(START)/run/best --prompt "What is 16 x 4?" --max-new-tokens 60 --temperature 0.7 --seed 0
	$(BIN)/baltoro generate $(START)/run/best --image $(PICTURE) --prompt "" --max-new-tokens 60 --temperature 0.7 --seed 0
	@echo "== $(START)/run/report.html shows the run; $(START)/run/best is a checkpoint in the official layout."
	@echo "== Next: $(BIN)/baltoro chat $(START)/run/best, $(BIN)/baltoro serve $(START)/run/best, docs/MAP.md"

lint: $(READY) ## format, lint, types, import directions
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

unit: $(READY) ## the CPU tests, every verb end to end among them; a process with one thread for each core
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n logical --maxprocesses 8 --dist loadfile

interop: $(READY) $(INTEROP_READY) ## foreign programs on our checkpoints and servers, in their own environment
	$(BIN)/python -m pytest -m interop tests/interop

slow: $(READY) ## the longer CPU tests
	$(BIN)/python -m pytest -m slow

# 3: this machine refuses some of them, for reasons it has printed.
tools: $(READY) ## install gVisor, CRIU, QEMU and what they boot, outside of the system
	$(BIN)/baltoro sandbox install || test $$? = 3

drivers: tools ## run every sandbox driver that keeps memory; names those that this machine refuses
	$(BIN)/python -m pytest -m drivers tests/sandbox/test_drivers_ci.py | tee $(DRIVERS_LOG)

# The drivers install and run while the interop environment downloads: both wait more than they work.
test: ## everything that CI checks, on a bare clone too
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory unit
	@$(MAKE) --no-print-directory --jobs=2 drivers $(INTEROP_READY)
	@$(MAKE) --no-print-directory interop
	@ran=$$(grep '^sandbox drivers:' $(DRIVERS_LOG)) && \
		echo "== passed: format, lint, types, import directions, CPU tests, interop; $$ran"

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
