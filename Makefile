# make run: the quickstart. make test: the tests. Both install into .venv first, if anything has changed; `make run` installs
# only what a run needs.

PYTHON ?= python3
BIN := .venv/bin
PARALLEL := -n auto --dist loadfile --no-loadscope-reorder  # a file's tests share what they compile

.PHONY: run test test-quick lint docs wheel torch browser install clean lock flower-demo bench conformance torture

run: .venv/run
	$(BIN)/fedhdp run $(ARGS)

test: install
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

test-quick: install  # without slow tests and without tests that start processes
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not process and not browser and not gpu" $(ARGS)

flower-demo: install  # a SuperLink and five SuperNodes on this machine
	$(BIN)/python examples/flower_app/demo.py $(ARGS)

bench:  # the simulator against its peers; standard output is the benchmark's alone
	@$(MAKE) --silent install >&2
	@$(BIN)/python benchmarks/bench.py $(ARGS)

conformance:  # the conformance kit against other libraries, each in an environment of its own
	@$(MAKE) --silent install >&2
	@$(BIN)/python benchmarks/conformance/conformance.py $(ARGS)

torture: install  # kills, full disks, damage to every file, contention: for ARGS="--minutes 20"
	$(BIN)/python benchmarks/torture $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: install  # into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: install  # build a wheel, install it into an empty environment, and train two rounds with it
	PYTHON=$(BIN)/python .ci/wheel

torch: install  # PyTorch, for the examples that need it and their tests
	$(BIN)/python -c "import torch" 2>/dev/null || \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0

browser: install  # Chromium and playwright, for the tests of pages; without root they need Chromium to be there
	$(BIN)/python -c "import playwright" 2>/dev/null || \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock playwright
	command -v chromium >/dev/null || command -v google-chrome >/dev/null || \
		{ [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } || \
		echo "no Chromium: tests of pages are skipped"

install: .venv/installed

.venv/run: EXTRAS =
.venv/installed: EXTRAS = [dev]
.venv/run .venv/installed: pyproject.toml requirements.lock
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock --editable '.$(EXTRAS)'
	touch .venv/run $@

clean:
	rm -rf .venv build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

lock:  # the newest versions that resolve today
	rm -rf build/lock && $(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	build/lock/bin/python -m pip freeze --exclude-editable > requirements.lock
	rm -rf build/lock
