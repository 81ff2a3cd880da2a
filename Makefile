.DEFAULT_GOAL := help
.PHONY: help train test check lint bench chaos clean
PYTHON ?= python3
ARGS ?=
BIN := .venv/bin

help:  ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

train: .venv/ready  ## train the digits on every GPU of this machine, or in two CPU processes; make train ARGS="key=value ..."
	@$(BIN)/python launch.py $(ARGS)

test: .venv/ready  ## the quick tests, under five minutes on two cores
	$(BIN)/python -m pytest -m "not slow"

check: lint  ## what CI runs: lint, format, types and every test
	$(BIN)/python -m pytest

bench: .venv/ready  ## start-up against torchrun and overhead against a raw loop, on an idle machine; both have limits
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/startup.py --ranks 4
	$(BIN)/python benchmarks/overhead.py

chaos: .venv/ready  ## 60 runs under random SIGKILLs at 2, 3 and 4 ranks; every one must end in the same bytes
	$(BIN)/python -m tests.chaos

lint: .venv/ready  ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

clean:  ## remove what set-up, tests and runs left behind; data/ stays
	rm -rf .venv runs .pytest_cache .ruff_cache .hypothesis *.egg-info

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.12"; exit 1; }
	@echo "setting up .venv (once; torch is large)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@
