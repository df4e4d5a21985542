"""An update that is not finite is skipped and counted; too many in a row end the run with the batch saved."""

import math

import pytest
import torch
from run_kit import EachStep, assert_bit_equal, logged, weights
from trainer_kit import make_ppo, make_trainer

from epo_trl.runs.guards import NonFiniteError, check_skipped, spread_nonfinite
from epo_trl.scoring import row_scorer


def spoil_loss(trainer, value, updates):
    """TRL's policy loss becomes `value` in the second micro-batch of these updates (counted from 0)."""
    original, calls = trainer._compute_loss, iter(range(1000))

    def spoiled(model, inputs):
        loss, call = original(model, inputs), next(calls)
        return loss + value if call // 2 in updates and call % 2 else loss

    trainer._compute_loss = spoiled


def spoil_gradient(trainer, value, updates, part="model"):
    """One gradient of the model, or of the critic, becomes `value` in these updates."""
    parameter = list(getattr(trainer, part).parameters())[-1]
    parameter.register_hook(lambda g: g + value if trainer.state.global_step in updates else g)


def guarded(make, folder, **changes):
    each = EachStep()
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 4}
    return make(folder, callbacks=[each], epo_lambda=0.1, **{**settings, **changes}), each


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "spoil", "max_grad_norm"),
    [
        (make_trainer, lambda trainer, at: spoil_loss(trainer, float("inf"), at), 0.0),
        (make_trainer, lambda trainer, at: spoil_gradient(trainer, float("nan"), at), 1.0),
        (make_ppo, lambda trainer, at: spoil_gradient(trainer, float("inf"), at, "critic"), 1.0),
    ],
    ids=["infinite loss", "NaN in a gradient", "infinity in the critic"],
)
def test_an_update_that_is_not_finite_changes_nothing_and_the_run_goes_on(tmp_path, make, spoil, max_grad_norm):
    trainer, each = guarded(make, tmp_path, max_grad_norm=max_grad_norm)
    spoil(trainer, {1})
    trainer.train()
    start, first, second, third, last = each.seen
    assert_bit_equal(first, second)
    for before, after in ((start, first), (second, third), (third, last)):
        assert any(not torch.equal(before[name], after[name]) for name in before)
    assert all(value.isfinite().all() for value in last.values())
    # the moments and the step count of the optimizer are those of three updates
    assert {int(state["step"]) for state in trainer.optimizer.state.values()} == {3}
    assert logged(trainer, "guard/skipped_updates") == [0, 1, 1, 1]
    assert math.isfinite(logged(trainer, "grad_norm")[2]) and not math.isfinite(logged(trainer, "grad_norm")[1])
    assert not (tmp_path / "_nonfinite").exists()


@pytest.mark.slow
def test_too_many_in_a_row_end_the_run_with_the_batch_saved(tmp_path):
    trainer, each = guarded(make_trainer, tmp_path, max_skipped_updates=2, max_steps=10)
    spoil_loss(trainer, float("nan"), {1, 3, 4})
    with pytest.raises(
        NonFiniteError, match="max_skipped_updates: 2 consecutive updates .* step 4, rank 0: losses .*nan"
    ):
        trainer.train()
    assert_bit_equal(weights(trainer), each.seen[3])
    saved = torch.load(tmp_path / "_nonfinite" / "step_000004_rank0.pt")
    assert saved["step"] == 4 and math.isnan(saved["grad_norm"])
    assert [math.isnan(loss) for loss in saved["losses"]] == [False, True]
    batch = saved["batch"]["inputs"]
    assert len(batch) == 2
    for name, value in trainer._buffered_inputs[1].items():
        torch.testing.assert_close(batch[1][name], value, rtol=0, atol=0, equal_nan=True)
    assert saved["batch"]["step"]["layout"]["turn_ids"].equal(trainer.step.layout.turn_ids)


@pytest.mark.slow
def test_entropies_that_are_not_finite_stay_out_of_the_history(tmp_path, monkeypatch):
    trainer, _ = guarded(make_trainer, tmp_path, max_steps=3)
    original = row_scorer.score_turns

    def spoiled(model, turns, **kwargs):
        scores = original(model, turns, **kwargs)
        if trainer.state.global_step == 1:
            scores.entropy.data.fill_(float("nan"))
        return scores

    monkeypatch.setattr(row_scorer, "score_turns", spoiled)
    trainer.train()
    assert trainer.rl_step == 3 and len(trainer.methods["epo"].history) == 2
    assert logged(trainer, "guard/skipped_updates") == [0, 1, 1]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_loss_that_is_not_finite_has_nan_gradients_only_and_a_finite_one_is_left_alone(value):
    x = torch.ones(3, requires_grad=True)
    spread_nonfinite(x.sum() + value).backward()
    assert x.grad.isnan().all()
    loss = (torch.tensor([1.0, 2.0], requires_grad=True) / 3).sum()
    assert torch.equal(spread_nonfinite(loss), loss)


def test_a_deepspeed_that_used_a_spoilt_gradient_is_an_error():
    check_skipped(math.inf, lambda: True)
    with pytest.raises(NonFiniteError, match="check_grad_overflow: true"):
        check_skipped(math.nan, lambda: False)
