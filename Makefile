PYTHON     ?= python3
ARGS       ?=
BENCHMARKS ?= benchmarks/tile_maps.py benchmarks/anywhere.py benchmarks/cpu.py benchmarks/models.py
TORCHES    ?= oldest newest
URL        := $(TILEWISE_URL)

BIN   := .venv/bin
PIP   := -m pip install --disable-pip-version-check -c constraints.txt
TORCH := $(shell grep '^torch==' constraints.txt)

.DEFAULT_GOAL := help
.PHONY: help demo test lint docs package test-matrix bench clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: .venv/.demo  ## run the demonstration
	$(BIN)/tilewise demo $(ARGS)

test: .venv/.ready  ## run the tests (ARGS='-k causal' passes options to pytest)
	$(BIN)/python -m pytest -n 2 -q $(ARGS)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 -q tests/interpreter

lint: .venv/.ready  ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/.docs  ## build the documentation site into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open site/index.html"

package: .venv/.package  ## build the sdist and the wheel into dist/ and try the wheel (URL=https://... for its links)
	rm -rf dist
	TILEWISE_URL='$(URL)' $(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*
	TILEWISE_URL='$(URL)' .ci/try_wheel $(PYTHON) dist/*.whl

test-matrix:  ## run the CPU tests with the oldest and the newest torch (TORCHES='2.7.1 2.9.0' chooses others)
	ARGS='$(ARGS)' .ci/test_matrix $(PYTHON) $(TORCHES)

bench: .venv/.ready  ## run the benchmarks (BENCHMARKS='benchmarks/gpu.py' chooses)
	@for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python $$script $(ARGS) || exit 1; done

clean:  ## delete caches and outputs (.venv stays)
	rm -rf build dist site tilewise-demo finetune-output .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks docs -type d -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# One environment, made once, which grows with what is asked of it. torch goes first and alone, so that nothing else decides which torch is installed.
.venv/.demo: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) was not found. Name a Python 3.10 or newer: make PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "tilewise needs Python 3.10 or newer, but $(PYTHON) is " + sys.version.split()[0] + ". Name another: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/python $(PIP) $(TORCH)
	$(BIN)/python $(PIP) -e '.[cli,viz]'
	@touch $@

.venv/.ready: .venv/.demo
	$(BIN)/python $(PIP) -e '.[dev]'
	@touch $@

.venv/.docs .venv/.package: .venv/.%: .venv/.demo
	$(BIN)/python $(PIP) -e '.[$*]'
	@touch $@
