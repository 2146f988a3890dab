# Every target does its own set-up: the environment in .venv, pinned by constraints.txt, the package editable in it.
PYTHON ?= python3
PIP = .venv/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
READY = .venv/.ready
CSRC = $(wildcard csrc/* csrc/*/*)
ARGS ?=
WORKERS ?= 2
PYTEST = .venv/bin/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: help setup train test test-all test-parity test-cluster lint bench

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/'

setup: $(READY) ## make .venv with everything that training and testing need

train: $(READY) ## train a small language model on two ranks; more with ARGS="train.steps=400 model=..."
	.venv/bin/dist-train train mesh.dp=2 $(ARGS)

test: $(READY) ## run the tests, of costly parameters a spread; some with ARGS="tests/launcher -k F29", in one process with WORKERS=0
	$(PYTEST) --spread $(ARGS)

test-all: $(READY) ## run the tests with all their parameters (an hour)
	$(PYTEST) $(ARGS)

test-parity: $(READY) ## all engines' cases and 600 layouts of the parity matrices (an hour); `make test` runs a draw of them
	PARITY=all $(PYTEST) tests/zero/test_parity.py tests/parity $(ARGS)

test-cluster: $(READY) ## run the tests on real clusters made here: Slurm, MPI, ssh, an image (root; installs what it needs)
	tests/cluster/setup.sh
	.venv/bin/python -m pytest -n $(WORKERS) --dist loadscope -o testpaths=tests/cluster $(ARGS)

lint: $(READY) ## ruff and mypy
	.venv/bin/ruff check .
	.venv/bin/mypy

bench: $(READY) ## our engine beside DDP, FSDP2 and DeepSpeed, interleaved; options with ARGS="--rounds 5"
	.venv/bin/python benchmarks/engines.py $(ARGS)

# torch comes alone and first: it is the largest, and the build of csrc/ and DeepSpeed's setup need it before. DeepSpeed compiles nothing.
$(READY): constraints.txt pyproject.toml setup.py $(CSRC)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "dist_train needs Python 3.10 or newer; set PYTHON=...")'
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	$(PIP) setuptools wheel torch==2.13.0
	DS_BUILD_OPS=0 $(PIP) --no-build-isolation --editable '.[dev,data,deepspeed]'
	touch $@
