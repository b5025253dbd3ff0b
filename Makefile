# make setup      .venv with the tested versions (done once; again when pyproject.toml or constraints.txt change)
# make demo       the tour: build data, train, kill, resume, export, sample (under four minutes)
# make test       check + every test (about twenty minutes on 2 cores)
# make test-long  the full parity matrix and the long fault campaigns
# make check      ruff, pyright, import-linter
# make format     let ruff rewrite what `check` would complain about
# make clean      remove .venv, caches and what the demo made, never runs

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/installed
EXTRAS := dev,demo,hf,plot,data,s3,parity
CODE   := $(wildcard src tests benchmarks examples)

.PHONY: setup demo check format test test-long clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no python3.11 or python3 on PATH; install Python 3.11 or give PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Sirara needs Python >= 3.11, $(PYTHON) is older; give PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

demo: setup
	$(BIN)/python examples/demo.py

check: setup
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/pyright --pythonpath $(BIN)/python src
	PATH="$(BIN):$$PATH" $(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

# Unit and command-line tests share the cores between two workers; the others start processes themselves.

test: check
	$(BIN)/pytest -q -n 2 tests/unit tests/cli
	$(BIN)/pytest -q tests --ignore=tests/unit --ignore=tests/cli

test-long: setup
	$(BIN)/pytest -q -m long --timeout 3600 tests

clean:
	rm -rf $(VENV) demo build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
