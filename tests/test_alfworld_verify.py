"""The fast engine answers as TextWorld's does."""

import os
import random
import shutil
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
from epo_trl.envs.alfworld.engine import State
from epo_trl.envs.alfworld.game_files import GAME_FILE
from epo_trl.envs.alfworld.generator import write_games
from epo_trl.envs.alfworld.pddl import TASK_TYPES
from epo_trl.envs.alfworld.scene import Scene
from epo_trl.envs.alfworld.task_specs import Filters

pytestmark = pytest.mark.games
textworld = pytest.importorskip("textworld", reason="needs the extra 'alfworld'")
from epo_trl.envs.alfworld import textworld_engine as stock_module  # noqa: E402
from epo_trl.envs.alfworld.parse_cache import CachedTextWorldEngine  # noqa: E402
from epo_trl.envs.alfworld.refuse_code import refuse_code  # noqa: E402
from epo_trl.envs.alfworld.textworld_engine import TextWorldEngine  # noqa: E402
from epo_trl.envs.alfworld.verify import ODD_FORMS, verify_games, verify_path  # noqa: E402

SPLITS = ("train", "iid", "ood")


def check(games, steps, seed=0):
    report = verify_games(games, steps=steps, seed=seed)
    assert report.ok, report.summary()
    return report


def test_both_engines_agree_on_a_game_of_each_type_in_the_form_of_the_download():
    report = check([as_downloaded(game) for game in one_of_each_type("iid", 8)], steps=12)
    assert report.games == 6 and report.task_types == set(TASK_TYPES)
    assert report.summary().startswith("equal: 6 games of 6 task types")


def test_both_engines_agree_on_what_only_real_games_hold():
    game = as_downloaded(game_like_the_real_ones())
    check([game, starting_at_a_receptacle(game)], steps=25)


@pytest.mark.slow
def test_both_engines_agree_on_games_of_all_types_and_splits_and_on_many_like_the_real_ones():
    games = [game for split in SPLITS for game in one_of_each_type(split, 21)]
    report = check(games + [game_like_the_real_ones(index, seed=9) for index in range(6)], steps=36)
    assert report.games == 24 and report.task_types == set(TASK_TYPES)
    assert report.steps > 1500 and report.odd_inputs > 300 and report.wins > 20


@pytest.mark.slow
@pytest.mark.skipif(not Path(os.environ.get("ALFWORLD_DATA", "-"), "json_2.1.1").is_dir(), reason="needs ALFWORLD_DATA")
def test_both_engines_agree_on_the_games_of_this_machine():
    report = verify_path(os.environ["ALFWORLD_DATA"], max_games=12, seed=5)
    assert report.ok, report.summary()


@pytest.mark.parametrize("form", ODD_FORMS)
def test_both_engines_answer_each_odd_form_of_an_action_alike(engines, form):
    fast, stock = engines
    before = stock.admissible
    action = next(action for action in before if action.startswith("go to "))
    odd = form(action)
    assert fast.step(odd) == stock.step(odd)
    assert fast.admissible == stock.admissible
    assert (stock.admissible == before) == (odd.strip() not in before)


@pytest.fixture(scope="module")
def engines():
    game = small_game()
    engine = TextWorldEngine()
    yield State(Scene.of(game)), engine.start(game)
    engine.close()


def test_the_comparison_hears_what_textworld_itself_says():
    """The patient engine saves work; it must not change an answer."""
    game, patient, plain = small_game(), CachedTextWorldEngine(), TextWorldEngine()
    logs = []
    for engine in (patient, plain):
        play, rng = engine.start(game), random.Random(3)
        log = [play.describe()]
        for _ in range(12):
            action = rng.choice((*play.admissible, "dance"))
            log += [play.admissible, action, play.step(action), play.won]
        logs.append(log)
        engine.close()
    assert logs[0] == logs[1]


def test_the_report_shows_the_first_difference(monkeypatch):
    monkeypatch.setattr(State, "_close", lambda self, r: f"You shut the {r}.")
    monkeypatch.setattr(State, "_inventory", lambda self: "You have empty pockets.")
    report = verify_games([small_game(index) for index in range(3)], steps=60)
    assert not report.ok and len(report.differences) > report.games  # several policies find one in the same game
    assert report.summary().startswith("DIFFERENT or refused: 3 of 3 games") and "differs after" in report.summary()
    assert "fast:" in report.summary() and "stock:" in report.summary()


def test_written_games_are_compared_from_their_folder(tmp_path):
    write_games(tmp_path, 3, 0, 0, filters=Filters(room_types=("bathrooms",)))
    report = verify_path(tmp_path, max_games=2, steps=3, seed=1)
    assert report.ok and report.games == 2
    game = next(tmp_path.rglob(GAME_FILE))
    movable = game.parents[1].with_name("pick_and_place_with_movable_recep-Cup-Pan-Cart-401") / "trial_T1"
    shutil.copytree(game.parent, movable)
    report = verify_path(tmp_path, steps=1)
    assert report.games == 3
    assert "(found 3 games; left out: 1 with movable receptacles or sliced objects)" in report.summary()
    with pytest.raises(EnvError, match="no playable game"):
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
    with pytest.raises(EnvError, match="reset: the environment is closed"):
        stock.reset(options={"task_id": "train/0"})


def test_alfworlds_own_environment_finds_every_written_game(tmp_path, capsys):
    from alfworld.agents.environment.alfred_tw_env import AlfredTWEnv

    write_games(tmp_path, 6, 0, 0)
    config = {
        "env": {"goal_desc_human_anns_prob": 0, "task_types": [1, 2, 3, 4, 5, 6]},
        "dataset": {"data_path": str(tmp_path / "json_2.1.1" / "train"), "num_train_games": 0},
    }
    assert len(AlfredTWEnv(config).game_files) == 6


def with_code(game, path):
    """Returns the game with code in its task sentence that writes a file."""
    code = "{" + f"open({str(path)!r}, 'w').write('run')" + "}"
    return replace(game, grammar=game.grammar.replace("Your task is to: ", f"Your task is to: {code} "))


def test_code_in_a_task_sentence_is_refused_and_never_run(tmp_path, monkeypatch):
    path = tmp_path / "proof"
    game = with_code(small_game(), path)
    report = verify_games([game, small_game()], steps=2)
    assert report.games == 2 and len(report.differences) == 1 and not path.exists()
    assert (
        "not compared: train/0: the task sentence" in report.summary()
        and "'{}'" in report.summary()
        and "as code" in report.summary()
    )
    engine = TextWorldEngine()
    with pytest.raises(EnvError, match="train/0.*task sentence.*as code"):
        engine.start(game)
    assert not path.exists()
    monkeypatch.setattr(stock_module, "refuse_code", lambda game: None)
    engine.start(game)  # without the check, TextWorld runs it
    assert path.read_text() == "run"
    engine.close()


@pytest.mark.parametrize(
    ("field", "old", "new"),
    [
        ("grammar", "You open the {r.name}", "You open the {exit()}"),
        ("grammar", "You open the {r.name}", r"You open the \u007bexit()\u007d"),
        ("grammar", "[{o.indefinite + ' ' + o.name |", "[{o.name.upper() |"),
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
    with pytest.raises(EnvError, match="as code"):
        refuse_code(replace(game, **{field: text.replace(old, new)}))


def test_a_grammar_that_differs_from_the_known_ones_in_plain_words_may_be_played():
    game = small_game()
    refuse_code(as_downloaded(game))
    refuse_code(replace(game, grammar=game.grammar.replace("You open the", "You pry open the")))
    with pytest.raises(EnvError, match="grammar cannot be read"):
        refuse_code(replace(game, grammar=game.grammar.replace("action OpenObject", "OpenObject")))
