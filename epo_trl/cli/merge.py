"""`epo-trl merge`: a plain checkpoint of an adapter."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from epo_trl.cli.base import fail, parser_of, say


def main(argv: Sequence[str]) -> int:
    """Returns the exit code after the checkpoint is written."""
    args = _parser().parse_args(argv)
    from epo_trl.models import merge_adapter

    try:
        path = merge_adapter(args.adapter, args.out, dtype=args.dtype, trust_remote_code=args.trust_remote_code)
    except (OSError, ValueError) as error:
        return fail(error)
    say(f"wrote {path}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("merge", "Writes the base model with the adapter's changes in its weights, and the tokenizer.")
    parser.add_argument("adapter", metavar="ADAPTER", help="folder or Hub id of a LoRA adapter")
    parser.add_argument("--out", required=True, metavar="DIR", help="new folder for the checkpoint")
    parser.add_argument(
        "--dtype", default="auto", choices=("auto", "bfloat16", "float16", "float32"), help="data type of the weights"
    )
    parser.add_argument("--trust_remote_code", action="store_true", help="allow code from the Hub to run")
    return parser
