"""Generalized advantage estimation: numbers worked out by hand, a slow reference, and what each credit leaves alone."""

from dataclasses import replace

import pytest
import torch
from gae_batches import CREDITS, RESPONSE, batch_of, chain, close, one_episode, random_batch

from epo_trl.methods import Batch, CriticValues
from epo_trl.methods.gae import OutcomeGAE, TokenGAE, TurnGAE
from epo_trl.objectives import value_loss
from epo_trl.objectives.gae import turn_edges


def test_turn_credit_of_a_terminated_episode_by_hand():
    """gamma 0.5, lambda 0.5. Turn 1: 10 + 0.5 * 0 - 3 = 7. Turn 0: 0.5 + 0.5 * 3 - 1 + 0.25 * 7 = 2.75."""
    result = TurnGAE(0.5, 0.5).credit(one_episode(0.0))
    close(result.advantages, [2.75, 2.75, 0, 0, 7, 7, 0])
    close(result.returns, [3.75, 0, 0, 0, 10, 0, 0])
    assert result.value_mask.tolist() == [[True, False, False, False, True, False, False]]


def test_token_credit_of_a_terminated_episode_by_hand():
    """gamma 1, lambda 0.5. Last: 10 - 5 = 5. Before it: 5 - 3 + 0.5 * 5 = 4.5. Over the environment's two tokens:
    0.5 + 3 - 2 + 0.5 * 4.5 = 3.75. First: 2 - 1 + 0.5 * 3.75 = 2.875."""
    result = TokenGAE(1.0, 0.5).credit(one_episode(0.0))
    close(result.advantages, [2.875, 3.75, 0, 0, 4.5, 5, 0])
    close(result.returns, [3.875, 5.75, 0, 0, 7.5, 10, 0])
    assert torch.equal(result.value_mask, torch.tensor([RESPONSE]).bool())


@pytest.mark.parametrize("final_value", [0.0, 8.0])
def test_outcome_credit_pays_every_turn_the_whole_reward_and_never_bootstraps(final_value):
    """gamma 1, lambda 0.5, both turns are paid 10.5. Turn 1: 5.5, then 2 + 2.75. Turn 0: 8.5, then 1 + 4.25."""
    result = OutcomeGAE(1.0, 0.5).credit(one_episode(final_value))
    close(result.advantages, [5.25, 8.5, 0, 0, 4.75, 5.5, 0])
    close(result.returns, [6.25, 10.5, 0, 0, 7.75, 10.5, 0])


def test_a_turn_of_one_token_is_its_first_and_its_last():
    turn_ids, mask = torch.tensor([[0, 1, 1, 2, 2, -1]]), torch.tensor([[1, 0, 1, 1, 1, 0]])
    first, last = turn_edges(turn_ids, mask)
    assert first.tolist() == [[True, False, True, True, False, False]]
    assert last.tolist() == [[True, False, True, False, True, False]]


# ------------------------------------------------------------------------------------------------- slow reference


def slow(batch: Batch, credit: str, gamma: float, lam: float):
    """Returns advantages and returns, in loops over episodes, turns and tokens."""
    advantages, returns = torch.zeros_like(batch.values), torch.zeros_like(batch.values)
    for b in range(len(batch.values)):
        value, reward = batch.values[b].tolist(), batch.turn_rewards[b].tolist()
        end = float(batch.final_values[b])
        turns: dict[int, list[int]] = {}
        for t in range(batch.turn_ids.shape[1]):
            if batch.mask[b, t]:
                turns.setdefault(int(batch.turn_ids[b, t]), []).append(t)
        tokens = [t for places in turns.values() for t in places]
        if credit == "turn":
            result = chain([value[p[0]] for p in turns.values()], [reward[k] for k in turns], end, gamma, lam)
            for a, places in zip(result, turns.values(), strict=True):
                advantages[b, places] = a
                returns[b, places[0]] = a + value[places[0]]
            continue
        if credit == "token":
            paid = [reward[k] * (t == places[-1]) for k, places in turns.items() for t in places]
            result = chain([value[t] for t in tokens], paid, end, gamma, lam)
        else:
            result = []
            for places in turns.values():
                paid = [sum(reward) * (t == places[-1]) for t in places]
                result += chain([value[t] for t in places], paid, 0.0, gamma, lam)
        for t, a in zip(tokens, result, strict=True):
            advantages[b, t], returns[b, t] = a, a + value[t]
    return advantages, returns


@pytest.mark.parametrize("credit", CREDITS)
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.95), (1.0, 0.0), (0.0, 1.0), (0.7, 0.3)])
def test_every_credit_agrees_with_loops_over_turns_and_tokens(credit, gamma, lam):
    for seed in range(8):
        batch = random_batch(seed)
        advantages, returns = slow(batch, credit, gamma, lam)
        result = CREDITS[credit](gamma, lam).credit(batch)
        torch.testing.assert_close(result.advantages, advantages, rtol=0, atol=1e-10)
        torch.testing.assert_close(result.returns, returns, rtol=0, atol=1e-10)
        assert result.advantages.abs().max() > 0.1
        assert not result.value_mask[0].any(), "the row of an aborted episode: no sampled token"


@pytest.mark.parametrize("credit", CREDITS)
def test_only_values_at_decision_points_count_and_an_episode_does_not_see_its_neighbours(credit):
    batch = random_batch(3)
    result = CREDITS[credit](0.9, 0.8).credit(batch)
    critic = CriticValues(torch.where(result.value_mask, batch.values, 1e6), batch.final_values)
    changed = replace(batch, critic=critic)
    assert torch.equal(CREDITS[credit](0.9, 0.8).credit(changed).advantages, result.advantages)
    row = {name: getattr(batch, name)[4:5] for name in ("values", "turn_rewards", "final_values", "turn_ids", "mask")}
    alone = batch_of(**row)
    assert torch.equal(CREDITS[credit](0.9, 0.8).credit(alone).advantages, result.advantages[4:5])


# ----------------------------------------------------------------------------------------------------- the value loss


def test_value_loss_by_hand():
    """Old value 1, clip 0.5, target 4. At 3: (3 - 4)^2 against (1.5 - 4)^2. At 1.2 both are the same. Target 0 at 3:
    9 against 2.25, so moving the wrong way is not forgiven."""
    values = torch.tensor([3.0, 1.2, 3.0], requires_grad=True)
    loss, clipped = value_loss(values, torch.ones(3), torch.tensor([4.0, 4.0, 0.0]), clip=0.5)
    torch.testing.assert_close(loss, torch.tensor([3.125, 3.92, 4.5]))
    assert clipped.tolist() == [True, False, False]
    loss.sum().backward()
    torch.testing.assert_close(values.grad, torch.tensor([0.0, -2.8, 3.0]))
    loss, clipped = value_loss(values, torch.ones(3), torch.tensor([4.0, 4.0, 0.0]))
    torch.testing.assert_close(loss, torch.tensor([0.5, 3.92, 4.5]))
    assert not clipped.any()
