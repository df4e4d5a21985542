"""`epo-trl serve ENV`: serve games to any OpenEnv client."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, fields
from typing import Annotated, Any

from epo_trl.bounds import Count, Positive, Range, check_bounds, option
from epo_trl.cli.base import did_you_mean, fail, say
from epo_trl.envs.base import EnvError, TaskSuite
from epo_trl.envs.checker import checked_reset
from epo_trl.envs.registry import ENVIRONMENTS, build_suite, environment_arguments
from epo_trl.errors import InputError

USAGE = f"""usage: epo-trl serve ENV [--port 8000] [--seats 64] [--option value ...]

ENV is {", ".join(ENVIRONMENTS)}, or 'module:Class' for a custom environment. Examples:
  epo-trl serve trap
  epo-trl serve alfworld --games generated --port 8001
  epo-trl serve scienceworld --seats 32
All options: epo-trl serve ENV --help"""
MAX_MESSAGE_BYTES = 2**20
GRACE_SECONDS = 5


@dataclass
class ServeArguments:
    """The server and the rules of an episode."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 lets other machines connect, without a password.")
    port: Annotated[int, Range(least=1, most=65535)] = option(8000, "Port to listen on.")
    seats: Count = option(64, "Maximum number of sessions at once.")
    idle_timeout: Positive = option(3600.0, "Seconds without a message after which a session loses its seat.")
    call_timeout: Positive = option(60.0, "Time limit of a reset or a step, in seconds.")
    protocol: str = option("", "Protocol whose turn limit and options hold; by default the environment's.")
    max_turns: Count | None = option(
        None, "Turn limit of an episode; by default that of the protocol, if there is one."
    )


def main(argv: Sequence[str]) -> int:
    """Serves until it is interrupted; returns the exit code: 1 for a port that is not free.

    Raises:
        EpoTrlError: If an option is invalid, or openenv is not installed.
    """
    if not argv or argv[0] in ("-h", "--help"):
        say(USAGE)
        return 0
    settings = environment_arguments(argv[0])
    from transformers.hf_argparser import HfArgumentParser

    types: Any = (ServeArguments, settings)
    parser = HfArgumentParser(types, prog=f"epo-trl serve {argv[0]}", allow_abbrev=False)
    try:
        args, chosen, unknown = parser.parse_args_into_dataclasses(list(argv[1:]), return_remaining_strings=True)
    except ValueError as error:  # of the settings' own checks
        raise InputError(str(error)) from error
    if unknown:
        known = [f"--{entry.name}" for kind in types for entry in fields(kind)]
        raise InputError(f"{unknown[0]}: unknown option{did_you_mean(unknown[0], known)}")
    check_bounds(args)
    try:
        from epo_trl.lab.serve.server import ServedGames, make_app
    except ImportError as error:
        raise EnvError(f"serve: needs the package openenv ({error}); pip install 'epo-trl[openenv]'") from error
    suite = build_suite(chosen)
    games = ServedGames(suite, call_timeout_seconds=args.call_timeout, **rules(args, suite))
    task_id = next((ids[0] for ids in games.tasks.values() if ids), None)
    if task_id is not None:  # an environment that does not start, or violates the contract, is not served
        with closing(suite.make_env()) as env:
            checked_reset(env, task_id, 0, games.env_options)
    app = make_app(games, seats=args.seats, idle_timeout_seconds=args.idle_timeout)
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    try:
        listener = socket.create_server((args.host, args.port), family=family)
    except OSError as error:
        reason = (error.strerror or "").partition(" (")[0]
        return fail(f"host, port: expected a free port, got {args.host} and {args.port} ({reason}); try --port")
    host = f"[{args.host}]" if family is socket.AF_INET6 else args.host
    say(f"serving {argv[0]} at http://{host}:{args.port}, {args.seats} seats; Ctrl-C ends it")
    sys.stdout.flush()
    import uvicorn

    server = uvicorn.Server(
        uvicorn.Config(
            app, log_level="warning", ws_max_size=MAX_MESSAGE_BYTES, ws_per_message_deflate=False,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
    )  # fmt: skip
    with suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
    all_ended = False
    with suppress(KeyboardInterrupt):
        all_ended = games.all_ended(GRACE_SECONDS)
    if not all_ended:
        os._exit(0)  # Python itself waits for a game that hangs
    return 0


def rules(args: ServeArguments, suite: TaskSuite) -> dict[str, Any]:
    """Returns the rules of an episode: those of the protocol, if there is one."""
    name = args.protocol or suite.protocol
    if not name:
        return {"max_turns": args.max_turns}
    from epo_trl.evaluation import get_protocol

    protocol = get_protocol(name).varied(max_turns=args.max_turns)
    return {"protocol": protocol.name, "max_turns": protocol.max_turns, "env_options": protocol.env_options}
