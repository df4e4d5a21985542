"""The RL step on one page: its loss and gradient are those of `EPOTrainer`."""

import importlib.util
from pathlib import Path

import pytest
import torch
from trainer_kit import GROUP, catch_step, difference, largest, make_episodes, make_model, make_trainer, with_episodes

from epo_trl.objectives import EntropyHistory, beta_schedule

PATH = Path(__file__).parents[1] / "recipes" / "rl_step.py"


@pytest.fixture
def rl_step():
    spec = importlib.util.spec_from_file_location("rl_step", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("past", [(), (3.0, 4.0), (0.5,)], ids=["first", "inside the band", "above the band"])
def test_loss_and_gradient_are_those_of_the_trainer(tmp_path, monkeypatch, rl_step, past):
    """Eight episodes made by hand, one of them aborted; the terms weigh enough to be seen."""
    monkeypatch.setattr(rl_step, "LAMBDA", 0.5)
    steps = 10
    trainer = make_trainer(tmp_path, epo_lambda=0.5, temperature=1.0, max_steps=steps, disable_dropout=True)
    trainer.args.max_steps = 1  # stops after one step
    monkeypatch.setattr(type(trainer), "total_rl_steps", steps)
    loss, gradients = catch_step(with_episodes(trainer), history=past, rl_step=len(past))

    model, history, episodes = make_model().eval(), EntropyHistory(), make_episodes()
    for entropy in past:
        history.append(entropy)
    advantages = rl_step.group_advantages(episodes, GROUP)
    beta = beta_schedule(len(past), steps, start=2.0, end=1.0, decay=3.0)
    found, entropy = rl_step.backward(model, episodes, advantages, history, beta)
    mine = {name: weight.grad for name, weight in model.named_parameters()}
    assert largest(gradients) > 0.1 and difference(gradients, mine) < 1e-5
    assert found == pytest.approx(float(loss), abs=1e-5)
    history.append(entropy)
    assert trainer.methods["epo"].history.reference() == pytest.approx(history.reference(), rel=1e-5)


def test_an_episode_is_compared_with_its_group_alone(rl_step):
    episodes = make_episodes()
    advantages = rl_step.group_advantages(episodes, GROUP)
    assert [advantage == 0 for advantage, e in zip(advantages, episodes, strict=True) if not e.is_usable] == [True]
    for start in (0, GROUP):
        part = torch.tensor(advantages[start : start + GROUP])
        assert part.sum().abs() < 1e-3 and part.abs().max() > 0.5
