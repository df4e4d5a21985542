"""Few-shot prompts: selects and loads the example episodes in front of the first prompt.

Examples come from training tasks that the environment's expert solves, or from a text file; never from test tasks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from epo_trl.bounds import Count, CountOrZero, check_bounds, option
from epo_trl.envs.base import TaskSuite
from epo_trl.envs.border import squeeze
from epo_trl.envs.checker.results import checked_reset
from epo_trl.errors import InputError
from epo_trl.rollout.templates import Example, PastTurn

SPLIT = "train"
TRIES = 20  # maximum number of training tasks to try per example


@dataclass(frozen=True, slots=True)
class FewShot:
    """Examples and a name that identifies them.

    Args:
        examples: Example episodes.
        source: Number of expert examples, or name of the text file.
    """

    examples: tuple[Example | str, ...] = ()
    source: str = ""

    @property
    def label(self) -> str:
        """`source` and the first digits of a checksum over the examples, such as `"2-9f86d081"`; `""` for none."""
        if not self.examples:
            return ""
        content = [one if isinstance(one, str) else astuple(one) for one in self.examples]
        return f"{self.source}-{hashlib.sha256(json.dumps(content).encode()).hexdigest()[:8]}"


@dataclass
class FewShotArguments:
    """Options for the examples in front of the first prompt."""

    few_shot: CountOrZero = option(
        0, "Example episodes in the prompt, played by the environment's expert on training tasks."
    )
    few_shot_turns: Count = option(12, "Maximum length of an example in turns; longer training tasks are skipped.")
    few_shot_seed: int = option(0, "Seed for the examples' training tasks and for the expert's choices.")
    few_shot_file: str | None = option(None, "Text file to show verbatim instead of the expert's episodes.")

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.few_shot and self.few_shot_file:
            raise InputError(f"few_shot_file: expected none with few_shot={self.few_shot}, got {self.few_shot_file!r}")

    def few_shot_of(self, suite: TaskSuite, env_options: Mapping[str, Any] | None = None) -> FewShot:
        """Loads the requested examples; they are the same in every process.

        Args:
            suite: Suite that provides the training tasks.
            env_options: Further options for every `reset`.

        Raises:
            EnvError: If the suite has no expert or no training tasks.
            InputError: If there is no text file, or the expert wins too few of the tried tasks within the turns.
        """
        if self.few_shot_file:
            return FewShot((read_example(self.few_shot_file),), Path(self.few_shot_file).name)
        if not self.few_shot:
            return FewShot()
        return FewShot(self._expert_examples(suite, env_options), str(self.few_shot))

    def _expert_examples(self, suite: TaskSuite, env_options: Mapping[str, Any] | None) -> tuple[Example, ...]:
        """Plays training tasks in random order and returns the first episodes that the suite's expert wins."""
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
                    return tuple(found)
        raise InputError(
            f"few_shot: got {count}, but of {len(ids)} training tasks the expert solved {len(found)} within "
            f"few_shot_turns={self.few_shot_turns}; use fewer examples, or more turns"
        )


def read_example(path: str) -> str:
    """Reads a text file and strips surrounding white space."""
    try:
        text = Path(os.path.expanduser(path)).read_text(encoding="utf-8-sig").strip()
    except OSError as error:
        raise InputError(f"few_shot_file: expected a text file, got {path!r} ({error})") from error
    if not text:
        raise InputError(f"few_shot_file: expected a text, got the empty {path!r}")
    return text
