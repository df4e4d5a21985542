"""The fast engine answers as TextWorld's does. On your own games: `benchmarks/compare_alfworld_engines.py`."""

import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
from alfworld_games import (
    as_downloaded,
    game_like_the_real_ones,
    one_of_each_type,
    small_game,
    starting_at_a_receptacle,
)

from epo_trl.envs import EnvError
from epo_trl.envs.alfworld import GeneratedAlfworld
from epo_trl.envs.alfworld.game_files import find_games, load_game
from epo_trl.envs.alfworld.generator import write_games
from epo_trl.envs.alfworld.pddl import TASK_TYPES

pytestmark = pytest.mark.games
textworld = pytest.importorskip("textworld", reason="needs the extra 'alfworld'")
from compare_alfworld_engines import CachedTextWorld, compare  # noqa: E402

from epo_trl.envs.alfworld import textworld_engine  # noqa: E402
from epo_trl.envs.alfworld.refuse_code import refuse_code  # noqa: E402
from epo_trl.envs.alfworld.textworld_engine import TextWorldEngine  # noqa: E402

SPLITS = ("train", "iid", "ood")


def check(games, steps, seed=0):
    report = compare(games, steps=steps, seed=seed)
    assert report.ok, report.summary()
    return report


def test_both_engines_agree_on_a_game_of_each_type_in_the_form_of_the_download():
    report = check([as_downloaded(game) for game in one_of_each_type("iid", 8)], steps=12)
    assert report.games == 6 and report.task_types == set(TASK_TYPES)


def test_both_engines_agree_on_what_only_real_games_hold():
    game = as_downloaded(game_like_the_real_ones())
    check([game, starting_at_a_receptacle(game)], steps=25)


@pytest.mark.slow
def test_both_engines_agree_on_games_of_all_types_and_splits_and_on_many_like_the_real_ones():
    games = [one_of_each_type(split, 21)[part::3] for part, split in enumerate(SPLITS)]
    report = check(sum(games, []) + [game_like_the_real_ones(index, seed=9) for index in range(4)], steps=36)
    assert report.games == 10 and report.task_types == set(TASK_TYPES)
    assert report.steps > 600 and report.odd_inputs > 120 and report.wins > 8


@pytest.mark.slow
@pytest.mark.skipif(not Path(os.environ.get("ALFWORLD_DATA", "-"), "json_2.1.1").is_dir(), reason="needs ALFWORLD_DATA")
def test_both_engines_agree_on_the_games_of_this_machine():
    files, _ = find_games(Path(os.environ["ALFWORLD_DATA"]), TASK_TYPES)
    check(map(load_game, random.Random(5).sample(files, 12)), steps=40, seed=5)


def test_the_comparison_hears_what_textworld_itself_says():
    """The cached engine saves work; it must not change an answer."""

    def log(engine):
        play, rng = engine.start(small_game()), random.Random(3)
        yield play.describe()
        for _ in range(12):
            action = rng.choice((*play.admissible, "dance"))
            yield play.admissible, action, play.step(action), play.won

    plain = list(log(TextWorldEngine()))
    with CachedTextWorld() as cached:
        assert list(log(cached)) == plain


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


def test_code_in_a_task_sentence_is_refused_and_never_run(tmp_path, monkeypatch):
    path = tmp_path / "proof"
    code = f"{{open({str(path)!r}, 'w').write('run')}}"
    game = small_game()
    game = replace(game, grammar=game.grammar.replace("Your task is to: ", f"Your task is to: {code} "))
    engine = TextWorldEngine()
    with pytest.raises(EnvError, match="train/0.*task sentence.*as code"):
        engine.start(game)
    assert not path.exists()
    monkeypatch.setattr(textworld_engine, "refuse_code", lambda game: None)
    engine.start(game)  # without the check, TextWorld runs it
    assert path.read_text() == "run"
    engine.close()


@pytest.mark.parametrize(
    ("field", "old", "new"),
    [
        ("grammar", "You open the {r.name}", "You open the {exit()}"),
        ("grammar", "You open the {r.name}", r"You open the \u007bexit()\u007d"),
        ("grammar", "[{o.indefinite + ' ' + o.name |", "[{o.__class__ |"),
        ("grammar", "[{o.indefinite + ' ' + o.name |", r"[{o.name + '\\x7bo.__class__\\x7d' |"),
        ("grammar", 'template :: "open {r}"', 'template :: "open {exit()}"'),
        ("grammar", '"#OpenObject.feedback#"', '"{exit()}"'),
        ("problem", "agent1", "agent1{r.__class__}"),
        ("problem", "agent1", "agent" + "1" * 200),
        ("domain", "?lEnd", "?lEnd{0}"),
    ],
)
def test_other_texts_that_textworld_would_evaluate_or_copy_blindly_are_refused(field, old, new):
    game = small_game()
    text = getattr(game, field)
    assert old in text
    refuse_code(game)
    refuse_code(as_downloaded(game))
    with pytest.raises(EnvError, match="as code"):
        refuse_code(replace(game, **{field: text.replace(old, new)}))
