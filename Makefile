# Needs Linux x86-64, make, and Python 3.11 or later with venv and pip. Everything else goes into .venv.
#   make demo              a whole swarm on this machine      (DEMO_ARGS="--peers 3 --seconds 60")
#   make test              all tests, by two workers          (TEST_ARGS="tests/test_codec.py -x" TEST_WORKERS=0)
#   make test-quick        those that start no process, and 40 storms of 200
#   make storms            200 storms and long fuzzing, before a release
#   make check             ruff, mypy, and the documentation's site
#   make install           only sets up .venv, for a demo     (PIP_ARGS="--extra-index-url ..." for another torch build)
#   make proto             wire schema to Python
#   make docs              the reference pages in docs/ from the code
#   make screenshots       every page of the board, light, dark and phone, into runs/screenshots (needs Chromium)
#   make clean             removes .venv and caches

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# A Python that was built without optimisations, as pyenv does, takes a quarter to a third more processor time:
# another goes before it, if it has venv, and is named as it is taken. What is in .venv stays (make clean).
PYTHONS := python3 /usr/bin/python3 python3.14 python3.13 python3.12 python3.11
PYTHON ?= $(shell for wanted in \
	'import venv, ensurepip; ok = sys.base_prefix == "/usr" or "--enable-optimizations" in str(get_config_var("CONFIG_ARGS"))' \
	'import venv, ensurepip; ok = True' 'ok = True'; do for python in $(PYTHONS); do \
	$$python -c "import sys; from sysconfig import get_config_var; $$wanted; sys.exit(not ok or sys.version_info < (3, 11))" \
	2>/dev/null && echo $$python && exit; done; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ALL := $(VENV)/.installed-all
DEMO_ARGS ?=
TEST_ARGS ?=
TEST_WORKERS ?= 2
PIP_ARGS ?=
SCREENSHOT_ARGS ?=

# Installs us with these extras, and says what it is at: every ten seconds how far it has come, too.
COMMA := ,
pip = @( while :; do sleep 10 >/dev/null 2>&1; echo "    $$SECONDS s, $$(du -sm $(VENV) | cut -f1) MB in $(VENV)"; done ) & \
	ticking=$$!; trap "kill $$ticking" EXIT; \
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off $(PIP_ARGS) -c constraints.txt -e '.[$(1)]' \
		| sed -un 's/^Collecting \([^ ]*\).*/  \1/p; s/.*Downloading .*\(([^)]*[MG]B)\).*/    \1/p; s/^Installing collected.*/Installing .../p'

.PHONY: gone help install demo test test-quick storms check format proto docs screenshots clean

help:
	@sed -n '/^$$/q; s/^# \{0,1\}//p' Makefile

install: $(STAMP)

gone:

# Where its interpreter is gone make install makes it anew, and nothing else does: it may be another machine's.
$(STAMP): pyproject.toml setup.py constraints.txt p2p_co2/tensors/codec/passes.c \
		$(shell $(BIN)/python -c '' 2>/dev/null || echo gone)
	@$(BIN)/python -c '' 2>/dev/null || { \
		if [ -f $(VENV)/pyvenv.cfg ] && [ -z "$(filter install,$(MAKECMDGOALS))" ]; then \
			echo "error: the Python that $(VENV) was made with is not on this machine; to make it anew: make install" >&2; exit 2; fi; \
		if [ -z "$(PYTHON)" ]; then \
			echo "error: no Python 3.11 or later found; install one, or name it: make PYTHON=/path/to/python3.12" >&2; exit 2; fi; \
		if [ -L $(VENV) ] || { [ -n "$$(ls -A $(VENV) 2>/dev/null)" ] && [ ! -f $(VENV)/pyvenv.cfg ]; }; then \
			echo "error: $(VENV) is no Python environment, or a link to one that does not run: move it away, or make clean" >&2; exit 2; fi; \
		$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
			echo "error: this Python has no venv; on Debian or Ubuntu: sudo apt-get install python3-venv" >&2; exit 2; }; \
		$(PYTHON) -m venv --clear $(VENV); }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip >/dev/null || { \
		echo "error: $(VENV) has no pip, and ensurepip does not bring it (above): make clean install" >&2; exit 2; }
	@echo "Setting up $(VENV) with $$($(BIN)/python --version) of $$($(BIN)/python -c 'import sys; print(sys.base_prefix)'), \
	once (torch is large: some minutes on a slow line)."
	$(call pip,board$(COMMA)plot)
	@# Where processes may not write bytecode each would compile all again: half a second of processor time.
	@$(BIN)/python -m compileall -q p2p_co2 peers bootstrap monitoring
	@touch $(STAMP)

$(ALL): $(STAMP)
	@echo "Adding what the tests and the other extras need, once."
	$(call pip,all$(COMMA)dev)
	@touch $(ALL)

demo: $(STAMP)
	@$(BIN)/p2p-co2 demo $(DEMO_ARGS)

test: $(ALL)
	$(BIN)/python -m pytest -n $(TEST_WORKERS) $(TEST_ARGS)

test-quick: $(ALL)
	$(BIN)/python -m pytest -n $(TEST_WORKERS) -m "not swarm" --storms 40 $(TEST_ARGS)

storms: $(ALL)
	$(BIN)/python -m pytest -n $(TEST_WORKERS) tests/test_campaign.py tests/test_fuzz.py --storms 200 --hypothesis-profile=long

check: $(ALL)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: $(ALL)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(ALL)  # by an old compiler: what it writes is read by newer protobufs, not the other way round
	$(BIN)/pip install -q --target .venv/protoc "grpcio-tools==1.71.2"
	PYTHONPATH=.venv/protoc $(BIN)/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. p2p_co2/wire/messages.proto

docs: $(ALL)
	$(BIN)/python -m tools.reference_pages

screenshots: $(ALL)
	$(BIN)/python -m tools.screenshots $(SCREENSHOT_ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
