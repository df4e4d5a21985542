"""A run that would play nothing, or not what was asked for, is refused before its first rollout."""

import pytest
from datasets import Dataset
from trainer_kit import GROUP, ROWS, make_ppo, make_trainer

from epo_trl.envs.toy import ToySuite


class ShortSuite(ToySuite):
    """Lists of chosen lengths; one that has no length is left out."""

    def __init__(self, **lengths):
        super().__init__()
        self.lengths = lengths
        self.splits = tuple(lengths)

    def task_ids(self, split):
        return super().task_ids(split)[: self.lengths[split]]


def tasks(count):
    return Dataset.from_dict({"prompt": [f"train/{i}" for i in range(count)]})


@pytest.mark.parametrize(
    ("make", "changes", "needed"),
    [
        (make_trainer, {}, ROWS // GROUP),
        (make_trainer, {"gradient_accumulation_steps": 3}, 3 * ROWS // GROUP),
        (make_trainer, {"gradient_accumulation_steps": 3, "steps_per_generation": 1}, ROWS // GROUP),
        (make_trainer, {"num_generations": ROWS}, 1),
        (make_ppo, {}, ROWS),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_fewer_tasks_than_one_rl_step_needs_are_refused_and_just_enough_are_taken(tmp_path, make, changes, needed):
    with pytest.raises(ValueError, match=f"expected at least {needed} tasks, .* got {needed - 1} of 'treasure-hunt'"):
        make(tmp_path, train_dataset=tasks(needed - 1), **changes)
    trainer = make(tmp_path, train_dataset=tasks(needed), **changes)
    assert len(trainer.get_train_dataloader()) > 0


@pytest.mark.parametrize(
    ("lengths", "found"),
    [({"iid": 4, "ood": 0}, "{'iid': 4, 'ood': 0}"), ({}, "{}")],
    ids=str,
)
def test_an_evaluation_that_would_play_nothing_is_refused(tmp_path, lengths, found):
    suite = ShortSuite(train=8, **lengths)
    with pytest.raises(ValueError, match=f"suite: .*got 'treasure-hunt' with {found} of them"):
        make_trainer(tmp_path, suite=suite, eval_strategy="steps", eval_steps=1)
    trainer = make_trainer(tmp_path, suite=suite)  # training alone needs no test list
    with pytest.raises(ValueError, match=f"with {found} of them"):
        trainer.evaluate()


@pytest.mark.parametrize(
    ("argument", "advice"),
    [
        ({"tools": [len]}, "methods of a class, for a `ToolSuite`"),
        ({"eval_dataset": tasks(4)}, "the test lists of the suite"),
        ({"rollout_func": len}, "override `play`"),
        ({"environment_factory": ToySuite}, "environments come from the suite .*give it to a `ToolSuite`"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_of_trl_that_have_no_place_here_are_refused_with_what_to_do(tmp_path, argument, advice):
    (name,) = argument
    with pytest.raises(ValueError, match=f"{name}: expected none; .*{advice}"):
        make_trainer(tmp_path, **argument)
    make_trainer(tmp_path, **{name: None})
