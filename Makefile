# Everything a machine with Python 3.11+, make and a C compiler needs. `make` alone lists the targets.

SHELL := bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
KEEP ?=
NAME ?=
WORKERS ?= 4
PYTEST = PYTHONHASHSEED=0 $(BIN)/python -m pytest --dist worksteal --durations=10
NONE_FOUND_IS_FINE = $(if $(ARGS),|| [ $$? = 5 ])
TESTS ?= tests/frameworks
unexport PYTHONDONTWRITEBYTECODE # tests start thousands of processes, which would each compile the package
QUICK_BENCHES = $(shell grep -l '^QUICK = True' benchmarks/*.py 2>/dev/null)

.PHONY: help ready-demo ready-dev setup demo test test-all test-slow test-frameworks test-kubernetes fuzz check format reference pictures bench dist check-wheel clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' Makefile | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

setup: ready-dev  ## create .venv or mend it, and install what all targets need; nothing to do if it is up to date

demo: ready-demo  ## run the demonstration; KEEP=1 leaves its console open
	@$(BIN)/python examples/demo.py $(if $(KEEP),--keep) $(ARGS)

test: ready-dev  ## run the tests except the slow ones; ARGS="-k gate" is handed to pytest, WORKERS=0 runs them one by one
	@$(PYTEST) --numprocesses $(WORKERS) -m "not slow" $(ARGS) $(NONE_FOUND_IS_FINE)

test-slow: ready-dev  ## run the tests marked slow
	@$(PYTEST) --numprocesses $(WORKERS) -m slow $(ARGS) $(NONE_FOUND_IS_FINE)

test-all: ready-dev  ## run both, in one go, and print what they cost
	@$(PYTEST) --numprocesses $(WORKERS) --cpu-report $(ARGS) $(NONE_FOUND_IS_FINE)

test-frameworks: ready-dev  ## train with every framework, each installed once into .frameworks; NAME=tensorflow for one
	@FALAJ_NO_SKIPS=1 $(BIN)/python -m pytest --durations=0 --durations-min=1 $(TESTS) $(if $(NAME),-k $(NAME)) $(ARGS)

test-kubernetes: ready-dev  ## run jobs on a cluster: that of KUBECONFIG, or one that the folder FALAJ_TEST_CLUSTER starts; ARGS="-m slow" runs the slow ones
	@$(BIN)/python -m pytest --durations=10 -m "not slow" tests/kubernetes $(ARGS)

fuzz: ready-dev  ## search for requests that the model server mishandles, with another seed each time; about an hour
	@FALAJ_FUZZ=1 HYPOTHESIS_PROFILE=explore $(BIN)/python -m pytest --durations=0 -k for_long tests/unit/serving $(ARGS)

check: ready-dev  ## format, lint, types and layers
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

format: ready-dev  ## rewrite the code to the house format, and fix what the linter can
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

reference: ready-dev  ## rewrite the generated pages of docs/reference
	@$(BIN)/falaj reference > docs/reference/cli.md
	@$(BIN)/python scripts/reference_pages.py

pictures: ready-dev  ## take the pictures of docs/reference/console.md from the demonstration's console; about four minutes
	@FALAJ_WRITE_PICTURES=1 $(PYTEST) -k every_page tests/scenarios/test_demonstration.py $(ARGS)

bench: ready-dev  ## measure beside the peers: all the quick ones, or NAME=gate
ifdef NAME
	@$(BIN)/python benchmarks/$(NAME).py $(ARGS)
else
	@set -e; for bench in $(QUICK_BENCHES); do echo "== $$bench" >&2; $(BIN)/python $$bench; done
endif

dist: ready-dev  ## build the wheel and its bill of materials (CycloneDX) into dist
	@rm -rf dist
	@$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	@$(BIN)/python scripts/bill_of_materials.py dist/falaj-*.whl dist/falaj.cdx.json
	@ls dist

check-wheel: ready-dev  ## install the wheel in a clean virtualenv and run the tutorial there; ARGS=--all for every Python that is found
	@$(BIN)/python scripts/check_wheel.py $(ARGS)

clean:  ## remove .venv, caches, and the virtualenvs of peers and frameworks
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis benchmarks/.venvs .frameworks .images .screenshots
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

# scripts/setup.py sees what is missing. The Python of the virtualenv runs it, if that starts; else PYTHON, which makes one.
ready-demo ready-dev:
	@for python in $(BIN)/python '$(PYTHON)'; do \
	  "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && \
	    exec "$$python" scripts/setup.py --venv $(VENV) --extra $(@:ready-%=%); \
	done; \
	echo "Falaj needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || true)." >&2; \
	echo "  fix   make $(or $(MAKECMDGOALS),setup) PYTHON=/path/to/python3.11" >&2; exit 1
