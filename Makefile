.DEFAULT_GOAL := help
.PHONY: help train test check check-all lint rewritten bench chaos fuzz judge docs clean
PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
# Bytecode is kept, whatever the caller's setting: without it each test process rewrites every assert again, in 7 s.
unexport PYTHONDONTWRITEBYTECODE
# In the gate six at a time, on two cores: they wait for processes and for time limits, and four left the cores idle for
# a quarter of the time. The nightly ones compute more: four. The quick ones wait for nothing: two.
# tests/conftest.py groups them and puts slow ones first.
PYTEST := $(BIN)/python -m pytest --dist loadgroup --no-loadscope-reorder

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

train: .venv/base  ## train the digits on every GPU of this machine, or in two CPU processes; make train ARGS="key=value ..."
	@$(BIN)/python launch.py $(ARGS)

test: .venv/ready  ## the quick tests
	$(PYTEST) -n 2 -m "not slow and not nightly"

check: rewritten lint  ## what CI runs: lint, format, types and every test but the nightly ones
	$(PYTEST) -n 6 -m "not nightly"

check-all: rewritten lint  ## every test; tests/test_map.md says what the nightly ones add
	$(PYTEST) -n 4

bench: .venv/ready  ## start-up against torchrun and overhead against a raw loop, on an idle machine; both have limits
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/startup.py --ranks 4
	$(BIN)/python benchmarks/overhead.py

chaos: .venv/ready  ## runs under SIGKILLs at random and in every phase, 2 to 4 ranks; all must end in the same bytes
	$(BIN)/python -m tests.campaigns.chaos
	$(BIN)/python -m tests.campaigns.lost_ranks
	$(BIN)/python -m tests.campaigns.lost_session

fuzz: .venv/ready  ## random commands under random faults: the same bytes, or a cause that is named; goes on where it was left
	$(BIN)/python -m tests.campaigns.fuzz $(ARGS)

judge: .venv/ready  ## ckpt-chaos kills three ranks at every file event of a run with checkpoints; 13 minutes on two cores
	@$(BIN)/python -c 'import ckpt_chaos' 2>/dev/null || $(BIN)/python -m pip install --quiet --constraint constraints.txt ckpt-chaos
	$(BIN)/ckpt-chaos run --work runs/judge --ranks 3 --timeout 120 --ckpt-ignore-size \
	  --step-regex 'from step (\d+)' --checkpoint-glob '{out}/checkpoints/step_*' \
	  --result-file '{out}/checkpoints/step_00000004/model.safetensors' \
	  --fail-on HARD_FAIL,SILENT_DIVERGENCE,LOST_WORK,CONTROL_FAIL -- \
	  $(BIN)/python launch.py 'run_dir={out}' model=mlp data.limit=48 train.global_batch_size=24 train.epochs=2 \
	  train.evaluate_every_epochs=99 checkpoint.every_steps=2 checkpoint.keep=9

docs: | .venv/bin/pip  ## the site of docs/ in build/site; a dead link or anchor is an error
	@$(BIN)/python -c 'import material' 2>/dev/null || $(PIP_INSTALL) --quiet mkdocs-material
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

lint: .venv/ready  ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

# Beside lint, which needs one core: test files are rewritten for asserts once, not in four processes. Errors are the tests'.
rewritten: .venv/ready
	@$(BIN)/python -m pytest --collect-only -qq -p no:cacheprovider >/dev/null 2>&1 &

clean:  ## remove what set-up, tests and runs left behind; data/ stays
	rm -rf .venv build runs .pytest_cache .ruff_cache .hypothesis *.egg-info

# Two stamps: .venv/base has what training needs, .venv/ready the tools for tests and lint too. pip's own progress is shown.
# pip would compile all 16,000 files to bytecode, one after the other, in a minute. COMPILE does the 2,000 that a start
# imports, in 10 s: the first `python launch.py` is no slower. Python does the others when they are first imported. Tests
# import all of these, in `make check` on the core that lint leaves idle.
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --no-compile --constraint constraints.txt
COMPILE := $(BIN)/python -c 'import ddp_train.commands.flags, ddp_train.runs.worker, torch._dynamo'

.venv/base: pyproject.toml constraints.txt | .venv/bin/pip
	@echo "Setting up .venv, once: PyTorch with its CUDA libraries is a download of 3 GB, 5.7 GB on disk."
	@$(PIP_INSTALL) --editable .
	@$(COMPILE)
	@touch $@

.venv/ready: pyproject.toml constraints.txt | .venv/bin/pip
	@echo "Setting up .venv, once, with the tools for tests, lint and trackers: 3.3 GB to download, 6.5 GB on disk."
	@$(PIP_INSTALL) --editable '.[dev]'
	@touch .venv/base $@

.venv/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.12"; exit 1; }
	@$(PYTHON) -m venv .venv
