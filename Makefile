# `make demo` and `make test` need no other set-up: both build .venv themselves.
SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV := .venv
BIN := $(VENV)/bin
CODE := src lab tests conftest.py
# A name on the PATH may be a shim that does not run: ask each candidate for its version before trusting it.
FIND_PYTHON = for p in "$(PYTHON)" python3.12 python3.13 python3.14 python3 \
	$${PYENV_ROOT:-$$HOME/.pyenv}/versions/3.1[2-9]*/bin/python; do \
	[ -n "$$p" ] && "$$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1 && { echo "$$p"; break; }; done

.PHONY: help demo test test-lab test-exhaustive conformance lint format peers peers-tpu gates harness clients bench readme clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 10

demo: $(VENV)/.core ## ask a real model about a real document, dense and with Kascade; leaves build/demo/
	$(BIN)/python -m lab demo --out build/demo

test: $(VENV)/.dev ## run the package's tests
	$(BIN)/ruff check $(CODE)
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadgroup tests

test-lab: $(VENV)/.dev ## run the laboratory's tests
	$(BIN)/ruff check $(CODE)
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadgroup lab/tests

test-exhaustive: $(VENV)/.dev ## the suite with every repetition: each kernel in each shape and dtype, each planted fault (an hour or more)
	$(BIN)/python -m pytest --exhaustive -n auto --maxprocesses 4 --dist loadgroup

conformance: $(VENV)/.dev ## what clients and test suites of other servers expect of `tessera serve`, and what it refuses on purpose
	@set -o pipefail; $(BIN)/python -m pytest -n 0 -v -rA --no-header tests/serve/test_conformance.py | sed -nE 's/^(PASSED|FAILED|ERROR) .*\[(.*)\].*/\1  \2/p;$$p'

lint: $(VENV)/.dev ## check style
	$(BIN)/ruff check $(CODE) && $(BIN)/ruff format --check $(CODE)

format: $(VENV)/.dev ## fix style
	$(BIN)/ruff check --fix $(CODE) && $(BIN)/ruff format $(CODE)

peers: .venv-peers/.done ## build the environment of the libraries we compare with, and compare with them live
	$(BIN)/python -m lab.peers.check_live
	$(BIN)/python -m lab.peers.check_gguf

# Tokamax's wheel has only v7x's timings; TIMINGS=FOLDER names its repository's folder tokamax/data/autotuning.
peers-tpu: $(VENV)/.dev .venv-tokamax/.done ## predict times that Tokamax measured for its TPU kernel; TIMINGS=its repository's tokamax/data/autotuning (hours; resumes where it stopped)
	for chip in v5p v6e v7x; do $(BIN)/python -m lab study tpu-validation --chip $$chip $(if $(TIMINGS),--timings $(TIMINGS)) || exit 1; done
	$(BIN)/python -m lab study tpu-validation --report $(if $(TIMINGS),--timings $(TIMINGS))

gates: $(VENV)/.dev ## every configuration of the Hopper kernels: machine code, then the simulator (hours; resumes where it stopped)
	$(BIN)/python -m lab study compiles --platform gpu
	$(BIN)/tessera verify --simulate --kernel gpu_ --configs all

harness: .venv-harness/.done ## the shipped model under the real lm_eval, on tasks made here
	.venv-harness/bin/python -m lab.peers.check_harness

clients: $(VENV)/.dev .venv-clients/.done ## agent loops of OpenAI's client, LangChain, LiteLLM and others against the server; MODEL=FILE for a real model
	$(BIN)/python -m lab.peers.check_clients $(if $(MODEL),--model $(MODEL)) $(if $(OUT),--out $(OUT))

bench: $(VENV)/.core .venv-peers/.done ## measure speed against the peers and the demo's answers; appends to evidence/
	$(BIN)/python -m lab bench --suite cpu
	$(BIN)/python -m lab bench --suite demo

readme: $(VENV)/.core ## render the tables of README.md and docs/, and the pictures in docs/, from the stored records
	$(BIN)/python -m lab report
	$(BIN)/python -m lab.report.house

clean: ## remove what the targets above built
	rm -rf $(VENV) .venv-peers .venv-tokamax .venv-harness .venv-clients build dist src/*.egg-info

$(VENV)/.python:
	@python="$$($(FIND_PYTHON))"; \
	if [ -z "$$python" ]; then echo "error: Python 3.12 or newer (with venv) was not found; install it, or name one: make PYTHON=/path/to/python" >&2; exit 1; fi; \
	echo "using $$python"; rm -rf $(VENV) && "$$python" -m venv $(VENV) && touch $@

$(VENV)/.core: $(VENV)/.python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[report,serve]'
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,deviceless]'
	@touch $@

# Peers are only compared with, so they have a separate environment. PEER_PYTHON: any version that torch has a wheel for.
PEER_PYTHON ?= python3
.venv-peers/.done: $(VENV)/.core lab/peers/requirements.txt
	rm -rf .venv-peers && $(PEER_PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check -r lab/peers/requirements.txt
	@touch $@

.venv-harness/.done: $(VENV)/.python pyproject.toml
	rm -rf .venv-harness && $(BIN)/python -m venv .venv-harness
	.venv-harness/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[eval]'
	@touch $@

# instructor excludes the versions of jiter and rich that the others need; it works with them.
.venv-clients/.done: $(VENV)/.python lab/peers/requirements-clients.txt
	rm -rf .venv-clients && $(BIN)/python -m venv .venv-clients
	.venv-clients/bin/python -m pip install --quiet --disable-pip-version-check -r lab/peers/requirements-clients.txt
	.venv-clients/bin/python -m pip install --quiet --disable-pip-version-check --no-deps instructor==1.17.0
	@touch $@

# Needs no chip and no torch; libtpu is the compiler.
.venv-tokamax/.done: $(VENV)/.python lab/peers/requirements-tpu.txt
	rm -rf .venv-tokamax && $(BIN)/python -m venv .venv-tokamax
	.venv-tokamax/bin/python -m pip install --quiet --disable-pip-version-check -r lab/peers/requirements-tpu.txt
	@touch $@
