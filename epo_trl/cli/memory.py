"""`epo-trl memory`: what training takes on each GPU."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from epo_trl.cli.base import at_least, fail, parser_of, say


def main(argv: Sequence[str]) -> int:
    """Returns the exit code after the estimate is printed."""
    args = _parser().parse_args(argv)
    from epo_trl.memory import PRESETS, Run, format_memory, format_memory_table, shape_of

    gpus = tuple(args.gpus)
    settings = {
        "zero_stage": args.zero_stage, "offload": args.offload, "batch_tokens": args.batch_tokens,
        "reference": not args.no_reference, "critic": args.critic,
        "gradient_checkpointing": not args.no_gradient_checkpointing,
    }  # fmt: skip
    try:
        if args.model is None:
            say(format_memory_table(gpus, args.gpu_gb, **settings))
            return 0
        shape = PRESETS.get(args.model)
        if shape is None:
            from transformers import AutoConfig

            shape = shape_of(args.model, AutoConfig.from_pretrained(args.model).get_text_config().to_dict())
        say("\n\n".join(format_memory(shape, Run(gpus=count, **settings), args.gpu_gb) for count in gpus))
    except (OSError, ValueError) as error:
        return fail(error)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(
        "memory", "Estimates the memory that training takes on each GPU, by the formula in docs/memory.md."
    )
    parser.add_argument(
        "--model", help="1.5B, 3B or 7B (Qwen2.5), a local path or a Hub id (default: a table of those three)"
    )
    parser.add_argument(
        "--gpus", type=at_least(1), nargs="+", default=[1, 4, 8], metavar="N", help="numbers of GPUs (default: 1 4 8)"
    )
    parser.add_argument("--gpu-gb", type=float, default=80, metavar="GB", help="memory of one GPU (default: 80)")
    parser.add_argument("--zero-stage", type=int, choices=(0, 2, 3), default=3, help="0 is DDP (default: 3)")
    parser.add_argument("--offload", action="store_true", help="ZeRO-3 with weights and optimizer in the machine")
    parser.add_argument(
        "--batch-tokens",
        type=at_least(1),
        default=16384,
        metavar="N",
        help="tokens of one micro-batch on one GPU, padding included (default: 16384)",
    )
    parser.add_argument("--critic", action="store_true", help="PPO with a separate critic")
    parser.add_argument(
        "--no-reference", action="store_true", help="no beta, ref-nucleus or archer: no reference model"
    )
    parser.add_argument("--no-gradient-checkpointing", action="store_true", help="keep all activations")
    return parser
