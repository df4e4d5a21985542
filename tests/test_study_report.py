"""What the runs of a study came to, and how it is written: numbers by hand, names as data, pictures with many arms."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.axes import Axes

from epo_trl.lab.study.config import Arm, Study
from epo_trl.lab.study.figure import BEHIND, draw
from epo_trl.lab.study.outcomes import judge
from epo_trl.lab.study.record import EvaluationRecord, Record
from epo_trl.lab.study.statistics import Estimate
from epo_trl.lab.study.study_report import (
    differences_table,
    gains_table,
    paper_differences,
    paper_table,
    percent,
    plain,
    points,
    report,
    seeds_table,
    spread,
    thirds_table,
    tokens_table,
    training_table,
    write_report,
)


def study_of(*arms, seeds=(1, 2), **changes):
    listed = tuple(Arm(arm, Path("r.py"), Path("c.yaml"), {}, seeds) for arm in arms)
    return Study(name="s", path=Path("studies/s.yaml"), warm_start=None, arms=listed, baseline=arms[0], **changes)


def record_of(arm, seed, success=(), evaluations=(), begins_with="", left=(), thinned=(), **curves):
    names = {"invalid": "env/invalid_actions", "entropy": "entropy/all_tokens"}
    whole = {"env/success_rate": [*success], **{names.get(name, name): values for name, values in curves.items()}}
    listed = tuple(EvaluationRecord(step, split, "tiny", wins, 10, {}, {}) for step, split, wins in evaluations)
    return Record(arm, seed, {}, "0.1", 1.0, whole if success else {}, dict(thinned), dict(left), listed, begins_with)


def text_of(study, records):
    return report(study, records, picture=False)


def test_a_run_is_judged_by_the_last_steps_of_its_training():
    up = [0.0] * 20 + [0.9] * 20
    study = study_of("a", seeds=(1, 2, 3, 4))
    records = [record_of("a", 1, up), record_of("a", 2, [0.8] * 40), record_of("a", 3, [0.5] * 40),
               record_of("a", 4, [0.9] * 19)]  # fmt: skip
    runs = judge(study, records)
    assert list(runs.success) == pytest.approx([0.9, 0.8, 0.5, math.nan], nan_ok=True)
    assert list(runs.solved) == [True, False, False, False] and not any(runs.trapped)  # above, not at
    # nine values of .9 in ten are .81: nine steps after the 20th
    assert list(runs.solved_at) == pytest.approx([29, 10, math.nan, 10], nan_ok=True)


def test_explosion_and_collapse_are_found_from_the_curves():
    calm, invalid, good = [1.0] * 40, [0.1] * 40, [0.9] * 40
    study = study_of("good", "wild", "back", "dead", seeds=(1,))
    records = [
        record_of("good", 1, good, entropy=calm, invalid=invalid),
        record_of("wild", 1, good, entropy=[1.0] * 5 + [3.0] * 35, invalid=invalid),
        record_of("back", 1, good, entropy=[1.0] * 5 + [3.0] * 34 + [1.0], invalid=invalid),
        record_of("dead", 1, [0.3] * 40, entropy=[1.0] * 3 + [0.2] * 37, invalid=invalid),
    ]
    found = judge(study, records)
    # RL steps 6 to 15
    assert list(found.exploded_at.fillna(0)) == [0, 15, 15, 0] and list(found.exploded) == [False, True, False, False]
    # the running mean over ten is below .3 when one of them is 1.0: (1 + 9 * .2) / 10; RL steps 3 to 12
    assert list(found.collapsed_at.fillna(0)) == [0, 0, 0, 12] and list(found.collapsed) == [False, False, False, True]
    text = training_table(study, judge(study, records))
    assert "| wild | 1 | 90.0 | 1 (21 to 100 %) | 0 | 10 (1) | 1.00 → 3.00 | 10.0 | 1, 1 | 0, 0 |" in text
    assert "→ 2.90 | 10.0 | 1, 0 | 0, 0 |" in text  # the last twenty: (19 * 3 + 1) / 20
    marks = seeds_table(study, judge(study, records))
    assert "| wild | 90.0 **solved** exploded |" in marks and "| back | 90.0 **solved** |" in marks


EVALUATED = [(0, "iid", 2), (0, "ood", 1), (5, "iid", 8), (5, "ood", 5), (10, "iid", 4), (10, "ood", 5), (15, "iid", 6),
             (15, "ood", 6)]  # fmt: skip


def test_the_paper_s_table_by_hand():
    better = [(step, split, wins + (step > 0) * {"iid": 1, "ood": 3}[split]) for step, split, wins in EVALUATED]
    records = [record_of("a", 1, evaluations=EVALUATED), record_of("a", 2, evaluations=EVALUATED),
               record_of("b", 1, evaluations=better)]  # fmt: skip
    study = study_of("a", "b", eval_window=2)
    outcomes = judge(study, records)
    lines = paper_table(outcomes).splitlines()
    assert lines[0] == "| arm | seeds | IID Succ.\\* | IID Succ. | OOD Succ.\\* | OOD Succ. |"
    same = "± 0.0 ({0} to {0})"
    assert lines[2] == f"| before RL | 2 | – | 20.0 {same.format('20.0')} | – | 10.0 {same.format('10.0')} |"
    cells = [f"{value} {same.format(value)}" for value in ("80.0", "50.0", "60.0", "55.0")]
    assert lines[3] == f"| a | 2 | {' | '.join(cells)} |"
    assert lines[4] == "| b | 1 | 90.0 | 60.0 | 90.0 | 85.0 |"
    head, _, row = paper_differences(study, outcomes).splitlines()
    assert head.endswith("OOD Succ.\\* | OOD Succ. | mean of the lists, Succ. |")
    assert row == "| b | 1 | +10.0 | +10.0 | +30.0 | +30.0 | +20.0 |"
    assert "| – | – |" in paper_table(judge(replace(study, eval_window=4), records)).replace("90.0 |", "– |")
    assert training_table(study, outcomes) == "" == thirds_table(outcomes)


def test_the_gain_of_rl_is_from_the_run_s_own_start_and_over_both_lists_of_the_seeds_that_have_both():
    """Gains of a of 10 and 30 points: 20, with a standard error of 10, and t is 12.706 at one degree of freedom."""
    one = [(0, "iid", 2), (0, "ood", 1), (5, "iid", 9), (9, "iid", 3), (9, "ood", 2)]
    records = [record_of("a", 1, evaluations=one), record_of("a", 2, evaluations=[(0, "iid", 1), (9, "iid", 4)]),
               record_of("b", 1, evaluations=[(0, "iid", 5), (0, "ood", 4), (9, "iid", 6), (9, "ood", 6)]),
               record_of("c", 1, evaluations=[(9, "iid", 6), (9, "ood", 6)])]  # fmt: skip
    study = study_of("a", "b", "c")
    lines = gains_table(judge(study, records)).splitlines()
    assert lines[0] == "| arm | seeds | IID Succ. | OOD Succ. | mean of the lists, Succ. |"
    assert lines[2] == "| a | 2 | +20.0 (-107.1 to +147.1) | +10.0 | +10.0 |"
    assert lines[3:] == ["| b | 1 | +10.0 | +20.0 | +15.0 |"]  # c was not played before RL
    assert gains_table(judge(study, [record_of("b", 1, [0.5])])) == ""


def test_entropy_of_choices_and_of_forced_tokens_by_hand():
    """Sixty RL steps are thirty points of two; medians, and a run that logged one of the two alone does not count."""
    choices = {"ref-nucleus/choice_entropy": [1.0, 2.0] + [4.0, 2.0] + [0.0, 1.0] * 28}
    forced = [[0.1, 0.5, 0.3], [0.3, 0.3, 0.1], [0.2, 9.0, 9.0]]
    thinned = [{"rl_step": [20, 40, 60], "ref-nucleus/forced_entropy": each} for each in forced]
    records = [record_of("a", i, [0.5] * 60, thinned=each, **choices) for i, each in enumerate([*thinned, {}])]
    lines = tokens_table(judge(study_of("a", seeds=(0, 1, 2, 3)), records)).splitlines()
    assert lines[2] == "| a | 3 | 1.50 → 3.00 → 0.50 | 0.20 → 0.50 → 0.30 |"


def test_the_order_of_the_thirds():
    thirds = [(5, 6, 9), (9, 8, 7), (5, None, 9)]
    records = [
        record_of("a", seed, left=zip(("first", "middle", "last"), each, strict=True))
        for seed, each in enumerate(thirds)
    ]
    lines = thirds_table(judge(study_of("a", seeds=(0, 1, 2)), records)).splitlines()
    assert lines[2] == "| a | 5 (3 of 3) | 7 (2 of 3) | 9 (3 of 3) | 1 of 2 |"


def test_numbers_and_names_as_they_are_shown():
    assert spread(Estimate(0.95, 0.1, 0.7, 1.2, 3)) == "95.0 ± 10.0 (70.0 to 100.0)"
    assert points(Estimate(-0.00001, 0.1, -1.2, 0.7, 3)) == "0.0 (-120.0 to +70.0)"
    assert points(Estimate(0.1, math.nan, math.nan, math.nan, 1)) == "+10.0"
    assert spread(None) == points(None) == percent(math.nan) == "–"
    assert plain("a|b *c* <d> $x$ [e](f) `g`") == "a\\|b \\*c\\* \\<d\\> \\$x\\$ \\[e\\]\\(f\\) \\`g\\`"


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 4])
def test_any_number_of_arms_with_any_name_is_drawn(tmp_path, count):
    names = [f"arm $x^{{{i}}} | <b>" + "long" * 20 for i in range(count)]
    study = study_of(*names)
    records = [
        record_of(name, seed, [0.1 * (i % 7) for i in range(30)], EVALUATED, entropy=[None, *[1.0] * 29])
        for name in names
        for seed in (1, 2)
    ]
    first = [file.read_bytes() for file in write_report(study, records, tmp_path)]
    assert first[1].startswith(b"\x89PNG") and len(first[1]) < 200_000
    assert [file.read_bytes() for file in write_report(study, records, tmp_path)] == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curves.png", "report.md"]


def test_an_arm_is_drawn_beside_the_baseline_of_its_own_seeds(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Axes, "plot", lambda self, x, y, **style: drawn.append((style["color"], list(y))))
    rates = {("a", 1): 0.2, ("a", 2): 0.6, ("b", 2): 0.5, ("c", 3): 0.4}
    records = [record_of(arm, seed, [rate] * 4) for (arm, seed), rate in rates.items()]
    draw(study_of("a", "b", "c"), records, tmp_path / "x.png")
    assert [values[0] for color, values in drawn if color == BEHIND] == [pytest.approx(60)]  # a's seed 2, beside b


def test_a_study_without_a_run_has_a_report_that_says_so(tmp_path):
    study = study_of("a", "b")
    assert [file.name for file in write_report(study, [], tmp_path)] == ["report.md"]
    text = (tmp_path / "report.md").read_text()
    assert "- a: seeds 1 2\n- b: seeds 1 2\n" in text and "## Training" not in text


def test_the_caveats_count_seeds_and_comparisons():
    study = study_of("a", "b", "c", "d", seeds=(1, 2, 3, 4))
    records = [record_of("a", seed, [0.9] * 20) for seed in (1, 2, 3, 4)] + [record_of("b", 1, [0.9] * 20)]
    text = text_of(study, records)
    assert "an arm is an anecdote: b." in text and "1 to 4 seeds per arm" in text
    assert "Not run on the same seeds as a: b. Seeds differ" in text
    assert "(comparisons: 1)" in text and "same runs of a" not in text
    text = text_of(study, [*records, record_of("c", 5, [0.9] * 20), record_of("d", 2, [0.9] * 20)])
    assert "(comparisons: 2)" in text and "for one comparison, not corrected for 2." in text
    text = text_of(study, records[:4])
    assert "Not run on" not in text and "anecdote" not in text and "- 4 seeds per arm" in text


def test_runs_that_began_with_other_weights_are_named_and_form_no_pairs():
    play = [(0, "iid", 2), (9, "iid", 5)]
    begun = {("a", 1): "x", ("a", 2): "x", ("b", 1): "x", ("b", 2): "y", ("c", 1): "x", ("c", 2): ""}
    records = [record_of(*run, [0.5] * 20, play, weights) for run, weights in begun.items()]
    study = study_of("a", "b", "c")
    text, outcomes = text_of(study, records), judge(study, records)
    assert text.count("began differently") == 1 and "- b and a began differently (seeds 2)" in text
    assert "| b | 1 | 0.0 | 0.0 |\n| c | 2 | 0.0 (" in paper_differences(study, outcomes)
    assert "| b | 1 | 0.0 | " in differences_table(study, outcomes)
    assert "| b | 2 | +30.0 (" in gains_table(outcomes)  # each from its own start


@pytest.mark.parametrize("change", [{"protocol": "greedy"}, {"episodes": 20}, {"rules": "r2"}])
def test_lists_that_were_played_otherwise_are_not_compared(change):
    """The runs of b are pairs in training, and on the list that both played alike. Unknown rules are no other rules."""
    played = [(9, "iid", 6), (9, "ood", 2)]
    records = [record_of(arm, 1, [0.5] * 20, played, "x") for arm in ("a", "b")]
    study, (iid, ood) = study_of("a", "b", seeds=(1,)), records[1].evaluations
    for rules in ("", "r1"):
        records[0] = replace(records[0], evaluations=(iid, replace(ood, rules=rules)))
        assert "| b | 1 | 0.0 | 0.0 | 0.0 | 0.0 | 0.0 |" in paper_differences(study, judge(study, records))
    records[1] = replace(records[1], evaluations=(iid, replace(ood, **change)))
    outcomes, text = judge(study, records), text_of(study, records)
    assert "| b | 1 | 0.0 | 0.0 | – | – | – | – | – |" in paper_differences(study, outcomes)
    assert "| b | 1 | 0.0 |" in differences_table(study, outcomes) and "iid: 10 tasks, protocol `tiny`; ood, " in text
