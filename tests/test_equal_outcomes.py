"""PPO on a batch whose episodes do not differ in reward: the policy stays, the critic learns, and the log says so."""

import math
from dataclasses import replace

import pytest
import torch
from gae_batches import CREDITS, batch_of, random_batch
from ppo_kit import inject, paid, parts, step_on
from run_kit import logged
from trainer_kit import catch_step, largest, make_ppo

from epo_trl.methods import Comm, CriticValues
from epo_trl.methods.gae import TokenGAE, TurnGAE
from epo_trl.objectives.gae import turn_edges
from epo_trl.trainers.critic_values import equal_outcomes, whitened
from epo_trl.types import StopReason

NO = math.nan


# --------------------------------------------------------------------------------------------------------- the trainer


@pytest.mark.parametrize("credit", CREDITS)
@pytest.mark.parametrize("normalize", [True, False], ids=["whitened", "plain"])
def test_without_a_reward_the_policy_has_no_gradient_and_the_critic_has(tmp_path, credit, normalize):
    """Values differ from state to state and some episodes are bootstrapped, so lambda-returns differ as well."""
    silent = [paid(*[0.0] * n) for n in (3, 1, 4, 2)]
    trainer, batch, gradients = step_on(
        tmp_path, silent, credit=credit, normalize_advantages=normalize, gamma=0.9, gae_lambda=0.8
    )
    policy, critic = parts(gradients)
    assert largest(policy) == 0.0 and largest(critic) > 0.01
    assert not batch["advantages"].any()
    assert batch["old_values"][batch["value_points"]].std() > 0.1
    assert credit == "outcome" or batch["returns"][batch["value_points"]].std() > 0.1
    assert logged(trainer, "gae/equal_outcomes") == [1.0]


@pytest.mark.parametrize(
    ("episodes", "settings", "equal"),
    [
        ([(0, 0), (0,), (0, 0, 0)], {}, True),
        ([(0, 0), (0,), (0, 0, 1e-9)], {}, False),  # PPO does not know units of reward
        # all won: the sooner the better, but only with a discount
        ([(0, 10), (10,), (0, 0, 10)], {}, True),
        ([(0, 10), (10,), (0, 0, 10)], {"gamma": 0.9}, False),
        ([(0, 10), (0, 10), (0, 10)], {"gamma": 0.9}, True),
        # a price for each turn: equal, however much is still ahead of an early one, as long as all pay it as often
        ([(-0.1, -0.1, -0.1)] * 3, {}, True),
        ([(-0.1, -0.1, -0.1), (-0.1, -0.1), (-0.1, -0.1, -0.1)], {}, False),
        # the same total, paid in another turn
        ([(1, 0), (0, 1), (0, 1)], {}, False),
        # 0.3 in one turn or in two, rounded otherwise
        ([(0.1, 0.2), (0.3,), (0.1, 0.2)], {}, True),
        ([(0.1, 0.2), (0.3,), (0.2, 0.1)], {"credit": "outcome"}, True),
    ],
    ids=str,
)
def test_which_rewards_are_a_difference(tmp_path, episodes, settings, equal):
    trainer, batch, gradients = step_on(tmp_path, [paid(*rewards) for rewards in episodes], **settings)
    assert logged(trainer, "gae/equal_outcomes") == [float(equal)]
    assert (largest(parts(gradients)[0]) == 0.0) is equal is (not batch["advantages"].any())


def test_the_reward_of_an_aborted_episode_is_no_difference(tmp_path):
    episodes = [paid(0.0, 0.0), paid(0.0), paid(0.0, 7.0, stop=StopReason.ABORTED)]
    trainer, _, gradients = step_on(tmp_path, episodes)
    assert logged(trainer, "gae/equal_outcomes") == [1.0] and largest(parts(gradients)[0]) == 0.0


@pytest.mark.parametrize("normalize", [True, False], ids=["whitened", "plain"])
def test_where_outcomes_differ_advantages_are_the_credits_to_the_last_bit(tmp_path, normalize):
    trainer = make_ppo(tmp_path, normalize_advantages=normalize, gamma=0.9, gae_lambda=0.8)
    batches, credits = inject(trainer), []
    original = trainer.methods.credit
    trainer.methods.credit = lambda batch: credits.append((original(batch), batch.mask)) or credits[-1][0]
    catch_step(trainer)
    (credit, mask), advantages = credits[0], batches[0]["advantages"]
    expected = whitened(credit.advantages, mask, lambda sums: sums) if normalize else credit.advantages
    assert torch.equal(advantages, expected) and advantages.any()
    assert logged(trainer, "gae/equal_outcomes") == [0.0]


# -------------------------------------------------------------------------------------------------------- the outcomes


def test_outcomes_by_hand():
    """gamma 0.5, turns of two tokens. One point a turn: 0.5 + 0.5 * 10 = 5.5. Every token one: 0.5 * 10 = 5, and
    0.5 * (0.5 + 0.5 * 5) = 1.5. The third row has no token, the second no second turn."""
    batch = batch_of(
        values=torch.full((3, 4), 99.0),
        turn_rewards=torch.tensor([[0.5, 10.0], [0.5, 0.0], [0.0, 0.0]]),
        final_values=torch.full((3,), 99.0),
        turn_ids=torch.tensor([[0, 0, 1, 1], [0, 0, -1, -1], [0, 0, -1, -1]]),
        mask=torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]),
    )
    by_hand = {TurnGAE: [[5.5, 10], [0.5, NO], [NO, NO]], TokenGAE: [[1.5, 5], [0.25, NO], [NO, NO]]}
    for credit, expected in by_hand.items():
        outcomes = credit(0.5, 0.9).credit(batch).outcomes
        torch.testing.assert_close(outcomes, torch.tensor(expected).double(), equal_nan=True)


@pytest.mark.parametrize("credit", CREDITS)
@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_outcomes_are_the_advantages_of_a_critic_that_is_zero_with_lambda_1(credit, gamma):
    for seed in range(8):
        batch = random_batch(seed)
        nothing = CriticValues(torch.zeros_like(batch.values), torch.zeros_like(batch.final_values))
        zeros = replace(batch, critic=nothing)
        advantages = CREDITS[credit](gamma, 1.0).credit(zeros).advantages
        outcomes = CREDITS[credit](gamma, 0.7).credit(batch).outcomes
        first, _ = turn_edges(batch.turn_ids, batch.mask)
        rows, places = first.nonzero().T
        found = outcomes[rows, batch.turn_ids[rows, places]]
        torch.testing.assert_close(found, advantages[rows, places], rtol=0, atol=1e-10)
        assert int(outcomes.isfinite().sum()) == len(rows)


def on_ranks(*parts):
    """Returns what each of the ranks says whose outcomes these are."""
    rows = [row for part in parts for row in part]
    return [equal_outcomes(torch.tensor(part), Comm(gather=lambda mine: rows)) for part in parts]


def test_a_reward_on_one_rank_is_a_difference_on_all():
    nothing, won = [[0.0, 0.0, 0.0], [0.0, NO, NO]], [[0.0, NO], [10.0, 10.0]]
    assert on_ranks(nothing, nothing) == [True, True]
    assert on_ranks(nothing, won) == on_ranks(won, nothing) == [False, False]
    assert on_ranks([[10.0, 10.0]], [[10.0]], [[NO]]) == [True] * 3, "no rank has a difference, nor have all of them"
    assert on_ranks([[10.0, 10.0]], [[0.0]]) == [False] * 2, "no rank has a difference, but two together have"
