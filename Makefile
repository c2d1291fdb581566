# Two commands do everything from nothing: `make train` runs the main job, `make test` passes the tests.
# Both prepare the environment first (`make setup`: .venv, dependencies, the compiled kernel).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
NATIVE := $(wildcard csrc/*.cc csrc/*.h) CMakeLists.txt pyproject.toml constraints.txt

.PHONY: help setup train test lint format bench wheel sanitize clean

help:
	@echo "make train   train a small language model on real text, about five minutes"
	@echo "make test    run the tests"
	@echo "make lint    formatters, linters, type checker"
	@echo "make bench   compare with torch's own CPU kernels on this machine"
	@echo "make wheel   build the wheel into dist/"
	@echo "make clean   remove what was built"

setup: $(STAMP)

$(STAMP): $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "attnspan needs Python 3.11 or newer as '$(PYTHON)'. Name another: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || command -v g++ >/dev/null || { \
	  echo "attnspan's CPU kernel needs a C++20 compiler (GCC 11 or Clang 14, or newer), and none was found."; \
	  echo "Debian, Ubuntu: sudo apt-get install g++    Fedora: sudo dnf install gcc-c++    macOS: xcode-select --install"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "Python's venv module is missing. Debian, Ubuntu: sudo apt-get install python3-venv"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	  --config-settings=cmake.define.ATTNSPAN_WERROR=ON --editable '.[dev]'
	@touch $@

train: setup
	$(BIN)/attnspan train $(ARGS)

test: setup
	$(BIN)/python -m pytest $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror csrc/*.cc csrc/*.h tests/native/*.cc

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i csrc/*.cc csrc/*.h tests/native/*.cc

bench: setup
	$(BIN)/python benchmarks/flash.py $(ARGS)

wheel: setup
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

# The kernel over random problems under the address and undefined-behaviour sanitizers.
sanitize: setup
	cmake --preset sanitize -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python
	cmake --build --preset sanitize --target attnspan_memory_check
	build/sanitize/attnspan_memory_check

clean:
	rm -rf build dist $(VENV)
