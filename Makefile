# Every target sets up what it needs (scripts/setup): virtual environment, locked packages, Java.
PYTHON := .venv/bin/python
export PYTHONHASHSEED ?= random

SEEDS ?= 2000
# Processes that `make test` runs tests in: one more than CI has cores, since tests on Spark and of worker processes mostly wait.
TEST_PROCESSES ?= 3

.PHONY: help setup demo orders test check bench chaos cluster compat lock vendor clean

help:
	@echo 'make demo    the flights job on Spark: kills itself, restores, compares with plain Spark SQL'
	@echo 'make orders  Kafka to windows to PostgreSQL and Delta on Spark, killed in its commits; compares with DuckDB'
	@echo 'make test    all tests, in TEST_PROCESSES=3 processes'
	@echo 'make check   lint, types, layers'
	@echo 'make bench   the benchmarks; results in benchmarks/results/'
	@echo 'make chaos   simulated jobs under failures, SEEDS=2000 of them; long runs; each sabotage until it is caught; real kills on Spark; property tests with more examples'
	@echo 'make cluster a job over four hosts (network namespaces: needs root) whose links are cut; ARGS="--seed 2", or --without-spark'
	@echo 'make compat  Flink 2.3: its command line and its classes against a coordinator (fetches 330 MB the first time)'
	@echo '             KAFKA=host:port: what the tests take for granted of Kafka, at a real broker, instead'
	@echo 'make vendor  fetch the files of others in web pages anew, as scripts/vendored.json pins them'
	@echo 'make lock    write requirements.lock anew from pyproject.toml'

setup:
	@scripts/setup

demo: setup
	@$(PYTHON) examples/flights.py $(ARGS)

orders: setup
	@$(PYTHON) examples/orders.py $(ARGS)

test: setup
	@scripts/setup --tests
	@PYTHONDONTWRITEBYTECODE= $(PYTHON) -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder $(ARGS)

check:
	@scripts/setup --no-java
	@.venv/bin/ruff check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports --no-logo

bench: setup
	@$(PYTHON) -m benchmarks.run $(ARGS)

chaos: setup
	@$(PYTHON) -m holdfast chaos sim --seeds $(SEEDS) $(ARGS)
	@$(PYTHON) -m holdfast chaos sim --workload long --seeds 4 --seed-timeout 600
	@$(PYTHON) -m holdfast chaos sim --sabotage all
	@PYTHONDONTWRITEBYTECODE= $(PYTHON) -m pytest -m endurance
	@HOLDFAST_EXAMPLES=8 PYTHONDONTWRITEBYTECODE= $(PYTHON) -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder \
		tests/api tests/barriers tests/statebackends tests/coordinator tests/operators tests/scenarios tests/simulation/test_determinism.py \
		tests/simulation/test_user_pipelines.py tests/simulation/test_transitions.py

cluster:
	@scripts/setup --cluster
	@$(PYTHON) -m tests.cluster $(ARGS)

compat: setup
	@$(if $(KAFKA),,scripts/setup --flink && scripts/setup --browser)
	@HOLDFAST_KAFKA=$(KAFKA) PYTHONDONTWRITEBYTECODE= $(PYTHON) -m pytest -m compat $(if $(KAFKA),tests/compat/test_kafka.py,tests/compat) $(ARGS)

lock:
	@scripts/setup --no-java
	@$(PYTHON) -m pip install --quiet uv
	@.venv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
		--no-header --no-annotate --all-extras pyproject.toml -c /dev/null -o requirements.lock

vendor:
	@scripts/setup --no-java
	@$(PYTHON) scripts/vendor.py

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
