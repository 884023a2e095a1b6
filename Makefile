# make demo | check | test | test-full | test-gpu | bench OP=rms_norm | bench-all | docs | wheel
#
# Each works on a fresh machine that has Python >= 3.10: it makes .venv with the versions in constraints.txt first.
#   PYTHON=python3.12        the Python to make it with
#   VENV=/path               another place for it; an environment that stands there already is used as it is
#   VENV=none                no environment: run with PYTHON, install nothing

PYTHON ?= python3
VENV ?= .venv
NEWEST_TRITON := 3.9.0

ifeq ($(filter-out none,$(VENV)),)
RUN := $(PYTHON)
SETUP := true
else
RUN := $(VENV)/bin/python
SETUP := $(PYTHON) scripts/install.py $(VENV)
endif

export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

.PHONY: help setup demo check test test-full test-gpu bench bench-all docs wheel

help:
	@sed -n '/^$$/q; s/^# \{0,1\}//p' Makefile

setup:
	@$(SETUP)

demo: setup
	$(RUN) -m powertrain demo
	$(RUN) -m powertrain tour

check: setup
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy
	$(RUN) -m pytest tests/test_layers.py

test: setup
	@$(RUN) scripts/test.py

# every test, under the oldest and the newest Triton
test-full: setup
	@$(RUN) scripts/test.py --slow
ifneq ($(SETUP),true)
	@$(PYTHON) scripts/install.py $(VENV)-triton-$(NEWEST_TRITON) --triton $(NEWEST_TRITON)
	@$(VENV)-triton-$(NEWEST_TRITON)/bin/python scripts/test.py --slow
endif

test-gpu: setup
	@$(RUN) -c "import sys, torch; torch.cuda.is_available() or sys.exit('make test-gpu needs a GPU that torch can see')"
	@$(RUN) scripts/test.py --gpu

bench: setup
	$(if $(OP),,$(error make bench OP=rms_norm (or several: OP="rms_norm rope")))
	$(RUN) -m benchmarks $(OP)

# the regression table, or SECTIONS="host decode mla attention head-dims short masks few-rows ops" of it, beside the last committed one
bench-all: setup
	$(RUN) -m benchmarks.all $(SECTIONS)

# the site, in ./site; its tools have an environment of their own, so that no other target downloads them
docs:
ifeq ($(SETUP),true)
	$(PYTHON) scripts/docs.py
else
	@$(PYTHON) scripts/install.py $(VENV)-docs --docs
	$(VENV)-docs/bin/python scripts/docs.py
endif

wheel: setup
	$(RUN) -m build --wheel --no-isolation
