"""Values of a collected batch: bootstrap states, whose values continue GAE after the last turn, and metrics."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from copy import copy
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from epo_trl.devices import to_device
from epo_trl.envs.border import error_text
from epo_trl.methods import Comm, Credit
from epo_trl.methods.token_statistics import masked_moments
from epo_trl.rollout import ContextBuilder
from epo_trl.rollout.context import TurnView
from epo_trl.rollout.loop import build_prompts
from epo_trl.rollout.templates import PastTurn
from epo_trl.types import Episode, StopReason

CUT_OFF = frozenset({StopReason.TRUNCATED, StopReason.TURN_LIMIT, StopReason.CONTEXT_FULL})


def final_states(episodes: Sequence[Episode], context: ContextBuilder) -> list[list[int]]:
    """Returns the token ids of the state after each episode's last turn, `[]` for episodes that were not truncated.

    The state is the prompt that would have come next, preceded by the whole sequence in concatenated context. A prompt
    that does not fit (`context_full`) is truncated from the left. Where the last observation or info cannot be shown,
    it is `[]` too, with a warning.
    """
    cut = [i for i, episode in enumerate(episodes) if episode.stop in CUT_OFF and episode.turns]
    views = {i: _view(episodes[i]) for i in cut}
    prompts = dict(zip(cut, build_prompts(context, [*views.values()]), strict=True))
    too_long = [i for i in cut if prompts[i] is None]
    unlimited = copy(context)
    unlimited.max_prompt_tokens, unlimited.max_context_tokens = sys.maxsize, None
    prompts |= zip(too_long, build_prompts(unlimited, [views[i] for i in too_long]), strict=True)
    concatenated = not context.is_windowed
    longest = context.max_context_tokens if concatenated else context.max_prompt_tokens
    states: list[list[int]] = [[] for _ in episodes]
    for i, prompt in prompts.items():
        if isinstance(prompt, BaseException):
            warnings.warn(
                "bootstrap_truncated: expected a last observation and info that can be shown as after any other turn, "
                f"got {error_text(prompt)} for {episodes[i].task_id}, which is not bootstrapped",
                stacklevel=2,
            )
            continue
        assert prompt is not None
        before = [*_sequence(episodes[i])] if concatenated else []
        states[i] = [*before, *prompt.ids][-(longest or 0) :]
    return states


def final_values(
    model: Any,
    states: Sequence[Sequence[int]],
    size: int,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> Tensor:
    """Returns the (B,) values of the final states, 0 where there is none. Collective under ZeRO-3.

    Every rank makes one pass per micro-batch of episodes, whether or not any episode was truncated.
    `states` are those of `final_states`, `size` of them in a pass; `autocast` makes the context manager of a pass.
    """
    values = []
    for start in range(0, len(states), size):
        part = states[start : start + size]
        lengths = torch.tensor([max(len(state), 1) for state in part])
        ids = pad_sequence([torch.tensor(state or [0]) for state in part], batch_first=True)
        with autocast():
            state_values = model(input_ids=to_device(ids, device), values_only=True).state_values
        cut_off = torch.tensor([bool(state) for state in part])
        if state_values.dim() == 3:  # of two heads, the first is that of turns
            state_values = state_values[..., 0]
        last = state_values.gather(1, to_device(lengths.unsqueeze(1) - 1, device))
        values.append(last.squeeze(1) * to_device(cut_off, device))
    return torch.cat(values)


def _sequence(episode: Episode) -> list[int]:
    return [token for turn in episode.turns for token in (*turn.prompt_ids, *turn.response_ids)]


def _view(episode: Episode) -> TurnView:
    return TurnView(
        observation=episode.final_observation,
        info=episode.final_info,
        history=[PastTurn(turn.observation, turn.action, turn.thought) for turn in episode.turns],
        last_response_ids=episode.turns[-1].response_ids,
        context_tokens=len(_sequence(episode)),
    )


def value_statistics(
    credit: Credit, values: Tensor, turn_ids: Tensor, max_turns: int, sum_over_ranks: Callable[[Tensor], Tensor]
) -> dict[str, float]:
    """Returns the metrics of the decision points of a batch. Collective.

    Explained variance is `1 - Var(return - value) / Var(return)`: 1 is perfect, 0 no better than a constant. It is
    omitted if the returns have no variance. Turn positions without decision points are omitted too.
    The credit's advantages are those before whitening; `values` are (B, T) at collection, `turn_ids` (B, T).
    """
    points = credit.value_mask
    assert points is not None and credit.returns is not None
    returns, value, advantage = (x[points].double() for x in (credit.returns, values, credit.advantages))
    error = returns - value
    size = math.ceil(math.log2(max_turns)) + 1
    names = ["1", "2", *(f"{2 ** (k - 1) + 1}_{2**k}" for k in range(2, size))][:size]
    bins = torch.log2(turn_ids[points].double() + 1).ceil().long().clamp(max=len(names) - 1)
    # Columns: bins of turn positions, `1`, `2`, `3_4`, `5_8`, and so on. Rows: sums over their decision points.
    terms = torch.stack(
        [torch.ones_like(value), returns, returns**2, error, error**2, value, advantage, advantage**2]
    )  # fmt: skip
    sums = terms.new_zeros(len(terms), len(names)).index_add_(1, bins, terms)
    sums = sum_over_ranks(sums)

    count, *totals = sums.sum(1).tolist()
    if not count:
        return {}
    mean = [total / count for total in totals]
    metrics = {"critic/return": mean[0], "critic/value": mean[4]}
    spread, left = mean[1] - mean[0] ** 2, mean[3] - mean[2] ** 2
    if spread > 1e-12 * mean[1]:  # more than rounding
        metrics["critic/explained_variance"] = 1 - left / spread
    for name, (n, *_, v, a, squared) in zip(names, sums.T.tolist(), strict=True):
        if n:
            metrics[f"gae/value_turns_{name}"] = v / n
            metrics[f"gae/advantage_turns_{name}"] = a / n
            metrics[f"gae/advantage_std_turns_{name}"] = math.sqrt(max(squared / n - (a / n) ** 2, 0.0))
    return metrics


def whitened(advantages: Tensor, mask: Tensor, sum_over_ranks: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns the (B, T) advantages with mean 0 and deviation 1 over the masked tokens of all ranks. Collective.

    `mask` (B, T) is 1 on the tokens of the loss; all others become 0.
    """
    mean, deviation = masked_moments(advantages, mask, sum_over_ranks)
    return (advantages - mean) / (deviation + 1e-8) * mask


def equal_outcomes(outcomes: Tensor, ranks: Comm) -> bool:
    """Returns whether all episodes, on all ranks, have equal rewards-to-go at each turn index. Collective.

    If so, no outcome distinguishes one action from another, and differences between advantages are errors of the
    critic. Lambda-returns cannot show this, because they bootstrap from the critic. Turns are compared at the same
    index: a reward that every episode gets in each turn makes the rewards-to-go of earlier turns larger, but this is no
    difference between episodes.
    """
    columns = zip_longest(*ranks.gather(outcomes.tolist()), fillvalue=math.nan)  # the longest episode differs by rank
    every = torch.tensor(list(columns), dtype=torch.float64).T[None]
    low, high = every.nan_to_num(torch.inf).amin(1), every.nan_to_num(-torch.inf).amax(1)
    return bool((high - low <= 1e-6 * every.nan_to_num(0.0).abs().max()).all())  # relative: rewards have no fixed unit
