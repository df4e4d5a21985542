"""`epo-trl games WORLD`: generate games."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from epo_trl.cli.base import at_least, make_parser, say


def main(argv: Sequence[str]) -> int:
    """Writes the games and returns the exit code."""
    args = _parser().parse_args(argv)
    return int(args.run(args))


def _alfworld(args: argparse.Namespace) -> int:
    from epo_trl.envs.alfworld.generator import write_games
    from epo_trl.envs.alfworld.task_specs import Filters

    filters = Filters(args.task_types, args.room_types, args.max_receptacles)
    write_games(args.out, args.train, args.valid_seen, args.valid_unseen, args.seed, filters)
    say(f"wrote {args.train} train, {args.valid_seen} valid_seen, {args.valid_unseen} valid_unseen games to {args.out}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("games", "Generates games.")
    alfworld = parser.add_subparsers(required=True, metavar="WORLD").add_parser(
        "alfworld", help="generate ALFWorld-style games in the file layout of the real ones"
    )
    alfworld.add_argument("--out", required=True, metavar="DIR", help="folder to write to")
    for split, what in (("train", ""), ("valid-seen", " in training rooms"), ("valid-unseen", " in held-out rooms")):
        alfworld.add_argument(
            f"--{split}", type=at_least(0), required=True, metavar="N", help=f"number of {split} games{what}"
        )
    alfworld.add_argument(
        "--seed", type=int, default=0, metavar="S", help="seed; the same seed gives the same games (default: 0)"
    )
    alfworld.add_argument("--task-types", nargs="+", metavar="TYPE", help="only these task types (default: all six)")
    alfworld.add_argument("--room-types", nargs="+", metavar="ROOM", help="only these kinds of room (default: all)")
    alfworld.add_argument(
        "--max-receptacles", type=at_least(1), metavar="N", help="largest number of receptacles in a room"
    )
    alfworld.set_defaults(run=_alfworld)
    return parser
