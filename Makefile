# The one door: what a person runs is what CI runs.
#   make setup   install into .venv            TORCH_INDEX=URL  take torch from another index (CPU-only builds)
#   make demo    one chat request, end to end  CUDA=12|13       with cupy and the matching UCX build
#   make serve   gateway + prefill + decode on this machine, until Ctrl-C
#   make test    every test                    ARGS="-k name"   passed on to pytest (and to serve)
#   make soak    1,000 random fault schedules, totals at the end    ARGS="--schedules 50 --seed 7"
#   make fuzz    every decoder of network bytes, a bounded time each    FUZZ_SECONDS=60
#   make test-kernels   the CPU kernels under address and undefined behaviour sanitizers, then in AVX2
#   make test-eval   lm-evaluation-harness, in an environment of its own, scores a task through a pair
#   make test-cluster   the chart on a real control plane, the image's steps; builds the control plane the first time
#   make check   format, lint, types, layers
#   make bench   benchmarks, JSON to build/bench
#   make bench-peers   against vLLM and llama.cpp, where ARGS="--install vllm llama" has put them

BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: setup demo serve test test-kernels test-eval test-cluster soak fuzz check bench bench-peers format lock clean

setup: $(STAMP)

$(STAMP): pyproject.toml requirements.lock scripts/setup
	TORCH_INDEX="$(TORCH_INDEX)" CUDA="$(CUDA)" scripts/setup
	@touch $@

demo: $(STAMP)
	$(BIN)/python -m services.demo $(ARGS)

serve: $(STAMP)
	$(BIN)/kvbaton serve $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

soak: $(STAMP)
	$(BIN)/python -m tests.soak $(ARGS)

fuzz: $(STAMP)
	$(BIN)/python -m pip install -q --disable-pip-version-check "atheris>=3,<4" || true
	$(BIN)/python -m tests.fuzz all $(or $(FUZZ_SECONDS),20)

test-kernels: $(STAMP)
	PYTHON=$(BIN)/python scripts/test-kernels $(ARGS)

EVAL := .venv-eval
test-eval: $(STAMP) $(EVAL)/.installed
	KVBATON_EVAL_PYTHON=$(CURDIR)/$(EVAL)/bin/python $(BIN)/python -m pytest tests/e2e/test_lm_eval.py $(ARGS)

$(EVAL)/.installed:
	python3 -m venv $(EVAL)
	$(EVAL)/bin/python -m pip install -q --disable-pip-version-check "lm-eval[api]==0.4.13" "transformers>=5,<6"
	@touch $@

test-cluster: $(STAMP)
	scripts/build-control-plane
	KVBATON_IMAGE_STEPS=1 $(BIN)/python -m pytest -x -s tests/cluster tests/image $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python -m benchmarks $(ARGS)

bench-peers: $(STAMP)
	$(BIN)/python -m benchmarks.peers $(ARGS)

lock: $(STAMP)
	scripts/lock

clean:
	rm -rf .venv .venv-eval build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
