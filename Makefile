# The environment's own tools first: DeepSpeed's build finds ninja there.
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.DEFAULT_GOAL := help
.PHONY: help setup demo lint test slow oldest check coverage gpu bench bench-gpu docs docs-site fix clean

help: ## What can be made
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile

setup: ## .venv with raypo and the pinned packages (instant when it is there)
	@scripts/setup.sh

demo: setup ## SFT, a reward model and PPO on a tiny model that is made on the spot; CPU, minutes
	python -m examples.quickstart.demo

lint: setup ## Lint, format, types, floors; a minute on two slow cores
	ruff check
	ruff format --check
	pyright
	lint-imports

test: setup ## Unit and integration tests
	python -m pytest tests/unit -n auto
	python -m pytest tests/integration -m integration --durations=20 -n 2 \
		--dist loadscope --no-loadscope-reorder

slow: setup ## Learning curves, faults and clusters: hours
	python -m pytest tests/slow -m slow --durations=50 -n 0

oldest: ## The engine's tests with the oldest supported vLLM, torch and transformers, in .venv-oldest
	scripts/oldest.sh

check: lint ## What is to be seen within minutes: lint and unit tests
	python -m pytest tests/unit -n auto

coverage: setup ## Unit tests, with the lines of raypo/ that they do not run
	python -m pytest tests/unit -n auto --cov=raypo --cov-report=term:skip-covered

gpu: ## On a machine with a GPU: the pinned CUDA set, then the acceptance; minutes, a report
	@nvidia-smi -L 2>/dev/null | grep -q '^GPU ' || { echo "raypo: nvidia-smi finds no GPU here."; exit 2; }
	@RAYPO_DEVICE=gpu scripts/setup.sh
	python -m tests.gpu.acceptance

bench: setup ## raypo beside TRL, vLLM, PyTorch and DeepSpeed: a table; an hour on two slow cores
	python -m tests.benchmarks.bench

bench-gpu: ## On a machine with a GPU: raypo beside TRL, vLLM and PyTorch, 0.5B and 1.5B: a table
	@nvidia-smi -L 2>/dev/null | grep -q '^GPU ' || { echo "raypo: nvidia-smi finds no GPU here."; exit 2; }
	@RAYPO_DEVICE=gpu scripts/setup.sh
	python -m tests.benchmarks.bench_gpu

docs: setup ## Write docs/configuration.md, and the tables in docs/outputs.md and docs/migrating.md
	python -m scripts.config_reference
	python -m scripts.metrics_table
	python -m scripts.rules_table
	python -m scripts.migration_tables
	python -m scripts.recipe_plans

docs-site: setup ## Write build/site: the pages and an API reference (installs the extra docs)
	uv pip install --quiet -e '.[docs]'
	python -m mkdocs build --strict

fix: setup ## Format, and repair what ruff can repair
	ruff check --fix
	ruff format

clean: ## Remove runs and what tools leave; .venv stays
	rm -rf runs build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	rm -rf examples/*/data examples/smollm2_positive/model
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
