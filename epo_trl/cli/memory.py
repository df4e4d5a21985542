"""`epo-trl memory`: estimate the memory per GPU and, with a config, the duration of a run."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from epo_trl.cli.base import at_least, fail, make_parser, say

# Options of the estimate only: a plan reads these values from its config.
OF_THE_ESTIMATE = ("model", "batch_tokens", "critic", "no_reference", "no_gradient_checkpointing")
# Options of the plan only, which are the fields of `Assumed`: help text and type.
ASSUMED = {
    "turns": ("mean number of turns per episode (default: max_turns, the upper bound)", float),
    "prompt_tokens": ("mean prompt length, in tokens (default: max_prompt_length, the upper bound)", float),
    "response_tokens": ("mean response length, in tokens (default: max_completion_length, the upper bound)", float),
    "tokens_per_second": ("tokens sampled per second and GPU (default: from the memory bandwidth)", float),
    "bandwidth_share": ("fraction of the memory bandwidth that sampling reaches (default: 0.5)", float),
    "mfu": ("model FLOPs utilization: fraction of the peak that the update reaches (default: 0.3)", float),
    "env_seconds": ("seconds per turn in the environment (default: 0.005)", float),
    "eval_episodes": ("episodes per evaluation, all lists together; 274 for the two of ALFWorld", int),
    "rl_steps": ("number of RL steps (default: max_steps of the config)", int),
}
OF_THE_PLAN = ("gpu", "tflops", "bandwidth_gb_s", "server_gpus", "rates", "json", *ASSUMED)


def main(argv: Sequence[str]) -> int:
    """Prints the estimate or the plan and returns the exit code."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if rest and args.config is None:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        _refuse_mixed(args)
        if args.config is None:
            _estimate(args)
        else:
            _plan(args, rest)
    except (OSError, ValueError) as error:
        return fail(error)
    return 0


def _estimate(args: argparse.Namespace) -> None:
    from epo_trl.memory import Run, format_memory, format_memory_table

    gpus, gpu_gb = tuple(args.gpus or (1, 4, 8)), args.gpu_gb or 80.0
    settings = {
        "zero_stage": args.zero_stage, "offload": args.offload, "batch_tokens": args.batch_tokens or 16384,
        "reference": not args.no_reference, "critic": args.critic,
        "gradient_checkpointing": not args.no_gradient_checkpointing,
    }  # fmt: skip
    if args.model is None:
        say(format_memory_table(gpus, gpu_gb, **settings))
        return
    shape = _shape(args.model)
    say("\n\n".join(format_memory(shape, Run(gpus=count, **settings), gpu_gb) for count in gpus))


def _plan(args: argparse.Namespace, options: Sequence[str]) -> None:
    from epo_trl.memory import Assumed, Machines, find_hardware, make_plan, read_rates
    from epo_trl.memory.report import as_json, as_text, print_table

    if len(args.gpus or ()) != 1:
        raise ValueError(f"--gpus: expected one number of training GPUs with --config, got {args.gpus or 'nothing'}")
    gpu = find_hardware(args.gpu, args.gpu_gb, args.tflops, args.bandwidth_gb_s)
    machines = Machines(gpu, args.gpus[0], args.server_gpus or 0, args.zero_stage, args.offload)
    assumed = Assumed(**{name: value for name in ASSUMED if (value := getattr(args, name)) is not None})
    rates = None if args.rates is None else read_rates(args.rates)
    from epo_trl.launch.plain_settings import plain_settings  # slow to import, so last

    settings, given = plain_settings(args.config, options)
    plan = make_plan(settings, given, _shape(str(settings["model_name_or_path"])), machines, assumed, rates)
    if args.json:
        say(as_json(plan))
    elif sys.stdout.isatty():
        print_table(plan)
    else:
        say(as_text(plan))


def _shape(model: str) -> Any:
    """Returns the sizes of a preset, a checkpoint, or the base model of an adapter."""
    from epo_trl.memory import PRESETS, find_preset, shape_of

    shape = PRESETS.get(model) or find_preset(model)
    if shape is not None:
        return shape
    from transformers import AutoConfig

    from epo_trl.models.adapters import Adapter
    from epo_trl.models.tiny import tiny_size

    if tiny_size(model):
        raise ValueError(f"model_name_or_path: expected a folder or a Hub id, got {model!r}, which has no fixed size")
    if model.count("/") > 1 and not Path(model).is_dir():
        raise ValueError(f"model_name_or_path: expected an existing folder or a Hub id, got {model!r}")
    adapter = Adapter.find(model)
    if adapter is not None:
        return _shape(adapter.base)
    return shape_of(model, AutoConfig.from_pretrained(model).get_text_config().to_dict())


def _size(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number > 0, got {text}")
    return value


def _refuse_mixed(args: argparse.Namespace) -> None:
    """Raises `ValueError` for an option of the plan without a config, or of the estimate with one."""
    if args.config is None:
        names, why = OF_THE_PLAN, "only with --config"
    else:
        names, why = OF_THE_ESTIMATE, "only without --config, which sets it"
    for name in names:
        if getattr(args, name) not in (None, False):
            raise ValueError(f"--{name.replace('_', '-')}: expected {why}, got {getattr(args, name)}")


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "memory",
        "Estimates the memory of training per GPU with the formula in docs/memory.md. With --config, plans a whole "
        "run: tokens, seconds, GPU-hours and memory, each with the basis of its estimate. Fields of the config can "
        "be overridden, for example --max_turns 30.",
    )
    parser.allow_abbrev = False
    parser.add_argument("--gpus", type=at_least(1), nargs="+", metavar="N", help="numbers of GPUs (default: 1 4 8)")
    parser.add_argument("--gpu-gb", type=_size, metavar="GB", help="memory of one GPU (default: 80, or that of --gpu)")
    parser.add_argument(
        "--zero-stage", type=int, choices=(0, 2, 3), default=3, help="ZeRO stage; 0 is DDP (default: 3)"
    )
    parser.add_argument("--offload", action="store_true", help="ZeRO-3 with weights and optimizer in CPU memory")
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
    sizes.add_argument("--critic", action="store_true", help="PPO with a separate critic")
    sizes.add_argument(
        "--no-reference", action="store_true", help="no reference model (no beta, ref-nucleus or archer)"
    )
    sizes.add_argument("--no-gradient-checkpointing", action="store_true", help="keep all activations in memory")
    plan = parser.add_argument_group("plan of a run")
    plan.add_argument("--config", metavar="YAML", help="a training config, or the name of a shipped one")
    plan.add_argument("--gpu", metavar="NAME", help="type of GPU, such as A100 or H100, see docs/memory.md")
    plan.add_argument("--tflops", type=float, help="peak dense bf16 TFLOPS of the GPU (default: that of --gpu)")
    plan.add_argument(
        "--bandwidth-gb-s", type=float, metavar="GB/S", help="memory bandwidth of the GPU (default: that of --gpu)"
    )
    plan.add_argument(
        "--server-gpus", type=at_least(1), metavar="N", help="GPUs of a vLLM server, in addition to --gpus"
    )
    for name, (text, kind) in ASSUMED.items():
        plan.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N", help=text)
    plan.add_argument("--rates", metavar="RUN", help="run folder whose log provides turns and seconds")
    plan.add_argument("--json", action="store_true", help="print JSON")
    return parser
