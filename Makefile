# Two commands work on a fresh machine with Python 3.11+ and make:
#   make demo    install the simulator and run the main job on the bundled sample trace
#   make test    install everything and run all checks: lint, types, import contracts, tests
# make native compiles the event loop, which then takes half the time.
# All build .venv themselves. PYTHON=python3.12 chooses another interpreter, VENV another folder.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
# The CPU build of this version is what the tests are run with; the code supports torch >= 2.11.
TORCH ?= torch==2.13.0
TRITON ?= triton>=3.6
# Tests that compare times of the real engine (mark `quiet`) run after the others, alone.
PYTEST_ARGS ?= -n auto --dist worksteal
# Run again with the event loop compiled, where there is a C compiler.
LOOP_TESTS = tests/engine tests/cluster tests/policies tests/metrics

.PHONY: demo native test lint types contracts pytest bench clean

demo: $(VENV)/.installed
	$(BIN)/simulate --trace traces/data/synthetic_azure_conv.csv --policy chunked
	@echo "make native compiles the event loop: the same results in half the time"

# Half a minute with a C compiler; without one the simulator stays in Python.
native: $(VENV)/.installed
	$(PIP) --editable ".[native]"
	$(BIN)/python -m sim.native

test: lint types contracts pytest

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-test
	$(BIN)/mypy

contracts: $(VENV)/.installed-test
	$(BIN)/lint-imports

pytest: $(VENV)/.installed-test
	TOKENTWIN_NATIVE=0 $(BIN)/python -m pytest $(PYTEST_ARGS) -m "not quiet"
	$(BIN)/python -m pytest -m quiet
	if $(BIN)/python -m sim.native; then \
	  TOKENTWIN_NATIVE=1 $(BIN)/python -m pytest $(PYTEST_ARGS) $(LOOP_TESTS); fi

bench: $(VENV)/.installed-test
	$(BIN)/python -m tests.benchmarks

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "tokentwin needs Python 3.11 or newer; name one with: make PYTHON=python3.12 ..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml
	$(PIP) --editable .
	@touch $@

# torch first and pinned, so that no extra pulls another build of it.
$(VENV)/.installed-test: $(VENV)/bin/python pyproject.toml
	$(PIP) $(TORCH)
	$(PIP) "$(TRITON)" --editable ".[test,kernels,notebooks]"
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
