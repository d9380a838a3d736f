# Everything a newcomer needs: `make demo`, `make test`. See README.md.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/.ready
DEMO := --budget 700MiB --trials 30 --seed 1

.PHONY: help venv demo test check format bench bench-accuracy soak docs browser clean

help:  ## Show what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

venv: $(READY)  ## Set up .venv alone

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "vram-tuner needs Python 3.11 or newer; name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -m venv .venv || { \
	    echo "python3-venv is missing: apt-get install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY)  ## Search the digits study under a budget, print the front
	$(BIN)/tuner run studies/digits_cnn.py $(DEMO)
	@echo "open the app with: $(BIN)/tuner app"

# One more than there are cores: many a test waits for a child that sleeps.
WORKERS ?= $(shell expr $$(nproc) + 1)

test: $(READY) browser  ## Run every test
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(TESTS)

check: $(READY)  ## Format, lint, types, import layers, single migration head
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@echo "migration head: $$($(BIN)/python -c 'from tuner.store.migrations import head_revision; print(head_revision())')"

format: $(READY)  ## Format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)  ## Run the benchmarks
	$(BIN)/python benchmarks/memory_accuracy.py --json artifacts/memory_accuracy.json
	$(BIN)/python benchmarks/prediction_speed.py --json artifacts/prediction_speed.json
	PYTHONPATH=. $(BIN)/python benchmarks/search_quality.py --json artifacts/search_quality.json
	PYTHONPATH=. $(BIN)/python benchmarks/throughput.py --json artifacts/throughput.json
	PYTHONPATH=. $(BIN)/python benchmarks/many_writers.py --json artifacts/many_writers.json
	PYTHONPATH=. $(BIN)/python benchmarks/early_stopping.py --json artifacts/early_stopping.json

soak: $(READY)  ## Run 1,000 trials while children, drivers and the database are killed (half an hour)
	PYTHONPATH=. $(BIN)/python benchmarks/soak.py --json artifacts/soak.json

ACCURACY := .venv-accuracy/bin
REFERENCE ?= ../shared/reference

bench-accuracy: .venv-accuracy/.ready  ## Score predictions against GPU figures measured by others
	PYTHONPATH=. $(ACCURACY)/python benchmarks/memory_accuracy.py --reference $(REFERENCE) \
	    --json artifacts/memory_accuracy_reference.json

# A venv of its own: torchvision needs a CUDA build of PyTorch (5.5 GB).
.venv-accuracy/.ready: Makefile
	@$(PYTHON) -m venv .venv-accuracy
	$(ACCURACY)/python -m pip install --quiet torch==2.14.1 torchvision==0.29.1 transformers==4.51.3
	@touch $@

docs: $(READY)  ## Write the generated parts of docs/
	$(BIN)/python docs/generate.py

browser:  ## Install Chromium for the browser tests, where we may
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || \
	{ [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null; } || \
	echo "the browser tests need Chromium: install it, for example with: sudo apt-get install chromium" >&2

clean:  ## Remove what the targets made
	rm -rf .venv .venv-accuracy artifacts build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
