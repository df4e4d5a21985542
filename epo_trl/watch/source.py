"""Locates stored episodes: in the folder of a run, or beside the output of an evaluation."""

from __future__ import annotations

import json
import os
from pathlib import Path

from epo_trl.errors import InputError
from epo_trl.types import Episode, StopReason
from epo_trl.watch.sample import Sample, read_samples, sample_of

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
        source: Folder of a run, output of a finished or running evaluation, or file of samples.

    Raises:
        InputError: If there are no episodes, or a file is damaged. The message names it.
    """
    path = Path(source)
    if path.is_dir():
        samples = [sample for file in sorted((path / FOLDER).glob("*.jsonl")) for sample in read_samples(file)]
    elif path.suffix == ".jsonl" and path.is_file() and not evaluation_file(path).is_file():
        samples = read_samples(path)
    else:
        samples = _of_evaluation(path)
    if not samples:
        raise InputError(
            f"RUN: expected the folder of a run or the output of an evaluation, made with keep_episodes above 0, got "
            f"{path}, which has no episodes"
        )
    return sorted(samples, key=_sort_key)


def _sort_key(sample: Sample) -> tuple[bool, bool, float, int]:
    """Returns the sort key of a sample, which is smaller for a worse episode."""
    episode = sample.episode
    return episode.stop is not StopReason.ABORTED, episode.won, episode.total_reward, -sample.rl_step


def _of_evaluation(output: Path) -> list[Sample]:
    file = evaluation_file(output)
    if file.is_file():
        return read_samples(file)
    samples = []
    for part in sorted(output.with_name(f"{output.name}.parts").glob("*-*.json")):
        split, found = part.stem.rpartition("-")[0], json.loads(part.read_text(encoding="utf-8"))
        samples += [sample_of(Episode.from_dict(episode), split=split) for episode in found["episodes"]]
    return samples
