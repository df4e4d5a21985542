"""`epo-trl games alfworld`: generates games."""

from __future__ import annotations

from collections.abc import Sequence

from epo_trl.cli.base import at_least, make_parser, say


def main(argv: Sequence[str]) -> int:
    """Writes the games and returns the exit code."""
    parser = make_parser("games", "Generates ALFWorld-style games in the file layout of the real ones.")
    add = parser.add_argument
    add("world", choices=["alfworld"])
    add("--out", required=True, metavar="DIR", help="folder to write to")
    for split, what in (("train", ""), ("valid-seen", " in training rooms"), ("valid-unseen", " in held-out rooms")):
        add(f"--{split}", type=at_least(0), required=True, metavar="N", help=f"number of {split} games{what}")
    add("--seed", type=int, default=0, metavar="S", help="the same seed gives the same games (default: 0)")
    add("--task-types", nargs="+", metavar="TYPE", help="only these task types (default: all six)")
    add("--room-types", nargs="+", metavar="ROOM", help="only these kinds of room (default: all)")
    add("--max-receptacles", type=at_least(1), metavar="N", help="largest number of receptacles in a room")
    args = parser.parse_args(argv)

    from epo_trl.envs.alfworld.generator import write_games
    from epo_trl.envs.alfworld.task_specs import Filters

    filters = Filters(args.task_types, args.room_types, args.max_receptacles)
    write_games(args.out, args.train, args.valid_seen, args.valid_unseen, args.seed, filters)
    say(f"wrote {args.train} train, {args.valid_seen} valid_seen, {args.valid_unseen} valid_unseen games to {args.out}")
    return 0
