"""The fast engine answers as TextWorld's does."""

import random

import pytest
from alfworld_games import game_like_the_real_ones, small_game, starting_at_a_receptacle

from epo_trl.envs import EnvError
from epo_trl.envs.alfworld import GeneratedAlfworld
from epo_trl.envs.alfworld.engine import State
from epo_trl.envs.alfworld.generator import generate, write_games
from epo_trl.envs.alfworld.pddl import TASK_TYPES

pytestmark = pytest.mark.games
textworld = pytest.importorskip("textworld", reason="needs the extra 'alfworld'")
from epo_trl.envs.alfworld.verify import verify_games, verify_path  # noqa: E402

SPLITS = ("train", "iid", "ood")


def check(games, steps, seed=0):
    report = verify_games(games, steps=steps, seed=seed)
    assert report.ok, report.summary()
    return report


@pytest.mark.games
def test_both_engines_agree_on_a_game_of_each_type():
    report = check([generate("iid", index, 8).game for index in range(6)], steps=8)
    assert report.games == 6 and report.task_types == set(TASK_TYPES)
    assert report.summary().startswith("equal: 6 games of 6 task types")


def test_both_engines_agree_on_what_only_real_games_hold():
    game = game_like_the_real_ones()
    check([game, starting_at_a_receptacle(game)], steps=25)


@pytest.mark.slow
def test_both_engines_agree_on_many_games_like_the_real_ones():
    check([game_like_the_real_ones(index, seed=9) for index in range(12)], steps=50)


@pytest.mark.slow
def test_both_engines_agree_on_over_100_games_of_all_types_and_splits():
    wanted = [(split, index) for split in SPLITS for index in range(36)]
    random.Random(0).shuffle(wanted)  # the policies take turns, and so do the types
    report = check((generate(split, index, 21).game for split, index in wanted), steps=24)
    assert report.games == 108 and report.task_types == set(TASK_TYPES)
    assert report.steps > 1000 and report.wins > 15


def test_the_report_shows_the_first_difference(monkeypatch):
    monkeypatch.setattr(State, "_close", lambda self, r: f"You shut the {r}.")
    monkeypatch.setattr(State, "_inventory", lambda self: "You have empty pockets.")
    report = verify_games([small_game(index) for index in range(3)], steps=60)
    assert not report.ok
    assert report.summary().startswith("DIFFERENT in ") and "observation differs after" in report.summary()
    assert "fast:" in report.summary() and "stock:" in report.summary()


def test_written_games_are_compared_from_their_folder(tmp_path):
    write_games(tmp_path, 3, 0, 0, room_types=["bathrooms"])
    report = verify_path(tmp_path, max_games=2, steps=3, seed=1)
    assert report.ok and report.games == 2
    with pytest.raises(EnvError, match="no files game.tw-pddl"):
        verify_path(tmp_path / "json_2.1.1" / "valid_seen")


def test_the_suite_plays_the_same_in_either_engine():
    settings = {"n_train": 2, "n_iid": 0, "n_ood": 0, "room_types": ["bathrooms"]}
    fast = GeneratedAlfworld(**settings).make_env()
    stock = GeneratedAlfworld(**settings, engine="textworld").make_env()
    for task_id in ("train/0", "train/1"):
        observation, info = fast.reset(options={"task_id": task_id})
        assert stock.reset(options={"task_id": task_id}) == (observation, info)
        expert = GeneratedAlfworld().make_expert()
        expert.reset(observation, info)
        for turn in range(30):
            action = "jump" if turn == 1 else expert.act(observation, info)[1]
            answer = fast.step(action)
            assert stock.step(action) == answer
            observation, _, terminated, _, info = answer
            if terminated:
                break
        assert info["won"]
    stock.close()
    stock.close()


def test_alfworlds_own_environment_finds_every_written_game(tmp_path, capsys):
    from alfworld.agents.environment.alfred_tw_env import AlfredTWEnv

    write_games(tmp_path, 6, 0, 0)
    config = {
        "env": {"goal_desc_human_anns_prob": 0, "task_types": [1, 2, 3, 4, 5, 6]},
        "dataset": {"data_path": str(tmp_path / "json_2.1.1" / "train"), "num_train_games": 0},
    }
    assert len(AlfredTWEnv(config).game_files) == 6
