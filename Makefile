# `make demo` and `make test` each make .venv and install all they need, once; a second run needs no network.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
# The build that pip serves for this machine: on Linux x86-64 PyPI's wheel has CUDA, other indexes serve CPU builds.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=

# A stamp is named after what it installed: a changed pin or dependency installs again, anything else does not.
PINS := $(shell { cat pyproject.toml; echo '$(TORCH)'; } | cksum | cut -d' ' -f1)
RUN_STAMP := $(VENV)/.installed-$(PINS)
DEV_STAMP := $(VENV)/.installed-dev-$(PINS)
BENCH_STAMP := $(VENV)/.installed-benchmark-$(PINS)

.PHONY: help
help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v >= (3, 11) else "Python 3.11 or newer is needed; %s is %d.%d. Name another one: make PYTHON=python3.12" % ((sys.executable,) + v))'
	$(PYTHON) -m venv $(VENV)

$(RUN_STAMP): | $(BIN)/python
	$(BIN)/python -m pip install '$(TORCH)' -e .
	@touch $@

$(DEV_STAMP): | $(BIN)/python
	$(BIN)/python -m pip install '$(TORCH)' -e '.[dev]'
	@touch $@ $(RUN_STAMP)

$(BENCH_STAMP): $(RUN_STAMP)
	$(BIN)/python -m pip install '$(TORCH)' -e '.[benchmark]'
	@touch $@

.PHONY: demo
demo: $(RUN_STAMP) ## answer a question with the built-in model
	$(BIN)/minillm generate "What is the capital of France?" --temperature 0 --dtype float32

.PHONY: lint
lint: $(DEV_STAMP) ## ruff and mypy
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy

# Two workers of one thread each: most tests are single-threaded Python.
.PHONY: test
test: lint ## lint, type check and all tests
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 $(PYTEST_ARGS)

.PHONY: bench-cpu
bench-cpu: $(BENCH_STAMP) ## the engine against transformers on this CPU
	$(BIN)/minillm bench cpu

.PHONY: bench-scheduler
bench-scheduler: $(RUN_STAMP) ## time of schedule + commit per step
	$(BIN)/minillm bench scheduler

.PHONY: bench-quick
bench-quick: $(BENCH_STAMP) ## every benchmark program in small, the report and the history
	$(BIN)/minillm bench all --quick

.PHONY: clean
clean: ## remove the environment and tool caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
