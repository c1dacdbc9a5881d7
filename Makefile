# Everything a contributor runs. Each target makes the environment in .venv first when it is missing or out of date.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.microtome-installed
PYTEST_ARGS ?=
BENCHES ?= planner_leaves wire link attention sampler overhead
PEERS ?= main rest
PEERS_ARGS ?=

.PHONY: help env demo test check format proto docs wheel bench bench-peers soak constraints clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

env: $(STAMP) ## make the environment in .venv (every other target does so by itself)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
	  { echo "Microtome needs Python 3.11 to 3.13; '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.11" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || \
	  { echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "installing into $(VENV) (a few minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt hatchling editables
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

demo: $(STAMP) ## fetch the default model, serve it here, stream eight chats through it, stop it
	@$(BIN)/python -m microtome demo

test: $(STAMP) ## every test that needs no GPU
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(STAMP) ## style, types, import directions, generated code
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m tests.support.stubs check
	@$(BIN)/python -m tests.support.pages check

format: $(STAMP) ## apply the style
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

proto: $(STAMP) ## generate microtome/v1 from proto/
	@$(BIN)/python -m tests.support.stubs write

docs: $(STAMP) ## bring the made parts of docs/ up to date
	@$(BIN)/python -m tests.support.pages write

wheel: $(STAMP) ## build the package into dist/
	@rm -rf dist
	@$(BIN)/python -m build --no-isolation --outdir dist . >/dev/null
	@ls dist

bench: $(STAMP) ## measure; prints ratios within one run
	@for name in $(BENCHES); do echo "== bench.$$name"; $(BIN)/python -m bench.$$name; done

# $$PEERS_HOME says where they go; PEERS which of them, PEERS_ARGS what else `python -m bench.peers` is told.
bench-peers: $(STAMP) ## install other engines (13 GB, 12 minutes, once) and measure beside them
	@PYTHON=$(PYTHON) bash bench/peer_engines/install.sh
	@for set in $(PEERS); do $(BIN)/python -m bench.peers $$set $(PEERS_ARGS); done

soak: $(STAMP) ## ten minutes of kills under load, and the tests that take minutes
	@$(BIN)/python -m tests.integration.soak --minutes 10
	@$(BIN)/python -m pytest -m 'slow and not gpu' $(PYTEST_ARGS)
	@$(BIN)/python -m tests.simulation.soak --seeds 10000

constraints: $(STAMP) ## write constraints.txt from the environment
	@{ sed '/^[^#]/,$$d' constraints.txt; \
	  $(BIN)/python -m pip freeze --exclude microtome | sed -E 's/(==[^+]*)\+.*/\1/'; } > constraints.new
	@mv constraints.new constraints.txt

clean: ## remove what these targets made, the environment included
	@rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
