"""What every recipe does, whatever its environment: read its config, load, train, resume, keep the results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback, TrainingArguments
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from epo_trl.envs.base import EnvError, TaskSuite
from epo_trl.envs.registry import ENVIRONMENTS, environment_arguments
from epo_trl.models import load_policy
from epo_trl.trainers import EPOConfig, EPOTrainer
from epo_trl.trainers.checkpoint_files import last_checkpoint, seal
from epo_trl.trainers.preemption import EXIT_CODE


@dataclass
class EnvironmentArguments:
    """Which environment is played."""

    environment: str = field(metadata={"help": f"One of {', '.join(ENVIRONMENTS)}, or 'module:Class'."})


def parse_recipe(*types: type, environment: str | None = None, argv: Sequence[str] | None = None) -> tuple[Any, ...]:
    """Returns the task suite and one object per type, from the command line and the YAML file after `--config`.

    The environment's settings are fields beside those of the types; a key that nobody knows is an error.

    Args:
        types: Dataclasses, as for TRL's `TrlParser`.
        environment: For a recipe of one environment. Otherwise the config has to say it, as `environment: NAME`.
        argv: The command line, without the program.

    Raises:
        EnvError: If the environment, or a setting of it, is wrong.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    first: tuple[type, ...] = ()
    if environment is None and not {"-h", "--help"}.intersection(argv):
        environment, first = _environment(argv), (EnvironmentArguments,)
    settings = environment_arguments(environment) if environment else EnvironmentArguments
    parsed = TrlParser((*first, settings, *types)).parse_args_and_config(argv)
    settings = parsed[len(first)]
    suite = settings.make_suite()
    if isinstance(suite, TaskSuite):
        may_change = getattr(settings, "MAY_CHANGE", ())
        suite.settings = {
            field.name: getattr(settings, field.name) for field in fields(settings) if field.name not in may_change
        }
    return suite, *parsed[len(first) + 1 :]


def _environment(argv: Sequence[str]) -> str:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--environment")
    parser.add_argument("--config")
    given, _ = parser.parse_known_args(argv)
    if given.environment is None and given.config is not None:
        config = yaml.safe_load(Path(given.config).read_text(encoding="utf-8")) or {}
        given.environment = config.get("environment")
    if given.environment is None:
        known = ", ".join(ENVIRONMENTS)
        raise EnvError(f"environment: got nothing, takes one of {known} or 'module:Class', in the YAML or as an option")
    return str(given.environment)


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
