# make help lists the targets. PYTHON, VENV, LOCKED and PYTEST_FLAGS can be set: make PYTHON=python3.12 test

PYTHON ?= python3
VENV ?= .venv
# Whole files to a process: what a file trains or compiles for its tests is made once.
PYTEST_FLAGS ?= -n auto --maxprocesses=4 --dist=loadfile --no-loadscope-reorder --durations=20
# 1: the versions that the tests ran with, in requirements.lock; 0: the newest that setup.py allows.
LOCKED ?= 1
WORKDIR ?= runs/quickstart
PROMPT ?= It was late in the evening when

RUN := $(VENV)/bin/python
# Python compiles what is imported; pip, which compiles all, takes a quarter longer to a first step.
PIP := $(RUN) -m pip --disable-pip-version-check install --quiet --no-compile \
  $(if $(filter 1,$(LOCKED)),--constraint requirements.lock,--upgrade)
TESTED := $(VENV)/installed-test-$(LOCKED)
INSTALLED := $(VENV)/installed-$(LOCKED)

.PHONY: help versions quickstart test test-all test-compile soak lint wheel clean
.DEFAULT_GOAL := help

help:
	@echo 'make quickstart  install, train a small model on three novels, evaluate it, sample from it'
	@echo 'make test        run the tests, but for the slow ones'
	@echo 'make test-all    run all of them'
	@echo 'make test-compile  compile kernels and steps for TPUs and GPUs that are not here'
	@echo 'make soak        kill, damage, fill and hang runs for hours; SOAK_FLAGS="--kills 30" for less'
	@echo 'make lint        check style, formatting, types and the tables of the documentation'
	@echo 'make wheel       build dist/brt-*.whl'
	@echo 'LOCKED=0 with any of them: the newest versions that setup.py allows, not those of requirements.lock'
	@echo 'make clean       remove what was built; $(VENV) and runs/ stay'

quickstart: $(INSTALLED)
	$(RUN) -m brt.train --gin_file=configs/runs/quickstart.gin --workdir=$(WORKDIR)
	$(RUN) -m brt.evaluate --workdir=$(WORKDIR) --split=test --ablate=state --gin.Evaluation.segment_length=64
	$(RUN) -m brt.generate --workdir=$(WORKDIR) --prompt='$(PROMPT)' --max_tokens=400

versions: $(TESTED)
	@$(RUN) -c 'import platform; from importlib.metadata import version; print("Python", platform.python_version(), *(f"{name} {version(name)}" for name in ("jax", "flax", "numpy")))'

test: $(TESTED)
	$(RUN) -m pytest $(PYTEST_FLAGS)

test-all: $(TESTED)
	$(RUN) -m pytest $(PYTEST_FLAGS) -m 'slow or not slow'

test-compile: $(TESTED)
	$(PIP) --editable '.[tpu-compile,gpu-compile]'
	$(RUN) -m pytest -m 'slow or not slow' tests/compiled

soak: $(TESTED)
	$(RUN) tests/faults/soak.py $(SOAK_FLAGS)

lint: $(TESTED)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) tools/tables.py --check

wheel: $(VENV)/created
	$(RUN) -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir=dist .
	@ls dist/*.whl

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find brt tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps are written last, so an interrupted install is done again.
$(VENV)/created:
	@command -v $(PYTHON) >/dev/null || { \
	  echo 'brt: $(PYTHON) is not installed; install Python 3.11 or newer (Debian: apt install python3 python3-venv)' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "brt: $(PYTHON) is $$($(PYTHON) -V 2>&1), but brt needs 3.11 or newer; name one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo 'brt: $(PYTHON) lacks its venv module (Debian: apt install python3-venv)' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(INSTALLED): $(VENV)/created setup.py pyproject.toml requirements.lock
	@echo 'Installing brt into $(VENV); the first time this takes a minute or two.'
	@rm -f $(VENV)/installed*
	$(PIP) --editable .
	@touch $@

$(TESTED): $(VENV)/created setup.py pyproject.toml requirements.lock
	@echo 'Installing brt and what its tests need into $(VENV).'
	@rm -f $(VENV)/installed*
	$(PIP) --editable '.[test]'
	@touch $@ $(INSTALLED)
