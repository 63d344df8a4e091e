# From a fresh clone, with Python (3.10 or newer), pip and make alone: `make demo`, `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One more than cores: some tests wait for minutes, for a service or for its end.
WORKERS ?= 3
READY := $(VENV)/.ready
export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export NO_MKDOCS_2_WARNING := 1

.PHONY: help demo test test-slow test-order test-first-to-last test-last-to-first chart calibrate evaluate check lint types imports docs docs-serve clean

help: ## Show what there is to make
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

demo: $(READY) ## The main job: a picture of what is asked for, on whatever is here
	$(BIN)/anyaccel devices
	$(BIN)/anyaccel generate "a fox and a rocket on a light blue background" --seed 7 --force -o demo/

evaluate: $(READY) ## The embedded model's figures (about an hour on two cores)
	$(BIN)/python -m training evaluate --json benchmarks/results/embedded_cpu.json

test: $(READY) ## The tests
	$(BIN)/python -m pytest -m "not slow" --numprocesses $(WORKERS) --dist worksteal

test-slow: $(READY) ## The long sweeps
	$(BIN)/python -m pytest -m slow

test-order: $(READY) ## The tests in one process from first to last, beside them in another from last to first
	$(MAKE) --jobs 2 --output-sync test-first-to-last test-last-to-first

test-first-to-last test-last-to-first: $(READY)
	$(BIN)/python -m pytest -m "not slow" $(if $(findstring test-last,$@),--last-first)

chart: $(READY) ## Every tiny pipeline on every virtual device, plain and placed (about a quarter of an hour)
	rm -f benchmarks/results/chart.json
	$(BIN)/anyaccel chart --keep benchmarks/results/chart.json --html chart.html

calibrate: $(READY) ## Public failures and known good cases on the virtual devices: caught, and false alarms
	$(BIN)/python -m tests.calibration

check: $(READY) ## The one check, for people and for CI
	$(MAKE) lint
	$(MAKE) --jobs 2 test types imports docs

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	$(BIN)/lint-imports --no-cache

docs: $(READY) ## Build the documentation into site/
	$(BIN)/mkdocs build --strict --quiet

docs-serve: $(READY) ## Serve the documentation while it is written
	$(BIN)/mkdocs serve

clean: ## Remove the environment and everything that was built
	rm -rf $(VENV) site .mypy_cache .ruff_cache .pytest_cache

# The exact versions that the tests ran on. pip is asked, not uv: it also finds wheels that lie on the machine.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "anyaccel needs Python 3.10 or newer, and this is " + sys.version.split()[0] + "\nhint: make PYTHON=python3.12")'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { rm -rf $(VENV); $(PYTHON) -m venv $(VENV); } || { rm -rf $(VENV); \
	  echo "hint: Debian and Ubuntu keep venv in a package of its own: apt install python3-venv" >&2; exit 1; }
	@echo "Installing into $(VENV): a minute or two, once." >&2
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@
