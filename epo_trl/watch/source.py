"""Locates stored episodes: in the folder of a run, or beside the output of an evaluation."""

from __future__ import annotations

import os
from pathlib import Path

from epo_trl.errors import InputError
from epo_trl.types import StopReason
from epo_trl.watch.sample import Sample, read_samples

FOLDER = "episodes"  # in a run's `output_dir`


def sample_file(output_dir: str | os.PathLike[str], rl_step: int) -> Path:
    """Returns the file for the episodes of an RL step, which counts from 1."""
    return Path(output_dir) / FOLDER / f"rl_step_{rl_step:06d}.jsonl"


def evaluation_file(output: str | os.PathLike[str]) -> Path:
    """Returns the file for the episodes of a finished evaluation."""
    return Path(f"{os.fspath(output)}.{FOLDER}.jsonl")


def find_samples(source: str | os.PathLike[str]) -> list[Sample]:
    """Loads stored episodes, worst first: aborted, then lost by reward, then won; ties put the latest first.

    Args:
        source: Folder of a run, or output of a finished evaluation.

    Raises:
        InputError: If there are no episodes, or a file is damaged. The message names it.
    """
    path = Path(source)
    files = sorted((path / FOLDER).glob("*.jsonl")) if path.is_dir() else [evaluation_file(path)]
    samples = [sample for file in files if file.is_file() for sample in read_samples(file)]
    if not samples:
        raise InputError(
            f"RUN: expected the folder of a run or the output of an evaluation, made with keep_episodes above 0, got "
            f"{path}, which has no episodes"
        )
    return sorted(samples, key=_sort_key)


def _sort_key(sample: Sample) -> tuple[bool, bool, float, int]:
    episode = sample.episode
    return episode.stop is not StopReason.ABORTED, episode.won, episode.total_reward, -sample.rl_step
