"""`epo-trl verify WORLD`: compare game engines, or check a shop."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from epo_trl.cli.base import at_least, make_parser, say


def main(argv: Sequence[str]) -> int:
    """Runs the check of a world; returns 0 if all is well, else 1."""
    args = _parser().parse_args(argv)
    return int(args.run(args))


def _alfworld(args: argparse.Namespace) -> int:
    from epo_trl.envs.alfworld.verify import verify_path

    report = verify_path(args.path, max_games=args.max_games, steps=args.steps, seed=args.seed)
    say(report.summary())
    return 0 if report.ok else 1


def _webshop(args: argparse.Namespace) -> int:
    from epo_trl.envs.webshop import WebShopSuite
    from epo_trl.envs.webshop.verify import verify_release, verify_shop

    if args.generated:
        lines, is_ok = verify_shop(WebShopSuite(goods="generated"), args.goals)
    else:
        lines, is_ok = verify_release(args.path, args.catalogue, args.instructions, args.goals)
    for line in lines:
        say(line)
    return 0 if is_ok else 1


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("verify", "Compares game engines on games, or checks a shop.")
    worlds = parser.add_subparsers(required=True, metavar="WORLD")
    _add_alfworld(worlds.add_parser("alfworld", help="compare the fast engine with the stock engine"))
    _add_webshop(worlds.add_parser("webshop", help="check the release's files and whether its goals can be met"))
    return parser


def _add_alfworld(alfworld: argparse.ArgumentParser) -> None:
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


def _add_webshop(webshop: argparse.ArgumentParser) -> None:
    webshop.add_argument("path", metavar="PATH", nargs="?", help="folder of the release's JSON files ($WEBSHOP_DATA)")
    webshop.add_argument("--generated", action="store_true", help="check the generated shop instead")
    webshop.add_argument("--catalogue", choices=("small", "all"), default="small", help="which files (default: small)")
    webshop.add_argument(
        "--instructions", choices=("human", "synthetic"), default="synthetic", help="which goals (default: synthetic)"
    )
    webshop.add_argument(
        "--goals", type=at_least(1), default=500, metavar="N", help="number of test goals to play (default: 500)"
    )
    webshop.set_defaults(run=_webshop)
