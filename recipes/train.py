"""RL on any environment, by GRPO or PPO, with the terms of EPO (arXiv 2509.22576).

The YAML sets what to play, `environment: my_env:MyArguments` (a dataclass in a module beside the YAML or in the current
folder, or the name of a built-in environment), and how to train, `algorithm: grpo` or `ppo`:

    python recipes/sft.py --config recipes/my_env/sft_tiny_cpu.yaml      # the warm start
    python recipes/train.py --config recipes/my_env/tiny_cpu.yaml

Every field of the config can be overridden on the command line, for example `--epo_lambda 0`. Starting an interrupted
run again resumes it from its last checkpoint. docs/environments.md defines an environment.

The other RL recipes in this folder are this one with environment and algorithm fixed.
"""

from epo_trl.cli.program import run_recipe_file

if __name__ == "__main__":
    run_recipe_file("train")
