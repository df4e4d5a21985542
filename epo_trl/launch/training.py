"""The body of every RL recipe: parse, load, train, resume, and save the results."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from trl import ModelConfig

from epo_trl.envs.base import TaskSuite
from epo_trl.launch.command_line import config_path, with_config_apart
from epo_trl.launch.first_options import AlgorithmArguments, algorithm_name
from epo_trl.launch.options import parse_recipe
from epo_trl.launch.program import run_recipe
from epo_trl.launch.warm_start import StartArguments, check_start
from epo_trl.long_runs.preemption import EXIT_CODE
from epo_trl.long_runs.run_lock import run_lock
from epo_trl.models import policy_for_training
from epo_trl.trainers import EPOConfig, EPOPPOConfig, EPOPPOTrainer, EPOTrainer

ALGORITHMS: dict[str, tuple[type[EPOConfig], type[EPOTrainer]]] = {
    "grpo": (EPOConfig, EPOTrainer),
    "ppo": (EPOPPOConfig, EPOPPOTrainer),
}


def rl_recipe(configs: Sequence[str], environment: str | None = None, algorithm: str | None = None) -> None:
    """Runs an RL recipe from its command line.

    Args:
        configs: Glob patterns of the recipe's YAML files, relative to its own folder.
        environment: Environment of a recipe for one environment; by default the option `environment` sets it.
        algorithm: Key of `ALGORITHMS`, of a recipe for one algorithm; by default the option `algorithm` sets it.
    """
    run_recipe(lambda: main(environment, algorithm), configs)


def main(environment: str | None = None, algorithm: str | None = None) -> None:
    """Parses the command line and trains. The arguments are those of `rl_recipe`."""
    config, trainer_class = ALGORITHMS[algorithm_name(only=algorithm)]
    types = (AlgorithmArguments, StartArguments, config, ModelConfig)
    suite, _, start, args, model_args = parse_recipe(*types, environment=environment)
    check_start(model_args.model_name_or_path, start, config_path(with_config_apart(sys.argv[1:])))
    train(suite, args, model_args, trainer_class)


def train(
    suite: TaskSuite, args: EPOConfig, model_args: ModelConfig, trainer_class: type[EPOTrainer] = EPOTrainer
) -> EPOTrainer:
    """Trains with RL, resuming from the last checkpoint in `args.output_dir` if any, and returns the trainer.

    Saves the final model and tokenizer to `output_dir` as a Hub-style checkpoint. A finished run is left unchanged.
    After a SIGTERM the run saves a checkpoint to resume from, and the program exits with code 143.

    Args:
        suite: The tasks.
        args: Training configuration of the type that the trainer expects.
        model_args: Model and adapter settings.
        trainer_class: `EPOTrainer` or a subclass.

    Raises:
        RunningError: If another process trains in `output_dir`.
        ValueError: If `output_dir` holds a run with other settings.
    """
    with run_lock(args):
        policy = policy_for_training(model_args, args, suite, args.prompt_template)
        trainer = trainer_class(suite=suite, args=args, **policy)
        try:
            trainer.train_to_end()
        finally:
            trainer.close_envs()
    if trainer.preempted:
        raise SystemExit(EXIT_CODE)
    return trainer
