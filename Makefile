# Two commands matter: `make serve` and `make test`. Everything they need lands in .venv.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TEST_WORKERS ?= 2
PIP := $(BIN)/python -m pip --disable-pip-version-check
SERVE_STAMP := $(VENV)/.serve-installed
TEST_STAMP := $(VENV)/.test-installed
CLIENTS_STAMP := $(VENV)/.clients-installed

.PHONY: serve test pytest clients lint bench loadtest compose-check clean help

help:
	@echo "make serve | test | clients | lint | bench | loadtest | compose-check"

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
	  { echo "chatsvc needs Python 3.11 to 3.13; set PYTHON=/path/to/python3.12, for example"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "The venv module is missing (Debian: apt-get install python3-venv)"; exit 1; }

# Bytecode for what a server imports, now (the start must not wait for it), and not for the rest: 90 MB less.
# torch comes first and by its exact version: a newer one may be a CUDA build of several gigabytes.
$(SERVE_STAMP): pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing chatsvc into $(VENV) (a few minutes the first time)"
	$(PIP) install --progress-bar on --no-compile -c constraints.txt -e .
	@$(BIN)/python -m compileall -q -j 0 -x '/(sympy|networkx|setuptools|pip|torch/_inductor|torch/testing)/' $(VENV)/lib || true
	@$(BIN)/python -m kernels.cpu.build
	@touch $@

$(TEST_STAMP): pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing chatsvc and its test tools into $(VENV)"
	$(PIP) install --progress-bar on --no-compile -c constraints.txt -e '.[test,lint]'
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null || true
	@$(BIN)/python -m kernels.cpu.build
	@touch $@ $(SERVE_STAMP)

serve: $(SERVE_STAMP)
	@m="$${CHATSVC_MODEL:-smollm2-135m}"; seen="$(VENV)/.model-$${m//\//_}"; [ -f "$$seen" ] || \
	  { $(BIN)/chatsvc pull "$$m" >/dev/null && { touch "$$seen" 2>/dev/null || true; }; }
	@exec $(BIN)/chatsvc serve

# The linters run beside the tests. A worker takes whole files, so what a file starts is started once; the longest files
# come first (tests/conftest.py).
test: $(TEST_STAMP)
	@$(BIN)/chatsvc pull >/dev/null
	@scripts/ensure_redis.sh
	@$(MAKE) --no-print-directory -j2 lint pytest

pytest: $(TEST_STAMP)
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

# Other people's clients against a real server: Python's, and Node's where npm can install them.
$(CLIENTS_STAMP): $(TEST_STAMP)
	$(PIP) install --progress-bar on --no-compile -c constraints.txt -e '.[clients]'
	@touch $@

clients: $(CLIENTS_STAMP)
	@$(BIN)/chatsvc pull >/dev/null
	@if command -v npm >/dev/null; then cd tests/clients/node && npm ci --no-audit --no-fund || \
	  echo "npm could not install the Node clients: they are skipped"; else echo "No npm: the Node clients are skipped"; fi
	$(BIN)/python -m pytest tests/clients

lint: $(TEST_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(SERVE_STAMP)
	@$(BIN)/chatsvc pull >/dev/null
	$(BIN)/chatsvc bench

loadtest: $(TEST_STAMP)
	@mkdir -p loadtest/report
	$(BIN)/locust -f loadtest/locustfile.py --headless -u $${USERS:-8} -r $${RATE:-4} -t $${TIME:-60s} \
	  --host $${HOST:-http://127.0.0.1:8000} --html loadtest/report/report.html --csv loadtest/report/report

compose-check: $(TEST_STAMP)
	$(BIN)/python docker/check_compose.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
