# From a fresh clone, with Python (3.10 or newer), pip and make alone: `make demo`, `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One more than cores: some tests wait for minutes, for a service or for its end.
WORKERS ?= 3
# One environment, filled in three stages: what the package needs to run, then what the tests, then what the checks need.
READY := $(VENV)/.ready
READY_TEST := $(READY)-test
READY_CHECK := $(READY)-check
START := $(shell date +%s)
export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export NO_MKDOCS_2_WARNING := 1
# pip does not compile bytecode (see below), so Python must keep what it compiles on import.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-all test-slow test-quantized test-order test-first-to-last test-last-to-first chart calibrate evaluate check lint types imports docs docs-serve clean

help: ## List the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

demo: $(READY) ## Install the package, generate an image and a video on the best available device
	@echo "Generating an image and a video (about half a minute in total)"
	@$(BIN)/anyaccel generate "a fox and a rocket on a light blue background" --seed 7 --force -o demo/
	@$(BIN)/anyaccel generate "a cat bouncing" --frames 8 --seed 7 --force -o demo/cat.webp
	@echo "Done in $$(($$(date +%s) - $(START))) s"

evaluate: $(READY_TEST) ## Measure the embedded model (about an hour on two cores)
	$(BIN)/python -m training evaluate --json benchmarks/results/embedded_cpu.json

PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

test: $(READY_TEST) ## Run the tests, except the long ones (8 minutes on two cores)
	$(PYTEST) -m "not slow and not long"

test-all: $(READY_TEST)
	$(PYTEST) -m "not slow"

test-slow: $(READY_TEST) ## Run the slow tests
	$(BIN)/python -m pytest -m slow

QUANTIZATION := build/quantization

$(QUANTIZATION)/.ready: $(READY_TEST) tests/quantized_weights/requirements.txt
	@$(INSTALL) --no-deps --upgrade --target $(QUANTIZATION) --requirement tests/quantized_weights/requirements.txt
	@touch $@

test-quantized: $(QUANTIZATION)/.ready ## Run the tests of quantized weights with bitsandbytes, quanto and torchao
	PYTHONPATH=$(QUANTIZATION) $(PYTEST) -m "" tests/quantized_weights tests/upstream/test_quantization_internals.py

test-order: $(READY_TEST) ## Run the tests in order and in reverse order, one process each
	$(MAKE) --jobs 2 --output-sync test-first-to-last test-last-to-first

test-first-to-last test-last-to-first: $(READY_TEST)
	$(BIN)/python -m pytest -m "not slow" $(if $(findstring test-last,$@),--last-first)

chart: $(READY_TEST) ## Run every tiny pipeline on every virtual device (15 to 30 minutes)
	rm -f benchmarks/results/chart.json
	$(BIN)/anyaccel chart --keep benchmarks/results/chart.json --html chart.html

calibrate: $(READY_TEST) ## Count detected failures and false positives of the virtual devices
	$(BIN)/python -m tests.calibration

check: $(READY_CHECK) ## Run all checks, as in CI
	$(MAKE) lint
	$(MAKE) --jobs 2 test-all types imports docs

lint: $(READY_CHECK)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY_CHECK)
	$(BIN)/mypy

imports: $(READY_CHECK)
	$(BIN)/lint-imports --no-cache

docs: $(READY_CHECK) ## Build the documentation into site/
	$(BIN)/mkdocs build --strict --quiet

docs-serve: $(READY_CHECK) ## Serve the documentation locally and rebuild it on changes
	$(BIN)/mkdocs serve

clean: ## Remove the environment and all build output
	rm -rf $(VENV) site .mypy_cache .ruff_cache .pytest_cache

# constraints.txt pins the versions that the tests ran with. uv is not used, because it does not read pip's configuration.
# --no-compile saves a third of the time: pip would compile 11,000 files, and generating an image imports 2,600.
INSTALL := $(BIN)/python -m pip install -qq --no-compile --constraint constraints.txt
# Installs packages and shows every few seconds how far it is; pip shows only downloads, and unpacking torch takes longer.
PROGRESS_S := 10
comma := ,
install = $(INSTALL) $(1) & pip=$$!; trap 'kill $$pip 2>/dev/null' EXIT; trap 'exit 130' INT TERM; s=0; while kill -0 $$pip 2>/dev/null; do sleep 1; s=$$((s + 1)); \
  [ $$((s % $(PROGRESS_S))) -ne 0 ] || echo "  $$s s, $$(du -sm $(VENV) | cut -f 1) MB in $(VENV)"; done; wait $$pip

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "anyaccel needs Python 3.10 or newer, and this is " + sys.version.split()[0] + "\nhint: make PYTHON=python3.12")'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { echo "Creating $(VENV)"; rm -rf $(VENV); $(PYTHON) -m venv $(VENV); } || { rm -rf $(VENV); \
	  echo "hint: on Debian and Ubuntu, apt install python3-venv" >&2; exit 1; }
	@echo "Installing the package (about a minute)"
	@$(call install,--editable .)
	@touch $@

# The package is installed already: only what an extra adds is.
$(READY_TEST): $(READY)
	@echo "Installing what the tests need (about a minute)"
	@$(call install,'anyaccel[test-suite]')
	@touch $@

$(READY_CHECK): $(READY_TEST)
	@echo "Installing what the checks need (about half a minute)"
	@$(call install,'anyaccel[check$(comma)docs]')
	@touch $@
