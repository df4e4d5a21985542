import pytest

from epo_trl.envs.alfworld import GeneratedAlfworld
from epo_trl.envs.base import EnvError


def test_the_expert_wins_most_games_of_every_split():
    suite = GeneratedAlfworld(n_train=12, n_iid=12, n_ood=12)
    env = suite.make_env()
    wins = 0
    for split in suite.splits:
        for task_id in suite.task_ids(split):
            observation, info = env.reset(options={"task_id": task_id})
            expert = suite.make_expert()
            expert.reset(observation, info)
            for _ in range(50):
                _, action = expert.act(observation, info)
                assert action in info["admissible_actions"]
                observation, reward, terminated, truncated, info = env.step(action)
                assert not truncated and reward == float(terminated)
                if terminated:
                    wins += 1
                    break
    assert wins >= 32


def test_reset_without_a_task_says_what_it_takes():
    env = GeneratedAlfworld(n_train=3).make_env()
    with pytest.raises(EnvError, match="task_id"):
        env.reset()
    with pytest.raises(EnvError, match="'train/0' to 'train/2'"):
        env.reset(options={"task_id": "train/3"})
