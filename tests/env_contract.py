"""The contract tests of every task suite. A new environment gets them all from three lines:

class TestMyGame(EnvContract):
    def make_suite(self):
        return MySuite()
"""

import os
import pickle
import subprocess
import sys

import pytest

from epo_trl.envs import TaskSuite
from epo_trl.envs.checker import check_task_suite, check_text_env

_START = """
import pickle, sys
suite = pickle.load(sys.stdin.buffer)
env = suite.make_env()
for split in suite.splits:
    ids = list(suite.task_ids(split))
    print(ids[:50], env.reset(seed=3, options={"task_id": ids[-1]}))
"""


class EnvContract:
    deterministic = True  # False: the engine has noise of its own
    expert_turns: int | None = 50  # within so many turns the expert wins; None: the suite has no expert
    expert_wins = 1.0  # at least this share of the tasks looked at
    player = None  # chooses actions where the environment lists none

    def make_suite(self) -> TaskSuite:
        raise NotImplementedError

    @pytest.fixture
    def suite(self):
        return self.make_suite()

    def test_the_task_lists_keep_the_contract(self, suite):
        check_task_suite(suite)

    def test_the_environment_keeps_the_contract(self, suite):
        ids = [suite.task_ids(split)[0] for split in suite.splits]
        check_text_env(
            suite.make_env(), ids, make_env=suite.make_env, deterministic=self.deterministic, player=self.player
        )

    def test_another_process_sees_the_same_lists_and_starts(self, suite):
        seen = set()
        for hash_seed in ("1", "2"):
            done = subprocess.run(
                [sys.executable, "-c", _START],
                input=pickle.dumps(suite),
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONHASHSEED": hash_seed},
                check=True,
            )
            seen.add(done.stdout)
        assert len(seen) == 1
        assert seen != {b""}

    def test_the_expert_plays_admissible_actions_and_wins(self, suite):
        if self.expert_turns is None:
            pytest.skip("no expert")
        env, expert = suite.make_env(), suite.make_expert()
        ids = [task_id for split in suite.splits for task_id in suite.task_ids(split)[:10]]
        wins = sum(self._expert_wins(env, expert, task_id) for task_id in ids)
        env.close()
        assert wins >= self.expert_wins * len(ids)

    def _expert_wins(self, env, expert, task_id) -> bool:
        observation, info = env.reset(seed=0, options={"task_id": task_id})
        expert.reset(observation, info)
        for _ in range(self.expert_turns):
            thought, action = expert.act(observation, info)
            assert isinstance(thought, str)
            listed = info["admissible_actions"]
            observation, _, terminated, truncated, info = env.step(action)
            assert info["accepted"] if listed is None else action in listed
            if terminated or truncated:
                break
        return info["won"]
