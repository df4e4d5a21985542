"""Intervals against hand numbers, reports against counted episodes."""

import json
from dataclasses import replace

import pytest

from epo_trl.errors import InputError
from epo_trl.evaluation import (
    EvalReport,
    Protocol,
    TypeCount,
    format_table,
    get_protocol,
    register_protocol,
    wilson_interval,
)
from epo_trl.evaluation.paired import compare, mcnemar, paired_outcomes, read_reports
from epo_trl.evaluation.protocol import protocol_names
from epo_trl.evaluation.report import LOWER_IS_BETTER
from epo_trl.types import Episode, StopReason, Turn

GOOD = {"name": "mine", "max_turns": 3, "history_length": 2, "temperature": 0.4}


# Wilson. The numbers were worked out by hand with z = 1.959964, z^2 = 3.841459. For 8 of 10:
# centre = (0.8 + 0.192073) / 1.384146 = 0.716740, half-width = 1.959964 / 1.384146 * sqrt(0.016 + 0.009604) = 0.226577.
@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        (8, 10, 0.490163, 0.943317),
        (5, 10, 0.236593, 0.763407),
        (0, 10, 0.0, 0.277533),
        (10, 10, 0.722467, 1.0),
        (0, 0, 0.0, 1.0),
    ],
)
def test_the_wilson_interval_equals_hand_numbers(successes, n, low, high):
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=2e-6)


# Protocols


def test_the_alfworld_protocol_is_that_of_the_paper():
    protocol = get_protocol("alfworld50")
    assert (protocol.max_turns, protocol.history_length, protocol.temperature) == (50, 2, 0.4)
    assert (protocol.success_rule, protocol.context) == ("won", "windowed")
    assert get_protocol("alfworld-tiny20").max_turns == 20


def test_the_scienceworld_protocols_differ_in_turns_and_in_what_is_solved():
    strict30, strict100, released = map(get_protocol, ("strict30", "strict100", "epo-released"))
    assert (strict30.max_turns, strict100.max_turns, released.max_turns) == (30, 100, 30)
    assert strict30.success_rule == strict100.success_rule == "won"
    assert released.success_rule == "ended-with-score"
    assert released.env_options == {**strict30.env_options, "engine_limit": 100}


def test_a_name_cannot_stand_for_two_settings():
    known = get_protocol("alfworld50")
    assert register_protocol(replace(known, description="")) is known
    with pytest.raises(ValueError, match="max_turns: 50 there, 51 now"):
        register_protocol(replace(known, max_turns=51))
    assert get_protocol("alfworld50").max_turns == 50


@pytest.mark.parametrize("name", protocol_names())
def test_every_protocol_is_described_and_survives_json(name):
    protocol = get_protocol(name)
    assert protocol.description
    assert Protocol(**json.loads(json.dumps(protocol.rules()))) == protocol


# Reports

TINY20, STRICT30, ALFWORLD50 = (get_protocol(name) for name in ("alfworld-tiny20", "strict30", "alfworld50"))


def episode(task_type, stop, valid=(True,)):
    turns = tuple(Turn((1,), (2,), "look", "a room", "look", is_valid=is_valid) for is_valid in valid)
    return Episode("iid/0", "tidy up", task_type, turns, stop, won=stop is StopReason.WON)


# pick: 2 of 3 won; heat: 0 of 1. 4 + 2 + 0 + 2 = 8 turns, 3 of them invalid.
EPISODES = [
    episode("pick", StopReason.WON, (True, True, False, True)),
    episode("pick", StopReason.WON, (True, True)),
    episode("pick", StopReason.ABORTED, ()),
    episode("heat", StopReason.TURN_LIMIT, (False, False)),
]


@pytest.fixture
def report():
    return EvalReport.from_episodes(EPISODES, protocol=TINY20, suite="toy", split="iid", seconds=1.5)


def test_a_report_equals_what_one_counts_by_hand(report):
    assert (report.episodes, report.wins, report.success_rate) == (4, 2, 0.5)
    assert report.success_interval == pytest.approx((0.150036, 0.849964), abs=1e-5)
    assert report.macro_success_rate == pytest.approx((2 / 3 + 0) / 2)
    assert report.mean_turns == 2.0
    assert report.won_turns == (2, 4) and report.mean_won_turns == 3.0
    slow = replace(report, won_turns=(9, 17), protocol=replace(TINY20, max_turns=20))
    assert slow.won_within == {10: 1 / 4, 15: 1 / 4, 20: 2 / 4}
    assert format_table([slow], width=160).endswith(
        "iid: 13.0 turns per won game; won within 10: 25.0 %, 15: 25.0 %, 20: 50.0 %; macro success 33.3 %; "
        "ended by won 2, turn_limit 1, aborted 1\n"
    )
    assert report.invalid_action_rate == 3 / 8 and report.to_dict()["protocol"]["max_turns"] == 20
    assert report.stop_reasons == {"won": 2, "turn_limit": 1, "aborted": 1}
    assert {name: (count.episodes, count.wins) for name, count in report.types.items()} == {
        "heat": (1, 0),
        "pick": (3, 2),
    }


def test_scores_and_waits_equal_what_one_counts_by_hand(report):
    def scored(score, *actions):
        turns = tuple(Turn((1,), (2,), "r", "a room", action, is_valid=True) for action in actions)
        return Episode("iid/0", "boil", "boil", turns, StopReason.TURN_LIMIT, score=score)

    # 30 + 0 for the failure + 0 for the aborted one, over 3; 3 of 5 turns waited
    episodes = [scored(30, "wait", "look"), scored(-100, "wait1", "focus on air", "wait"), scored(None)]
    some = EvalReport.from_episodes(episodes, protocol=STRICT30, suite="s", split="iid", seconds=0.0)
    assert (some.mean_score, some.wait_rate) == (10.0, 3 / 5)
    assert (some.scalars()["score"], some.scalars()["wait_actions"]) == (10.0, 0.6)
    assert set(some.scalars()) > set(LOWER_IS_BETTER)
    assert EvalReport.from_dict(json.loads(json.dumps(some.to_dict()))) == some
    row = next(line for line in format_table([some]).splitlines() if line.split()[:1] == ["iid"])
    assert row.split()[6] == "10.0" and "60.0 % of turns wait" in some.notes()
    # without a score there is nothing to show
    assert report.mean_score is None
    assert "score" not in report.scalars()
    assert "score" not in format_table([report])


def test_what_was_aborted_scores_0_and_is_no_kind_of_task():
    """An environment that has failed keeps the score that it had, and before it has begun it says no kind of task."""
    begun = replace(episode("pick", StopReason.ABORTED), score=50.0)
    won = [replace(episode(kind, StopReason.WON), score=100.0) for kind in ("pick", "heat", "heat")]
    counted = [*won, begun, episode("", StopReason.ABORTED, ())]
    report = EvalReport.from_episodes(counted, protocol=STRICT30, suite="s", split="iid", seconds=0.0)
    assert report.mean_score == 300 / 5 and report.success_rate == 3 / 5
    assert report.macro_success_rate == (1 / 2 + 1) / 2
    assert {name for name in report.scalars() if name.startswith("success_rate_")} == {
        "success_rate_low", "success_rate_high", "success_rate_pick", "success_rate_heat"}  # fmt: skip
    assert "(not begun)" in format_table([report])
    alone = EvalReport.from_episodes(counted[-1:], protocol=STRICT30, suite="s", split="iid", seconds=0.0)
    assert alone.macro_success_rate == 0.0 and "success_rate_" not in alone.scalars()


def test_names_in_a_table_are_no_markup():
    kinds = ("[easy]", "[/math]", "mail :bug: x", "[bold]one")
    won = [episode(kind, StopReason.WON) for kind in kinds]
    report = EvalReport.from_episodes(won, protocol=STRICT30, suite="[red]s", split="[/x]", seconds=0.0)
    text = format_table({"[/label]": [report], ":bug:": [report]}, width=160)
    assert all(name in text for name in (*kinds, "[red]s", "[/x]", "[/label]", ":bug:"))


def test_the_scalars_of_a_report_are_its_rates(report):
    scalars = report.scalars()
    assert scalars["success_rate"] == 0.5
    assert (scalars["success_rate_low"], scalars["success_rate_high"]) == report.success_interval
    assert (scalars["success_rate_pick"], scalars["success_rate_heat"]) == (2 / 3, 0.0)
    assert scalars["macro_success_rate"] == pytest.approx(1 / 3)
    assert (scalars["turns"], scalars["invalid_actions"]) == (2.0, 3 / 8)
    assert (scalars["aborted"], scalars["seconds"]) == (0.25, 1.5)
    assert all(isinstance(value, float) for value in scalars.values())


def test_the_table_shows_the_protocol_the_rates_and_the_kinds_of_task(report):
    text = format_table([report])
    assert text.splitlines()[0] == "protocol alfworld-tiny20, suite toy"
    row = next(line for line in text.splitlines() if line.startswith("iid "))
    assert row.split() == ["iid", "4", "50.0", "15.0", "to", "85.0", "2.0", "37.5"]
    assert any("pick" in line and "66.7" in line for line in text.splitlines())
    assert any("heat" in line and "0.0" in line for line in text.splitlines())
    long = replace(
        report, split="valid_seen", types=dict.fromkeys(("", "pick_clean_then_place_in_recep"), TypeCount(140, 137))
    )
    table = format_table({"before RL": [long, long], "after RL": [long]})
    assert " pick_clean_then_place_in_recep" in table
    assert max(map(len, table.splitlines())) <= 80


def test_the_table_keeps_protocols_and_labels_apart(report):
    other = replace(report, protocol=ALFWORLD50)
    text = format_table({"before RL": [report], "after RL": [other]}, width=160)
    assert any("before RL" in line and "alfworld-tiny20" in line for line in text.splitlines())
    assert any("after RL" in line and "alfworld50" in line for line in text.splitlines())


# Two policies on the same games


def played(won, split="iid"):
    """A report whose games have the ids 0, 1, ... and were won where `won` has a 1."""
    episodes = [
        replace(
            EPISODES[1], task_id=str(i), won=won == "1", stop=StopReason.WON if won == "1" else StopReason.TURN_LIMIT
        )
        for i, won in enumerate(won)
    ]
    return EvalReport.from_episodes(episodes, protocol=ALFWORLD50, suite="toy", split=split, seconds=1.0)


# Only the first won 1, only the second won 7: 2 (C(8, 0) + C(8, 1)) / 2^8 = 18 / 256.
FIRST, SECOND = "1" + "0" * 7 + "11" + "0", "0" + "1" * 7 + "11" + "0"


def test_mcnemar_equals_a_hand_number_and_scipy():
    from scipy.stats import binomtest

    assert paired_outcomes(played(FIRST), played(SECOND)) == (2, 1, 7, 1) and mcnemar(1, 7) == 18 / 256
    for only_first, only_second in [(0, 0), (0, 1), (3, 3), (12, 4), (0, 40)]:
        flips = only_first + only_second
        expected = binomtest(only_first, flips).pvalue if flips else 1.0
        assert mcnemar(only_first, only_second) == pytest.approx(expected)


def test_a_comparison_under_two_protocols_names_both():
    first, cold = played("10"), replace(played("01"), protocol=get_protocol("alfworld50").varied(temperature=0.0))
    assert compare([first], {"iid": cold}, "o.json").endswith(
        "; protocol alfworld50, that of the other alfworld50+temperature=0: name: 'alfworld50+temperature=0' there, "
        "'alfworld50' now, temperature: 0.0 there, 0.4 now"
    )
    assert "protocol" not in compare([first], {"iid": first}, "o.json")
    edited = replace(first, protocol=replace(first.protocol, max_turns=40, history_length=0, description="new"))
    assert compare([first], {"iid": edited}, "o.json").endswith(
        "that of the other alfworld50: history_length: 0 there, 2 now, max_turns: 40 there, 50 now"
    )


def test_a_task_that_a_list_repeats_is_paired_in_the_order_of_play():
    one, other = (
        EvalReport.from_episodes(
            [replace(EPISODES[1], task_id="a", won=won) for won in wins], protocol=ALFWORLD50, suite="toy",
            split="iid", seconds=1.0,
        )
        for wins in ((True, False), (False, True))
    )  # fmt: skip
    assert paired_outcomes(one, other) == (0, 1, 1, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"environment": {"games_seed": "1"}}, "games_seed: '1' there, '0' now"),
        ({"contents": {"iid": "b"}}, "the tasks of 'iid' have other contents"),
        ({"report": played("101")}, "iid: 3 games of toy there"),
        ({"report": replace(played("10"), suite="other")}, "iid: 2 games of other there"),
        ({"report": played("10", split="ood")}, "there is no report on 'iid'"),
    ],
    ids=str,
)
def test_reports_on_other_games_are_not_compared(tmp_path, changes, message):
    path, report, lists = tmp_path / "r.json", played("10"), {"iid": ["1", "0"]}
    here = {"environment": {"games_seed": "0"}, "contents": {"iid": "a", "train": "c"}}
    for settings in (here | {"environment": {"games_seed": "0", "of_a_later_version": "1"}}, {}):
        path.write_text(json.dumps({"reports": [report.to_dict()], "settings": settings}))
        assert read_reports(str(path), "toy", lists, here) == {"iid": report}
    found = {"reports": [changes.pop("report", report).to_dict()], "settings": here | changes}
    path.write_text(json.dumps(found))
    with pytest.raises(InputError, match=f"compare_to: expected the same games of toy, got others in .*{message}"):
        read_reports(str(path), "toy", lists, here)


@pytest.mark.parametrize("text", [None, "{", "[]", "{}", '{"reports": [{}]}'])
def test_a_file_that_is_no_evaluation_is_refused(text, tmp_path):
    if text is not None:
        (tmp_path / "r.json").write_text(text)
    with pytest.raises(InputError, match="compare_to: expected a file written by --output"):
        read_reports(str(tmp_path / "r.json"), "toy", {}, {})
