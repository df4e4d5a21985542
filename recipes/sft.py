"""Warm start: supervised fine-tuning on episodes of a scripted expert.

    python recipes/sft.py --config recipes/alfworld/sft_tiny_cpu.yaml

The result is a Hub-style checkpoint; give it to the RL recipe as `--model_name_or_path`.
"""

import epo_trl.threads  # noqa: F401 - before torch

from epo_trl.cli.imitation import main
from epo_trl.cli.program import run_recipe

if __name__ == "__main__":
    run_recipe(main, configs=["*/sft_*"])
