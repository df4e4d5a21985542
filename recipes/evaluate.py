"""Evaluates a checkpoint on the whole fixed test lists under a named protocol.

    python recipes/evaluate.py --config recipes/alfworld/eval_tiny_cpu.yaml --model_name_or_path runs/.../grpo_epo

On several GPUs: `accelerate launch recipes/evaluate.py ...`; the lists are spread over the processes. With `--output`,
repeating the command resumes an interrupted evaluation.
"""

import epo_trl.threads  # noqa: F401 - before torch

from epo_trl.cli.evaluation import main
from epo_trl.cli.program import run_recipe

if __name__ == "__main__":
    run_recipe(main, configs=["*/eval_*"])
