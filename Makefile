# make run    install, then reproduce one fault on the embedded pair
# make test   install with the test tools, then format, lint, types, import contracts and tests
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The constraints also hold for build environments, so that building a dependency cannot pull in another torch.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# An installed accelerator plug-in must not break `import torch` on a machine without that accelerator.
export TORCH_DEVICE_BACKEND_AUTOLOAD := 0

.PHONY: run test check format docs bench clean

run: $(VENV)/.installed
	$(BIN)/harness run --fault grad_overflow

test: check

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	OMP_NUM_THREADS=1 $(BIN)/pytest

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.installed-dev
	$(BIN)/harness faults docs
	$(BIN)/python -m experiments.failures

bench: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m experiments.benchmarks.step

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install --quiet -c constraints.txt --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install --quiet -c constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
