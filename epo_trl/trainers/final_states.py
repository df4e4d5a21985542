"""What comes after the last turn of an episode that was cut off: the state whose value GAE goes on with."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from epo_trl.envs.base import Info, TextEnv
from epo_trl.rollout import ContextBuilder
from epo_trl.rollout.context import TurnView
from epo_trl.types import Episode, StopReason

CUT_OFF = frozenset({StopReason.TRUNCATED, StopReason.TURN_LIMIT, StopReason.CONTEXT_FULL})


class RememberingEnv(TextEnv):
    """Plays an environment and remembers its last info, which the next prompt would have been built from."""

    def __init__(self, env: TextEnv) -> None:
        self.env = env
        self.info: Info = {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        """As the environment's."""
        self.reset_async(seed=seed, options=options)
        return self.reset_wait()

    def reset_async(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """As the environment's."""
        self.env.reset_async(seed=seed, options=options)

    def reset_wait(self) -> tuple[str, Info]:
        """As the environment's."""
        observation, self.info = self.env.reset_wait()
        return observation, self.info

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        """As the environment's."""
        self.step_async(action)
        return self.step_wait()

    def step_async(self, action: str) -> None:
        """As the environment's."""
        self.env.step_async(action)

    def step_wait(self) -> tuple[str, float, bool, bool, Info]:
        """As the environment's."""
        result = self.env.step_wait()
        self.info = result[-1]
        return result

    def close(self) -> None:
        """As the environment's."""
        self.env.close()


def final_states(episodes: Sequence[Episode], infos: Sequence[Info], context: ContextBuilder) -> list[list[int]]:
    """Returns the token ids of the state after each episode's last turn, `[]` for episodes that were not cut off.

    That state is the prompt that would have come next; in concatenated context the whole sequence with it. A prompt
    that does not fit (`context_full`) loses its beginning.

    Args:
        episodes: As played.
        infos: The last info of each episode's environment.
        context: What built the prompts.
    """
    cut = [i for i, episode in enumerate(episodes) if episode.stop in CUT_OFF and episode.turns]
    views = {i: _view(episodes[i], infos[i]) for i in cut}
    prompts = dict(zip(cut, context.build(list(views.values())) if cut else [], strict=True))
    too_long = [i for i in cut if prompts[i] is None]
    if too_long:
        unlimited = replace(context, max_prompt_tokens=sys.maxsize, max_context_tokens=None)
        prompts |= zip(too_long, unlimited.build([views[i] for i in too_long]), strict=True)
    concatenated = context.mode == "concatenated"
    longest = context.max_context_tokens if concatenated else context.max_prompt_tokens
    states: list[list[int]] = [[] for _ in episodes]
    for i, prompt in prompts.items():
        assert prompt is not None
        before = [*_sequence(episodes[i])] if concatenated else []
        states[i] = [*before, *prompt.ids][-(longest or 0) :]
    return states


def _sequence(episode: Episode) -> list[int]:
    return [token for turn in episode.turns for token in (*turn.prompt_ids, *turn.response_ids)]


def _view(episode: Episode, info: Info) -> TurnView:
    return TurnView(
        observation=episode.final_observation,
        info=info,
        history=[(turn.observation, turn.action) for turn in episode.turns],
        last_response_ids=episode.turns[-1].response_ids,
        context_tokens=len(_sequence(episode)),
    )
