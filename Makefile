# Every target sets up .venv first; after that it starts at once (the stamp depends on the files that list what to install).
VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint bench walk fuzz stress programs conformance conformance-fast clean

demo: $(STAMP)
	@$(BIN)/python examples/hybrid/demo.py

test: $(STAMP)
	$(BIN)/python -X faulthandler -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python -m bench

# The way of one call and one backward through the code; `python -m tests.walk --write` puts it into docs/design.md.
walk: $(STAMP)
	@$(BIN)/python -m tests.walk

fuzz: $(STAMP)
	TELEGRAD_FUZZ_EXAMPLES=40000 $(BIN)/python -X faulthandler -m pytest -k fuzz -o timeout=3600 -o faulthandler_timeout=3500
	$(BIN)/python -X faulthandler -m tests.live_fuzz --count 1000000

stress: $(STAMP)
	$(BIN)/python -X faulthandler -m pytest -m stress -o timeout=1800 -o faulthandler_timeout=1700

programs: $(STAMP)
	$(BIN)/python -m tests.random_programs --count 20000

# PyTorch's own tests, unmodified, against telegrad.
conformance: $(STAMP)
	$(BIN)/python -m tests.conformance

# The fixed part of them that continuous integration runs.
conformance-fast: $(STAMP)
	$(BIN)/python -m tests.conformance --fast --quiet

# --no-deps and --no-build-isolation: the pinned files alone decide what is installed, so no other torch can slip in.
$(STAMP): requirements.txt requirements-dev.txt pyproject.toml
	@test -x $(BIN)/python || { python3.11 -m venv $(VENV) 2>/dev/null || python3 -m venv $(VENV); }
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11) and "telegrad needs Python 3.11 or newer")'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} +
