# Everything a developer or CI runs. The tool itself needs none of this: pip install . is enough.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
SPECIFIED_BY := setup.cfg constraints.txt pyproject.toml
CODE := $(wildcard axonn_tune benchmarks configs machines tests)

.DEFAULT_GOAL := help
.PHONY: help demo test check style types generated unit format docs accuracy bench fit clean
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: .venv/installed ## install, rank all grids of an 80b model on 1,024 GPUs, write the launch config
	@mkdir -p build/demo
	@$(BIN)/axonn-tune --gpus 1024 --model 80b -o build/demo/launch.yaml
	@printf '\nThe launch config of the first row is build/demo/launch.yaml. It begins:\n\n'
	@head -n 24 build/demo/launch.yaml

test: style types generated ## everything: style, types, generated files, all tests
	@$(BIN)/python -m pytest

check: style types generated unit ## what to run before each commit: as test, but unit tests only

style: .venv/installed-dev ## lint, and whether the code is formatted
	@$(BIN)/ruff check --quiet $(CODE)
	@$(BIN)/ruff format --quiet --check $(CODE)

types: .venv/installed-dev ## mypy --strict
	@$(BIN)/mypy --no-error-summary

generated: .venv/installed-dev ## whether docs/cli.md and the JSON Schemas match the code
	@$(BIN)/python -m axonn_tune.specs.json_schemas --check
	@$(BIN)/python -m axonn_tune.cli.reference --check

unit: .venv/installed-dev ## unit tests
	@$(BIN)/python -m pytest tests/unit

format: .venv/installed-dev ## format the code and mend what ruff can
	@$(BIN)/ruff check --quiet --fix $(CODE)
	@$(BIN)/ruff format --quiet $(CODE)

docs: .venv/installed-dev ## rewrite docs/cli.md and the JSON Schemas
	@$(BIN)/python -m axonn_tune.specs.json_schemas
	@$(BIN)/python -m axonn_tune.cli.reference

accuracy: .venv/installed-dev ## predictions against published measurements; options in ARGS
	@$(BIN)/axonn-tune validate --published $(ARGS)

bench: .venv/installed-dev ## speed of the tool, and of the runtime's steps beside FSDP2 and DTensor; options in ARGS
	@$(BIN)/python -m benchmarks.run $(ARGS)
	@$(BIN)/python -m benchmarks.runtime_steps $(ARGS)

fit: .venv/installed-dev ## fit machine profiles to measurements; options in ARGS
	@$(BIN)/python -m benchmarks.fit $(ARGS)

clean: ## remove .venv and everything built
	@rm -rf .venv build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +

# The tests need torch, the tuner does not: it is in the extra [runtime].
.venv/installed: $(SPECIFIED_BY) | .venv/bin/python
	@echo 'installing axonn-tune into .venv' >&2
	@$(PIP) install --constraint constraints.txt --editable .
	@touch $@

.venv/installed-dev: .venv/installed
	@echo 'installing the development tools into .venv' >&2
	@$(PIP) install --constraint constraints.txt --editable '.[dev,runtime]'
	@touch $@

.venv/bin/python:
	@.ci/make-venv '$(PYTHON)' .venv
