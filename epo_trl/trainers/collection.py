"""Collects the batches of a run, selects their groups, and measures them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, stdev
from typing import Any

import torch

from epo_trl.envs.base import Faults, TaskSuite
from epo_trl.methods import Comm, Group, Methods, Selection
from epo_trl.rollout import RolloutTimes
from epo_trl.trainers.config import EPOConfig
from epo_trl.types import Episode, StopReason


@dataclass(slots=True)
class Played:
    """Episodes as they were played, the time that took, and the faults of the environments meanwhile."""

    episodes: list[Episode] = field(default_factory=list)
    times: RolloutTimes = field(default_factory=RolloutTimes)
    faults: Faults = field(default_factory=Faults)


@dataclass(slots=True)
class Collected:
    """The episodes that an RL step trains on, and all episodes played for it.

    Args:
        tasks: Tasks of this rank's episodes.
        episodes: One episode per task, with the rewards assigned by the methods.
        played: All episodes as they were played, including those of discarded groups.
    """

    tasks: list[str]
    episodes: list[Episode]
    played: list[Episode]


@dataclass
class Collector:
    """Collects the batches of a run and their metrics.

    A group that a method replaces is discarded, and another task is played instead, in at most `max_resamples` rounds.
    The replacement tasks depend only on the run's seed and the RL step, so a resumed run draws the same ones. The
    episodes of groups that a method leaves out are marked as `left_out`. The `group_size` episodes of a task are
    adjacent in the list over all ranks.
    """

    suite: TaskSuite
    methods: Methods
    ranks: Comm
    spare_tasks: Sequence[str]  # from which replacements are drawn
    args: EPOConfig
    group_size: int
    end_ids: Sequence[int]  # tokens that end a response

    def play(self, tasks: Sequence[str], play: Callable[..., list[Episode]], played: Played) -> list[Episode]:
        """Plays one episode per task by `EPOTrainer.play`, adds them to those of the batch, and returns them."""
        faults_before = self.suite.faults()
        # One seed for all: the members of a group start from the identical state on every rank.
        episodes = play([(task, self.args.seed) for task in tasks], description="rollout", times=played.times)
        played.episodes += episodes
        played.faults += self.suite.faults() - faults_before
        return episodes

    def collect(
        self, tasks: Sequence[str], play: Callable[..., list[Episode]], rl_step: int, played: Played | None = None
    ) -> tuple[Collected, dict[str, float]]:
        """Returns a batch of episodes, and metrics of the batch and of all episodes played for it. Collective.

        Args:
            tasks: Tasks of this rank, each repeated for the members of its group on this rank.
            play: See `EPOTrainer.play`. Collective, even without a task.
            rl_step: Index of the RL step, from 0.
            played: The episodes of the tasks, if they were played before.
        """
        if played is None:
            self.play(tasks, play, played := Played())
        rewarded = [self.methods.with_rewards(episode) for episode in played.episodes]
        batch = Collected(list(tasks), rewarded, played.episodes)
        selection: dict[str, float] = {}
        if self.methods.overriding("select"):
            draw = random.Random(f"{self.args.seed}/{rl_step}")
            selection = self._select(batch, lambda tasks: self.play(tasks, play, played), draw)
        metrics = rollout_metrics(batch.played, played.times, played.faults, self.end_ids, self.ranks, self.args.device)
        return batch, metrics | group_metrics(batch.episodes, self.group_size, self.ranks) | selection

    def _select(
        self, batch: Collected, play: Callable[[Sequence[str]], list[Episode]], draw: random.Random
    ) -> dict[str, float]:
        """Replaces groups, then marks the episodes of those that are left out; returns the numbers of groups."""
        first, size, discarded = self.ranks.index * len(batch.tasks), self.group_size, 0
        for left in reversed(range(self.args.max_resamples + 1)):
            selected = self.methods.select(self._groups(batch.episodes))
            refused = [number for number, selections in enumerate(selected) if Selection.REPLACE in selections]
            if not refused or not left:
                break
            discarded += len(refused)
            new_tasks = {group: draw.choice(self.spare_tasks) for group in refused}
            places = [i for i in range(len(batch.tasks)) if (first + i) // size in new_tasks]
            episodes = play([new_tasks[(first + i) // size] for i in places])
            for i, episode in zip(places, episodes, strict=True):
                batch.tasks[i], batch.episodes[i] = episode.task_id, self.methods.with_rewards(episode)
        left_out = [Selection.LEAVE_OUT in selections for selections in selected]
        batch.episodes = [
            replace(episode, left_out=left_out[(first + i) // size]) for i, episode in enumerate(batch.episodes)
        ]
        return {
            "rollout/resampled_groups": discarded,
            "rollout/unwanted_groups": len(refused),
            "rollout/left_out_groups": sum(left_out),
        }

    def _groups(self, episodes: Sequence[Episode]) -> list[Group]:
        """Returns the groups of all ranks, in order. Collective."""
        seen = self.ranks.gather([(episode.total_reward, episode.won, episode.is_usable) for episode in episodes])
        members = [seen[i : i + self.group_size] for i in range(0, len(seen), self.group_size)]
        return [Group(*zip(*group, strict=True)) for group in members]


def episode_return(completions: Sequence[Any], episode_return: Sequence[float], **_: Any) -> list[float]:
    """Returns the total reward of each episode. A reward function for TRL."""
    return list(episode_return)


def rollout_metrics(
    episodes: Sequence[Episode],
    times: RolloutTimes,
    faults: Faults,
    end_ids: Collection[int],
    ranks: Comm,
    device: torch.device,
) -> dict[str, float]:
    """Returns the metrics of the episodes. Collective.

    Rates per episode or turn leave aborted episodes out; they are NaN if all were aborted.
    `episodes` are those of this rank as played, `end_ids` the tokens that end a response.
    """
    usable_ones = [episode for episode in episodes if episode.is_usable]
    turns_of_them = [turn for episode in usable_ones for turn in episode.turns]
    local = {
        "episodes": len(episodes),
        "usable": len(usable_ones),
        "won": sum(e.won for e in usable_ones),
        "return": sum(e.total_reward for e in usable_ones),
        "turns": len(turns_of_them),
        "invalid": sum(e.invalid_actions for e in usable_ones),
        "prompt_tokens": sum(len(turn.prompt_ids) for turn in turns_of_them),
        "dropped": sum(turn.dropped_turns > 0 for turn in turns_of_them),
        "cut": sum(turn.response_ids[-1] not in end_ids for turn in turns_of_them),
        **{f"stop/{reason}": sum(e.stop is reason for e in episodes) for reason in StopReason},
        **asdict(faults),
    }
    sums = ranks.sum(torch.tensor(list(local.values()), dtype=torch.float64, device=device)).tolist()
    total = dict(zip(local, sums, strict=True))
    usable, turns = (total[name] or math.nan for name in ("usable", "turns"))
    return {
        "env/success_rate": total["won"] / usable,
        "env/return": total["return"] / usable,
        "env/turns": total["turns"] / usable,
        "env/invalid_actions": total["invalid"] / turns,
        "env/aborted": 1 - total["usable"] / total["episodes"],
        **{f"env/{name}": total[name] for name in asdict(faults)},
        "rollout/prompt_tokens": total["prompt_tokens"] / turns,
        "rollout/shortened_prompts": total["dropped"] / turns,
        "rollout/cut_responses": total["cut"] / turns,
        "time/generate": times.generate,
        "time/env": times.env,
        "time/text": times.text,
        **{name: total[name] / total["episodes"] for name in total if name.startswith("stop/")},
    }


def group_metrics(episodes: Sequence[Episode], group_size: int, ranks: Comm) -> dict[str, float]:
    """Returns how much the members of a group differ, as GRPO learns only from these differences. Collective.

    Means over the groups with at least two usable members; `{}` if there are none. The `group_size` episodes of a group
    are adjacent in the list over all ranks.
    """
    seen = ranks.gather(
        [(e.is_usable, e.won, e.total_reward, tuple(turn.action for turn in e.turns)) for e in episodes]
    )
    groups = [[member for member in seen[i : i + group_size] if member[0]] for i in range(0, len(seen), group_size)]
    groups = [group for group in groups if len(group) > 1]
    if not groups:
        return {}
    return {
        "env/group_return_std": fmean(stdev(total for _, _, total, _ in group) for group in groups),
        "env/group_equal": fmean(len({won for _, won, _, _ in group}) == 1 for group in groups),
        "env/group_first_actions": fmean(len({actions[0] for *_, actions in group}) for group in groups),
        "env/group_actions": fmean(len({action for *_, actions in group for action in actions}) for group in groups),
    }
