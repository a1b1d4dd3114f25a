# The two commands of the README; each does its own set-up and is quick when nothing is missing.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
INPUTS := pyproject.toml constraints.txt
# Two workers with one BLAS thread each beat two threads fighting over small matrices.
THREADS := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.PHONY: reproduce check test soak sabotage lint docs clean
.DELETE_ON_ERROR:

reproduce: $(VENV)/.run
	$(PY) -m nucleon reproduce fig-ripples

# While working: lint and types beside the quick tests, at most 90 s on two idle cores. No ranks, no mutants, no
# whole claims, no browser, no command lines, no kernels under Triton's interpreter; `make test` has them.
CHECKED := @CHECKED@
check: $(VENV)/.dev
	@log=$$(mktemp); $(MAKE) --no-print-directory lint > $$log 2>&1 & linting=$$!; \
	$(THREADS) $(PY) -m pytest -q -n 2 --dist worksteal -m 'not slow' $(CHECKED); tests=$$?; \
	wait $$linting; lint=$$?; cat $$log; rm -f $$log; \
	say() { test $$1 = 0 && echo passed || echo failed; }; \
	echo "check: lint and types $$(say $$lint), tests $$(say $$tests)"; \
	test $$lint = 0 -a $$tests = 0

test: $(VENV)/.dev
	$(THREADS) $(PY) -m pytest -n auto --dist worksteal

sabotage: $(VENV)/.dev
	$(THREADS) $(PY) tests/mutants/sabotage.py

# For the night: long quiet runs, and far more examples of steps and of functions.
soak: $(VENV)/.dev
	$(THREADS) NUCLEON_SOAK=1 $(PY) -m pytest -n 2 --dist worksteal tests/soundness tests/linalg

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright
	$(VENV)/bin/lint-imports

docs: $(VENV)/.dev
	$(PY) -m mkdocs build --strict --quiet
	@echo 'open site/index.html'

$(PY):
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "nucleon needs Python 3.11 or newer: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: $(INPUTS) | $(PY)
	$(PIP) --editable '.[cli]'
	touch $@

$(VENV)/.dev: $(INPUTS) | $(PY)
	$(PIP) --editable '.[dev]'
	touch $(VENV)/.run $@

clean:
	rm -rf $(VENV) build dist site .pytest_cache .hypothesis .ruff_cache .import_linter_cache
