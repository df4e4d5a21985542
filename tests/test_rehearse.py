"""`make rehearse`: several processes learn what one process learns, and a difference is found."""

import copy
import sys

import forked
import pytest
import rehearse
import torch
from rehearse import ALONE, KINDS, compare


def left():
    """Returns what three runs leave that learn the same."""
    steps = [{"loss": 0.5, "grad_norm": 2.0, "advantages": [1.0, -1.0], "largest": 1.0} for _ in range(2)]
    weights = {"weights": {"w": torch.ones(4)}, "start": {"w": torch.zeros(4)}}
    return {
        way: copy.deepcopy({"kind": kind, "processes": 1 if way == ALONE else 8, "steps": steps, **weights})
        for way, kind in KINDS.items()
    }


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda run: run["steps"][1].update(loss=0.5002), "ZeRO-3, RL step 2: loss is 0.5002, in one process 0.5"),
        (lambda run: run["steps"][0].update(grad_norm=float("nan")), "ZeRO-3, RL step 1: grad_norm is nan"),
        (
            lambda run: run["steps"][0].update(advantages=[1.0, -1.1]),
            "ZeRO-3, RL step 1: an advantage differs by 1.0e-01",
        ),
        (lambda run: run["weights"]["w"].mul_(1.01), "ZeRO-3: the final weights differ by 1.0e-02"),
        (lambda run: run.update(kind="MULTI_CPU"), "ZeRO-3: ran as MULTI_CPU with 8 processes"),
        (lambda run: run.update(processes=1), "ZeRO-3: ran as DEEPSPEED with 1 processes"),
    ],
)
def test_a_difference_is_named(change, line):
    runs = left()
    change(runs["ZeRO-3"])
    _, (wrong,) = compare(runs, 8)
    assert wrong.startswith(line)


@pytest.mark.slow
def test_two_processes_rehearse(tmp_path, monkeypatch, capsys):
    """Under ZeRO-3, as `make rehearse` does with eight, which also does it under DDP."""
    pytest.importorskip("deepspeed")

    def in_a_fork(words, log):  # accelerate, too, which starts programs
        assert forked.run(words, cwd=tmp_path, log=log).returncode == 0, log.read_text()[-3000:]

    monkeypatch.setattr(rehearse, "run", in_a_fork)
    monkeypatch.setattr(rehearse, "CONFIGS", {"ZeRO-3": "zero3"})
    monkeypatch.setattr(rehearse.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["rehearse.py", "--processes", "2"])
    with pytest.raises(SystemExit) as end:
        rehearse.main()
    said = capsys.readouterr().out
    assert end.value.code == 0, said
    assert "| ZeRO-3 | 2 | 2 |" in said and "the same: loss and gradient norm" in said
