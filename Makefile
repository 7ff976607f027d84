# make run: the quickstart. make test: the tests. Both make their own environment in .venv first; the second time that is nothing.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: run test lint install clean lock flower-demo bench

run: install
	$(BIN)/fedhdp run $(ARGS)

test: install
	$(BIN)/python -m pytest -n auto $(ARGS)

flower-demo: install  # a SuperLink and five SuperNodes on this machine: training to a table, then everything is stopped
	$(BIN)/python examples/flower_app/demo.py $(ARGS)

bench:  # the engine against its peers; standard output is the benchmark's alone
	@$(MAKE) --silent install >&2
	@$(BIN)/python benchmarks/bench.py $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: .venv/installed

.venv/installed: pyproject.toml requirements.lock
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

lock:  # the versions that a fresh environment takes today
	rm -rf build/lock && $(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	build/lock/bin/python -m pip freeze --exclude-editable > requirements.lock
	rm -rf build/lock
