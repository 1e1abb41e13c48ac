# Everything a developer or CI runs. The tool itself needs none of this: pip install . is enough.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
SPECIFIED_BY := setup.cfg constraints.txt pyproject.toml
PARALLEL := $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder
CODE := $(wildcard axonn_tune benchmarks configs docs/hooks.py machines tests tools)

.DEFAULT_GOAL := help
# Tests start hundreds of processes, each of which would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help demo test guards nightly deep check style types generated structured generate unit format outputs docs accuracy golden bench gpu fit frameworks structure wheel clean chromium
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: .venv/installed-demo ## install; rank grids of an 80b model; then predicted vs. measured on an emulated cluster
	@$(BIN)/python -m tools.demo

test: .venv/installed-dev chromium ## a fast guard for each promise, style, types, generated files: six minutes on two cores
	@$(MAKE) --no-print-directory -j2 style generated structured types guards

guards: .venv/installed-dev # beside types, which has one core
	@$(PARALLEL) -n 3 --ignore=tests/published

nightly: .venv/installed-dev chromium ## the tests that take longer, marked nightly: half an hour on two cores
	@$(PARALLEL) -m nightly

deep: .venv/installed-dev chromium ## before a release: tests marked deep, and 50 synthetic machines that learn
	@$(PARALLEL) -m deep
	@$(BIN)/python -m tools.learning_coverage

chromium: # the browser that reports are tested in, where it may be installed
	@.ci/chromium

check: style types generated structured unit ## what to run before each commit: as test, but unit tests only

style: .venv/installed-dev ## lint, and whether the code is formatted
	@$(BIN)/ruff check --quiet $(CODE)
	@$(BIN)/ruff format --quiet --check $(CODE)

types: .venv/installed-dev ## mypy --strict
	@$(BIN)/mypy --no-error-summary

generated: .venv/installed-dev ## whether docs/cli.md, docs/files.md and the JSON Schemas match the code
	@$(BIN)/python -m tools.reference --check

unit: .venv/installed-dev ## unit tests
	@$(BIN)/python -m pytest tests/unit

format: .venv/installed-dev ## format the code and mend what ruff can
	@$(BIN)/ruff check --quiet --fix $(CODE)
	@$(BIN)/ruff format --quiet $(CODE)

generate: .venv/installed-dev ## rewrite docs/cli.md, docs/files.md and the JSON Schemas
	@$(BIN)/python -m tools.reference

outputs: .venv/installed-dev ## rewrite outputs of commands on pages, in a minute or two; names of pages in ARGS
	@$(BIN)/python -m tools.outputs $(ARGS)

docs: .venv/installed-dev ## build the documentation site into build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo 'Open build/site/index.html; with its search: $(BIN)/python -m http.server --directory build/site'

wheel: .venv/installed ## build the wheel into dist, check its contents, and run it in an empty environment
	@rm -rf build/lib build/bdist.* dist
	@$(PIP) wheel --no-deps --wheel-dir dist .
	@$(BIN)/python -m tools.wheel dist/*.whl

accuracy: .venv/installed-dev ## predictions against published measurements, and the tests of their floors; options in ARGS
	@$(BIN)/axonn-tune accuracy $(ARGS)
	@$(PARALLEL) -n 2 tests/published

golden: .venv/installed-dev ## what every command prints and writes, against its recording; ARGS=--write records, ARGS=NAME runs some
	@$(BIN)/python -m tests.golden.golden $(ARGS)

bench: .venv/installed-dev chromium ## speed of the tool, of its reports, and of the runtime's steps beside FSDP2 and DTensor; options in ARGS
	@$(BIN)/python -m benchmarks.run $(ARGS)
	@$(BIN)/python -m benchmarks.report
	@$(BIN)/python -m benchmarks.runtime_steps $(ARGS)

gpu: .venv/installed-runtime ## what the runtime does on the GPU here, predicted beside measured: docs/gpu.md; options in ARGS
	@PYTORCH_ALLOC_CONF=expandable_segments:True $(BIN)/python -m benchmarks.gpu_proof $(ARGS)

fit: .venv/installed-dev ## fit machine profiles to measurements; options in ARGS
	@$(BIN)/python -m tools.fit.profiles $(ARGS)

frameworks: .venv/installed-dev ## show the frameworks' own code the commands written for them, and record what it says; names in ARGS
	@$(BIN)/python -m tools.frameworks.record $(ARGS)

structured: .venv/installed-dev ## whether figures of the code base's structure are at most those committed
	@$(BIN)/python -m tools.structure --check

structure: .venv/installed-dev ## figures of the code base's structure, and where they come from; options in ARGS
	@$(BIN)/python -m tools.structure $(ARGS)

clean: ## remove .venv and everything built
	@rm -rf .venv build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +

# The tests need torch, the tuner does not: it is in the extra [runtime].
.venv/installed: $(SPECIFIED_BY) | .venv/bin/python
	@echo 'installing axonn-tune into .venv' >&2
	@$(PIP) install --constraint constraints.txt --editable .
	@touch $@

.venv/installed-runtime: .venv/installed
	@echo 'installing torch into .venv' >&2
	@$(PIP) install --constraint constraints.txt --editable '.[runtime]'
	@touch $@

.venv/installed-demo: .venv/installed
	@echo 'installing torch and plotly into .venv' >&2
	@$(PIP) install --constraint constraints.txt --editable '.[report,runtime]'
	@touch $@

.venv/installed-dev: .venv/installed-runtime
	@echo 'installing the development tools into .venv' >&2
	@$(PIP) install --constraint constraints.txt --editable '.[dev,docs]'
	@touch $@

.venv/bin/python:
	@.ci/make-venv '$(PYTHON)' .venv
