PY := .venv/bin/python
STAMP := .venv/.lowroll-installed

.PHONY: setup demo test lint bench
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

lint: $(STAMP)
	.venv/bin/ruff check .
	.venv/bin/mypy

bench: $(STAMP)
	$(PY) -m bench.engine
	$(PY) -m bench.learner
	$(PY) docs/tables.py
