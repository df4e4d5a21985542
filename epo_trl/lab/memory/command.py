"""`epo-trl memory`: estimate the memory per GPU of a model or a config."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from epo_trl.cli.base import at_least, make_parser, say
from epo_trl.errors import InputError

# Options that a config sets, and options that need one.
WITHOUT_CONFIG = ("model", "batch_tokens", "no_reference", "no_gradient_checkpointing")
WITH_CONFIG = ("prompt_tokens", "response_tokens", "json")


def main(argv: Sequence[str]) -> int:
    """Prints the estimate and returns the exit code."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if rest and args.config is None:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    _refuse_mixed(args)
    if args.config is None:
        _estimate(args)
    else:
        _estimate_config(args, rest)
    return 0


def _estimate(args: argparse.Namespace) -> None:
    from epo_trl.lab.memory.sizes import Run, format_memory, format_memory_table

    settings = {
        "zero_stage": args.zero_stage, "offload": args.offload, "batch_tokens": args.batch_tokens or 16384,
        "reference": not args.no_reference, "critic": args.critic == "separate",
        "gradient_checkpointing": not args.no_gradient_checkpointing,
    }  # fmt: skip
    if args.model is None:
        say(format_memory_table(args.gpus, args.gpu_gb, **settings))
        return
    shape, _ = _shape(args.model)
    say("\n\n".join(format_memory(shape, Run(gpus=count, **settings), args.gpu_gb) for count in args.gpus))


def _estimate_config(args: argparse.Namespace, options: Sequence[str]) -> None:
    from trl import ModelConfig

    from epo_trl.cli.options import AlgorithmArguments, read_command_line, read_settings
    from epo_trl.cli.train import StartArguments, find_algorithm
    from epo_trl.lab.memory.config import read_run
    from epo_trl.lab.memory.sizes import format_memory, memory_per_gpu

    critic = [f"--critic={args.critic}"] if args.critic else []
    line = read_command_line(["--config", args.config, *options, *critic], program="epo-trl memory")
    if critic and line.algorithm != "ppo":
        raise InputError(f"--critic: expected a config of algorithm 'ppo', got {line.algorithm!r}; add --algorithm ppo")
    settings = read_settings(line, AlgorithmArguments, StartArguments, find_algorithm(line.algorithm)[0], ModelConfig)
    shape, adapter = _shape(str(settings["model_name_or_path"]))
    settings |= {"lora_r": adapter.get("r", settings["lora_r"])}  # an adapter is trained on as it is
    given = {name: getattr(args, name) for name in ("zero_stage", "offload", "prompt_tokens", "response_tokens")}
    for gpus in args.gpus:
        run, tokens = read_run(settings, gpus=gpus, gpu_gb=args.gpu_gb, **given)
        if args.json:
            parts = memory_per_gpu(shape, run)
            fits = parts["total"] <= args.gpu_gb * 1e9
            say(json.dumps({"model": shape.name, "gpus": gpus, "bytes": parts, "fits": fits}))
        else:
            say(f"{format_memory(shape, run, args.gpu_gb)}\n{tokens}\n")


def _shape(model: str) -> tuple[Any, dict[str, Any]]:
    """Returns the sizes of a local folder, a preset or a Hub id, of an adapter's base model, and its settings."""
    from epo_trl.lab.memory.sizes import PRESETS, find_preset, shape_of

    shape = None if Path(model).is_dir() else PRESETS.get(model) or find_preset(model)
    if shape is not None:
        return shape, {}
    from transformers import AutoConfig

    from epo_trl.models.adapters import Adapter
    from epo_trl.models.families import unread_by_text, without_weights
    from epo_trl.models.names import check_model_name, tiny_size

    if tiny_size(model):
        raise InputError(f"model_name_or_path: expected a folder or a Hub id, got {model!r}, which has no fixed size")
    check_model_name(model)
    adapter = Adapter.find(model)
    if adapter is not None:
        return _shape(adapter.base)[0], adapter.settings
    try:
        config = AutoConfig.from_pretrained(model)
    except ValueError as error:
        raise InputError(f"model: expected one that transformers can load, got {model!r}: {error}") from error
    whole = without_weights(model)
    frozen = 0 if whole is None else sum(weight.numel() for weight in unread_by_text(whole))
    return shape_of(model, config.get_text_config().to_dict(), frozen), {}


def _positive(text: str) -> float:
    with suppress(ValueError):
        if 0 < (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"expected a number > 0, got {text}")


def _refuse_mixed(args: argparse.Namespace) -> None:
    """Raises `InputError` for an option that needs a config, without one, or that a config sets."""
    alone = args.config is None
    why = "only with --config" if alone else "only without --config, which sets it"
    for name in WITH_CONFIG if alone else WITHOUT_CONFIG:
        if getattr(args, name) not in (None, False):
            raise InputError(f"--{name.replace('_', '-')}: expected {why}, got {getattr(args, name)}")


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "memory",
        "Estimates the memory of training per GPU with the formula in docs/memory.md, for a model or for a config. "
        "Fields of the config can be overridden, for example --max_turns 30.",
    )
    parser.allow_abbrev = False
    parser.add_argument(
        "--gpus", type=at_least(1), nargs="+", default=(1, 4, 8), metavar="N", help="numbers of GPUs (default: 1 4 8)"
    )
    parser.add_argument("--gpu-gb", type=_positive, default=80.0, metavar="GB", help="memory of a GPU (default: 80)")
    parser.add_argument(
        "--zero-stage", type=int, choices=(0, 2, 3), default=3, help="ZeRO stage; 0 is DDP (default: 3)"
    )
    parser.add_argument("--offload", action="store_true", help="ZeRO-3 with weights and optimizer in CPU memory")
    parser.add_argument(
        "--critic",
        nargs="?",
        const="separate",
        choices=("separate", "value_head"),
        help="PPO's critic; without a value: separate (default: the config's, or none)",
    )
    sizes = parser.add_argument_group("memory of a model")
    sizes.add_argument(
        "--model", help="1.5B, 3B or 7B (Qwen2.5), a local path or a Hub id (default: a table of those three)"
    )
    sizes.add_argument(
        "--batch-tokens",
        type=at_least(1),
        metavar="N",
        help="tokens of one micro-batch on one GPU, padding included (default: 16384)",
    )
    sizes.add_argument(
        "--no-reference", action="store_true", help="no reference model (no beta, ref-nucleus or archer)"
    )
    sizes.add_argument("--no-gradient-checkpointing", action="store_true", help="keep all activations in memory")
    config = parser.add_argument_group("memory of a config")
    config.add_argument("--config", metavar="YAML", help="a training config, or the name of a shipped one")
    for name, limit in (("prompt", "max_prompt_length"), ("response", "max_completion_length")):
        config.add_argument(
            f"--{name}-tokens", type=_positive, metavar="N", help=f"mean {name} length (default: the limit, {limit})"
        )
    config.add_argument("--json", action="store_true", help="print JSON, one line for each number of GPUs")
    return parser
