# Every target sets up .venv by itself: `make demo` and `make test` work in a fresh clone.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= python3
WORKERS ?= $(shell nproc 2>/dev/null || echo 2)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
READY := $(VENV)/.ready

# One thread per process: the tests start several processes on few cores.
test test-all check bench: export OMP_NUM_THREADS = 1
test test-all check bench: export MKL_NUM_THREADS = 1
test test-all check bench: export OPENBLAS_NUM_THREADS = 1

# Python keeps what it compiles, whatever the caller's habit: the tests start it a hundred times.
test test-all check: export PYTHONDONTWRITEBYTECODE =

.PHONY: help setup demo check test test-all lint format docs bench accuracy pase-report wheel-check parsers clean

help:
	@echo "make demo         calibrate this machine briefly, search, run the plans, show predicted against measured"
	@echo "make check        lint, types and the quick tests: what to run after each change"
	@echo "make test         what must hold before a change lands, tests with several processes included"
	@echo "make test-all     every test: those of make test and the nightly ones, which show the same on more plans and draws"
	@echo "make lint         ruff (rules and format), mypy and the wording of what users read"
	@echo "make format       let ruff rewrite the files"
	@echo "make docs         build the documentation site into build/docs; every warning is an error"
	@echo "make bench        the speed of perfmodel itself (tests/benchmarks)"
	@echo "make accuracy     how far predictions are from published runs, models left out; writes docs/accuracy.md and"
	@echo "                  docs/accuracy-serving.md again"
	@echo "                  (KERNELS=FOLDER of the published kernel tables adds their lines)"
	@echo "make pase-report  repeat the experiment of the PaSE paper: search times, strategies and speedups"
	@echo "make wheel-check  build the wheel, install it alone and use it without torch"
	@echo "make parsers      read exported configurations with the parsers of their frameworks (installs them into .venv-parsers)"
	@echo "make clean        remove caches and build results (.venv stays)"

setup: $(READY)

# torch is pinned before anything else asks for it, so that no other build of it is fetched; hatchling comes from the same pins as
# everything else because the package is then built without an isolated (unpinned) environment.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; set PYTHON=..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt torch==2.13.0 hatchling
	$(PIP) install --quiet -c constraints.txt --no-build-isolation -e '.[torch,dev]'
	@touch $@

demo: $(READY)
	$(BIN)/perfmodel demo

# Tests of the times and the ends of several processes run alone, one after the other; only the files that have some are read. Both halves
# always run (pytest's exit code 5 is "no test selected").
test: SELECTED := and not nightly
test test-all: $(READY)
	@failed=0; \
	$(BIN)/python -m pytest -q -m 'not dist $(SELECTED)' -n $(WORKERS) --dist worksteal || failed=1; \
	$(BIN)/python -m pytest -q -m 'dist $(SELECTED)' $$(grep -rl 'mark\.dist' tests --include='test_*.py' | sort) || [ $$? -eq 5 ] || failed=1; \
	exit $$failed

check: lint
	$(BIN)/python -m pytest -q -m 'not slow and not dist and not gpu' -n $(WORKERS) --dist worksteal

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tests.vocabulary

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)
	$(BIN)/sphinx-build -E -W --keep-going -q -b html docs build/docs

bench: $(READY)
	$(BIN)/python -m pytest -q -s -p no:xdist tests/benchmarks

CASES := tests/golden/published_training.jsonl.gz
OUT_OF_MEMORY := tests/golden/published_out_of_memory.jsonl.gz
SERVED := tests/golden/published_serving.jsonl.gz

accuracy: $(READY)
	mkdir -p build
	$(BIN)/python -m lab.fitted $(CASES)
	$(BIN)/python -m lab.generic
	$(BIN)/python -m lab.left_out $(CASES) $(if $(KERNELS),--kernels $(KERNELS)) --out build/left_out.csv
	$(BIN)/python -m lab.residuals $(CASES) --left-out build/left_out.csv --out-of-memory $(OUT_OF_MEMORY)
	$(BIN)/python -m lab.accuracy $(CASES) $(OUT_OF_MEMORY) --left-out build/left_out.csv --out docs/accuracy.md
	$(BIN)/python -m lab.serving.engines $(SERVED)
	$(BIN)/python -m lab.serving.residuals $(SERVED)
	$(BIN)/python -m lab.serving.accuracy $(SERVED) --out docs/accuracy-serving.md
	$(BIN)/python -m lab.page_figures docs
	$(BIN)/python -m tests.documents --figures README.md docs/*.md docs/*/*.md

pase-report: $(READY)
	$(BIN)/python -m lab.pase --figure

wheel-check: $(READY)
	$(BIN)/python -m pytest -q tests/contracts/test_wheel.py

# A layer over .venv, from which torch and all else that is pinned there comes; the frameworks' kernels and data loaders are left out.
# The setuptools of a Python 3.11 environment builds no wheel without the package wheel; that of .venv does.
PARSERS := .venv-parsers
$(PARSERS)/.ready: tests/parsers/requirements.txt $(READY)
	test -x $(PARSERS)/bin/python || { $(BIN)/python -m venv $(PARSERS) && $(PARSERS)/bin/python -m pip uninstall --quiet --yes setuptools; }
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $(PARSERS)/lib/$$(ls $(PARSERS)/lib)/site-packages/project.pth
	DS_BUILD_OPS=0 $(PARSERS)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --no-build-isolation -r tests/parsers/requirements.txt
	$(PARSERS)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --upgrade --target $(PARSERS)/torchtitan-0.3 torchtitan==0.3.0
	$(PARSERS)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --ignore-requires-python maxtext==0.2.5  # asks for Python 3.12
	@touch $@

# For the test of the static page; without npm it is skipped.
build/pyodide/pyodide-lock.json: tests/web/pyodide.py $(READY)
	$(BIN)/python -m tests.web.pyodide build/pyodide
	@touch $@

parsers: $(PARSERS)/.ready
	$(BIN)/python -m pytest -q tests/parsers

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
