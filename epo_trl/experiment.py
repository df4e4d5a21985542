"""What every recipe does, whatever its environment: load, train, resume, keep the results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback, TrainingArguments
from trl import ModelConfig

from epo_trl.envs.base import TaskSuite
from epo_trl.models import policy_for_training
from epo_trl.trainers import EPOConfig, EPOTrainer
from epo_trl.trainers.checkpoint_files import last_checkpoint, seal
from epo_trl.trainers.preemption import EXIT_CODE


def train(
    suite: TaskSuite, args: EPOConfig, model_args: ModelConfig, trainer_class: type[EPOTrainer] = EPOTrainer
) -> EPOTrainer:
    """Returns the trainer after a run that starts, or goes on from the last checkpoint in `args.output_dir`.

    The final model and tokenizer are saved to `output_dir` as a Hub-style checkpoint. After a SIGTERM the run has saved
    a checkpoint instead, and the program exits with code 143.

    Args:
        suite: The tasks.
        args: The configuration, of the kind that the trainer takes.
        model_args: Which model, and its adapter.
        trainer_class: `EPOTrainer` or a subclass.
    """
    policy = policy_for_training(model_args, args, suite, args.prompt_template)
    checkpoint = args.resume_from_checkpoint or newest_checkpoint(args)
    if checkpoint is not None:
        args.eval_on_start = False  # was done when the run began
    trainer = trainer_class(suite=suite, args=args, **policy)
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    finally:
        trainer.close_envs()
    if trainer.preempted:
        raise SystemExit(EXIT_CODE)
    trainer.save_model(args.output_dir)
    return trainer


def newest_checkpoint(args: TrainingArguments) -> str | None:
    """Returns the newest whole checkpoint in `args.output_dir`, or `None`; the main process's answer on all ranks."""
    found = [last_checkpoint(args.output_dir) if args.process_index == 0 else None]
    if args.world_size > 1:
        broadcast_object_list(found)
    return found[0]


class SealCheckpoints(TrainerCallback):
    """Makes the checkpoints of a trainer that is not ours ones that `newest_checkpoint` takes."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Writes the list of the checkpoint's files."""
        if args.should_save:
            seal(Path(args.output_dir) / f"checkpoint-{state.global_step}")
