"""`epo-trl serve ENV`: serve games to any OpenEnv client."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from epo_trl.bounds import Count, Positive, Range, check_bounds, option
from epo_trl.cli.base import fail, say
from epo_trl.cli.options import parse_options, read_command_line
from epo_trl.envs.base import EnvError, TaskSuite
from epo_trl.envs.checker import checked_reset

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
    """Serves until it is interrupted; returns the exit code: 1 for a port that is not free."""
    suite, args = parse_options(read_command_line(argv, program="epo-trl serve"), ServeArguments)
    check_bounds(args)
    try:
        from openenv.core.env_server import create_fastapi_app
        from openenv.core.env_server.types import ConcurrencyConfig

        from epo_trl.lab.serve.server import GameSession, ServedGames, TextAction, TextObservation
    except ImportError as error:
        raise EnvError(f"serve: needs the package openenv ({error}); pip install 'epo-trl[openenv]'") from error
    games = ServedGames(suite, call_timeout_seconds=args.call_timeout, **rules(args, suite))
    task_id = next((ids[0] for ids in games.tasks.values() if ids), None)
    if task_id is not None:  # an environment that does not start, or violates the contract, is not served
        with closing(suite.make_env()) as env:
            checked_reset(env, task_id, 0, games.env_options)
    seats = ConcurrencyConfig(max_concurrent_envs=args.seats, session_timeout=args.idle_timeout)
    app = create_fastapi_app(
        partial(GameSession, games), TextAction, TextObservation, concurrency_config=seats, env_name=suite.name
    )
    try:
        listener = socket.create_server((args.host, args.port))
    except OSError as error:
        reason = (error.strerror or "").partition(" (")[0]
        return fail(f"host, port: expected a free port, got {args.host} and {args.port} ({reason}); try --port")
    say(f"serving {suite.name} at http://{args.host}:{args.port}, {args.seats} seats; Ctrl-C ends it")
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
