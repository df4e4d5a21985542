"""Contract tests of any task suite, for pytest. A new environment gets all of them from three lines:

class TestMyGame(EnvContract):
    def make_suite(self):
        return MySuite()
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from typing import ClassVar
from unittest import SkipTest

from epo_trl.envs.base import Expert, TaskSuite, TextEnv
from epo_trl.envs.checker import Player, check_task_suite, check_text_env

_START = """
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
suite = pickle.load(sys.stdin.buffer)
from epo_trl.envs.testing import lists_and_starts
print(lists_and_starts(suite))
"""


def lists_and_starts(suite: TaskSuite) -> str:
    """Returns one line with the first ids of each list and the first observation of its last task."""
    env = suite.make_env()
    ids = {split: suite.task_ids(split) for split in suite.splits}
    seen = [(list(own[:50]), env.reset(seed=3, options={"task_id": own[-1]})) for own in ids.values()]
    env.close()
    return ascii(seen)


class EnvContract:
    """Tests of a task suite and its environments. Subclass it and implement `make_suite`."""

    deterministic: ClassVar[bool] = True  # `False` if the engine itself is noisy
    expert_turns: ClassVar[int | None] = 50  # within which the expert wins; `None` if the suite has no expert
    expert_tasks: ClassVar[int] = 10  # tasks of each list that the expert plays
    expert_wins: ClassVar[float] = 1.0  # minimum success rate of the expert on them
    player: ClassVar[Player | None] = None  # chooses actions where none are listed, see `check_text_env`

    def make_suite(self) -> TaskSuite:
        """Creates the suite. Its class must be importable in another process."""
        raise NotImplementedError

    def test_the_task_lists_keep_the_contract(self) -> None:
        """Runs `check_task_suite`."""
        check_task_suite(self.make_suite())

    def test_the_environment_keeps_the_contract(self) -> None:
        """Runs `check_text_env`."""
        suite = self.make_suite()
        ids = [suite.task_ids(split)[0] for split in suite.splits]
        player = type(self).player  # from the instance, a plain function would become its method
        check_text_env(suite.make_env(), ids, make_env=suite.make_env, deterministic=self.deterministic, player=player)

    def test_another_process_sees_the_same_lists_and_starts(self) -> None:
        """Compares this process with one in which `hash()` differs."""
        suite = self.make_suite()
        done = subprocess.run(
            [sys.executable, "-c", _START],
            input=pickle.dumps(sys.path) + pickle.dumps(suite),
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"},
            check=True,
        )
        wrong = "two processes made different lists or starts; do not use `hash()` or the order of a set"
        assert done.stdout.decode().splitlines()[-1:] == [lists_and_starts(suite)], wrong

    def test_the_expert_plays_admissible_actions_and_wins(self) -> None:
        """Plays `expert_tasks` tasks of each list."""
        if self.expert_turns is None:
            raise SkipTest("no expert")
        suite = self.make_suite()
        env, expert = suite.make_env(), suite.make_expert()
        ids = [task_id for split in suite.splits for task_id in suite.task_ids(split)[: self.expert_tasks]]
        wins = sum(_wins(env, expert, task_id, self.expert_turns) for task_id in ids)
        env.close()
        assert wins >= self.expert_wins * len(ids), f"the expert won {wins} of {len(ids)} tasks"


def _wins(env: TextEnv, expert: Expert, task_id: str, turns: int) -> bool:
    observation, info = env.reset(seed=0, options={"task_id": task_id})
    expert.reset(observation, info)
    for _ in range(turns):
        thought, action = expert.act(observation, info)
        assert isinstance(thought, str), f"{task_id}: expected a str as the expert's thought, got {thought!r}"
        listed = info["admissible_actions"]
        observation, _, terminated, truncated, info = env.step(action)
        known = info["accepted"] if listed is None else action in listed
        assert known, f"{task_id}: the expert chose {action!r}, which is not admissible"
        if terminated or truncated:
            break
    return bool(info["won"])
