# Two commands: `make chat` (set up and talk) and `make test` (set up, check and test).
# The rest is for developers. Nothing is installed outside .venv.

PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin

.PHONY: chat test test-oldest check unit format bench clean help

help: ## what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

chat: $(VENV)/.app ## set up and chat with the starter model (without a terminal: one answer)
	@$(BIN)/localllm chat -m smollm2-135m-instruct $(ARGS)

test: $(VENV)/.dev check unit ## set up, check and run every test

check: $(VENV)/.dev ## lint, format, types, import rules, catalog schema
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m localllm_catalog.check

unit: $(VENV)/.dev
	$(BIN)/python -m pytest $(ARGS)

test-oldest: ## run the tests on the oldest versions of every dependency we claim to support
	@PYTHON="$(or $(PYTHON_OLDEST),python3.11)" sh packaging/test-oldest.sh $(ARGS)

format: $(VENV)/.dev ## rewrite the code in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev ## measure against peers and limits (minutes; never part of the tests)
	$(BIN)/python -m benchmarks $(ARGS)

clean: ## remove the virtual environment and caches of this checkout
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(VENV)/.app: pyproject.toml packaging/setup.sh
	@PYTHON="$(PYTHON)" VENV="$(VENV)" sh packaging/setup.sh app

$(VENV)/.dev: pyproject.toml packaging/setup.sh
	@PYTHON="$(PYTHON)" VENV="$(VENV)" sh packaging/setup.sh dev
