"""VETTA: numbers by hand, loops over turns and tokens, values of two heads in both contexts, and two ranks."""

import math
from dataclasses import replace

import pytest
import torch
from gae_batches import batch_of, chain, close, one_episode, random_batch
from method_batches import record_calls
from run_kit import logged
from trainer_kit import catch_step, make_episodes, make_ppo, with_episodes

from epo_trl.methods import Comm
from epo_trl.methods.gae import VETTA, TurnGAE


def test_a_terminated_episode_by_hand():
    """A_turn is 2.75 and 7 with gamma 0.5 and lambda 0.5; U is 2 and 5 at the second tokens.

    Turn 0: last token 2.75 - 2 = 0.75; first 2 - 0 + 0.5 * 0.75 = 2.375. Turn 1: 7 - 5 = 2; 5 + 0.5 * 2 = 6. The
    targets are V + A_turn at the first tokens and U + A_token at the second ones.
    """
    result = VETTA(0.5, 0.5, token_weight=1.0, token_lambda=0.5).credit(one_episode(0.0))
    close(result.advantages, [2.375, 0.75, 0, 0, 6, 2, 0])
    close(result.returns, [3.75, 2.75, 0, 0, 10, 7, 0])
    assert result.value_mask.tolist() == [[True, True, False, False, True, True, False]]
    half = VETTA(0.5, 0.5, token_weight=0.5, token_lambda=0.5).credit(one_episode(0.0))
    close(half.advantages, [(2.75 + 2.375) / 2, 1.75, 0, 0, 6.5, 4.5, 0])


def slow(batch, weight, gamma, lam, token_lam):
    """Returns advantages and targets, in loops over episodes, turns and tokens."""
    advantages, returns = torch.zeros_like(batch.values), torch.zeros_like(batch.values)
    for b in range(len(batch.values)):
        value, reward = batch.values[b].tolist(), batch.turn_rewards[b].tolist()
        turns = {}
        for t in range(batch.turn_ids.shape[1]):
            if batch.mask[b, t]:
                turns.setdefault(int(batch.turn_ids[b, t]), []).append(t)
        starts = [value[places[0]] for places in turns.values()]
        whole = chain(starts, [reward[k] for k in turns], float(batch.final_values[b]), gamma, lam)
        for a_turn, v, places in zip(whole, starts, turns.values(), strict=True):
            u = [0.0, *(value[t] for t in places[1:])]
            paid = [a_turn * (t == places[-1]) for t in places]
            for t, a_token, before in zip(places, chain(u, paid, 0.0, 1.0, token_lam), u, strict=True):
                advantages[b, t] = (1 - weight) * a_turn + weight * a_token
                returns[b, t] = a_turn + v if t == places[0] else a_token + before
    return advantages, returns


@pytest.mark.parametrize(("weight", "token_lam"), [(1.0, 1.0), (1.0, 0.9), (0.3, 0.0), (0.7, 0.5)])
def test_it_agrees_with_loops_over_turns_and_tokens(weight, token_lam):
    for seed in range(8):
        batch = random_batch(seed)
        advantages, returns = slow(batch, weight, 0.9, 0.8, token_lam)
        result = VETTA(0.9, 0.8, weight, token_lam).credit(batch)
        torch.testing.assert_close(result.advantages, advantages, rtol=0, atol=1e-10)
        torch.testing.assert_close(result.returns, returns, rtol=0, atol=1e-10)
        assert result.advantages.std() > 0.1


def test_both_heads_weigh_the_same_over_all_ranks():
    """Two first tokens and two others here; on another rank six others. Each head has half of the ten tokens."""
    batch = one_episode(0.0)
    assert VETTA().credit(batch).value_weights.tolist() == [[1, 1, 0, 0, 1, 1, 0]]
    both = Comm(sum=lambda own: own + torch.tensor([0.0, 6.0], dtype=own.dtype), count=2)
    weights = VETTA().credit(replace(batch, ranks=both)).value_weights
    close(weights, [2.5, 0.625, 0, 0, 2.5, 0.625, 0])
    alone = batch_of(
        values=torch.ones(1, 2, dtype=torch.float64),
        turn_rewards=torch.ones(1, 2, dtype=torch.float64),
        final_values=torch.zeros(1, dtype=torch.float64),
        turn_ids=torch.tensor([[0, 1]]),
        mask=torch.ones(1, 2),
    )
    close(VETTA().credit(alone).value_weights, [1, 1])


# ------------------------------------------------------------------------------------------------------ in a trainer


@pytest.mark.parametrize("context", ["windowed", "concatenated"])
def test_each_token_has_the_value_of_its_head(tmp_path, context):
    """The first head before the first token of a turn, the second before the others; targets, and a loss of both."""
    trainer = make_ppo(tmp_path, credit="vetta", context=context, bootstrap_truncated=False, epo_lambda=0.0)
    expected = []
    for episode in make_episodes():
        past = []
        expected.append([])
        for turn in episode.turns * episode.is_usable:
            past = [*(past if context == "concatenated" else []), *turn.prompt_ids]
            for i, token in enumerate(turn.response_ids):
                with torch.no_grad():
                    both = trainer.model(input_ids=torch.tensor([past]), values_only=True).state_values[0, -1]
                expected[-1].append(float(both[min(i, 1)]))
                past = [*past, token]
    calls = record_calls(trainer.methods["vetta"], "credit")
    trainer.play = lambda tasks, **kwargs: make_episodes()
    _, gradients = catch_step(trainer)
    ((batch,), given), *_ = calls
    for row, wanted in enumerate(expected):
        assert batch.values[row][batch.mask[row].bool()].tolist() == pytest.approx(wanted, rel=1e-3, abs=1e-3)
    count = sum(map(len, expected))
    assert count == given.value_mask.sum() > 20 and given.value_weights.sum() == pytest.approx(count)
    assert batch.values.std() > 0.5
    heads = {name: value for name, value in gradients.items() if "head" in name and "critic" in name}
    assert len(heads) == 4 and all(value.abs().max() > 1e-3 for value in heads.values())


def test_the_critics_loss_is_the_mean_of_both_heads_losses(tmp_path):
    trainer = make_ppo(
        tmp_path, credit="vetta", bootstrap_truncated=False, epo_lambda=0.0, value_clip=None, max_steps=1
    )
    calls = record_calls(trainer.methods["vetta"], "credit")
    with_episodes(trainer).train()
    ((batch,), given), *_ = calls
    errors = 0.5 * (batch.values - given.returns).square()
    first = given.value_mask & (given.returns == TurnGAE(1.0, 1.0).credit(batch).returns)
    inside = given.value_mask & ~first
    expected = (errors[first].mean() + errors[inside].mean()) / 2
    assert logged(trainer, "critic/value_loss")[0] == pytest.approx(float(expected), rel=1e-3)
    assert not math.isclose(float(errors[first].mean()), float(errors[inside].mean()), rel_tol=0.05)
