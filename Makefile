# `make` lists the targets. Everything that is set up here lives in .venv, in the lab's state folder and in the cache
# (${XDG_CACHE_HOME:-~/.cache}/crosscloud), which is shared by all checkouts.

SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
BIN := .venv/bin
WHEELS := $(wildcard ../shared/wheels)
PIP := $(BIN)/pip install --disable-pip-version-check $(if $(WHEELS),--find-links $(WHEELS))
# what pip does now, in one line, where somebody looks
SHOWN := | if [ -t 1 ]; then while IFS= read -r line; do printf '\r\033[K  %.100s' "$$line"; done; printf '\r\033[K'; else cat >/dev/null; fi

help:  ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/ready  ## Install the three distributions and the tools into .venv

.venv/ready: requirements/constraints.txt requirements/tools.txt operator/pyproject.toml trainer/pyproject.toml lab/pyproject.toml
	@echo "setup: Python packages into .venv (a few minutes when nothing is cached)"
	@test -n "$(PYTHON)" && command -v "$(PYTHON)" >/dev/null || { echo "PYTHON: found \"$(PYTHON)\"; it must be Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "PYTHON: found Python " + sys.version.split()[0] + "; it must be 3.11 or newer: make PYTHON=/path/to/python3.11")'
	@"$(PYTHON)" -m venv .venv || { echo "python venv is missing: on Debian, apt-get install python3-venv"; exit 1; }
	@$(PIP) --upgrade -c requirements/constraints.txt pip setuptools wheel $(SHOWN)
	@$(PIP) --no-build-isolation -c requirements/constraints.txt -r requirements/tools.txt -e 'trainer[torch]' -e operator -e lab $(SHOWN)
	@touch $@

demo: setup  ## The main job on three real clusters, from nothing to a generated sentence (root, Linux)
	@$(BIN)/python -m crosscloud_lab.demo

down: setup  ## Remove what `make demo` left up
	@$(BIN)/crosscloud-lab down

test: setup  ## Lint, unit tests, and the end-to-end tests on real clusters of their own (root, Linux)
	@.ci/stages

bench-engine: setup  ## Our engine against plain DeepSpeed, in turns (ARGS="--help" lists the sizes)
	@$(BIN)/python benchmarks/engine.py $(ARGS)

lint: setup  ## Format check, ruff, mypy strict, import-linter
	@$(BIN)/ruff format --check --quiet . || { echo "run: make format"; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/lint-imports --no-cache | tail -n 4
	@$(BIN)/mypy

format: setup  ## Format the code
	@$(BIN)/ruff format --quiet . && $(BIN)/ruff check --quiet --fix .

lock: setup  ## Write the versions in .venv to requirements/constraints.txt
	@{ echo '# Every version that setup, tests and images use. Made by `make lock`; names and versions only.'; \
	   $(BIN)/pip freeze --all --exclude-editable | sed -E 's/ @ .*torch-([0-9.]+).*/==\1/; s/\+cpu//'; } > requirements/constraints.new
	@mv requirements/constraints.new requirements/constraints.txt

clean:  ## Remove .venv and the tools' caches (not the lab: make down)
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis demo
	@find . -name __pycache__ -prune -exec rm -rf {} +

.PHONY: help setup demo down test bench-engine lint format lock clean
