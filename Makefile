# `make help` lists the targets. Everything is installed into .venv; nothing outside this folder is changed.

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt
PYTEST := $(BIN)/python -m pytest
# A file is one worker's, so that what its tests share is made once; conftest.py has the order.
# Three workers on two cores: a quarter of what a test does is waiting for another process.
CORES := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
WORKERS := -n $(shell expr $(CORES) + $(CORES) / 2) --maxprocesses 4 --dist loadfile --no-loadscope-reorder

FUZZ_SECONDS ?= 60

# Threads that wait by spinning slow torch down many times over when the cores are shared.
export OMP_WAIT_POLICY ?= passive
# Without compiled modules on disk every worker and every process of the tests compiles all of Hone again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo demo-seeds faults table docs mutants torture trial fuzz wheel browser old-trl gym real-model test test-again test-slow test-gpu docs-test docs-test-slow deleted sampler check static clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/.dev ## make .venv and install Hone with the tools for its tests

demo: $(VENV)/.core ## the whole journey on the CPU, with a table and runs/demo/report.html at the end
	$(BIN)/hone demo

demo-seeds: $(VENV)/.dev ## the demo's promises on three seeds, as JSON (about 12 minutes)
	$(BIN)/python -m benchmarks.demo

faults: $(VENV)/.dev ## inject every fault of the catalogue: tests or `hone check` must catch each; writes docs/dev/faults.md
	$(BIN)/python -m benchmarks.faults

table: $(VENV)/.dev ## write the tables of docs/speed.md, docs/process.md and docs/verifiers.md from benchmarks/results
	$(BIN)/python -m benchmarks.table

docs: $(VENV)/.dev ## build the site of docs/ into build/site, offline; a link or an anchor that leads nowhere fails
	$(BIN)/python -m benchmarks.reference
	$(BIN)/python -m benchmarks.rooms --svg docs/rooms_after.svg --title After
	$(BIN)/zensical build --clean --strict

mutants: $(VENV)/.dev ## mutation testing of the algorithms (about 30 minutes on 2 cores); writes docs/dev/mutants.md
	$(BIN)/python -m benchmarks.mutants

torture: $(VENV)/.dev ## kill, starve and mislead runs of every loop: nothing may be lost; writes docs/dev/reliability.md (some minutes)
	$(BIN)/python -m benchmarks.torture --kills 300

trial: $(VENV)/.dev ## try every case of the field trial again; writes docs/dev/trial.md
	$(BIN)/python -m benchmarks.trial

fuzz: $(VENV)/.dev ## fuzz every parser of outside bytes, FUZZ_SECONDS each (60); by coverage where atheris can be installed
	-$(PIP) atheris==3.0.0
	$(BIN)/python -m tests.fuzz.run --seconds $(FUZZ_SECONDS)

wheel: $(VENV)/.dev ## build the wheel, install it in a folder elsewhere, and do there what the README says (some minutes)
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
		$(BIN)/python -m tests.wheel.install "$$folder" && \
		HONE_WHEEL="$$folder" $(PYTEST) tests/wheel --timeout 1800

browser: ## install Chromium (Debian, as root), so that the report is tested in a real browser
	command -v chromium >/dev/null || { apt-get update -qq && apt-get install -y -qq chromium >/dev/null; }

real-model: $(VENV)/.dev ## fetch the real model that tests/real reads (98 MB, then 542 MB on disk; without a network those tests skip)
	$(BIN)/hone fetch smollm2-135m --optional

old-trl: $(VENV)/.dev ## the last TRL with a PPO trainer, beside the newest, for the comparison with it
	test -d $(VENV)/trl-1.12.0/trl || $(BIN)/python -m pip install -q --no-deps --target $(VENV)/trl-1.12.0 trl==1.12.0

gym: $(VENV)/.dev ## reasoning-gym, whose tasks tests/reward makes and marks (110 MB: it imports matplotlib)
	$(PIP) reasoning-gym

test: $(VENV)/.dev ## the fast tests
	$(PYTEST) $(WORKERS) -m "not slow and not gpu" --ignore tests/docs

test-again: $(VENV)/.dev ## run alone, one after the other, what failed in the last `make test`
	$(PYTEST) --last-failed --last-failed-no-failures none -m "not slow and not gpu" --ignore tests/docs

test-slow: $(VENV)/.dev ## the slow tests
	$(PYTEST) -m "slow and not gpu" --timeout 3600

test-gpu: $(VENV)/.dev ## the tests that need an NVIDIA GPU
	$(PYTEST) -m gpu --timeout 1800

docs-test: $(VENV)/.dev ## follow the tutorial and the how-to pages word for word, but for what takes minutes
	$(PYTEST) tests/docs -m "not slow"

docs-test-slow: $(VENV)/.dev ## the same with the whole demo and the real model
	$(PYTEST) tests/docs --timeout 3600

deleted: $(VENV)/.dev ## delete each backend and each runner in a copy of Hone: everything must still work
	$(PYTEST) tests/equal/test_deleted_backends.py --timeout 1800

sampler: $(VENV)/.dev ## the sampler's figures against transformers, as JSON: of the GPU if there is one, else of the CPU
	$(BIN)/python -m benchmarks.sampler

static: $(VENV)/.dev ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

check: static test ## what a change must pass: format, lint, types and the fast tests

clean: ## remove .venv and all caches, keep runs/
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} +

# A stamp is newer than what it was installed from, or the installation is repeated.
$(VENV)/.core: pyproject.toml constraints.txt | $(VENV)/.made
	@echo "installing Hone into $(VENV) (torch is large: a few minutes the first time)"
	$(PIP) -e .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/.made
	@echo "installing Hone and its tools into $(VENV) (torch is large: a few minutes the first time)"
	$(PIP) -e ".[dev]"
	@touch $@ $(VENV)/.core

$(VENV)/.made:
	@for python in $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11; do \
		if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			$$python -m venv $(VENV) && touch $@ && exit 0; \
			rm -rf $(VENV); \
			echo "make: $$python cannot make a virtual environment: install its venv module (on Debian: python3-venv)" >&2; \
			exit 1; \
		fi; \
	done; \
	echo "make: Hone needs Python 3.11 or newer: install it, or name it with make PYTHON=/path/of/python" >&2; \
	exit 1
