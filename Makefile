# Every target works in a fresh clone. What it needs from the system is git, make and Python 3.11 or
# newer with its venv module; no other system package is needed, so nothing here installs any.
# The Python packages, in exactly the versions of requirements/lock.txt, go into .venv, which is set
# up on first use and brought up to date when the lock or pyproject.toml has changed.
#
#   make test PYTHON=/path/to/python3    chooses the Python that .venv is made with
#   make test ARGS="-k reshard -x"       passes options on (test, soak, demo)
#   PIP_INDEX_URL, PIP_EXTRA_INDEX_URL   are pip's own settings, for a mirror or for torch's CPU build

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?=
ARGS ?=
LOCK := requirements/lock.txt
READY := .venv/.ready
RUN := .venv/bin/python -m
TORCH = $(shell grep '^torch==' $(LOCK))

# Prints the first Python that is new enough and can make environments. A name that is found need not
# run (version managers put in shims), so each candidate is tried.
define find_python
for python in $(or $(PYTHON),python3.13 python3.12 python3.11 python3); do \
    if "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
        >/dev/null 2>&1; then found=$$python; break; fi; \
done; \
if [ -z "$${found:-}" ]; then \
    echo "error: found no Python 3.11 or newer with the venv module" \
        "(tried: $(or $(PYTHON),python3.13 python3.12 python3.11 python3))." >&2; \
    echo "Install one (on Debian: apt-get install python3 python3-venv)," \
        "or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; \
    exit 1; \
fi
endef

.PHONY: help demo test soak check bench lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-6s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY) ## the whole story on real text: train, save, kill, reshard, resume, compare
	.venv/bin/hyperopt-ckpt demo $(ARGS)

test: $(READY) ## the test suite
	@echo "Running the test suite: up to 12 minutes on two cores."
	$(RUN) pytest $(ARGS)

soak: $(READY) ## the long tests only
	@echo "Running the soak tests: hours, not minutes."
	$(RUN) pytest -m soak $(ARGS)

check: $(READY) ## format, lint and check types (with CI=true unformatted code is an error)
	$(RUN) ruff format $(if $(filter true,$(CI)),--check)
	$(RUN) ruff check
	$(RUN) mypy

bench: $(READY) ## benchmarks of the optimizer step and of checkpoints
	$(RUN) benchmarks.step
	$(RUN) benchmarks.checkpoint

$(READY): $(LOCK) pyproject.toml
	@if [ ! -x .venv/bin/python ]; then \
	    $(find_python); \
	    echo "Setting up .venv with $$("$$found" --version) (a few minutes, mostly for torch)"; \
	    "$$found" -m venv --clear .venv; \
	else echo "Bringing .venv up to date with $(LOCK)"; fi
	$(RUN) pip install --disable-pip-version-check '$(TORCH)'
	$(RUN) pip install --disable-pip-version-check -r $(LOCK)
	$(RUN) pip install --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

# The lock is what pip installs today for pyproject.toml beside the torch that the lock names (change
# that line first to move to another torch). Left out: torch's local version label, and the CUDA
# packages, which torch's own requirements pin exactly and which exist on some platforms only.
lock: ## write requirements/lock.txt anew, from the newest versions that pyproject.toml allows
	@$(find_python); "$$found" -m venv --clear build/lock
	build/lock/bin/python -m pip install '$(TORCH)'
	build/lock/bin/python -m pip install --upgrade 'setuptools>=77.0.3' '.[demo,dev]'
	@{ sed -n '/^#/p' $(LOCK); \
	   build/lock/bin/python -m pip freeze --all --exclude pip --exclude hyperopt-ckpt \
	   | sed -E 's/\+[a-z0-9.]+$$//' | grep -vE '^(nvidia-|cuda-|triton)'; } > build/lock.txt
	@mv build/lock.txt $(LOCK); rm -rf build; echo "Wrote $(LOCK)"

clean: ## remove .venv and everything that was built
	rm -rf .venv build dist demo-run *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
