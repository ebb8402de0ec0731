# Every target makes the environment it needs; the second call finds it ready.

PYTHON ?= python3
ARGS   ?=

VENV := .venv
BIN  := $(VENV)/bin
PIP  := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# The newest torch would pull gigabytes of CUDA, so no installation of it is left to chance.
TORCH := torch==2.13.0
# What an installation depends on: the metadata, and the sources of compiled extensions.
BUILD := pyproject.toml $(wildcard setup.py) $(shell find src -name '*.c' -o -name '*.h')

CHROMIUM := { command -v chromium || command -v chromium-browser || command -v chrome; }

.DEFAULT_GOAL := help
.NOTPARALLEL:  # two pips in one environment
.DELETE_ON_ERROR:
.PHONY: help demo test lint bench clean chromium

help:
	@echo "make demo    see tensortap at work"
	@echo "make test    run the tests           (ARGS='-k names' for some of them)"
	@echo "make lint    ruff, mypy, import-linter"
	@echo "make bench   measure what it costs   (ARGS for the benchmarks)"
	@echo "make clean   remove what the others left, but not $(VENV)"

demo: $(VENV)/.ready-view
	$(BIN)/tensortap demo $(ARGS)

test: $(VENV)/.ready-test chromium
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

# Pages are tested in a real browser; without one those tests are skipped, which is said.
chromium:
	@$(CHROMIUM) >/dev/null || \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium >/dev/null; \
	fi || true
	@$(CHROMIUM) >/dev/null || \
	    echo "no Chromium: tests of pages are skipped (Debian, Ubuntu: sudo apt-get install chromium)"

lint: $(VENV)/.ready-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.ready-bench
	$(BIN)/python -m bench $(ARGS)

# The stamps go too: a removed build has to be made again.
clean:
	rm -rf build dist src/*.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	rm -rf .import_linter_cache
	rm -f $(VENV)/.ready-*
	find src tests -name '*.so' -delete
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# pip, not python: it comes last, so an environment cut off halfway is made again.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	    "tensortap needs Python 3.11 or newer: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready-view: $(BUILD) | $(BIN)/pip
	$(PIP) -e '.[view]'
	@touch $@

$(VENV)/.ready-lint: $(BUILD) | $(BIN)/pip
	$(PIP) -e '.[lint]'
	@touch $@

$(VENV)/.ready-test: $(BUILD) | $(BIN)/pip
	$(PIP) -e '.[test]' $(TORCH)
	@touch $@ $(VENV)/.ready-view

$(VENV)/.ready-bench: $(BUILD) | $(BIN)/pip
	$(PIP) -e '.[bench]' $(TORCH)
	@touch $@
