# What people do here. Every target sets up what it needs first, on a fresh clone too.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# Which torch to install: any requirement that pip takes, 2.11 or newer. PyPI's is the CUDA build, several
# GB with its libraries; README.md says how to take PyTorch's CPU build of 200 MB.
TORCH ?= torch==2.13.0
# The virtual environment; one of your own may be named instead.
VENV ?= .venv
# More arguments for pytest, such as ARGS="tests/cache -x".
ARGS ?=
# Arguments for scripts/check_gpu.sh, such as CHECKS=--skip-build.
CHECKS ?=

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
PACKAGES := $(VENV)/.packages-$(shell printf %s '$(TORCH)' | tr -c 'A-Za-z0-9.' _)
INSTALLED := $(VENV)/.installed

.PHONY: help demo test lint lint-python lint-types lint-cpp format bench check-gpu resources wheel build clean

help: ## This list
	@grep -hE '^[a-z-]+:.*## ' Makefile | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

demo: $(INSTALLED) build ## Get SmolLM2-135M-Instruct and answer some prompts
	@$(PY) scripts/demo.py

test: $(INSTALLED) build ## Run the tests that need no GPU, but for the long trials
	@$(PY) -m pytest -m "not gpu and not trial" $(ARGS)

check-gpu: $(INSTALLED) ## Build, run the tests that need a GPU, compute-sanitizer and a small model
	@PYTHON=$(PY) scripts/check_gpu.sh $(CHECKS) -- $(ARGS)

lint: lint-python lint-types lint-cpp ## Check style and types

lint-python: $(PACKAGES)
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .

lint-types: $(PACKAGES)
	@$(VENV)/bin/mypy

lint-cpp: $(PACKAGES)
	@find csrc -regex '.*\.\(cpp\|cu\|h\|cuh\)' -print0 | xargs -0 $(VENV)/bin/clang-format --dry-run -Werror

format: $(PACKAGES) ## Format the sources as lint wants them
	@$(VENV)/bin/ruff check --fix .
	@$(VENV)/bin/ruff format .
	@find csrc -regex '.*\.\(cpp\|cu\|h\|cuh\)' -print0 | xargs -0 $(VENV)/bin/clang-format -i

bench: $(INSTALLED) build ## Measure the engine beside transformers, on SmolLM2
	@$(PY) benchmarks/bench_engine.py --model "$$($(PY) -m pagedinfer.sample_model)" --vs transformers $(ARGS)

resources: build ## Registers, shared memory and spills of every CUDA kernel; fails if one spills that may not
	@$(PY) scripts/kernel_resources.py $(ARGS)

wheel: $(INSTALLED) build ## Build a wheel for each Python found and try it
	@$(PY) scripts/build_wheels.py $(ARGS)

build: $(PACKAGES) ## Compile what has changed
	@$(PY) scripts/build_kernels.py

clean: ## Remove everything that was built (the environment stays)
	rm -rf build dist *.egg-info compile_commands.json pagedinfer/*.so pagedinfer/_build_info.json
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
	rm -f $(INSTALLED)

$(PY):
	@scripts/create_venv.sh $(VENV)

$(PACKAGES): pyproject.toml scripts/requirements.py | $(PY)
	@rm -f $(VENV)/.packages-*
	@echo "pagedinfer: installing $(TORCH): about 200 MB for a CPU build, several GB for PyPI's CUDA build"
	@$(PIP) install '$(TORCH)'
	@echo "pagedinfer: installing the other packages: about 150 MB"
	@$(PY) scripts/requirements.py build runtime test lint > $(VENV)/requirements.txt
	@$(PIP) install -q -r $(VENV)/requirements.txt
	@touch $@

# The modules are there when pip looks: this only makes the package importable.
$(INSTALLED): $(PACKAGES) setup.py | build
	@$(PIP) install -q --no-deps --no-build-isolation -e .
	@touch $@
