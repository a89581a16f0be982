# Everything starts from a bare clone: make and Python 3.11 or later, with venv, are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help serve test check format docs bench clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

serve: $(VENV)/.installed  ## serve the default model on port 8000; ARGS="MODEL --flag ..." for others
	@$(BIN)/octavo serve $(ARGS)

test: $(VENV)/.installed-dev  ## run the tests; ARGS="tests/unit -k name" for some
	$(BIN)/pytest $(ARGS)

check: $(VENV)/.installed-dev  ## lint, format, types, import contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev  ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.installed  ## rewrite the pages that are made from code
	$(BIN)/python -m octavo.cli.docs > docs/configuration.md

bench: $(VENV)/.installed-dev  ## measure what the README's figures say
	@set -e; for file in $$(grep -l __main__ benchmarks/*.py); do echo "$(BIN)/python $$file"; $(BIN)/python $$file; done

clean:  ## remove the environment and all that was built
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment without a working pip was left half made: it starts again from nothing.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: Octavo needs Python 3.11 or later and $(PYTHON) is $$($(PYTHON) --version 2>&1); use make PYTHON=python3.11" >&2; exit 1; }
	@$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || { \
	  echo "error: $(PYTHON) makes no environment; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@touch $@

$(VENV)/.installed: pyproject.toml | $(VENV)/.created
	$(PIP) install --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/.created
	$(PIP) install --editable '.[dev]'
	@touch $(VENV)/.installed $@
