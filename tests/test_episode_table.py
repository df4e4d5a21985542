"""Episodes on the console: each batch once, in as many columns as there are."""

import io

import pytest
from rich.console import Console
from trainer_kit import make_trainer

from epo_trl.evaluation.samples import print_episodes
from epo_trl.trainers import epo_trainer
from epo_trl.types import Episode, StopReason, Turn

SEEN = "You are in the middle of a room. Looking quickly around you, you see a bed 1, a desk 1 and a drawer 1."
SAID = "<think>the mug may be in the drawer</think> <action>go to drawer 1</action>"


def episode(said=SAID):
    turns = (
        Turn((1,), (2,), said, SEEN, "go to drawer 1", True, 0.0),
        Turn((1,), (2,), "go", "Nothing happens.", "go", False, -0.1, error="no action tag"),
    )
    return Episode("train/0", "put a mug on the desk", "find", turns, StopReason.TURN_LIMIT, False, error=None)


@pytest.fixture
def printed(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)

    def run(said=SAID, **console):
        file = io.StringIO()
        print_episodes([episode(said)], step=3, console=Console(file=file, color_system=None, **console))
        return file.getvalue().splitlines()

    return run


def test_output_that_goes_to_a_file_is_not_squeezed_into_80_columns(printed):
    lines = printed()
    assert any("go to drawer 1" in line and "the mug may be" in line for line in lines)
    assert 80 < max(map(len, lines)) <= 160


def test_a_terminal_is_told_nothing_that_it_would_obey(printed):
    evil = "\x1b[31m\x1b]0;title\x07 \r \x9b31m \u202e gnp.exe </script>"
    text = "".join(printed(evil))
    assert not [c for c in text if ord(c) < 32 or 0x7F <= ord(c) < 0xA0 or c == "\u202e"] and "\\x1b[31m" in text


def test_every_batch_is_shown_once_although_the_end_of_training_logs_again(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(epo_trainer, "print_episodes", lambda episodes, step: shown.append((step, len(episodes))))
    trainer = make_trainer(tmp_path, print_episodes=1)
    trainer.model.train()
    for step, batch in ((1, [episode(), episode()]), (2, [episode(), episode()])):
        trainer._to_print, trainer.state.global_step = batch[:1], step
        trainer.log({"loss": 1.0})
    trainer.log({"train_runtime": 1.0})
    assert shown == [(1, 1), (2, 1)]
