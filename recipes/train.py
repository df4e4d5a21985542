"""RL on any environment, by GRPO or PPO, with the terms of EPO (arXiv 2509.22576).

The YAML says what is played, `environment: my_env:MyArguments` (a dataclass in a module beside the YAML or in the
current folder, or the name of one of ours), and how it is trained, `algorithm: grpo` or `ppo`:

    python recipes/train.py --config recipes/my_env/tiny_cpu.yaml

Every field of the config can be overridden on the command line, for example `--epo_lambda 0`. A run that was
interrupted goes on from its last checkpoint when it is started again. docs/environments.md says what an environment is.
"""

import epo_trl.threads  # noqa: F401 - before torch

from dataclasses import dataclass, field

from trl import ModelConfig

from epo_trl.experiment import train
from epo_trl.recipe import RecipeError, early_option, parse_recipe, run_recipe
from epo_trl.trainers import EPOConfig, EPOPPOConfig, EPOPPOTrainer, EPOTrainer

ALGORITHMS = {"grpo": (EPOConfig, EPOTrainer), "ppo": (EPOPPOConfig, EPOPPOTrainer)}


@dataclass
class AlgorithmArguments:
    """Which algorithm trains."""

    algorithm: str = field(
        default="grpo", metadata={"help": "'grpo', or 'ppo' with a critic. epo_lambda=0 leaves out EPO's terms."}
    )


def main() -> None:
    """Parses the configuration and trains."""
    algorithm = early_option("algorithm") or AlgorithmArguments.algorithm
    if algorithm not in ALGORITHMS:
        raise RecipeError(f"algorithm: got {algorithm!r}, takes one of {', '.join(map(repr, ALGORITHMS))}")
    config, trainer_class = ALGORITHMS[algorithm]
    suite, _, args, model_args = parse_recipe(AlgorithmArguments, config, ModelConfig)
    train(suite, args, model_args, trainer_class=trainer_class)


if __name__ == "__main__":
    run_recipe(main, configs=["my_env/*"])
