# Needs python3 (3.11 or later) and make; everything else goes into .venv. PYTHON=… picks another interpreter.
# torch comes from pip's own index: on a machine without a GPU, PIP_EXTRA_INDEX_URL (or pip.conf) may name a CPU-only one.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
PACKAGES := engine transport rollout
SOURCES := $(PACKAGES) $(wildcard recipes) tests

# the heart without a process, a socket or a download; tests/test_shape.py holds that every file of scheduling and KV is met in it
QUICK := $(addprefix tests/engine/test_,arithmetic_names.py bad_groups.py block_store.py block_tables.py drafts.py engine.py lanes.py memory.py modes.py \
	parked_group.py plan.py preemption.py prefix_index.py running_table.py shared_prefixes.py shares.py stats.py stop_strings.py \
	tiles.py turns.py waiting_queue.py) \
	$(addprefix tests/transport/test_,frames.py messages.py) $(addprefix tests/rollout/test_,config.py outgoing.py) \
	tests/test_no_pickle.py tests/test_wire_documents.py tests/test_shape.py \
	tests/engine/test_greeting.py tests/engine/test_models.py::test_greedy_equals_generate
# of the GPU targets: a machine without network names its own Python, with torch in it, and finds the rest in WHEELS (make wheels)
GPU_PYTHON ?= $(BIN)/python
GPU_READY := $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(STAMP),gpu-wheels)
WHEELS ?= build/wheels
GPU_VERSION ?= 3.12
GPU_JOBS ?= 8

# tests start many processes: each would compile all of Python's modules again
unexport PYTHONDONTWRITEBYTECODE

# processes of pytest (pytest-xdist): two more than two cores, since tests also wait. Each begins with a stretch of files, and one
# that is done takes half of what another has left
JOBS ?= 4
IN_PARALLEL := -n $(JOBS) --dist worksteal
INTEGRATIONS := .venv-integrations
RAY := .venv-ray
DOCS := .venv-docs
CLIENTS := 'trl>=1.16,<1.17' 'openai>=2.54,<3' 'renderers>=0.1.12,<0.2' 'verifiers>=0.4,<0.5' 'lm_eval[api]>=0.4.13,<0.5' aiohttp pybase64

COMMIT = $(shell git rev-parse HEAD 2>/dev/null)
UV ?= $(shell command -v uv || echo $(BIN)/uv)

.DEFAULT_GOAL := help
.PHONY: help venv model demo test quick nightly integrations ray test-arithmetic fleet-chaos sbom endurance test-gpu sanitize-gpu sitting check docs format bench bench-gpu wheels gpu-wheels clean
.SUFFIXES:

help:
	@echo "make demo    a real model answers a trainer's groups over ZeroMQ (about a minute, after the installation)"
	@echo "make quick   core tests, less than a minute, in two processes: at each save"
	@echo "make test    all tests of the default tier, in JOBS=4 processes; ARGS='-k fork' or a path selects, in one process"
	@echo "make nightly   what is marked long: benchmarks, every Triton shape, every CUDA architecture, larger random tests;"
	@echo "             MINUTES=15 runs a slice of it, other files at each commit"
	@echo "make test-arithmetic   what depends on arithmetic, as on five CPUs (MACHINE=zen3 picks one), and a wheel without a compiler"
	@echo "make integrations   other people's clients (openai, TRL, verifiers, AReaL, lm_eval) against a live service; PRIME_RL=…, SLIME=… checkouts,"
	@echo "             VERL=… an interpreter with verl"
	@echo "make ray     a fleet on a Ray of this machine"
	@echo "make check   format, lint, types, import directions, and how much of the project the core imports"
	@echo "make docs    build the documentation and the API reference into build/docs; a warning is an error"
	@echo "make bench   throughput of the named workloads; WORKLOADS='fanout long' and ARGS='--scale 0.25' pick"
	@echo "make fleet-chaos  ten minutes of a fleet under an adversary; MINUTES=1 is shorter"
	@echo "make sbom       build/sbom.cdx.json, a CycloneDX list of the packages of uv.lock"
	@echo "make endurance  a fleet under attack for HOURS=0.1, SEED=0: kills, garbage, broken weights; the last line is JSON"
	@echo "make format  let ruff rewrite the sources"
	@echo "make sanitize-gpu   attention's kernels under compute-sanitizer: memcheck and racecheck"
	@echo "make test-gpu, bench-gpu   the CUDA paths: their tests, and figures as JSON lines; MODELS='qwen3-8b' and ARGS pick"
	@echo "make sitting   prints the commands of a first hour with a GPU, for a machine without make"
	@echo "make wheels  what these need on a machine without a network, for its Python GPU_VERSION=3.12, into build/wheels: carry it there"
	@echo "make clean   remove all that these targets have made here"

venv: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "rollout needs Python 3.11 or later; name one: make PYTHON=python3.12 …" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' \
		|| { echo "this Python cannot make virtual environments; on Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }
	@test -x $(BIN)/python && $(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	@echo "installing what rollout and its tests need into .venv, about 2 GB with torch: this takes minutes, without a word" >&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,wandb]'
	@touch $@

model: $(STAMP)
	@$(BIN)/python -m rollout.models smollm2 >/dev/null

demo: $(STAMP)
	@$(BIN)/rollout demo $(ARGS)

# What ARGS selects runs in one process: it is rarely worth the start of a second.
test: model
	@$(BIN)/python -m pytest $(if $(ARGS),,$(IN_PARALLEL)) --durations=15 --durations-min=2 $(ARGS)

# MINUTES=15: a slice, which differs from commit to commit
nightly: model
	@$(BIN)/python -m pytest -m 'long and not gpu and not integrations and not ray' $(if $(ARGS),,$(IN_PARALLEL)) --durations=15 \
		$(if $(MINUTES),--minutes $(MINUTES) --order $(or $(ORDER),$(COMMIT),none)) $(ARGS)

quick: $(STAMP)
	@$(BIN)/python -m pytest --quiet $(if $(ARGS),,-n 2 --dist worksteal) $(QUICK) $(ARGS)

# Of vLLM and SGLang only the sources of their response types are kept.
# Their packages lie in an environment of their own, over ours: .venv stays what the project needs. Without a network it must be there.
integrations: $(INTEGRATIONS)/.installed
	@PRIME_RL=$(PRIME_RL) SLIME=$(SLIME) VERL=$(VERL) $(INTEGRATIONS)/bin/python -m pytest -W default -m integrations tests/integrations $(ARGS)

$(INTEGRATIONS)/.installed: $(STAMP)
	@$(PYTHON) -m venv $(INTEGRATIONS)
	@$(BIN)/python -c 'import site; print("import site; site.addsitedir(%r)" % site.getsitepackages()[0])' \
		> $$($(INTEGRATIONS)/bin/python -c 'import site; print(site.getsitepackages()[0])')/ours.pth
	@$(INTEGRATIONS)/bin/python -m pip install --quiet --disable-pip-version-check $(CLIENTS) httptools uvloop
	@$(INTEGRATIONS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps areal==1.0.4
	@$(INTEGRATIONS)/bin/python -m tests.support.their_sources $(INTEGRATIONS)/their
	@touch $@

# 284 MB that nothing else needs: in an environment of its own, over ours
ray: model $(RAY)/.installed
	@$(RAY)/bin/python -m pytest -m ray tests/rollout/test_ray.py $(ARGS)

$(RAY)/.installed: $(STAMP)
	@$(PYTHON) -m venv $(RAY)
	@$(BIN)/python -c 'import site; print("import site; site.addsitedir(%r)" % site.getsitepackages()[0])' \
		> $$($(RAY)/bin/python -c 'import site; print(site.getsitepackages()[0])')/ours.pth
	@$(RAY)/bin/python -m pip install --quiet --disable-pip-version-check '.[ray]'
	@touch $@

# What depends on arithmetic, as on CPUs that this one can imitate; and the wheel, without a compiler.
test-arithmetic: model
	@$(BIN)/python -m tests.support.arithmetics $(or $(MACHINE),all) $(ARGS)
	@$(if $(MACHINE),,$(BIN)/python -m pytest -m long tests/test_wheel.py tests/test_arithmetics.py $(ARGS))

# replicas killed, stopped and cut off while weights change; the last line is JSON
fleet-chaos: $(STAMP)
	@$(BIN)/python -m tests.support.fleet_chaos --minutes $(or $(MINUTES),10) $(ARGS)

# build/sbom.cdx.json: what uv.lock installs with all extras, with hashes
sbom: $(STAMP)
	@test -x "$(UV)" || $(BIN)/python -m pip install --quiet --disable-pip-version-check uv==0.13.9
	@mkdir -p build && $(UV) export --quiet --frozen --no-emit-project --all-extras --preview-features sbom-export \
		--format cyclonedx1.5 --output-file build/sbom.cdx.json > /dev/null && echo build/sbom.cdx.json

# replicas, fronts and trainers killed, garbage, broken weights, and an account of every sample; the last line is JSON
endurance: model
	@$(BIN)/python -m tests.support.endurance.run --hours $(or $(HOURS),0.1) --seed $(or $(SEED),0) $(ARGS)

# tests that measure time or the device's free memory run alone, the others in GPU_JOBS processes, which mostly compile
test-gpu: $(GPU_READY)
	@$(GPU_PYTHON) -m pytest -n $(GPU_JOBS) -m gpu -W default tests/gpu/test_attention_oracle.py $(ARGS)
	@$(GPU_PYTHON) -m pytest -n $(GPU_JOBS) -m gpu -W default tests/gpu/test_same_samples.py tests/gpu/test_graphs_on_a_device.py \
		tests/gpu/test_draws_on_a_device.py tests/gpu/test_states_and_experts.py tests/gpu/test_products_on_a_device.py \
		tests/engine/test_streaming.py $(ARGS)
	@$(GPU_PYTHON) -m pytest -m gpu -W default tests/gpu/test_weights_ways.py tests/gpu/test_sleep_on_a_device.py \
		tests/gpu/test_copies_on_a_device.py tests/gpu/test_overlap_on_a_device.py $(ARGS)
	@$(GPU_PYTHON) -m pytest -m gpu -W default tests/gpu/test_ranks_on_a_device.py $(ARGS)
	@$(GPU_PYTHON) -m pytest -n $(GPU_JOBS) -m '' -W default tests/engine/test_device_sums.py tests/engine/test_triton_attention.py tests/engine/test_sampler_triton.py \
		tests/engine/test_graphs.py tests/engine/test_norms.py tests/engine/test_fused.py tests/engine/test_exact.py \
		tests/engine/test_recurrence_triton.py tests/engine/test_experts_triton.py \
		tests/engine/test_proven_products.py tests/engine/test_device_digests.py tests/rollout/test_exact_on_device.py \
		tests/rollout/test_exact_fused.py $(ARGS)

# what to run first on a machine with a GPU, in pieces of at most ten minutes
sitting:
	@$(PYTHON) -m tests.support.sitting

# reads and writes out of bounds, and races, of attention's kernels at production sizes; compute-sanitizer comes with the CUDA toolkit
sanitize-gpu: $(GPU_READY)
	@for tool in memcheck racecheck; do \
		REPEATS=2 compute-sanitizer --tool $$tool --error-exitcode 1 --target-processes all \
			$(GPU_PYTHON) -m pytest -m gpu -W default $(ARGS) \
			'tests/gpu/test_attention_oracle.py::test_every_context[decode-8x4x128-bfloat16]' \
			'tests/gpu/test_attention_oracle.py::test_sixteen_rows_over_a_prefix[8-8x4x128-bfloat16]' || exit 1; \
	done

# what a Python with torch, transformers and pytest lacks; run it where there is a network and carry WHEELS along. GPU_VERSION is
# the Python of that machine: wheels of compiled packages are for one version
wheels:
	@rm -rf $(WHEELS)
	@$(PYTHON) -m pip download --quiet --only-binary :all: --dest $(WHEELS) --implementation cp --python-version $(GPU_VERSION) \
		--platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --no-deps \
		msgspec psutil pyzmq tyro docstring-parser typeguard tomli-w gguf xxhash pytest-timeout pytest-xdist execnet

gpu-wheels:
	@$(GPU_PYTHON) -c 'import msgspec, psutil, zmq, tyro, tomli_w, xxhash, pytest_timeout, xdist' 2>/dev/null || \
		$(GPU_PYTHON) -m pip install --quiet --no-index --no-deps $(WHEELS)/*.whl

check: $(STAMP)
	@$(BIN)/ruff format --check $(SOURCES)
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/mypy
	@$(BIN)/pyright
	@$(BIN)/python -m tests.house
	@$(BIN)/python -m pytest --quiet tests/test_shape.py

docs: $(DOCS)/.installed
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict --quiet

# The API reference is read from the sources: nothing of ours is installed there.
$(DOCS)/.installed: pyproject.toml
	@$(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])' \
		| xargs $(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check
	@touch $@

format: $(STAMP)
	@$(BIN)/ruff format $(SOURCES)
	@$(BIN)/ruff check --fix $(SOURCES)

bench: model
	@$(BIN)/rollout bench $(or $(WORKLOADS),fanout long pressure shared_prefix fork_latency single_stream) $(ARGS)

bench-gpu: $(GPU_READY)
	@failed=0; for model in $(or $(MODELS),qwen3-0.6b qwen3-8b); do \
		$(GPU_PYTHON) -m tests.bench.gpu --model $$model --json bench-gpu-$$model.jsonl $(ARGS) || failed=1; \
	done; exit $$failed

clean:
	rm -rf .venv .venv-oldest $(INTEGRATIONS) $(RAY) $(DOCS) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
