"""Logs saved episodes as a table to trackers that support tables: Weights & Biases and Trackio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import pandas as pd

NAME = "episodes"
TRACKERS = ("wandb", "trackio")


def episode_rows(samples: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Returns a table with one row per turn.

    Args:
        samples: Samples as returned by `Sample.to_dict`.
    """
    rows = []
    for sample in samples:
        for number, turn in enumerate(sample["turns"], start=1):
            entropy = turn["entropy"]
            rows.append(
                {
                    "rl_step": sample["rl_step"], "why": sample["why"], "task_id": sample["task_id"],
                    "task": sample["task"], "task_type": sample["task_type"], "outcome": str(sample["stop"]),
                    "turn": number, "observation": turn["observation"], "response": turn["response"],
                    "action": turn["action"], "error": turn["error"], "reward": turn["reward"],
                    "mean_entropy": sum(entropy) / len(entropy) if entropy else None,
                }
            )  # fmt: skip
    return pd.DataFrame(rows)


def send_tables(samples: Sequence[Mapping[str, Any]], report_to: str | Sequence[str] | None) -> None:
    """Logs the samples as the table `episodes` to the trackers of the run. Call it on the logging process only.

    Args:
        samples: Samples as returned by `Sample.to_dict`.
        report_to: Names of trackers, as in the configuration.
    """
    for name in TRACKERS:
        if name not in (report_to or ()):
            continue
        tracker = import_module(name)
        rows = episode_rows(samples)
        if len(rows) and (name != "wandb" or tracker.run is not None):  # without a run, wandb has not been started
            tracker.log({NAME: tracker.Table(dataframe=rows)})
