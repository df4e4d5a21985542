"""Curves are read as they were logged, smoothed as one does by hand, and drawn."""

import runpy
from pathlib import Path

import numpy as np
import pytest
from event_files import write_events, write_run
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text

from epo_trl.errors import InputError
from epo_trl.lab.plots import PANELS, TAGS, average_seeds, default_labels, plot_runs, read_run, running_mean

ROOT = Path(__file__).parents[1]


@pytest.fixture
def figures(monkeypatch):
    """Returns the list of figures that are written."""
    written, save = [], Figure.savefig

    def savefig(figure, *args, **how):
        written.append(figure)
        save(figure, *args, **how)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return written


def panels_of(figure):
    """Returns for each panel by its title the texts inside the axes, and the numbers of its lines and bands."""
    return {
        axis.get_title(): ([text.get_text() for text in axis.texts], len(axis.lines), len(axis.collections))
        for axis in figure.axes
    }


def test_a_run_is_read_from_its_subfolders_without_values_that_are_not_finite(tmp_path):
    points = [("train/reward", 2, 5.0, 1.0), ("train/reward", 1, 4.0, 0.5), ("a/b", 1, 3.0, 1.0)]
    write_events(tmp_path / "logs" / "deep", [*points, ("train/reward", 3, float("nan"), 2.0)])
    assert list(read_run(tmp_path)) == ["train/reward"] and list(read_run(tmp_path, None)) == ["train/reward", "a/b"]
    steps, values = read_run(tmp_path)["train/reward"]
    assert (steps.tolist(), values.tolist()) == ([1, 2], [4.0, 5.0])


def test_what_followed_the_checkpoint_from_which_a_run_was_resumed_is_not_drawn(tmp_path):
    """Also where the new attempt has not come as far, or has not been evaluated; a late evaluation drops nothing."""
    old = [("train/reward", step, 1.0, 100.0 + step) for step in range(1, 11)]
    old += [("eval/iid/success_rate", step, 1.0, 100.5 + step) for step in (0, 4, 8)]
    write_events(tmp_path / "b", old)  # the names are chosen so that the older file is read last
    write_events(tmp_path / "a", [("train/reward", step, 2.0, 200.0 + step) for step in (6, 7)])
    write_events(tmp_path / "c", [("eval/ood/success_rate", 7, 3.0, 300.0)])
    curves = read_run(tmp_path)
    assert curves["train/reward"][0].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert curves["train/reward"][1].tolist() == [1.0] * 5 + [2.0] * 2
    assert curves["eval/iid/success_rate"][0].tolist() == [0, 4]


def test_an_evaluation_before_training_drops_nothing(tmp_path):
    old = [("train/reward", step, 1.0, 100.0 + step) for step in range(1, 7)]
    write_events(tmp_path / "a", [*old, ("eval/iid/success_rate", 4, 1.0, 104.5)])
    write_events(tmp_path / "b", [("eval/iid/success_rate", 0, 2.0, 200.0), ("train/reward", 5, 3.0, 301.0)])
    curves = read_run(tmp_path)
    assert [curve.tolist() for curve in curves["train/reward"]] == [[1, 2, 3, 4, 5], [1.0] * 4 + [3.0]]
    assert curves["eval/iid/success_rate"][0].tolist() == [0, 4]


def test_a_folder_of_several_runs_is_no_run(tmp_path):
    """Their steps would make one curve of pieces. Attempts of one run are below its folder `runs`."""
    events = [("train/reward", 1, 4.0, 0.5)]
    for place in ("runs/one/runs/attempt-1", "runs/one/runs/attempt-2", "runs/two/runs/attempt-1"):
        write_events(tmp_path / place, events)
    with pytest.raises(InputError, match=r"run: .*, which holds several \(runs/one, runs/two\)"):
        read_run(tmp_path)
    for place in ("runs/one", "runs/one/runs", "runs/two/runs/attempt-1"):
        assert list(read_run(tmp_path / place)) == ["train/reward"]
    write_events(tmp_path / "runs" / "one" / "round-1" / "runs" / "x", events)
    with pytest.raises(InputError, match=r"\(., round-1\)"):
        read_run(tmp_path / "runs" / "one")


def test_a_long_run_is_read_whole(tmp_path):
    write_events(tmp_path, [("train/reward", step, 0.0, step) for step in range(12_000)])
    assert len(read_run(tmp_path)["train/reward"][0]) == 12_000


def test_the_names_are_those_that_the_hf_trainer_writes(tmp_path):
    from transformers.integrations.integration_utils import rewrite_logs

    logged = ["reward", "env/success_rate", "env/invalid_actions", "entropy/early_turns", "entropy/late_turns"]
    logged += ["eval_iid/success_rate", "eval_ood/success_rate"]
    assert set(rewrite_logs(dict.fromkeys(logged, 0.0))) == set(TAGS)


def test_the_running_mean_looks_back_only_and_begins_where_its_window_is_full():
    assert running_mean(np.array([1.0, 3.0, 5.0, 11.0]), 2).tolist() == [2.0, 4.0, 8.0]
    assert running_mean(np.array([1.0, 3.0]), 10).tolist() == []
    assert running_mean(np.array([4.0, 8.0]), 1).tolist() == [4.0, 8.0]


def test_seeds_are_averaged_where_all_of_them_have_data():
    one = (np.array([0, 10, 20]), np.array([0.0, 1.0, 2.0]))
    two = (np.array([5, 15]), np.array([1.5, 2.5]))
    steps, mean, low, high = average_seeds([one, two])
    assert steps.tolist() == [5, 10, 15]
    assert low.tolist() == [0.5, 1.0, 1.5]
    assert high.tolist() == [1.5, 2.0, 2.5]
    assert mean.tolist() == [1.0, 1.5, 2.0]
    assert len(average_seeds([(np.array([0, 1]), np.zeros(2)), (np.array([5, 6]), np.zeros(2))])[0]) == 0


def test_seeds_of_one_setting_share_a_label_but_not_with_another_folder():
    runs = ["runs/epo-seed1", "runs/epo_seed12", "runs/seed3", "runs/epo-seed1-lr", "runs/reseed-2"]
    assert default_labels(runs) == ["epo", "epo", "seed3", "epo-seed1-lr", "reseed-2"]
    assert default_labels(["grpo/seed0", "epo/seed0", "a/x-seed0", "./a/x-seed1"]) == [
        "grpo/seed0",
        "epo/seed0",
        "a/x",
        "a/x",
    ]


def test_a_plot_averages_seeds_and_shades_their_spread(tmp_path, figures):
    runs = [tmp_path / name for name in ("grpo-seed0", "grpo-seed1", "epo-seed0", "epo-seed1", "epo-seed2")]
    for seed, run in enumerate(runs):
        write_run(run, seed, shift=float("epo" in run.name))
    out = tmp_path / "plots" / "curves.png"
    plot_runs(runs, out)
    seen = panels_of(figures[0])
    assert out.read_bytes().startswith(b"\x89PNG")
    assert seen["training reward"] == ([], 4, 2)  # two labels: two mean lines and two pale ones, two shaded bands
    assert seen[PANELS[2].title] == ([], 8, 4)  # early and late
    assert seen["invalid turns, %"] == ([], 4, 2)
    assert seen["IID success, %"] == ([], 4, 2)  # with the dots of the values before smoothing


@pytest.mark.parametrize(("points", "first"), [(40, 10), (11, 10), (10, 1), (3, 1)])
def test_no_line_begins_with_means_of_a_few_points(tmp_path, monkeypatch, points, first):
    """The second of two points has a mean of two, the thirtieth one of ten: the eye would take both for the same."""
    drawn = []
    plot = Axes.plot
    monkeypatch.setattr(Axes, "plot", lambda axis, x, y, **how: drawn.append((x, y, how)) or plot(axis, x, y, **how))
    for seed in (0, 1):
        rewards = [("train/reward", step, float(step % 3), float(step)) for step in range(1, points + 1)]
        write_events(tmp_path / f"run-seed{seed}", rewards)
    plot_runs([tmp_path / "run-seed0", tmp_path / "run-seed1"], tmp_path / "one.png")
    (steps, values, _), (pale_steps, pale, how) = drawn
    assert (steps[0], steps[-1], pale_steps[0], how["alpha"]) == (first, points, 1, 0.3)
    window = range(first) if first > 1 else range(1)
    assert values[0] == pytest.approx(np.mean([pale[i] for i in window]))


def test_a_panel_without_data_says_so(tmp_path, figures):
    for run, step in (("x-seed1", 50), ("x-seed2", 100)):
        write_events(tmp_path / run, [("train/reward", step, 1.0, 1.0)])
    plot_runs([tmp_path / "x-seed1"], tmp_path / "one.png")
    plot_runs([tmp_path / "x-seed1", tmp_path / "x-seed2"], tmp_path / "two.png")
    one, two = map(panels_of, figures)
    assert one["training reward"][0] == []
    assert one["OOD success, %"][0] == ["not logged by any run\neval/ood/success_rate"]
    assert two["training reward"][0] == ["no common step of the runs of a label\ntrain/reward"]


def test_the_readme_s_picture_has_a_key_and_can_be_read_on_a_phone():
    """At a width of 360 pixels no text is lower than 9; every curve has the colour of a bar that is named."""
    figure = runpy.run_path(str(ROOT / "docs" / "make_trap_figure.py"), run_name="figure")["draw"]()
    figure.draw_without_rendering()
    texts = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    assert min(text.get_fontsize() for text in texts) / 72 * 360 / figure.get_figwidth() >= 9
    curves, bars = figure.axes
    colors = {to_hex(line.get_color()) for line in curves.lines if line.get_linewidth() > 2}
    named = {to_hex(text.get_color()) for text in bars.texts if text.get_fontweight() == "bold"}
    assert len(colors) == 6 and colors == named
    assert [text.get_text() for text in bars.get_legend().texts] == ["over 80 % success", "50 to 80 %", "under 50 %"]
