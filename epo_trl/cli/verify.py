"""`epo-trl verify WORLD`: compare game engines."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from epo_trl.cli.base import at_least, make_parser, say


def main(argv: Sequence[str]) -> int:
    """Compares the engines; returns 0 if they agree, else 1."""
    args = _parser().parse_args(argv)
    return int(args.run(args))


def _alfworld(args: argparse.Namespace) -> int:
    from epo_trl.envs.alfworld.verify import verify_path

    report = verify_path(args.path, max_games=args.max_games, steps=args.steps, seed=args.seed)
    say(report.summary())
    return 0 if report.ok else 1


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("verify", "Compares game engines on games.")
    alfworld = parser.add_subparsers(required=True, metavar="WORLD").add_parser(
        "alfworld", help="compare the fast engine with the stock engine"
    )
    alfworld.add_argument("path", metavar="PATH", help="folder of games, for example $ALFWORLD_DATA")
    alfworld.add_argument(
        "--max-games",
        type=at_least(1),
        default=100,
        metavar="N",
        help="number of games in the random sample (default: 100)",
    )
    alfworld.add_argument(
        "--steps", type=at_least(1), default=40, metavar="N", help="number of inputs per episode (default: 40)"
    )
    alfworld.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the random player (default: 0)")
    alfworld.set_defaults(run=_alfworld)
    return parser
