"""What every recipe does, whatever its environment: load, train, resume, keep the results."""

from __future__ import annotations

from trl import ModelConfig

from epo_trl.envs.base import TaskSuite
from epo_trl.long_runs.preemption import EXIT_CODE
from epo_trl.long_runs.run_lock import run_lock
from epo_trl.models import policy_for_training
from epo_trl.trainers import EPOConfig, EPOTrainer


def train(
    suite: TaskSuite, args: EPOConfig, model_args: ModelConfig, trainer_class: type[EPOTrainer] = EPOTrainer
) -> EPOTrainer:
    """Returns the trainer after a run that starts, or goes on from the last checkpoint in `args.output_dir`.

    The final model and tokenizer are saved to `output_dir` as a Hub-style checkpoint; a run that has ended there is
    left as it is. After a SIGTERM the run has saved a checkpoint instead, and the program exits with code 143.

    Args:
        suite: The tasks.
        args: The configuration, of the kind that the trainer takes.
        model_args: Which model, and its adapter.
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
