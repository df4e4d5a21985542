"""`epo-trl memory`: what training takes on each GPU, and with a config how long it takes in all."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from epo_trl.cli.base import at_least, fail, parser_of, say

# Options of the estimate alone: with a config it is the config that says these.
OF_THE_ESTIMATE = ("model", "batch_tokens", "critic", "no_reference", "no_gradient_checkpointing")
# Options of the plan alone, all fields of `Assumed`: what it is, and whether it is an integer.
ASSUMED = {
    "turns": ("turns of an episode, in the mean (default: max_turns, the most)", float),
    "prompt_tokens": ("of a turn, in the mean (default: max_prompt_length, the most)", float),
    "response_tokens": ("of a turn, in the mean (default: max_completion_length, the most)", float),
    "tokens_per_second": ("that one GPU samples (default: by the bandwidth of its memory)", float),
    "bandwidth_share": ("share of that bandwidth which sampling reaches (default: 0.5)", float),
    "mfu": ("share of the peak which the update reaches (default: 0.3)", float),
    "env_seconds": ("of a turn in its environment (default: 0.005)", float),
    "eval_episodes": ("of one evaluation, all lists together; 274 for ALFWorld's two", int),
    "rl_steps": ("in place of what max_steps says", int),
}
OF_THE_PLAN = ("gpu", "tflops", "bandwidth_gb_s", "server_gpus", "rates", "json", *ASSUMED)


def main(argv: Sequence[str]) -> int:
    """Returns the exit code after the estimate or the plan is printed."""
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
    from epo_trl.memory import Assumed, Machines, hardware_of, make_plan, read_rates
    from epo_trl.memory.report import as_json, as_text, print_table

    if len(args.gpus or ()) != 1:
        raise ValueError(f"--gpus: expected one number of training GPUs with --config, got {args.gpus or 'nothing'}")
    gpu = hardware_of(args.gpu, args.gpu_gb, args.tflops, args.bandwidth_gb_s)
    machines = Machines(gpu, args.gpus[0], args.server_gpus or 0, args.zero_stage, args.offload)
    assumed = Assumed(**{name: value for name in ASSUMED if (value := getattr(args, name)) is not None})
    rates = None if args.rates is None else read_rates(args.rates)
    from epo_trl.launch.plain_settings import plain_settings  # takes seconds, so last

    settings, said = plain_settings(args.config, options)
    plan = make_plan(settings, said, _shape(str(settings["model_name_or_path"])), machines, assumed, rates)
    if args.json:
        say(as_json(plan))
    elif sys.stdout.isatty():
        print_table(plan)
    else:
        say(as_text(plan))


def _shape(model: str) -> Any:
    """Returns the sizes of a preset, of a checkpoint, or of the base of an adapter."""
    from epo_trl.memory import PRESETS, preset_of, shape_of

    shape = PRESETS.get(model) or preset_of(model)
    if shape is not None:
        return shape
    from transformers import AutoConfig

    from epo_trl.models.adapters import Adapter
    from epo_trl.models.tiny import tiny_size

    if tiny_size(model):
        raise ValueError(f"model_name_or_path: got {model!r}, which is made from a game; expected a folder or a Hub id")
    if model.count("/") > 1 and not Path(model).is_dir():
        raise ValueError(f"model_name_or_path: expected a folder that exists or a Hub id, got {model!r}")
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
    """Raises `ValueError` for an option that the other kind of answer takes."""
    names, why = (OF_THE_PLAN, "needs --config") if args.config is None else (OF_THE_ESTIMATE, "is in the config")
    for name in names:
        if getattr(args, name) not in (None, False):
            raise ValueError(f"--{name.replace('_', '-')}: got {getattr(args, name)}, but it {why}")


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(
        "memory",
        "Estimates the memory that training takes on each GPU, by the formula in docs/memory.md. With --config, plans "
        "a whole run: tokens, seconds, GPU-hours and memory, each with what it rests on. Other fields of the config "
        "may follow, as in --max_turns 30.",
    )
    parser.allow_abbrev = False
    parser.add_argument("--gpus", type=at_least(1), nargs="+", metavar="N", help="numbers of GPUs (default: 1 4 8)")
    parser.add_argument("--gpu-gb", type=_size, metavar="GB", help="memory of one GPU (default: 80, or by --gpu)")
    parser.add_argument("--zero-stage", type=int, choices=(0, 2, 3), default=3, help="0 is DDP (default: 3)")
    parser.add_argument("--offload", action="store_true", help="ZeRO-3 with weights and optimizer in the machine")
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
    sizes.add_argument("--no-reference", action="store_true", help="no beta, ref-nucleus or archer: no reference model")
    sizes.add_argument("--no-gradient-checkpointing", action="store_true", help="keep all activations")
    plan = parser.add_argument_group("plan of a run")
    plan.add_argument("--config", metavar="YAML", help="a training config, or the name of a shipped one")
    plan.add_argument("--gpu", metavar="NAME", help="A100, H100, ...: docs/memory.md has the list")
    plan.add_argument("--tflops", type=float, help="peak dense bf16 TFLOPS of the GPU (default: by --gpu)")
    plan.add_argument(
        "--bandwidth-gb-s", type=float, metavar="GB/S", help="memory bandwidth of the GPU (default: by --gpu)"
    )
    plan.add_argument(
        "--server-gpus", type=at_least(1), metavar="N", help="GPUs of a vLLM server, in addition to --gpus"
    )
    for name, (text, kind) in ASSUMED.items():
        plan.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N", help=text)
    plan.add_argument("--rates", metavar="RUN", help="run folder whose log gives turns and seconds")
    plan.add_argument("--json", action="store_true", help="print JSON")
    return parser
