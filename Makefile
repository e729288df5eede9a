# make train [MIXER=gsa] [SIZE=small] [CORPUS=path]     train a byte-level language model
# make compare [MIXERS=...] [TASKS=...] [RATES=...]     train many at equal size, at three rates
# make conversion [SIZE=25m] [TOKENS=...] [MINUTES=...] a Transformer converted in every way and trained on, one figure
# make bench [OP=gsa] [SHAPE=...] [CONTEXT=...] [PEER=no] operators beside the best public code, on a GPU
# make docs                                             the tables of README.md and docs/, from files of results
# make check                                            a test of each kind, under 2 minutes after the build
# make test [FULL=1]                                    every test that this machine can run; FULL: more examples
# make test-gpu [STAGES=...] [PARTS=...] [RECORD=file]  every test on a GPU, compute-sanitizer's too, and their record
# make smoke TORCH=2.13                                 builds for this torch and runs a little of everything
# make wheel [CUDA=ON] [TORCHES=2.14,2.15] [ARCHITECTURES=...]  one wheel for every Python and these torches, in dist/
# make check-wheel [TORCHES=2.14] [INTERPRETER=python3.13]  that wheel in clean environments
# make check-compilers                                  each installed g++ and clang compiles C++ without a warning; CUDA
#                                                       12.8's headers and ptxas accept the kernels
# make format / make check-format
#
# CHUNKS=4,8,16,32   of MIXER=cat: trains one model for all of these chunk lengths
# OPTIONS='chunk=1 phi=identity'  of train and compare: fields of the mixer's configuration
# CONTEXT=4096       of train and compare: tokens of a sequence of text; a step has as many tokens as without it
# SETTING='pairs=4,8 vocab_size=256'  of compare: numbers of a task   WIDTHS=64,128  of models, where the task has widths
# SEEDS=3, SEEDS=1,5 of compare: how many seeds, or which
# AT_ONCE=8192       tokens of a batch that a device of make train reads at once; the step is the same
# FOLDER=path        where a run or a comparison keeps its files
# CUDA=AUTO|ON|OFF   kernels: AUTO builds them exactly when a GPU is visible
# TORCH=2.11         use this version of torch, in an environment of its own (.venv-torch2.11)
# PYTHON=path        use this Python and its packages as they are instead of .venv
# KERNELS=path       of build and wheel: take this libgirih_kernels.so and compile no kernel
# WARNINGS=error     a compiler's warning fails the build
# ARCHITECTURES      of a wheel's kernels, as CMake names them
#
# Variables of the environment do not count, only those of the command line.
given = $(if $(filter command,$(firstword $(origin $(1)))),$($(1)))
ifeq ($(call given,CUDA),)
CUDA := AUTO
endif
ifneq ($(call given,PYTHON),)
ifneq ($(call given,TORCH),)
$(error TORCH=$(TORCH) with PYTHON=$(PYTHON): give one of them, PYTHON has a torch of its own)
endif
endif
newest := $(shell sed -n 's/^NEWEST = "\(.*\)"/\1/p' python/girih/_library.py)
ifeq ($(call given,PYTHON),)
torch := $(or $(call given,TORCH),$(newest))
PYTHON := .venv$(if $(filter-out $(newest),$(torch)),-torch$(torch))/bin/python
environment:
	@python3 tools/environment.py --torch $(torch)
else
environment:
endif

# The tree of this Python's torch; asked when it is there.
tree = build/torch$(shell $(PYTHON) -c 'from importlib.metadata import version; print(".".join(version("torch").split(".")[:2]))')
run := PYTHONPATH=python $(PYTHON)
option = $(if $(call given,$(1)),--$(2) '$($(1))')

.PHONY: environment build gpu train compare conversion bench docs check test test-gpu smoke wheel check-wheel check-compilers format check-format

build: environment
	@GIRIH_CUDA=$(CUDA) GIRIH_KERNELS='$(call given,KERNELS)' GIRIH_WARNINGS=$(call given,WARNINGS) $(PYTHON) setup.py --quiet build_ext --inplace

train: build
	@$(run) -m girih.train $(call option,MIXER,mixer) $(call option,CHUNKS,chunks) $(call option,OPTIONS,options) $(call option,CONTEXT,context) $(call option,SIZE,size) $(call option,CORPUS,corpus) $(call option,STEPS,steps) $(call option,AT_ONCE,at-once) $(call option,FOLDER,folder)

compare: build
	@$(run) -m girih.compare $(call option,MIXERS,mixers) $(call option,TASKS,tasks) $(call option,RATES,rates) $(call option,SETTING,setting) $(call option,OPTIONS,options) $(call option,CONTEXT,context) $(call option,STEPS,steps) $(call option,SIZE,size) $(call option,WIDTHS,widths) $(call option,SEEDS,seeds) $(call option,CORPUS,corpus) $(call option,FOLDER,folder)

conversion: build
	@$(run) tests/bench/conversion.py $(call option,SIZE,size) $(call option,TOKENS,tokens) $(call option,MINUTES,minutes) $(call option,CORPUS,corpus) $(call option,FOLDER,folder)

gpu: environment
	@$(PYTHON) tests/bench/device.py $(firstword $(MAKECMDGOALS))

bench: gpu build
	@$(run) tests/bench/bench.py $(call option,OP,op) $(call option,SHAPE,shape) $(call option,CONTEXT,context) $(call option,PEER,peer) $(call option,FOLDER,folder)

docs: build
	@$(run) tests/bench/pages.py

checked := against_recurrence splits step arguments gradcheck compile causality packed dtypes emulated_gsa models \
  parity graph_decoding conversion train readme library package torch_internals
check: build
	@$(tree)/tests/cpp/girih_tests --abort
	@$(run) tests/smoke.py
	@$(run) -m pytest -q -n 2 --each 1 $(checked:%=tests/*/test_%.py)

test: build
	@$(tree)/tests/cpp/girih_tests
	@$(if $(call given,FULL),GIRIH_FULL=1 )$(run) -m pytest -q -n 2 tests

test-gpu: gpu $(if $(filter no,$(call given,BUILD)),,build)
	@$(run) tests/gpu/run.py $(call option,STAGES,stages) $(call option,PARTS,parts) $(call option,RECORD,record) $(call option,BUILD,build)

smoke: build
	@$(run) tests/smoke.py

# The wheel leaves out torch's libraries and CUDA's, which torch brings; auditwheel sets the platform tag.
torch_libraries := libtorch* libc10* libcudart*
architectures = $(or $(call given,ARCHITECTURES),80;90a-real;100-real;120-real)
wheel: environment
	@rm -rf build/wheels dist/girih-*.whl
	@torches="$$(python3 tools/environment.py --headers $(or $(call given,TORCHES),all))" || exit 1; \
	  GIRIH_CUDA=$(CUDA) GIRIH_KERNELS='$(call given,KERNELS)' GIRIH_WARNINGS=$(call given,WARNINGS) \
	  CMAKE_CUDA_ARCHITECTURES='$(architectures)' \
	  GIRIH_TORCHES="$$torches" $(PYTHON) -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir build/wheels .
	@PATH=$(dir $(PYTHON)):$$PATH $(PYTHON) -m auditwheel repair --plat auto $(foreach l,$(torch_libraries),--exclude '$l') \
	  --wheel-dir dist build/wheels/*.whl
	@ls -l dist/*.whl

check-wheel: environment
	@$(PYTHON) tests/wheel.py $(call option,TORCHES,torches) $(call option,INTERPRETER,python)

check-compilers: environment
	@$(PYTHON) tests/compilers.py

sources = $(shell git ls-files 'csrc/*.h' 'csrc/*.cpp' 'kernels/*.h' 'kernels/*.cuh' 'kernels/*.cu' 'tests/cpp/*.h' 'tests/cpp/*.cpp' 'tests/emulated/*.h' 'tests/emulated/*.cpp')
clang_format = $(dir $(PYTHON))clang-format

format: environment
	@$(clang_format) -i $(sources)
	@$(PYTHON) -m ruff format --quiet . && $(PYTHON) -m ruff check --quiet --fix .

check-format: environment
	@$(clang_format) --dry-run -Werror $(sources)
	@$(PYTHON) -m ruff format --quiet --check . && $(PYTHON) -m ruff check --quiet .
