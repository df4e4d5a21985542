"""Reads the measured cost per turn from the log of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Rates:
    """Mean costs of a run, without its first log entry.

    Args:
        source: Name of the run and its number of RL steps, shown in messages.
        about: Model and number of processes of the run.
        turns: Turns per episode.
        response_tokens: Response tokens per turn.
        prompt_tokens: Prompt tokens per turn; `None` if the run did not log them.
        generate_seconds: Generation time per turn and process.
        env_seconds: Time for environments, prompts and parsing, per turn and process.
        update_seconds: Time for everything else.
    """

    source: str
    about: str
    turns: float
    response_tokens: float
    prompt_tokens: float | None
    generate_seconds: float
    env_seconds: float
    update_seconds: float


def read_rates(run: str | Path) -> Rates:
    """Reads the rates of a run from its newest checkpoint.

    Args:
        run: The `output_dir` of the run; it must hold a checkpoint, which contains the log.

    Raises:
        ValueError: If there is no checkpoint, or it logged no RL steps.
    """
    folder = Path(run)
    checkpoints = sorted(folder.glob("checkpoint-*/trainer_state.json"), key=lambda path: int(_number(path)))
    if not checkpoints:
        problem = "has no checkpoint, which contains the log" if folder.is_dir() else "is not a folder"
        raise ValueError(f"rates: expected the output_dir of a run, got {folder}, which {problem}")
    newest = checkpoints[-1]
    history = _read(newest, "log_history")
    settings = _read(newest.with_name("epo_state.json"), "settings")
    try:
        return compute_rates(history, settings, str(folder))
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise ValueError(
            f"rates: expected the log of an RL run, got {folder}, whose log has other fields ({error!r})"
        ) from error


def compute_rates(history: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], name: str) -> Rates:
    """Computes the rates from a log.

    Args:
        history: `log_history` of a trainer.
        settings: Settings in the checkpoint: batch size and number of processes.
        name: Name of the run, for messages.

    Raises:
        ValueError: If fewer than two RL steps were logged.
    """
    steps = settings["steps_per_generation"]
    updates = steps * settings["num_iterations"] / settings["gradient_accumulation_steps"]
    entries = [entry for entry in history if "time/update" in entry]
    before = [0, *(entry["step"] for entry in entries)]
    counted = [(entry, (entry["step"] - last) / updates) for entry, last in zip(entries, before, strict=False)][1:]
    rollouts = [entry for entry, _ in counted if "time/generate" in entry]
    rl_steps = sum(share for _, share in counted)
    if not rollouts or rl_steps < 1:
        raise ValueError(f"rates: expected at least 1 RL step after the first log entry, got {rl_steps:g} in {name}")
    # An entry that covers less than an RL step holds a part of it; one that covers more holds the mean.
    update = sum(entry["time/update"] * max(1.0, share) for entry, share in counted) / rl_steps

    def mean(metric: str) -> float:
        return sum(entry[metric] for entry in rollouts) / len(rollouts)

    turns = mean("env/turns")
    on_one = settings["per_device_train_batch_size"] * steps * turns
    prompts = [entry for entry in rollouts if "rollout/prompt_tokens" in entry]
    return Rates(
        source=f"{name}, {rl_steps:.0f} RL steps",
        about=f"{settings.get('model') or 'a model'} on {settings.get('world_size') or 1} process(es)",
        turns=turns,
        response_tokens=mean("completions/mean_length") / turns,
        prompt_tokens=mean("rollout/prompt_tokens") if len(prompts) == len(rollouts) else None,
        generate_seconds=mean("time/generate") / on_one,
        env_seconds=(mean("time/env") + mean("time/text")) / on_one,
        update_seconds=update / on_one,
    )


def _number(path: Path) -> str:
    number = path.parent.name.rpartition("-")[2]
    return number if number.isdigit() else "-1"


def _read(path: Path, key: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))[key]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"rates: {path} cannot be read ({error}); expected the output_dir of a run") from error
