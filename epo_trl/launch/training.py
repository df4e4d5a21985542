"""What every RL recipe does, whatever its environment: parse, load, train, resume, keep the results."""

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
        configs: Patterns of the recipe's YAML files, from its own folder.
        environment: For a recipe of one environment; otherwise an option, `environment`.
        algorithm: A key of `ALGORITHMS`, for a recipe of one algorithm; otherwise an option, `algorithm`.
    """
    run_recipe(lambda: main(environment, algorithm), configs)


def main(environment: str | None = None, algorithm: str | None = None) -> None:
    """Parses the command line and trains. The arguments are those of `rl_recipe`."""
    config, trainer_class = ALGORITHMS[algorithm or algorithm_name()]
    asked = () if algorithm else (AlgorithmArguments,)
    types = (*asked, StartArguments, config, ModelConfig)
    suite, *_, start, args, model_args = parse_recipe(*types, environment=environment)
    check_start(model_args.model_name_or_path, start, config_path(with_config_apart(sys.argv[1:])))
    train(suite, args, model_args, trainer_class)


def train(
    suite: TaskSuite, args: EPOConfig, model_args: ModelConfig, trainer_class: type[EPOTrainer] = EPOTrainer
) -> EPOTrainer:
    """Returns the trainer after a run that starts, or goes on from the last checkpoint in `args.output_dir`.

    The final model and tokenizer are saved to `output_dir` as a Hub-style checkpoint; a run that has ended there is
    left as it is. After a SIGTERM the run has saved a checkpoint instead, and the program exits with code 143.

    Args:
        suite: The tasks.
        args: The configuration, of the kind that the trainer takes.
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
