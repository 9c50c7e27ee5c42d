# Every target works without any earlier step; `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

export RAY_USAGE_STATS_ENABLED := 0
# As workers have it: workers/openmp.py.
export OMP_WAIT_POLICY := passive
export GOMP_SPINCOUNT := 10000

.PHONY: help venv gpu-tools demo serve test test-all lint types protos bench bench-quick clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# Editable, but for the kernels, which are compiled: again whenever their sources have changed.
$(STAMP): pyproject.toml setup.py $(wildcard kernels/csrc/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -e ".[dev]"
	touch $(STAMP)

venv: $(STAMP)  ## make .venv and install the project with its development tools

# Without what FlashInfer needs on a GPU alone, which is another 0.8 GB. 1.8 GB as it is, so not `dev`.
gpu-tools: venv  ## what tests of the GPU kernels need where there is no GPU: Triton, FlashInfer's Python
	$(BIN)/pip install -q "triton>=3.6,<3.9"
	$(BIN)/pip install -q --no-deps "flashinfer-python>=0.7,<0.8"
	$(BIN)/pip install -q "apache-tvm-ffi>=0.1.11,<0.2" "einops>=0.8,<1" "ninja>=1.11,<2" \
		"nvidia-ml-py>=12,<14" "tabulate>=0.9,<1"

demo: venv  ## two replicas of the default model on the CPU, a small workload over gRPC, then shut down
	$(BIN)/pagefleet demo

serve: venv  ## serve the default model until interrupted
	$(BIN)/pagefleet serve --replicas 2

test: venv  ## unit tests and core integration, at most 8 minutes
	$(BIN)/python -m pytest -q -m "not slow"

test-all: venv  ## everything, the slow parts too
	$(BIN)/python -m pytest -q

lint: venv  ## ruff and the import rule
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: venv  ## pyright, strict
	$(BIN)/pyright

protos:  ## regenerate protos/*_pb2* with grpcio-tools 1.71.2, in a throw-away venv
	set -e; dir=$$(mktemp -d); trap 'rm -rf "$$dir"' EXIT; \
	$(PYTHON) -m venv $$dir/venv; \
	$$dir/venv/bin/pip install -q grpcio-tools==1.71.2 "setuptools<81"; \
	$$dir/venv/bin/python -m grpc_tools.protoc -Ipagefleet/protos=protos --python_out=$$dir \
		--grpc_python_out=$$dir --pyi_out=$$dir protos/inference.proto protos/engine.proto; \
	cp $$dir/pagefleet/protos/* protos/

bench: venv  ## the benchmark suite, which takes hours; writes tests/benchmarks/RESULTS.md anew
	$(BIN)/python tests/benchmarks/run_all.py

bench-quick: venv  ## the same at its smallest sizes, in minutes; writes nothing
	$(BIN)/python tests/benchmarks/run_all.py --quick

clean:  ## remove what was built
	rm -rf $(VENV) build dist *.egg-info kernels/*.so
