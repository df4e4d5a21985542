"""Few-shot prompts: selects the example episodes in front of the first prompt.

Examples come from training tasks that the environment's expert solves, never from test tasks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

from epo_trl.bounds import Count, CountOrZero, check_bounds, option
from epo_trl.envs.base import TaskSuite
from epo_trl.envs.border import squeeze
from epo_trl.envs.checker import checked_reset
from epo_trl.errors import InputError
from epo_trl.rollout.templates import Example, PastTurn

SPLIT = "train"
TRIES = 20  # maximum number of training tasks to try per example


@dataclass(frozen=True, slots=True)
class FewShot:
    """Examples in front of the first prompt."""

    examples: tuple[Example, ...] = ()

    @property
    def label(self) -> str:
        """Their number and the first digits of a checksum, such as `"2-9f86d081"`; `""` for none."""
        if not self.examples:
            return ""
        content = json.dumps([astuple(example) for example in self.examples])
        return f"{len(self.examples)}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"


@dataclass
class FewShotArguments:
    """Options for the examples in front of the first prompt."""

    few_shot: CountOrZero = option(
        0, "Example episodes in the prompt, played by the environment's expert on training tasks."
    )
    few_shot_turns: Count = option(12, "Maximum length of an example in turns; longer training tasks are skipped.")
    few_shot_seed: int = option(0, "Seed for the examples' training tasks and for the expert's choices.")

    def __post_init__(self) -> None:
        check_bounds(self)

    def few_shot_of(self, suite: TaskSuite, env_options: Mapping[str, Any] | None = None) -> FewShot:
        """Plays training tasks in random order and takes the first episodes that the suite's expert wins.

        The examples are the same in every process. `env_options` are further options for every `reset`.

        Raises:
            EnvError: If the suite has no expert or no training tasks.
            InputError: If the expert wins too few of the tried tasks within the turns.
        """
        if not self.few_shot:
            return FewShot()
        from epo_trl.rollout.demonstrations import play_expert  # which imports these options

        count = self.few_shot
        ids = list(suite.demonstration_tasks(SPLIT, self.few_shot_turns, TRIES * count))
        chance = random.Random(self.few_shot_seed)
        chance.shuffle(ids)
        found: list[Example] = []
        with contextlib.closing(suite.make_env()) as env:
            for task_id in ids:
                own = chance.randrange(2**31)
                start = checked_reset(env, task_id, own, env_options)
                turns, won, _ = play_expert(suite, env, start, own, self.few_shot_turns)
                if won:
                    past = (PastTurn(turn.view.observation, turn.action, squeeze(turn.thought)) for turn in turns)
                    found.append(Example(str(start[1]["task"]), tuple(past)))
                if len(found) == count:
                    return FewShot(tuple(found))
        raise InputError(
            f"few_shot: got {count}, but of {len(ids)} training tasks the expert solved {len(found)} within "
            f"few_shot_turns={self.few_shot_turns}; use fewer examples, or more turns"
        )
