# Targets of fl_lightning; `make` alone prints them. PYTHON chooses the interpreter that makes .venv (3.10 or newer).
PYTHON ?= python3
BIN := .venv/bin
.DEFAULT_GOAL := help
unexport PYTHONDONTWRITEBYTECODE
# With it every process of a test run compiles all tests for itself.

.venv/installed: pyproject.toml Makefile
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[report]"
	@touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	@touch $@

.venv/installed-docs: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[docs]"
	@touch $@

.PHONY: help quickstart table test lint format docs bench bench-check gpu clean

help: ## print this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

quickstart: .venv/installed ## install into .venv and run the main job: 20 clients on real digits
	$(BIN)/fl-lightning fit --config experiments/quickstart.yaml --overwrite

table: .venv/installed ## 4 methods x 3 seeds on the digits as a table, and the page of its runs (runs/tables)
	$(BIN)/fl-lightning table experiments/tables/quickstart.yaml --jobs 2

test: .venv/installed-dev ## install the development extras and run every test (7 to 10 minutes on 2 cores)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: .venv/installed-dev ## ruff (lint and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/installed-dev ## let ruff reformat and fix what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/installed-docs ## build the documentation into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

bench: .venv/installed-dev ## the table of what it costs, beside hand-written loops; memory; FedDW's term (needs FashionMNIST)
	$(BIN)/python benchmarks/table.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/feddw_overhead.py

bench-check: .venv/installed-dev ## 2 minutes: fails where a part of a round became 10 % slower beside a loop written by hand
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/check.py

gpu: .venv/installed-dev ## under 8 minutes on a machine with a GPU: checks and times, into benchmarks/results/gpu.md
	$(BIN)/python benchmarks/gpu.py

clean: ## remove .venv and caches; runs/ stays
	rm -rf .venv build site *.egg-info .pytest_cache .mypy_cache .ruff_cache
