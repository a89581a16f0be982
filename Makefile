# Everything starts from a bare clone: make, a C++ compiler and Python 3.11 or later, with venv and
# headers, are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
ARGS ?=
# All tests, in two processes. In the order of the files: long ones come first.
TWO_AT_ONCE := --numprocesses 2 --dist loadfile --no-loadscope-reorder
NATIVE := $(VENV)/native
CXX_FILES := $(wildcard csrc/*.cpp csrc/*.h csrc/kernels/*.cpp csrc/kernels/*.h)
CXX_TESTS := $(wildcard tests/native/*.cpp tests/native/*.h)
DIST ?= dist
# Two makes at once take turns in the build folder, where there is flock.
TAKE_TURNS := $(shell command -v flock >/dev/null && echo flock $(VENV)/.lock)
# Python finds src, nothing is copied; the module is compiled into src by .built below.
EDITABLE := --no-build-isolation --config-settings=editable.mode=inplace \
  --config-settings=wheel.cmake=false --config-settings=wheel.py-api=py3 --editable

.DEFAULT_GOAL := help
.PHONY: help serve test check format docs bench build wheel clean
.NOTPARALLEL:

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

serve: $(VENV)/.built  ## serve the default model on port 8000; ARGS="MODEL --flag ..." for others
	@$(BIN)/octavo serve $(ARGS)

test: $(VENV)/.installed-dev $(VENV)/.built  ## run the tests; ARGS="tests/unit -k name" for some
	$(BIN)/pytest $(or $(ARGS),$(TWO_AT_ONCE))

check: $(VENV)/.installed-dev  ## lint, format, types, import contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES) $(CXX_TESTS)

format: $(VENV)/.installed-dev  ## let ruff and clang-format mend what they can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES) $(CXX_TESTS)

docs: $(VENV)/.built  ## rewrite the pages that are made from code
	$(BIN)/python -m octavo.cli.docs > docs/configuration.md
	$(BIN)/python -m octavo.bench.output.run > docs/run.schema.json

bench: $(VENV)/.installed-dev $(VENV)/.built  ## measure what the README's figures say
	@set -e; for file in $$(grep -l __main__ benchmarks/*.py); do echo "$(BIN)/python $$file"; $(BIN)/python $$file; done

build: $(VENV)/.built  ## compile what changed in csrc

wheel: $(VENV)/.installed-dev $(VENV)/.built  ## build dist/*.whl, for machines without a compiler
	rm -rf $(DIST)/unchecked
	$(TAKE_TURNS) $(PIP) wheel --no-deps --no-build-isolation --config-settings=build-dir=$(NATIVE) --wheel-dir $(DIST)/unchecked .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --plat auto --wheel-dir $(DIST) $(DIST)/unchecked/*.whl
	rm -r $(DIST)/unchecked

clean:  ## remove the environment and all that was built
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	rm -f src/octavo/ops/native/_native.*.so
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment without a working pip was left half made: it starts again from nothing.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: Octavo needs Python 3.11 or later and $(PYTHON) is $$($(PYTHON) --version 2>&1); use make PYTHON=python3.11" >&2; exit 1; }
	@$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || { \
	  echo "error: $(PYTHON) makes no environment; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@touch $@

# What compiles is installed in the environment, so that the build folder in it stays valid.
$(VENV)/.build-tools: pyproject.toml | $(VENV)/.created
	@command -v $${CXX:-c++} >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || { \
	  echo "error: Octavo compiles its kernels, and there is no C++ compiler here; on Debian and Ubuntu: apt install g++ (or set CXX)" >&2; exit 1; }
	@$(BIN)/python -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || { \
	  echo "error: $(PYTHON) has no headers (Python.h); on Debian and Ubuntu: apt install python3-dev" >&2; exit 1; }
	$(PIP) install cmake ninja $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"])')
	@touch $@

$(VENV)/.installed: pyproject.toml | $(VENV)/.build-tools
	$(PIP) install $(EDITABLE) .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/.build-tools
	$(PIP) install $(EDITABLE) '.[dev]'
	@touch $(VENV)/.installed $@

$(VENV)/.built: $(VENV)/.installed CMakeLists.txt $(CXX_FILES)
	@PATH="$(abspath $(BIN)):$$PATH" $(TAKE_TURNS) sh -ec '\
	  cmake -S . -B $(NATIVE) -G Ninja -DPython_EXECUTABLE=$(abspath $(BIN))/python $$CMAKE_ARGS --log-level=WARNING; \
	  cmake --build $(NATIVE); \
	  cmake --install $(NATIVE) --prefix src'
	@touch $@
