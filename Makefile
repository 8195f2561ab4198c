# Every command sets up what is missing first. TORCH_INDEX=URL names the index of torch's CPU build, PYTHON=PATH a Python 3.11.
PYTHON ?= $(or $(shell command -v python3.11 || command -v python3),python3)
UV ?= .venv/bin/uv
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup train test test-fast lint lock clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "%-10s %s\n", $$1, $$2}'

setup: ## the environment in .venv, with the fork in it
	@$(PYTHON) containers/setup_cpu.py

# What compiles C++ in a run finds ninja, which the environment brings, on the PATH.
train test test-fast: export PATH := $(CURDIR)/.venv/bin:$(PATH)

train: setup ## train the tiny model on this machine; ARGS="key=value ..." overrides the recipe
	python -m slurm submit configs/recipes/tiny.yaml --cluster local $(ARGS)

test: setup ## all tests; ARGS go to pytest
	python -m pytest $(ARGS)

test-fast: setup ## without the tests that start the trainer
	python -m pytest -m "not slow" $(ARGS)

lint: setup ## ruff and mypy
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy

lock: ## resolve pyproject.toml into containers/locks (needs the package registry); ARGS=--upgrade for newer versions
	@UV=$(UV) $(PYTHON) -m containers.lock $(ARGS)

clean: ## remove the environment, the built fork and all caches; run folders stay
	rm -rf .venv build .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
