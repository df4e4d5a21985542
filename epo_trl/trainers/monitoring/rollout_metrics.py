"""Metrics of the episodes of a batch, over all ranks."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import asdict
from statistics import fmean, stdev

import torch

from epo_trl.envs.base import Faults
from epo_trl.methods import Comm
from epo_trl.rollout import RolloutTimes
from epo_trl.types import Episode, StopReason


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
