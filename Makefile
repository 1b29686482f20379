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

.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: demo test test-fast lint types bench clean

demo: $(call installed,examples)
	$(BIN)/python examples/digits.py

test: $(call installed,test)
	OMP_NUM_THREADS=1 $(BIN)/pytest tests --numprocesses 3 --dist loadfile --no-loadscope-reorder

test-fast: $(call installed,test)
	OMP_NUM_THREADS=1 $(BIN)/pytest tests -m 'not slow' --numprocesses 3 --dist loadfile --no-loadscope-reorder

lint: $(call installed,lint)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory types

types: $(call installed,lint)
	@rm -rf $(TYPED) && mkdir -p $(TYPED) && ln -s $(PACKAGE:%=../../../%) $(TYPED)
	$(BIN)/mypy --package echelon
	$(BIN)/mypy examples benchmarks

bench: $(call installed,examples)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/overhead.py

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache tests/.pytest_cache

# The build runs in .venv as well: setuptools comes from constraints.txt, too.
$(VENV)/.installed-%: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing Echelon with '$*' into $(VENV); the first time, this takes a few minutes."
	@$(PIP) setuptools
	@$(PIP) --no-build-isolation --editable '.[$*]'
	@touch $@

$(BIN)/python:
	@for python in $(PYTHON) python3.11 python3.12 python3.13 python3.14; do \
	    if $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        exec $$python -m venv --clear $(VENV); \
	    fi; \
	done; \
	echo "No Python >= 3.11 with venv found; install one, or name it: make PYTHON=/path/to/python3 ..." >&2; exit 1
