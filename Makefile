PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.installed
DEMO    := .venv-demo
CLIENTS := .venv-clients
DOCS    := .venv-docs

.PHONY: help demo test test-slow test-clients test-core test-gpu lint docs dist clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

demo: $(DEMO)/.installed  ## train a small CNN on handwritten digits, without a GPU
	$(DEMO)/bin/python examples/digits.py

# Tests start some two hundred processes: they find their code compiled, also where Python is told not to write it. While
# one waits for such a process, a core is free for another: one worker more than cores.
WORKERS = $(shell $(PYTHON) -c "import os; print(os.cpu_count() + 1)")
test: $(STAMP)  ## run all tests, on the CPU
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=$(WORKERS) --dist=loadfile \
		--no-loadscope-reorder

test-slow: $(STAMP)  ## run what takes minutes: torch's own samples, hundreds of faults and programs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "slow and not gpu" --numprocesses=auto

test-clients: $(CLIENTS)/.installed  ## run everygpu with transformers, Lightning and others
	OMP_NUM_THREADS=1 $(CLIENTS)/bin/python -m pytest -m "not alone" tests/clients

test-gpu: $(STAMP)  ## run the tests for GPUs; call it until no file is left
	$(BIN)/python -m tests.gpu_suite

lint: $(STAMP)  ## run ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site's search works by `python -m http.server -d build/site`. A broken link or an export
# without a docstring is an error (mkdocs --quiet would hide warnings from --strict).
docs: $(DOCS)/.installed  ## build the site: build/site/index.html
	$(PYTHON) website/prepare.py
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --config-file build/mkdocs.en.yml
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --config-file build/mkdocs.zh-CN.yml
	$(DOCS)/bin/python website/check.py

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

$(DEMO)/.installed: pyproject.toml constraints.txt
	@echo "Installing PyTorch, scikit-learn and everygpu into $(DEMO), once: minutes, most of them for PyTorch's download."
	$(PYTHON) -m venv $(DEMO)
	$(DEMO)/bin/python -m pip install -c constraints.txt -e ".[demo]"
	touch $@

$(CLIENTS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet -c constraints.txt torch
	$(CLIENTS)/bin/python -m pip install --quiet -c constraints.txt -e ".[dev,clients]"
	touch $@

RELEASE := .venv-release
dist: $(RELEASE)/.installed  ## build wheel and sdist, and try both
	rm -rf dist
	PIP_CONSTRAINT="$(CURDIR)/constraints.txt" $(RELEASE)/bin/python -m build
	$(RELEASE)/bin/python -m twine check --strict dist/*
	$(RELEASE)/bin/python -m pytest --noconftest -o timeout=1800 tests/release

$(RELEASE)/.installed: constraints.txt
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet -c constraints.txt build twine pytest pytest-timeout
	touch $@

# For docs/versions.md, with any Python and torch: make test-core PYTHON=python3.13 TORCH=2.15.0
TORCH ?= 2.13.0
CORE  := .venv-core
test-core:  ## run the core tests: PYTHON=python3.13 TORCH=2.15.0
	$(PYTHON) -m venv --clear $(CORE)
	grep -v '^torch' constraints.txt > $(CORE)/constraints.txt
	$(CORE)/bin/python -m pip install --quiet "torch==$(TORCH)"
	$(CORE)/bin/python -m pip install --quiet -c $(CORE)/constraints.txt . \
		expecttest hypothesis numpy pytest pytest-timeout pytest-xdist
	OMP_NUM_THREADS=1 $(CORE)/bin/python -m pytest tests/test_api.py tests/test_tree.py tests/test_network.py \
		tests/test_torch_private*.py tests/parallel/test_conformance_outputs.py tests/step/test_train_step.py tests/checkpoint/test_save.py

$(DOCS)/.installed: website/requirements.txt constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet -c constraints.txt -r website/requirements.txt
	touch $@

clean:  ## remove what the others made
	rm -rf build dist $(VENV) $(DEMO) $(CLIENTS) $(DOCS) $(RELEASE) $(CORE) .pytest_cache .mypy_cache .ruff_cache .hypothesis
