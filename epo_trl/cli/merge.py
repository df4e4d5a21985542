"""`epo-trl merge`: merge an adapter into its base model."""

from __future__ import annotations

from collections.abc import Sequence

from epo_trl.cli.base import make_parser, say


def main(argv: Sequence[str]) -> int:
    """Writes the checkpoint and returns the exit code."""
    parser = make_parser("merge", "Merges an adapter into its base model and saves the result with the tokenizer.")
    parser.add_argument("adapter", metavar="ADAPTER", help="folder or Hub id of a LoRA adapter")
    parser.add_argument("--out", required=True, metavar="DIR", help="new folder for the checkpoint")
    parser.add_argument(
        "--dtype", default="auto", choices=("auto", "bfloat16", "float16", "float32"), help="data type of the weights"
    )
    parser.add_argument("--trust_remote_code", action="store_true", help="allow code from the Hub to run")
    args = parser.parse_args(argv)
    from epo_trl.models import merge_adapter

    path = merge_adapter(args.adapter, args.out, dtype=args.dtype, trust_remote_code=args.trust_remote_code)
    say(f"wrote {path}")
    return 0
