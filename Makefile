# Needs only make and Python 3.10 or newer. `make help` lists the targets.
# Everything is installed into .venv here; a torch that you have elsewhere is never touched.

PYTHON  ?= python3
VENV    ?= .venv
WORKERS ?= 2
# What the development environment runs on. Users bring any torch that pyproject.toml admits.
TORCH   ?= 2.13.0
# For torch builds that come without Triton (CPU builds): the version whose interpreter the tests run under.
TRITON  ?= 3.6.0
# The newest release: Gluon changes from one to the next, so the tests also compile Hopper's kernels with this one.
TRITON_NEWEST ?= 3.9.0

BIN   := $(VENV)/bin
PIP   := $(BIN)/python -m pip --disable-pip-version-check install -q
STAMP := $(VENV)/.installed
NEWEST := $(VENV)/triton-$(TRITON_NEWEST)
LINUX := $(filter Linux,$(shell uname -s))

# Threads that wait for each other sleep instead of spinning: on a busy machine spinning costs a factor of 4.
export OMP_WAIT_POLICY ?= PASSIVE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo test test-all gpu simulate lint style format bench readme docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

install: $(STAMP) ## create .venv and install gdpa with its development tools

demo: $(STAMP) ## the demonstration: one function, its kernel, its error, how it learns, its time and memory
	$(BIN)/gdpa demo

# One thread per worker: two workers with two torch threads each on two cores are 3 to 20 times slower than this.
test: export OMP_NUM_THREADS = 1
# What pytest makes of the asserts of 150 files is kept for the other worker and the other passes.
test: export PYTHONDONTWRITEBYTECODE =
# Neighbours stay in one worker, with what they share, until the other one has nothing left to do.
test: PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
ifdef LINUX
test: $(NEWEST)/.installed
endif
test: style ## ruff, then all tests (mypy among them), then the Triton kernels under Triton's interpreter and with the newest Triton
	$(PYTEST)
ifdef LINUX
	TRITON_INTERPRET=1 $(PYTEST) -m triton
	PYTHONPATH=$(NEWEST) EXPECTED_TRITON=$(TRITON_NEWEST) \
		$(PYTEST) tests/backends/test_hopper_compiled.py tests/backends/test_launching.py tests/backends/test_code.py \
		tests/backends/test_outlines.py
else
	@echo "Triton has no release for this system: what needs it was not run."
endif

test-all: export GDPA_FULL_GRID = 1
test-all: test ## as test, with whole grids: every function on every distribution of scores, every kernel (half an hour more)

# CI has no GPU: this is for a machine that has one.
gpu: $(STAMP) ## on a machine with a GPU: all tests of its kernels, then ten minutes of random calls against float64
	$(BIN)/python -m pytest -n $(WORKERS) -m "hopper or triton or gpu"
	$(BIN)/gdpa fuzz --minutes 10 --keep-going

simulate: $(STAMP) ## on any machine: the tests of Hopper's kernels in a simulator of that GPU (hours)
	GDPA_SIMULATE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m hopper --ignore tests/gpu

lint: style ## ruff (lint and format) and mypy; changes nothing
	$(BIN)/mypy

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP) ## let ruff fix and format what it can
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: $(STAMP) ## the benchmarks of this machine
	$(BIN)/gdpa bench

readme: $(STAMP) ## make the tables and plots of README and docs from benchmarks/results
	for page in benchmarks/results/*.html; do $(BIN)/gdpa bench --from "$${page%.html}.json" > /dev/null || exit 1; done
	$(BIN)/gdpa bench --readme README.md --readme docs/results.md --readme docs/accuracy.md --readme docs/functions.md

docs: $(STAMP) ## the guides and the API pages as HTML, in build/docs
	$(BIN)/python docs/build.py build/docs

clean: ## remove caches, builds and demo outputs; .venv and benchmarks/results stay
	rm -rf build dist gdpa-compare gdpa-demo gdpa-bench benchmarks/scratch .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# Made once, and redone when pyproject.toml changes.
# torch comes first and alone, so that no other requirement has a say in which build of it is picked.
# Triton second, only where torch brought none: torch's CUDA builds pin their own, and pip must not trade torch for it.
# Then gdpa, built with the setuptools that torch requires, so nothing is downloaded for the build.
$(STAMP): pyproject.toml | $(BIN)/python
	@echo "installing into $(VENV) (some minutes the first time)"
	$(PIP) torch==$(TORCH)
ifdef LINUX
	$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) triton==$(TRITON)
endif
	$(PIP) --no-build-isolation -e '.[dev]'
	@touch $@

# Beside the environment's own Triton, not instead of it: torch's CUDA builds pin theirs.
$(NEWEST)/.installed: | $(STAMP)
	$(PIP) --no-deps --target $(NEWEST) triton==$(TRITON_NEWEST)
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else "gdpa needs Python 3.10 or newer; $(PYTHON) is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
