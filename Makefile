# Two commands: `make chat` (set up and chat) and `make test` (set up, check and test). The other targets are for developers.
# Everything is installed in .venv, except builds of the engine for a GPU (localllm setup --list).

PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3.14 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin

.PHONY: chat screen test quick profile replay snapshots test-long test-oldest test-clean test-vulkan check unit format bench peers commands docs release clean help

help: ## list the targets
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

# Three processes, because tests spend over a quarter of their time waiting for servers and limits: two processes leave two
# cores partly idle. `make unit JOBS=0` uses one process.
JOBS ?= 3
unit: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --durations=15 $(ARGS)

# The code limits and the pure tests, which load no model and start no server. Under a minute on two cores.
QUICK := tests/test_*.py tests/catalog tests/grammars/test_gbnf.py tests/grammars/test_json_lark.py \
	$(wildcard tests/conversation/test_[hmn]*.py)
quick: $(VENV)/.dev ## lint, the code limits and the pure tests, in less than a minute
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -k "not largest_headers" $(QUICK) $(ARGS)

replay: $(VENV)/.dev ## send a recorded request to a running server again: make replay FILE=body.json
	$(BIN)/python -m benchmarks clients replay $(FILE) $(ARGS)

profile: $(VENV)/.dev ## show the time of each part of an engine's step, on an emulated device: make profile CASE=2.5/8/greedy
	$(BIN)/python -m benchmarks step --profile $(or $(CASE),2.5/8/defaults)

snapshots: $(VENV)/.dev ## redraw the pictures of the chat's screens (look at the difference before you commit it)
	UPDATE_SNAPSHOTS=1 $(BIN)/python -m pytest -q -m "" tests/tui/test_snapshots.py -k every_screen $(ARGS)
	PYTHONPATH=tests $(BIN)/python -m tui.pictures

screen: $(VENV)/.dev ## open the chat on scripted data (ARGS=/models: another screen)
	@PYTHONPATH=tests $(BIN)/python -m tui.open_screen $(ARGS)

test-long: $(VENV)/.dev ## run the long tests, and the others on new examples
	LOCALLLM_TEST_EXAMPLES=new $(BIN)/python -m pytest -m "long or hypothesis" $(ARGS)

test-oldest: ## run the tests on the oldest supported version of every dependency
	@PYTHON="$(or $(PYTHON_OLDEST),python3.11)" sh packaging/test-oldest.sh $(ARGS)

test-clean: ## install the wheel into clean environments, for every Python found, and use it with an empty HOME
	@sh packaging/test-clean.sh $(ARGS)

test-vulkan: ## run the GPU tests on a software GPU, made in ~/.cache/localllm-vulkan (Linux, no root)
	@sh packaging/test-vulkan.sh $(ARGS)

format: $(VENV)/.dev ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev ## measure against peers and limits (minutes; never part of the tests)
	$(BIN)/python -m benchmarks $(ARGS)

peers: $(VENV)/.dev ## measure against llama-server and others, and write docs/benchmarks.md (an hour, on an idle machine)
	$(BIN)/python -m benchmarks.peers --page docs/benchmarks.md $(ARGS)

commands: $(VENV)/.dev ## write docs/commands.md from the help of the commands
	$(BIN)/python packaging/commands_page.py

docs: $(VENV)/.dev ## build the site of docs/ in site/; fails on a broken link
	$(BIN)/python -m pip --disable-pip-version-check install --quiet --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --clean

release: $(VENV)/.dev ## make all files of a release in dist/ (docs/packaging.md has the checklist)
	$(BIN)/python -m pip --disable-pip-version-check install --quiet --requirement packaging/release-tools.txt
	@PYTHON="$(BIN)/python" sh packaging/release.sh $(ARGS)

clean: ## remove the virtual environment and caches of this checkout
	rm -rf $(VENV) dist site .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(VENV)/.app: pyproject.toml packaging/setup.sh
	@PYTHON="$(PYTHON)" VENV="$(VENV)" sh packaging/setup.sh app

$(VENV)/.dev: pyproject.toml packaging/setup.sh
	@PYTHON="$(PYTHON)" VENV="$(VENV)" sh packaging/setup.sh dev
