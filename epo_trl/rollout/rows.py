"""An episode as one row of a TRL batch: the turns are segments of the row."""

from __future__ import annotations

from dataclasses import dataclass

from epo_trl.types import Episode


@dataclass(frozen=True, slots=True)
class Row:
    """What TRL calls one prompt and its completion.

    Args:
        prompt_ids: The prompt of the first turn.
        completion_ids: response 1, prompt 2, response 2, ... as they were given and sampled.
        env_mask: 1 on response tokens, 0 on prompts.
        turn_ids: The turn that each completion token belongs to, from 0.
        logprobs: Log-probabilities at sampling time, 0.0 on prompts; `None` if the generator does not return them.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    env_mask: list[int]
    turn_ids: list[int]
    logprobs: list[float] | None


def episode_to_row(episode: Episode, placeholder_id: int) -> Row:
    """Returns the episode as a row.

    An episode that carries no learning signal becomes a row of two placeholder tokens with an empty mask: TRL needs
    a completion in every row, and every rank the same number of rows.

    Args:
        episode: The episode.
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
