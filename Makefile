# The one door: what a person runs is what CI runs.
#   make setup   install into .venv            TORCH_INDEX=URL  take torch from another index (CPU-only builds)
#   make demo    one chat request, end to end  CUDA=12|13       with cupy and the matching UCX build
#   make serve   gateway + prefill + decode on this machine, until Ctrl-C
#   make test    every test                    ARGS="-k name"   passed on to pytest (and to serve)
#   make test-cluster   the chart on a real control plane, the image's steps; builds the control plane the first time
#   make check   format, lint, types, layers
#   make bench   benchmarks, JSON to build/bench

BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: setup demo serve test test-cluster check bench format lock clean

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

lock: $(STAMP)
	scripts/lock

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
