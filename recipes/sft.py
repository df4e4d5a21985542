"""Warm start: supervised fine-tuning on episodes of a scripted expert.

    python recipes/sft.py --config recipes/alfworld/sft_tiny_cpu.yaml

The result is a Hub-style checkpoint; give it to the RL recipe as `--model_name_or_path`.
"""

from epo_trl.cli.program import run_recipe_file

if __name__ == "__main__":
    run_recipe_file("sft")
