"""Evaluates a checkpoint on the whole fixed test lists under a named protocol.

    python recipes/evaluate.py --config recipes/alfworld/eval_tiny_cpu.yaml --model_name_or_path runs/.../grpo_epo

On several GPUs: `accelerate launch recipes/evaluate.py ...`; the lists are spread over the processes. With `--output`,
repeating the command resumes an interrupted evaluation.
"""

from epo_trl.cli.program import run_recipe_file

if __name__ == "__main__":
    run_recipe_file("evaluate")
