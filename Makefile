PYTHON     ?= python3
ARGS       ?=
BENCHMARKS ?= benchmarks/tile_maps.py benchmarks/anywhere.py benchmarks/cpu.py benchmarks/models.py

BIN   := .venv/bin
TORCH := $(shell grep '^torch==' constraints.txt)

.DEFAULT_GOAL := help
.PHONY: help demo test lint bench clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-6s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: .venv/.ready  ## run the demonstration
	$(BIN)/tilewise demo $(ARGS)

test: .venv/.ready  ## run the tests (ARGS='-k causal' passes options to pytest)
	$(BIN)/python -m pytest -n 2 -q $(ARGS)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 -q tests/interpreter

lint: .venv/.ready  ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/.ready  ## run the benchmarks (BENCHMARKS='benchmarks/gpu.py' chooses)
	@for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python $$script $(ARGS) || exit 1; done

clean:  ## delete caches and outputs (.venv stays)
	rm -rf build dist tilewise-demo finetune-output .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -type d -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# The environment, made once. torch goes first and alone, so that nothing else decides which torch is installed.
.venv/.ready: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) was not found. Name a Python 3.10 or newer: make PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "tilewise needs Python 3.10 or newer, but $(PYTHON) is " + sys.version.split()[0] + ". Name another: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt $(TORCH)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
