# `make train` and `make test` need Python 3.11 or newer, pip and make; all else goes into .venv.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: train test test-slow lint clean

train: $(INSTALLED)  ## the default job: digits from image files to a trained model
	$(BIN)/raytrain demo

test: lint  ## lint, types, import contract, tests
	$(BIN)/pytest -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder

test-slow: $(INSTALLED)  ## the tests that take minutes
	$(BIN)/pytest -m slow

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

$(INSTALLED): pyproject.toml
	@echo "installing into .venv: a few minutes the first time (torch is large)"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv runs
