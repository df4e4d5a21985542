"""Decision tokens and their bonus: choices, metrics, value and gradient by hand."""

import pytest
import torch
from method_batches import batch_of, micro_of

from epo_trl.methods import StepSummary
from epo_trl.methods.decision_bonus import DecisionBonus

ENTROPY = torch.tensor([[0.1, 2.0, 0.3, 9.0], [1.0, 0.0, 9.0, 9.0]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
TURNS = [[0, 0, 1, 1], [0, 0, 0, -1]]


def modified(batch, threshold):
    return DecisionBonus(weight=0.1, threshold=threshold).modify_advantages(batch.entropy, batch)


# ---------------------------------------------------------------------------------------------------------- decisions


@pytest.mark.parametrize(
    ("threshold", "decisions"),
    [
        (0.3, [2.0, 1.0]),  # at the cut a token is forced
        (0.0, [0.1, 2.0, 0.3, 1.0]),
        (5.0, []),
    ],
)
def test_decisions_by_hand(threshold, decisions):
    """What the mask leaves out never counts, whatever its entropy is."""
    got = modified(batch_of(TURNS, entropy=ENTROPY, mask=MASK), threshold).token_annotations["decisions"]
    assert ENTROPY[got].tolist() == pytest.approx(decisions) and not (got & ~MASK.bool()).any()


def test_metrics_by_hand():
    batch = batch_of(TURNS, entropy=ENTROPY, mask=MASK)
    assert modified(batch, 0.5).metrics == pytest.approx(
        {"entropy/decision_tokens": 1.5, "entropy/forced_tokens": 0.4 / 3, "entropy/decision_share": 0.4}
    )
    empty = batch_of(TURNS, entropy=ENTROPY, mask=torch.zeros_like(MASK))
    assert modified(empty, 0.5).metrics == {"entropy/decision_share": 0.0}


# -------------------------------------------------------------------------------------------------------------- bonus


def test_the_bonus_by_hand():
    """Weight 0.6 falling to 0 over 4 RL steps: 0.4 at step 1. Turns of two tokens and of one, then one of two."""
    method = DecisionBonus(weight=0.6, threshold=0.25, schedule="linear", end_weight=0.0)
    advantages = torch.randn(2, 4)
    shaped = method.modify_advantages(advantages, batch_of(TURNS, entropy=ENTROPY, mask=MASK))
    assert shaped.advantages is advantages
    now = (ENTROPY + 1).requires_grad_()  # after an update; which tokens are decisions does not change
    micro = micro_of(TURNS, entropy=now, mask=MASK, num_episodes=2.0, rl_step=1, total_rl_steps=4,
                     token_annotations=shaped.token_annotations)  # fmt: skip
    loss = method.loss(micro)
    assert loss.item() == pytest.approx(-0.4 * (3.0 / 2 / 2 / 2 + 1.3 / 2 / 2 + 2.0 / 2 / 2))
    loss.backward()
    want = torch.tensor([[0.0, 1 / 8, 1 / 4, 0.0], [1 / 4, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(now.grad, -0.4 * want)
    metrics = method.end_rl_step(StepSummary(1.0, {}, rl_step=1, total_rl_steps=4))
    assert metrics == {"decision-bonus/weight": pytest.approx(0.4)}
    assert shaped.metrics["entropy/decision_share"] == pytest.approx(0.6)
