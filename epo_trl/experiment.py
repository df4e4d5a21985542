"""What every recipe does, whatever its environment: load, train, resume, keep the results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback, TrainingArguments
from trl import ModelConfig, get_peft_config, get_quantization_config

from epo_trl.envs.base import TaskSuite
from epo_trl.models import load_policy
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
    model, tokenizer = load_policy(
        model_args, suite, args.prompt_template, seed=args.seed, trust_remote_code=args.trust_remote_code
    )
    if isinstance(model, str):
        args.model_init_kwargs = {**_model_init_kwargs(model_args), **(args.model_init_kwargs or {})}
    checkpoint = args.resume_from_checkpoint or newest_checkpoint(args)
    if checkpoint is not None:
        args.eval_on_start = False  # was done when the run began
    trainer = trainer_class(
        model,
        suite,
        args=args,
        processing_class=tokenizer,
        peft_config=get_peft_config(model_args),
        quantization_config=get_quantization_config(model_args),
    )
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


def _model_init_kwargs(model_args: ModelConfig) -> dict[str, Any]:
    dtype = model_args.dtype
    return {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": getattr(torch, dtype) if dtype not in (None, "auto") else dtype,
    }
