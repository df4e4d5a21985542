"""Converts an episode to one row of a TRL batch, with its turns as segments."""

from __future__ import annotations

from dataclasses import dataclass

from epo_trl.types import Episode


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt and its completion in TRL's sense.

    Args:
        prompt_ids: Token ids of the first turn's prompt.
        completion_ids: Token ids of response 1, prompt 2, response 2, ..., unchanged.
        env_mask: 1 on response tokens, 0 on prompts.
        turn_ids: Index of each completion token's turn, from 0.
        logprobs: Log-probabilities at sampling time, 0.0 on prompts; `None` if the generator does not return them.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    env_mask: list[int]
    turn_ids: list[int]
    logprobs: list[float] | None


def episode_to_row(episode: Episode, placeholder_id: int) -> Row:
    """Converts an episode to a row.

    An episode without a learning signal becomes a row of two placeholder tokens with an empty mask: TRL needs a
    completion in every row, and every rank needs the same number of rows.

    Args:
        episode: Episode to convert.
        placeholder_id: Any valid token id.
    """
    if not episode.is_usable:
        return Row([placeholder_id], [placeholder_id], [0], [0], None)
    completion: list[int] = []
    mask: list[int] = []
    turn_ids: list[int] = []
    logprobs: list[float] | None = [] if all(turn.logprobs is not None for turn in episode.turns) else None
    for index, turn in enumerate(episode.turns):
        prompt = turn.prompt_ids if index else ()
        completion += [*prompt, *turn.response_ids]
        mask += [0] * len(prompt) + [1] * len(turn.response_ids)
        turn_ids += [index] * (len(prompt) + len(turn.response_ids))
        if logprobs is not None:
            logprobs += [0.0] * len(prompt) + list(turn.logprobs or ())
    return Row(list(episode.turns[0].prompt_ids), completion, mask, turn_ids, logprobs)
