# Every target works on a fresh clone: the environment in $(VENV) is made on first use.
#   make demo                              the main job, on the pair that ships with the package
#   make bench                             a table of speeds on that pair, in a minute or two; results in runs/bench
#   make test VENV="$VIRTUAL_ENV"         use an environment you already have

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
# without an NVIDIA driver this release is installed first, so that pip does not look for the newest CUDA build
CPU_TORCH ?= torch==2.13.0
ARGS ?=
PAIR := hybridspec_hf/assets/tiny_pair

ifeq ($(strip $(VENV)),)
$(error VENV is empty: activate an environment first, or leave VENV out to make .venv)
endif

BIN := $(VENV)/bin
READY := $(VENV)/.hybridspec-ready
# BLAS and OpenMP threads beside pytest's workers only fight for the cores
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1

.PHONY: demo style check test test-gpu bench

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	command -v nvidia-smi >/dev/null || $(BIN)/python -c "import torch" 2>/dev/null \
		|| $(BIN)/python -m pip install $(CPU_TORCH)
	$(BIN)/python -m pip install -e ".[dev]"
	# z-lab's own drafter, to compare ours with; its pinned requirements are for its servers
	$(BIN)/python -m pip install --no-deps dflash==0.1.0
	touch $@

demo: $(READY)
	$(BIN)/hybridspec demo $(ARGS)

style: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: $(READY)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/pre-commit run --all-files

test: $(READY)
	$(ONE_THREAD) $(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

test-gpu: $(READY)
	$(BIN)/python -m pytest -m gpu $(ARGS)

bench: $(READY)
	$(BIN)/hybridspec bench --target $(PAIR)/target --drafter $(PAIR)/drafter --dtype float32 --threads 1 \
		--limit 1 --repeats 1 --max-new-tokens 64 --output runs/bench $(ARGS)
