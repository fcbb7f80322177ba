# Everything happens in one virtual environment, which the first target that needs it makes.
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
PROMPT ?= Photosynthesis is the process by which
BIN = $(VENV)/bin
PROTOS = $(wildcard blockplane/v1/*.proto)

.PHONY: run test test-all test-containers bench bench-end-to-end bench-control-plane bench-wire bench-worker bench-nki bench-overload bench-placement bench-capacity bench-check bench-split bench-transfer pictures protos release-protos docker clean help

help:  ## Show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

run: $(VENV)/run.stamp  ## Set everything up and continue PROMPT with Gemma 3 270M
	$(BIN)/blockplane up --log-level warning -- generate "$(PROMPT)" --max-tokens 64 --temperature 0.7 --seed 1

test: $(VENV)/dev.stamp  ## Lint, types, protos and every test that is not slow: what lands must pass it
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/buf lint
	$(BIN)/buf breaking --against protos/released.binpb
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not slow" --numprocesses $(JOBS) --ignore tests/system
	# Whole systems have the machine to themselves.
	$(BIN)/pytest -m "not slow" tests/system

test-all: $(VENV)/dev.stamp $(VENV)/run.stamp test  ## The same and the slow tests, among them those on the real model
	$(BIN)/pytest -m slow --durations=0

bench: $(VENV)/run.stamp  ## Measure decode on this machine
	$(BIN)/python benchmarks/single_stream.py

bench-end-to-end: $(VENV)/run.stamp  ## Compare with vLLM and llama.cpp, where VLLM and LLAMA name pythons that have them
	$(BIN)/python benchmarks/end_to_end.py $(if $(VLLM),--vllm $(VLLM)) $(if $(LLAMA),--llama $(LLAMA))

bench-control-plane: $(VENV)/run.stamp  ## Measure what a step costs the engine
	$(BIN)/python benchmarks/control_plane.py

bench-wire: $(VENV)/run.stamp  ## Measure what crosses between engine and worker
	$(BIN)/python benchmarks/wire.py

bench-worker: $(VENV)/run.stamp  ## Measure what a step costs a worker outside the model
	$(BIN)/python benchmarks/worker_step.py

bench-overload: $(VENV)/dev.stamp  ## Offer a system twice what it can do
	$(BIN)/python benchmarks/overload.py

bench-check: $(VENV)/run.stamp $(VENV)/dev.stamp  ## Hold the benchmarks' ratios against benchmarks/bounds.json
	$(BIN)/python benchmarks/check.py

bench-split: $(VENV)/dev.stamp  ## Measure what long prompts do to streams, with prefill and decode apart
	$(BIN)/python benchmarks/split.py

bench-transfer: $(VENV)/dev.stamp  ## Measure how fast KV blocks move between workers
	$(BIN)/python benchmarks/transfer.py

bench-placement: $(VENV)/dev.stamp  ## Place prompts that begin alike over four groups, in virtual time
	$(BIN)/python benchmarks/placement.py --check

bench-capacity: $(VENV)/dev.stamp  ## Measure what one core of an engine drives and one of a frontend delivers
	$(BIN)/python benchmarks/capacity.py

bench-nki: $(VENV)/dev.stamp  ## Predict what the kernels for NeuronCores would take
	$(BIN)/python benchmarks/nki_cost.py

pictures: $(VENV)/dev.stamp  ## Make the pictures of docs/ from a real run, with Chromium and Prometheus
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,pictures]'
	$(BIN)/python docs/make_pictures.py

docker:  ## Build the image and run engine, frontend and worker in containers
	docker compose up --build --detach

test-containers:  ## Test the compose files in a Docker Engine, which Debian gets; docs/containers.txt is the log
	bash -o pipefail -c '.ci/containers | tee docs/containers.txt'

protos: $(VENV)/dev.stamp  ## Generate the protobuf code anew
	$(BIN)/python -m grpc_tools.protoc -I . --python_out=. --grpc_python_out=. --mypy_out=. --mypy_grpc_out=. $(PROTOS)

release-protos: $(VENV)/dev.stamp  ## Make the protos of a release, just tagged, what later ones must not break
	$(BIN)/buf build --exclude-source-info --output protos/released.binpb

clean:  ## Remove the virtual environment and what tools left
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/python.stamp:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/run.stamp: $(VENV)/python.stamp pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[demo]'
	touch $@

$(VENV)/dev.stamp: $(VENV)/python.stamp pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
