"""When more of a batch is aborted than the limit allows, the run saves its state and stops with one clear error."""

import pytest
from run_kit import logged
from trainer_kit import ROWS, make_trainer

from epo_trl.envs.toy import ToySuite, TreasureHunt
from epo_trl.runs.guards import TooManyAborted

pytestmark = pytest.mark.slow


class BreakingSuite(ToySuite):
    """The games of its first environments fail while `broken` says so."""

    broken = made = 0
    tail = ""

    def make_env(self):
        self.made += 1
        return BreakingHunt(self, self.made - 1)


class BreakingHunt(TreasureHunt):
    def __init__(self, suite, number):
        super().__init__()
        self.suite, self.number = suite, number

    def reset(self, **kwargs):
        if self.number < self.suite.broken:
            raise OSError(f"no such game: {self.number}{self.suite.tail}")
        return super().reset(**kwargs)


def breaking(make, folder, *, rollout, episodes=ROWS, **changes):
    """Returns a trainer in whose n-th rollout so many episodes are aborted."""
    trainer = make(folder, suite=BreakingSuite(), max_steps=4, **changes)
    play, played = trainer.play, []

    def break_and_play(tasks, **kwargs):
        played.append(tasks)
        trainer.suite.broken = episodes * (len(played) == rollout)
        return play(tasks, **kwargs)

    trainer.play = break_and_play
    return trainer


def test_a_run_stops_with_a_checkpoint_and_goes_on_from_it(tmp_path):
    trainer = breaking(make_trainer, tmp_path, rollout=3)
    with pytest.raises(TooManyAborted) as caught:
        trainer.train()
    first, *errors = str(caught.value).splitlines()
    checkpoint = tmp_path / "checkpoint-2"
    assert first.startswith("max_aborted_share: 100% of the episodes of this batch were aborted, 50% are allowed")
    assert f"the state before it is in {checkpoint}. " in first
    assert [line.partition(": ")[2] for line in errors] == [f"OSError: no such game: {i}" for i in range(3)]
    assert all(line.startswith("  rank 0, task 'train/") for line in errors)
    mended = make_trainer(tmp_path, max_steps=4)
    mended.train(resume_from_checkpoint=str(checkpoint))
    assert mended.rl_step == mended.state.global_step == 4
    assert [entry["step"] for entry in mended.state.log_history if "env/aborted" in entry] == [1, 2, 3, 4]


def test_the_limit_itself_is_allowed(tmp_path):
    trainer = breaking(make_trainer, tmp_path, rollout=2, episodes=4, max_aborted_share=0.5)
    trainer.suite.tail = "\x1b[31m"
    said = "50% of the episodes of this batch were aborted; .*OSError: no such game: 0"
    with pytest.warns(UserWarning, match=said) as caught:
        trainer.train()
    assert not any("\x1b" in str(one.message) for one in caught)
    assert logged(trainer, "env/aborted") == [0.0, 0.5, 0.0, 0.0]


def test_first_prompts_that_do_not_fit_stop_the_run_like_aborted_episodes(tmp_path):
    """The task that is looked at before the run fits, the ones that are drawn do not."""
    trainer = make_trainer(tmp_path)
    trainer.rules.context.max_prompt_tokens = 5
    with pytest.raises(TooManyAborted, match="100% of the episodes of this batch were aborted") as caught:
        trainer.train()
    assert "task 'train/" in str(caught.value) and "max_prompt_length leaves no room for its first" in str(caught.value)
    assert trainer.state.global_step == 0 and len(trainer.methods["epo"].history) == 0


@pytest.mark.parametrize(("rollout", "saved"), [(3, ["checkpoint-1"]), (4, [])])
def test_nothing_is_saved_inside_an_optimizer_step(tmp_path, rollout, saved):
    halves = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "steps_per_generation": 2}
    trainer = breaking(make_trainer, tmp_path, rollout=rollout, **halves)  # two batches are one optimizer step
    message = "in .*checkpoint-1" if saved else "nothing was saved inside an optimizer step"
    with pytest.raises(TooManyAborted, match=message):
        trainer.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == saved
