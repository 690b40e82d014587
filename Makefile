# The commands of the project. `make setup` once; the others call it when pyproject.toml has changed.
#
#   make demo    set up, start the three services on the demo model, stream a text through gRPC, stop
#   make test    set up, then make check, and beside its types the unit, kernels and integration tests, in this order
#   make whole   the same with every case of the long lists of tests/kit/cut.py, kernels and networks: before a release
#   make unit    the first of them: the unit tests
#   make check   the seconds of it: lint, types, floors, protos, the documentation's links, the workflows
#   make protos  make the Python bindings again
#   make sanitize   the CPU kernels under the sanitizers of addresses, undefined behaviour and threads; ten minutes
#   make chaos   ten minutes of kills, freezes and partitions, two each with drafts, of replicas of two workers and of two
#                stages, each failure of a rank by itself, a thousand cut connections, models that take turns; SECONDS=… SEED=…
#   make sim     ten minutes of simulated clusters with faults, from fresh seeds, on all processors; MINUTES and SEED
#                change that
#   make fuzz    100,000 changed messages of each kind into the services; minutes; CASES=… SEED=…
#   make soak    ten minutes at four fifths of the capacity: memory stays flat and nothing is left behind; SECONDS=…
#   make bench   the ratios, on a quiet machine, into benchmarks/results/
#   make docs    the documentation as a site, into build/site
#   make wheel   the source distribution, and the wheel with compiled kernels for Linux on x86-64, into dist/
#   make wheel-test   make wheel, then the wheel in new environments, without a compiler
#   make images  the images, by compose; COMPOSE_PROFILES=gpu, BLOCKYARD_TAG=…
#   make sbom    what is in these images, as CycloneDX, into dist/sbom/
#   make push REGISTRY=…   these images to a registry that `docker login` knows
#   make notes TAG=v…   a release's part of CHANGELOG.md, into dist/notes.md; refused where the versions differ
#   make up, make down   the services as containers, by compose; COMPOSE_PROFILES=gpu, or cpu,monitoring
#   make e2e     what needs a Docker engine (as root, on this machine), packages of others, or a browser

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
RELEASE := $(VENV)/.release
# Where to take PyTorch from; empty: wherever pip finds a CPU build, else PyTorch's index for the machine at hand.
TORCH_INDEX_URL ?=

# Three processes suit two cores: those that test processes wait for them. A file's tests stay together, for the sake
# of what they share; files in order.
PYTEST = $(BIN)/python -m pytest -q --numprocesses $(or $(WORKERS),3) --dist loadfile --no-loadscope-reorder --durations 15

# The images that docker-compose.yml builds: its profile is cpu, see .env, where none is named.
IMAGE_TAG = $(or $(BLOCKYARD_TAG),dev)
PROFILES = $(or $(COMPOSE_PROFILES),cpu)
IMAGES = blockyard-control:$(IMAGE_TAG) $(if $(findstring cpu,$(PROFILES)),blockyard-worker:$(IMAGE_TAG)) \
	$(if $(findstring gpu,$(PROFILES)),blockyard-worker:$(IMAGE_TAG)-cuda)
# The oldest system that a wheel promises to run on, by its glibc; 2.31 is that of Debian 11 and Ubuntu 20.04.
WHEEL_PLATFORM = manylinux_2_31_x86_64
# The compiled kernels of this checkout, which a build in another folder finds by it.
KERNELS_DIR = $(CURDIR)/blockyard_kernels/cpu/built

COMPOSE = $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose)

export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
# It tells of a successor at each build.
export NO_MKDOCS_2_WARNING := 1
# The tests start hundreds of processes, each of which would compile the sources anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test tests whole unit check style types lint protos sanitize chaos sim fuzz soak bench docs wheel \
	wheel-test images sbom push notes up down e2e clean

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml protos/compiler.txt install_torch.sh $(wildcard blockyard_kernels/cpu/csrc/*) blockyard_kernels/cpu/build.py
	@$(PYTHON) -c 'import sys; sys.exit("Blockyard needs Python 3.11 or newer; set PYTHON=…" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	sh install_torch.sh $(BIN)/python "$(TORCH_INDEX_URL)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement protos/compiler.txt
	$(BIN)/python -m blockyard_kernels.cpu.build
	$(BIN)/pyright --version
	touch $(INSTALLED)

$(RELEASE): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[release]'
	touch $(RELEASE)

demo: setup
	$(BIN)/python examples/demo.py

# Types take a minute of one core, and the tests leave some of both: side by side they are done sooner.
test: style
	$(MAKE) --no-print-directory --jobs=2 types tests

tests: setup
	$(PYTEST) tests/unit tests/kernels tests/integration

whole: export BLOCKYARD_TEST_WHOLE := 1
whole: test

unit: setup
	$(PYTEST) tests/unit

check: style types

style: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	cd protos && ../$(BIN)/buf lint && ../$(BIN)/buf format --diff --exit-code --exclude-path google
	$(BIN)/mkdocs build --strict --quiet
	! test -x $(BIN)/actionlint || $(BIN)/actionlint

types: setup
	$(BIN)/pyright

lint: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: setup
	sh protos/generate.sh

sanitize: setup
	$(BIN)/python -m tests.kit.kernels.sanitizers

chaos: setup
	$(BIN)/python -m tests.kit.chaos.chaos --seconds $(or $(SECONDS),600) --seed $(or $(SEED),1)
	$(BIN)/python -m tests.kit.chaos.chaos --seconds $(or $(SECONDS),120) --seed $(or $(SEED),1) --speculation auto
	$(BIN)/python -m tests.kit.chaos.chaos --seconds $(or $(SECONDS),120) --seed $(or $(SEED),1) --tensor-parallel-size 2
	$(BIN)/python -m tests.kit.chaos.chaos --seconds $(or $(SECONDS),120) --seed $(or $(SEED),1) --pipeline-parallel-size 2
	$(BIN)/python -m tests.kit.chaos.rank_failures
	$(BIN)/python -m tests.kit.chaos.chaos --seconds $(or $(SECONDS),120) --seed $(or $(SEED),1) --late-depth 3
	$(BIN)/python -m tests.kit.chaos.cuts --cuts 1000 --seed $(or $(SEED),1)
	$(BIN)/python -m tests.kit.chaos.scheduler_kills --kills 50
	$(BIN)/python -m tests.kit.chaos.model_switches --requests 200 --kills 40 --seed $(or $(SEED),1)

sim: setup
	$(BIN)/python -m tests.kit.simulation run --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED)) --write

fuzz: setup
	$(BIN)/python -m tests.kit.fuzz --cases $(or $(CASES),100000) --seed $(or $(SEED),1)

soak: setup
	$(BIN)/python benchmarks/soak.py --seconds $(or $(SECONDS),600) --write

bench: setup
	$(BIN)/python benchmarks/schedule_cost.py --write
	$(BIN)/python benchmarks/boundary.py --write
	$(BIN)/python benchmarks/groups/rank_cost.py --write
	$(BIN)/python benchmarks/groups/group_cost.py --write
	$(BIN)/python benchmarks/groups/rank_failure.py --write
	$(BIN)/python benchmarks/groups/rank_speed.py --write
	$(BIN)/python benchmarks/groups/tree_cost.py --write
	$(BIN)/python benchmarks/fleet.py --write
	$(BIN)/python benchmarks/gateway/rate.py --write
	$(BIN)/python benchmarks/gateway/open_streams.py --write
	$(BIN)/python benchmarks/host_cost.py --write
	$(BIN)/python benchmarks/start.py --write
	$(BIN)/python benchmarks/throughput.py --model llama-135m --write
	$(BIN)/python benchmarks/throughput.py --model qwen2-0.5b --write
	$(BIN)/python benchmarks/plot.py

docs: setup
	$(BIN)/mkdocs build --strict

wheel: $(RELEASE)
	rm -rf dist build/lib build/bdist.*
	BLOCKYARD_KERNELS_DIR=$(KERNELS_DIR) $(BIN)/python -m build --outdir dist/built
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --plat $(WHEEL_PLATFORM) --wheel-dir dist dist/built/*.whl
	mv dist/built/*.tar.gz dist
	rm -r dist/built

wheel-test: wheel
	BLOCKYARD_TEST_WHEEL=$$(ls dist/*.whl) $(BIN)/python -m pytest -q -m e2e tests/e2e/test_installed.py

images:
	$(COMPOSE) build

sbom: $(RELEASE)
	$(BIN)/python release/sbom.py dist/sbom $(IMAGES)

push:
	for image in $(IMAGES); do docker tag $$image $(REGISTRY)/$$image && docker push $(REGISTRY)/$$image || exit 1; done

notes:
	mkdir -p dist
	$(PYTHON) release/notes.py $(TAG) > dist/notes.md

up:
	sh docker/up.sh $(COMPOSE)

down:
	$(COMPOSE) --profile cpu --profile gpu --profile monitoring down

e2e: setup
	$(BIN)/python -m pytest -q -m e2e tests

clean:
	rm -rf $(VENV) build dist blockyard_kernels/cpu/built .pytest_cache .ruff_cache .hypothesis .import_linter_cache .triton_cache
