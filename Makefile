# make demo   set up, train on real text in every precision, compare, leave plots in demo/
# make test   set up, then every check: style, types, tests
# make browser  tests of the report's page in Debian's Chromium (apt install chromium), and its
#             screenshot in docs/
# make gpu    tests that need a GPU, and its speed; with a torch that is built for it
# make bench  speed against named peers; writes benchmarks/results/ (not for noisy machines)
# make soak   kill and damage at length; writes benchmarks/results/
# make study  what each precision costs in loss, 40 minutes; stopped, it goes on where it was
# make docs   write the measured tables and plots of README and docs from benchmarks/results/
# make clean  remove what make made

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test browser gpu bench soak study docs clean

demo: $(VENV)/.train
	$(BIN)/halfword demo

test: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n auto --dist loadfile -m "not gpu"

browser: $(VENV)/.dev
	$(PIP) -e '.[train,dev,browser]'
	$(BIN)/python -m pytest tests/report/test_browser.py
	$(BIN)/python benchmarks/screenshot.py

gpu: $(VENV)/.dev
	$(BIN)/python -m pytest -m gpu tests/gpu
	$(BIN)/python benchmarks/step_gpu.py

bench: $(VENV)/.train
	$(BIN)/python benchmarks/train_loop.py
	$(BIN)/python benchmarks/checkpoint_stall.py
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/step_memory.py
	$(BIN)/python benchmarks/zero_memory.py
	$(BIN)/python benchmarks/plan.py
	$(BIN)/python benchmarks/zero_throughput.py

soak: $(VENV)/.train
	$(BIN)/python benchmarks/soak.py

study: $(VENV)/.train
	$(BIN)/python benchmarks/convergence.py
	$(BIN)/python benchmarks/finetuning.py

docs: $(VENV)/.train
	$(BIN)/python benchmarks/tables.py
	$(BIN)/python benchmarks/plots.py

clean:
	rm -rf $(VENV) demo build dist .mypy_cache .pytest_cache .ruff_cache

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "halfword needs Python 3.11 or newer; name one: make PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.train: pyproject.toml constraints.txt | $(VENV)/.python
	@echo "Setting up $(VENV). To download: about 450 MB with a CPU build of torch, 3 GB where pip"
	@echo "picks the CUDA build. Once; later calls reuse it."
	$(PIP) -e '.[train]'
	@touch $@

$(VENV)/.dev: $(VENV)/.train
	@echo "Setting up the tools for tests. To download: about 60 MB, and 200 MB of Triton on Linux."
	$(PIP) -e '.[train,dev]'
	@touch $@
