# The two commands of the README; each does its own set-up and is quick when nothing is missing.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
INPUTS := pyproject.toml constraints.txt
# Two workers with one BLAS thread each beat two threads fighting over small matrices. Tests start
# hundreds of processes, which find the package compiled.
THREADS ?= 1
TESTED  := OMP_NUM_THREADS=$(THREADS) MKL_NUM_THREADS=$(THREADS) PYTHONDONTWRITEBYTECODE=
# Some virtual machines advertise AMX and then fault on it. oneDNN reads the variable once, when torch is imported.
PRODUCT := import torch; x = torch.ones(2, 256, 256, dtype=torch.bfloat16); x @ x; x[0] @ x[0]
CAPPED   = if [ -z "$$ONEDNN_MAX_CPU_ISA" ] && ! $(PY) -c '$(PRODUCT)'; then \
	export ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16; \
	echo "a product of bfloat16 dies on this machine: ONEDNN_MAX_CPU_ISA=$$ONEDNN_MAX_CPU_ISA for this run"; fi

.PHONY: reproduce check test pages portable test-torchtitan test-timm soak sabotage mutate evidence gallery gpu lint docs clean
.DELETE_ON_ERROR:

reproduce: $(VENV)/.run
	$(PY) -m nucleon reproduce fig-ripples

# While working: lint and types beside the quick tests of linalg, bounds and optimizers, at most 60 s on two idle cores (80 s of
# processor time). A tenth of the random examples, and no games, ranks, claims, command lines or Triton's interpreter.
CHECKED := tests/linalg tests/online/theory tests/optim $(addprefix tests/test_,$(addsuffix .py,checks files moments noise))
LEFT    := $(addprefix --ignore=tests/optim/,$(addsuffix .py,test_certified_runs test_fused test_other_devices test_triton_compiles))
check: $(VENV)/.dev
	@$(CAPPED); log=$$(mktemp); $(MAKE) --no-print-directory lint > $$log 2>&1 & linting=$$!; \
	HYPOTHESIS_PROFILE=quick $(TESTED) $(PY) -m pytest -q -n 2 --dist worksteal -m 'not slow' $(LEFT) $(CHECKED); tests=$$?; \
	wait $$linting; lint=$$?; [ $$lint = 0 ] || cat $$log; rm -f $$log; \
	said() { if [ $$1 = 0 ]; then echo passed; else echo failed; fi; }; \
	echo "check: lint and types $$(said $$lint), tests $$(said $$tests)"; \
	[ $$lint = 0 ] && [ $$tests = 0 ]

# tests/conftest.py says which tests share a worker, and which begin first.
test: $(VENV)/.dev
	@$(CAPPED); $(TESTED) $(PY) -m pytest -n auto --dist loadgroup --no-loadscope-reorder $(addprefix --ignore=,$(PAGES))

# The site as mkdocs builds it, and pages in a browser: `.ci/run` alone runs these.
PAGES = tests/test_site.py tests/report/test_browser.py
pages: $(VENV)/.dev
	$(TESTED) $(PY) -m pytest -n 2 --dist loadfile $(PAGES)

# The numerical tests as other processors would run them: with no more than SSE4, with AVX2, and with a mixture, for which
# hypothesis explores anew. A failure is a bound that was measured on one machine: derive it; an example becomes an @example.
NUMERICAL := $(addprefix tests/,optim linalg online soundness test_moments.py test_noise.py)
SSE4  := ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 ONEDNN_MAX_CPU_ISA=SSE41
AVX2  := ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2
MIXED := ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 HYPOTHESIS_PROFILE=explore
portable: $(VENV)/.dev
	@failed=; for processor in "$(SSE4)" "$(AVX2)" "$(MIXED)"; do echo "portable: $$processor"; \
	env $$processor $(TESTED) $(PY) -m pytest -n auto --dist worksteal $(NUMERICAL) || failed="$$failed\n  $$processor"; done; \
	[ -z "$$failed" ] || { printf "portable: failed with$$failed\n"; exit 1; }

# torchtitan on two ranks, saved and resumed, and TRL: on demand, with packages of their own.
TRAINERS := $(VENV)/trainers
test-torchtitan: $(TRAINERS)/.installed
	$(TESTED) $(TRAINERS)/bin/torchrun --standalone --nproc-per-node 2 tests/trainers/check_torchtitan.py
	$(TESTED) $(TRAINERS)/bin/python examples/trainers/trl_sft.py

# Every fused weight of timm that is cut: the cut is the one its own `forward` makes.
test-timm: $(TRAINERS)/.timm
	$(TESTED) $(TRAINERS)/bin/python tests/trainers/check_timm.py

sabotage: $(VENV)/.dev
	$(TESTED) $(PY) tests/sabotage/sabotage.py

# Small random faults in the source, each held to the tests of its file: what survives is equivalent, or a hole.
COUNT ?= 40
SEED  ?= 0
mutate: $(VENV)/.dev
	$(TESTED) $(PY) tests/mutate.py --count $(COUNT) --seed $(SEED)

# For the night: long quiet runs, far more examples of steps and of functions, every case of Triton's interpreter, every
# configuration of its compiler.
SOAKED := $(addprefix tests/,soundness linalg optim/test_fused.py optim/test_adamw.py optim/test_triton_compiles.py)
soak: $(VENV)/.dev
	$(TESTED) NUCLEON_SOAK=1 $(PY) -m pytest -n 2 --dist worksteal $(SOAKED)

# The protocol of docs/evidence.md on two cores, in five hours or more; goes on where it was stopped.
DATA ?= .data
evidence: $(VENV)/.run
	$(TESTED) $(PY) benchmarks/evidence.py run --processes 2 --data $(DATA)
	$(PY) benchmarks/evidence.py report

# Every claim in full, with its figures for docs/gallery.md: about 8 minutes on two idle cores.
gallery: $(VENV)/.run
	$(PY) -m nucleon reproduce --all --output build/gallery
	for figure in build/gallery/*/*/*.png; do run=$$(dirname $$figure); \
	cp $$figure docs/figures/gallery/$$(basename $$(dirname $$run))-$$(basename $$figure); done

# Everything that wants a CUDA device, with the Python at hand, whose torch can use it. Goes on after a failure; the log has all
# of it. MINUTES is for the evidence, whose byte pairs `benchmarks/evidence.py tokens --out .data` writes.
MINUTES ?= 25
WITH    := PYTHONPATH=src $(PYTHON)
XDIST    = $(shell $(PYTHON) -c 'import xdist' 2> /dev/null && echo -n 8)
GPULOG  ?= gpu.log
gpu:
	@{ NUCLEON_SOAK=1 $(WITH) -m pytest -q $(XDIST) tests/gpu; \
	$(WITH) benchmarks/step.py --device cuda --set gpt2-small --set llama-1b; \
	for model in small-gpt gpt2 llama-1b; do $(WITH) benchmarks/models.py $$model --device cuda; done; \
	$(WITH) benchmarks/evidence.py run --cells G --processes 4 --minutes $(MINUTES) --data $(DATA) --out $(DATA)/lines; \
	} 2>&1 | tee $(GPULOG)

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

$(TRAINERS)/.installed: $(INPUTS) | $(PY)
	$(PY) -m venv $(TRAINERS)
	$(TRAINERS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable '.[torchtitan,trl]'
	touch $@

# timm brings torchvision, which the other environment is to be without.
$(TRAINERS)/.timm: $(TRAINERS)/.installed
	$(TRAINERS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt timm
	touch $@

clean:
	rm -rf $(VENV) build dist site .pytest_cache .hypothesis .ruff_cache .import_linter_cache
