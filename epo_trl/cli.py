"""The command `epo-trl`: draw runs, make and check games, estimate memory. Heavy imports wait for their command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from epo_trl import __version__
from epo_trl.envs.base import EnvError


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 1 if a check failed or the input is unusable (argparse exits with 2 on its own)."""
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except EnvError as error:
        return _fail(error)


def _fail(error: Exception) -> int:
    message = " ".join(str(error).split())
    sys.stderr.write(f"epo-trl: error: {message}\n")
    return 1


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _plot(args: argparse.Namespace) -> int:
    from epo_trl.plots import RunError, plot_runs

    try:
        path = plot_runs(args.runs, args.out, labels=args.labels, window=args.window)
    except (RunError, ValueError) as error:
        return _fail(error)
    _say(f"wrote {path}")
    return 0


def _games_alfworld(args: argparse.Namespace) -> int:
    from epo_trl.envs.alfworld.generator import write_games

    filters: dict[str, Any] = {
        name: getattr(args, name)
        for name in ("task_types", "room_types", "max_receptacles")
        if getattr(args, name) is not None
    }
    write_games(args.out, args.train, args.valid_seen, args.valid_unseen, args.seed, **filters)
    _say(
        f"wrote {args.train} train, {args.valid_seen} valid_seen, {args.valid_unseen} valid_unseen games to {args.out}"
    )
    return 0


def _verify_alfworld(args: argparse.Namespace) -> int:
    from epo_trl.envs.alfworld.verify import verify_path

    report = verify_path(args.path, max_games=args.max_games, steps=args.steps, seed=args.seed)
    _say(report.summary())
    return 0 if report.ok else 1


def _memory(args: argparse.Namespace) -> int:
    from epo_trl.memory import PRESETS, Run, format_memory, format_memory_table, shape_of

    gpus = tuple(args.gpus)
    settings = {
        "zero_stage": args.zero_stage, "offload": args.offload, "batch_tokens": args.batch_tokens,
        "reference": not args.no_reference, "critic": args.critic,
        "gradient_checkpointing": not args.no_gradient_checkpointing,
    }  # fmt: skip
    try:
        if args.model is None:
            _say(format_memory_table(gpus, args.gpu_gb, **settings))
            return 0
        shape = PRESETS.get(args.model)
        if shape is None:
            from transformers import AutoConfig

            shape = shape_of(args.model, AutoConfig.from_pretrained(args.model).get_text_config().to_dict())
        _say("\n\n".join(format_memory(shape, Run(gpus=count, **settings), args.gpu_gb) for count in gpus))
    except (OSError, ValueError) as error:
        return _fail(error)
    return 0


def _merge(args: argparse.Namespace) -> int:
    from epo_trl.models import merge_adapter

    try:
        path = merge_adapter(args.adapter, args.out, dtype=args.dtype, trust_remote_code=args.trust_remote_code)
    except (OSError, ValueError) as error:
        return _fail(error)
    _say(f"wrote {path}")
    return 0


def _study(args: argparse.Namespace) -> int:
    from epo_trl.long_runs.folder_lock import RunningError
    from epo_trl.study.command import study
    from epo_trl.study.config import StudyError

    options = {name: value for name, value in vars(args).items() if name not in ("run", "config")}
    try:
        return study(args.config, **options)
    except (OSError, StudyError, RunningError) as error:
        return _fail(error)
    except KeyboardInterrupt:
        return _fail(RuntimeError("interrupted; the same command goes on from the last checkpoints"))


def _at_least(minimum: int) -> Any:
    def integer(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"got {value}, takes an integer >= {minimum}")
        return value

    return integer


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="epo-trl", description="Tools around training LLM agents with EPO.")
    parser.add_argument("--version", action="version", version=f"epo-trl {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_plot(commands)
    _add_study(commands)
    _add_memory(commands)
    _add_merge(commands)

    games = commands.add_parser("games", help="make games").add_subparsers(required=True, metavar="WORLD")
    _add_games_alfworld(games)
    verify = commands.add_parser("verify", help="check an engine on games").add_subparsers(
        required=True, metavar="WORLD"
    )
    _add_verify_alfworld(verify)
    return parser


def _add_merge(commands: Any) -> None:
    merge = commands.add_parser(
        "merge",
        help="make a plain checkpoint of an adapter and its base",
        description="Writes the base model with the adapter's changes in its weights, and the tokenizer.",
    )
    merge.add_argument("adapter", metavar="ADAPTER", help="folder or Hub id of a LoRA adapter")
    merge.add_argument("--out", required=True, metavar="DIR", help="new folder for the checkpoint")
    merge.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float16", "float32"), help="of weights")
    merge.add_argument("--trust_remote_code", action="store_true", help="whether the Hub's own code may run")
    merge.set_defaults(run=_merge)


def _add_plot(commands: Any) -> None:
    plot = commands.add_parser(
        "plot",
        help="draw reward, success and entropy curves of runs",
        description="Draws training reward, training, IID and OOD success, and the entropy of early and late turns.",
    )
    plot.add_argument("runs", nargs="+", metavar="RUN", help="output directory of a training run")
    plot.add_argument("--out", required=True, metavar="PNG", help="image file to write")
    plot.add_argument(
        "--labels",
        nargs="+",
        metavar="LABEL",
        help="one per run; equal labels are averaged (default: the directory's name without -seedN)",
    )
    plot.add_argument("--window", type=_at_least(1), default=10, help="points of the running mean (default: 10)")
    plot.set_defaults(run=_plot)


def _add_study(commands: Any) -> None:
    study = commands.add_parser(
        "study",
        help="run methods x seeds from one YAML file, and report",
        description="Runs what is missing of a study and writes its report. The same command goes on after a kill.",
    )
    study.add_argument("config", metavar="CONFIG", help="YAML file, see docs/study.md")
    study.add_argument("--arms", nargs="+", metavar="NAME", help="only these methods")
    study.add_argument("--seeds", nargs="+", type=_at_least(0), metavar="S", help="these seeds instead of the file's")
    study.add_argument("--jobs", type=_at_least(1), metavar="N", help="runs side by side (default: cores / threads)")
    study.add_argument("--threads", type=_at_least(1), default=1, metavar="N", help="threads of a run (default: 1)")
    study.add_argument("--runs-dir", metavar="DIR", help="where runs are kept (default: runs/NAME)")
    study.add_argument("--results-dir", metavar="DIR", help="where results are kept (default: results/NAME)")
    study.add_argument("--report-only", action="store_true", help="run nothing: a report of the results that are there")
    study.set_defaults(run=_study)


def _add_memory(commands: Any) -> None:
    memory = commands.add_parser(
        "memory",
        help="estimate the memory that training takes on each GPU",
        description="Estimates the memory that training takes on each GPU, by the formula in docs/memory.md.",
    )
    memory.add_argument(
        "--model", help="1.5B, 3B or 7B (Qwen2.5), a local path or a Hub id (default: a table of those three)"
    )
    memory.add_argument(
        "--gpus", type=_at_least(1), nargs="+", default=[1, 4, 8], metavar="N", help="numbers of GPUs (default: 1 4 8)"
    )
    memory.add_argument("--gpu-gb", type=float, default=80, metavar="GB", help="memory of one GPU (default: 80)")
    memory.add_argument("--zero-stage", type=int, choices=(0, 2, 3), default=3, help="0 is DDP (default: 3)")
    memory.add_argument("--offload", action="store_true", help="ZeRO-3 with weights and optimizer in the machine")
    memory.add_argument(
        "--batch-tokens",
        type=_at_least(1),
        default=16384,
        metavar="N",
        help="tokens of one micro-batch on one GPU, padding included (default: 16384)",
    )
    memory.add_argument("--critic", action="store_true", help="PPO with a separate critic")
    memory.add_argument(
        "--no-reference", action="store_true", help="no beta, ref-nucleus or archer: no reference model"
    )
    memory.add_argument("--no-gradient-checkpointing", action="store_true", help="keep all activations")
    memory.set_defaults(run=_memory)


def _add_games_alfworld(games: Any) -> None:
    alfworld = games.add_parser("alfworld", help="generate ALFWorld-style games in the layout of the real ones")
    alfworld.add_argument("--out", required=True, metavar="DIR", help="folder to write to")
    for split, what in (("train", ""), ("valid-seen", ", training rooms"), ("valid-unseen", ", held-out rooms")):
        alfworld.add_argument(
            f"--{split}", type=_at_least(0), required=True, metavar="N", help=f"number of {split} games{what}"
        )
    alfworld.add_argument("--seed", type=int, default=0, metavar="S", help="same seed, same games (default: 0)")
    alfworld.add_argument("--task-types", nargs="+", metavar="TYPE", help="only these task types (default: all six)")
    alfworld.add_argument("--room-types", nargs="+", metavar="ROOM", help="only these kinds of room (default: all)")
    alfworld.add_argument("--max-receptacles", type=_at_least(1), metavar="N", help="only rooms with at most so many")
    alfworld.set_defaults(run=_games_alfworld)


def _add_verify_alfworld(verify: Any) -> None:
    alfworld = verify.add_parser("alfworld", help="replay the fast and the stock engine against each other")
    alfworld.add_argument("path", metavar="PATH", help="folder of games, for example $ALFWORLD_DATA")
    alfworld.add_argument(
        "--max-games", type=_at_least(1), default=100, metavar="N", help="a random draw of so many (default: 100)"
    )
    alfworld.add_argument(
        "--steps", type=_at_least(1), default=40, metavar="N", help="inputs per episode (default: 40)"
    )
    alfworld.add_argument("--seed", type=int, default=0, metavar="S", help="of the random player (default: 0)")
    alfworld.set_defaults(run=_verify_alfworld)


if __name__ == "__main__":
    sys.exit(main())
