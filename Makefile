# On a fresh machine with Python 3.11 to 3.13 and make, `make demo` and `make test` each do all of their set-up themselves.
# PYTHON=... names the interpreter to build on; ARGS=... goes to the program, e.g. `make demo ARGS="--seed 1"`.

BIN := .venv/bin
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
# One thread and one order of summation: what tests compare to the bit must not depend on the machine's size.
TESTS := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE MKL_CBWR=AUTO,STRICT $(BIN)/python -m pytest

.PHONY: help demo test test-slow check format schemas bench bench-models bench-fairness bench-faults bench-scale bench-envs bench-recovery install dev clean distclean

help:  ## What there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | awk -F '\t' '{ printf "  make %-12s %s\n", $$1, $$2 }'

demo: install  ## Four tenants' jobs at once, about six minutes; runs/demo/ has the results
	@$(BIN)/python -m ops.demo $(ARGS)

test: check  ## Lint, types, import contracts, schema drift and the fast tests
	$(TESTS) -m "not slow" $(ARGS)

test-slow: dev  ## The tests that take minutes
	$(TESTS) -m slow $(ARGS) || [ $$? = 5 ]  # 5: there are none

check: dev  ## Everything but the tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python -m ops.schemas.generate --check

format: dev  ## Put the code in the house's form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

schemas: dev  ## Write schemas/generated/ from schemas/*.py
	$(BIN)/python -m ops.schemas.generate

bench: install  ## Measure the line
	$(BIN)/python -m ops.bench $(ARGS)

bench-models: install  ## Measure what sharing one backbone is worth, about five minutes; runs/bench/ has the results
	@$(BIN)/python -m ops.bench.models $(ARGS)

bench-fairness: install  ## Measure what a flood costs another tenant, about two minutes; runs/bench/ has the results
	@$(BIN)/python -m ops.bench.fairness $(ARGS)

bench-faults: install  ## Kill everything at random, and see what of the jobs is lost, about ten minutes; runs/bench/ has the results
	@$(BIN)/python -m ops.bench.faults $(ARGS)

bench-scale: install  ## Measure what further producers add, two minutes; runs/bench/ has the results
	@$(BIN)/python -m ops.bench.scale $(ARGS)

bench-envs: install  ## Measure sessions over the bus against simulators called directly, and datasets, four minutes; runs/bench/ has the results
	@$(BIN)/python -m ops.bench.envs $(ARGS)

bench-recovery: install  ## Measure how long the line stands still after kill -9 of each role, five minutes; runs/bench/ has the results
	@$(BIN)/python -m ops.bench.recovery $(ARGS)

install:  ## Make .venv with what running needs
	@ops/setup.sh all

dev:  ## Make .venv with what developing needs
	@ops/setup.sh dev

clean:  ## Remove what tools and runs left behind
	rm -rf build dist *.egg-info runs .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find schemas nexus_bus workers ops tests -name __pycache__ -type d -exec rm -rf {} +

distclean: clean  ## ... and the virtual environment
	rm -rf .venv
