"""What every recipe does, whatever its environment: load, train, resume, keep the results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from trl import ModelConfig, get_peft_config, get_quantization_config

from epo_trl.envs.base import TaskSuite
from epo_trl.models import load_policy
from epo_trl.trainers import EPOConfig, EPOTrainer
from epo_trl.trainers.epo_trainer import STATE_FILE


def train(suite: TaskSuite, args: EPOConfig, model_args: ModelConfig) -> EPOTrainer:
    """Returns the trainer after a run that starts, or goes on from the last checkpoint in `args.output_dir`.

    The final model and tokenizer are saved to `output_dir` as a Hub-style checkpoint.
    """
    model, tokenizer = load_policy(
        model_args, suite, args.prompt_template, seed=args.seed, trust_remote_code=args.trust_remote_code
    )
    if isinstance(model, str):
        args.model_init_kwargs = {**_model_init_kwargs(model_args), **(args.model_init_kwargs or {})}
    checkpoint = args.resume_from_checkpoint or last_checkpoint(args.output_dir, complete=STATE_FILE)
    if checkpoint is not None:
        args.eval_on_start = False  # was done when the run began
    trainer = EPOTrainer(
        model,
        suite,
        args=args,
        processing_class=tokenizer,
        peft_config=get_peft_config(model_args),
        quantization_config=get_quantization_config(model_args),
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model(args.output_dir)
    return trainer


def last_checkpoint(folder: str, complete: str = "trainer_state.json") -> str | None:
    """Returns the newest whole checkpoint in the folder, or `None`.

    Args:
        folder: A run's output folder.
        complete: The file that the trainer writes last. A checkpoint without it was cut off and is passed over.
    """
    found = [path for path in Path(folder).glob("checkpoint-*") if (path / complete).is_file()]
    return str(max(found, key=lambda path: int(path.name.rpartition("-")[2]))) if found else None


def _model_init_kwargs(model_args: ModelConfig) -> dict[str, Any]:
    dtype = model_args.dtype
    return {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": getattr(torch, dtype) if dtype not in (None, "auto") else dtype,
    }
