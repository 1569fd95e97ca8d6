# Each target is a few lines on purpose: read it, then run it by hand if you like.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help setup demo test check bench chaos clean

help:  ## what each target does
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: .venv/installed  ## create .venv from requirements.lock

.venv/installed: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -qq --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

demo: setup  ## four peers train one model on this machine
	$(BIN)/gasloc launch --workers 4

test: setup  ## every test
	$(BIN)/pytest --numprocesses 2 --dist worksteal

bench: setup  ## compare the topologies; writes benchmarks/results/
	$(BIN)/python -m benchmarks.topologies --quick

chaos: setup  ## a swarm under random kills, freezes and joins: make chaos MINUTES=10
	$(BIN)/python -m benchmarks.chaos --minutes $(or $(MINUTES),10)

check: setup  ## lint, types, import rules, versions; changes nothing
	$(BIN)/ruff check gasloc peers tests benchmarks
	$(BIN)/ruff format --check gasloc peers tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/pip --disable-pip-version-check check

clean:  ## remove what the other targets made
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis gasloc-runs
