"""`epo-trl evaluate --player`: the expert or chance plays the lists of a protocol for its report, without a model."""

import json
import re

import pytest

from epo_trl.cli import evaluation
from epo_trl.envs.alfworld import GeneratedAlfworld
from epo_trl.evaluation import EvalReport, get_protocol
from epo_trl.evaluation.play import protocol_settings
from epo_trl.rollout.running_episode import RunningEpisode

SMALL = ("--environment", "alfworld", "--games", "generated", "--n_train", "8", "--n_iid", "6", "--n_ood", "6")
SMALL += ("--max_receptacles", "12")  # rooms that the expert searches within 50 turns


@pytest.fixture
def evaluate(command, tmp_path, monkeypatch):
    """Returns a function that evaluates a player by the command and returns what it wrote and printed."""
    monkeypatch.setattr(evaluation, "load_player", lambda *_: pytest.fail("a model was loaded"))

    def run(player, *words, name="r.json"):
        code, out, error = command("evaluate", "--player", player, "--output", tmp_path / name, *words)
        assert code == 0, error
        content = json.loads((tmp_path / name).read_text())
        return content["model"], {one["split"]: EvalReport.from_dict(one) for one in content["reports"]}, out

    return run


def counts(reports):
    return {split: [*report.outcomes, *report.won_turns, report.turns] for split, report in reports.items()}


def test_the_expert_of_alfworld_wins_its_lists_within_the_turns_of_the_protocol(evaluate):
    model, reports, out = evaluate("expert", *SMALL)
    assert model == "expert" and set(reports) == {"iid", "ood"}
    for report in reports.values():
        assert (report.protocol, report.suite) == (get_protocol("alfworld50"), "alfworld-generated")
        assert (report.episodes, report.wins, report.invalid_turns) == (6, 6, 0)
        assert len(report.won_turns) == 6 and report.won_turns[-1] <= 50 and report.mean_won_turns > 2
        assert report.notes() in " ".join(out.split())
    limit = reports["iid"].won_turns[2]
    _, short, _ = evaluate("expert", *SMALL, "--max_turns", str(limit), "--parallel", "2", name="short.json")
    for split, report in short.items():
        expected = tuple(turns for turns in reports[split].won_turns if turns <= limit)
        assert report.won_turns == expected and report.protocol.name == f"alfworld50+max_turns={limit}"
        stops = {"won": len(expected), "turn_limit": 6 - len(expected)}
        assert report.stop_reasons == {stop: count for stop, count in stops.items() if count}


def test_chance_takes_admissible_actions_until_the_turns_are_used_up_and_its_seed_decides_them(evaluate):
    few = (*SMALL, "--splits", "iid", "--max_turns", "12")
    model, reports, _ = evaluate("random", *few)
    (report,) = reports.values()
    assert model == "random" and report.invalid_turns == 0 and report.wins < 3
    assert report.turns == sum(report.won_turns) + 12 * (6 - report.wins)
    _, again, _ = evaluate("random", *few, "--parallel", "4", name="again.json")
    assert counts(again) == counts(reports), "whatever plays before an episode"
    replayed, kept = evaluate("random", *few), evaluate("random", *few, "--keep_episodes", "6", name="kept.json")
    assert "nothing was played" in replayed[2] and counts(kept[1]) == counts(reports)


def test_an_expert_plays_as_by_hand(evaluate, tmp_path):
    """The first episode of the list, with the action of each turn."""
    evaluate("expert", *SMALL, "--splits", "iid")
    lines = (tmp_path / "r.json.episodes.jsonl").read_text().splitlines()
    kept = next(each for each in map(json.loads, lines) if each["task_id"] == "iid/0")
    env = GeneratedAlfworld(8, 6, 6, max_receptacles=12).make_env()
    episode = RunningEpisode("iid/0", 0, env, protocol_settings(get_protocol("alfworld50")))
    episode.start()
    for turn in kept["turns"]:
        assert turn["observation"] == episode.observation
        assert turn["action"] in episode.info["admissible_actions"]
        episode.act(turn["action"])
    assert episode.stop == kept["stop"] == "won"


def test_two_players_are_compared_game_by_game(evaluate, tmp_path):
    evaluate("random", *SMALL, "--max_turns", "12")
    against = ("--compare_to", str(tmp_path / "r.json"))
    _, reports, out = evaluate("expert", *SMALL, *against, name="e.json")
    assert out.count("McNemar") == 2 and all(report.wins == 6 for report in reports.values())


@pytest.mark.games
def test_scienceworld_is_played(evaluate, tmp_path):
    words = ("--environment", "scienceworld", "--task_types", "find-animal", "--splits", "iid", "--eval_episodes", "2")
    words += ("--heldout_types", "boil", "--gold_folder", str(tmp_path / "gold"), "--protocol", "strict30")
    model, reports, _ = evaluate("expert", *words)
    (report,) = reports.values()
    assert model == "expert" and report.episodes == report.wins == 2 and report.mean_score == 100
    assert report.protocol.max_turns == 30 and report.turns <= 2 * 30


def test_what_an_environment_lacks_for_a_player_is_said(command, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"hidden": "crane"}) + "\n")
    tools = ("--factory", "word_game:WordGame", "--iid_rows", tmp_path / "rows.jsonl", "--splits", "iid")
    words = ("--environment", "tools", *tools, "--tool_rewards", "word_game:reward_func", "--protocol", "strict30")
    for player, said in (("expert", "has no expert"), ("random", "1 of 1 episodes .*aborted.* lists no actions")):
        code, _, error = command("evaluate", "--player", player, *words)
        assert code == 1 and re.search(said, error)
    error = command("evaluate", "--player", "chance", *SMALL)[2]
    assert "player: expected one of 'model', 'expert', 'random', got 'chance'" in error
