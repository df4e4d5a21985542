"""HGPO, GAGPO, GraphGPO, RLOO, REINFORCE++ and anchors: advantages by hand, over ranks, and by a plain loop."""

import random
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, pstdev, stdev

import pytest
import torch
from method_batches import batch_of_turns, episode_of, run_on_ranks
from trainer_kit import make_trainer

from epo_trl.envs.toy import ToySuite, TreasureHunt
from epo_trl.methods.reinforce import RLOO, ReinforcePlusPlus
from epo_trl.methods.same_state import GAGPO, HGPO, SUCCESS, GiGPO, GraphGPO, distances_to_success
from epo_trl.types import StopReason

ALL = (GiGPO, HGPO, GAGPO, GraphGPO, RLOO, ReinforcePlusPlus)


def per_turn(method, batch):
    """Returns the advantages of the turns, after checking that both tokens of a turn have the same."""
    advantages = method.credit(batch).advantages
    assert torch.equal(advantages[:, ::2], advantages[:, 1::2])
    return advantages[:, ::2]


ONE = episode_of(["a", "b", "c"], [0.0, 0.0, 8.0], won=True)  # returns with gamma 0.5: 2, 4, 8
TWO = episode_of(["a", "b", "a"], [0.0, 0.0, 2.0])  # returns 0.5, 1, 2
THREE = episode_of(["b", "b"], [0.0, 4.0])  # returns 2, 4


def test_hgpo_by_hand():
    """Depth 1: a has returns 2, .5, 2 and b 4, 1, 2, 4. Depth 2: ab has 4, 1; ba, bc, bb are alone. Depth 3: none."""
    batch = batch_of_turns([ONE, TWO, THREE], [0, 0, 0])
    a, b, ab = (pstdev(returns) + 1e-6 for returns in ([2, 0.5, 2], [4, 1, 2, 4], [4, 1]))
    want = [
        [0.5 / a, (2 * 1.25 / b + 3 * 1.5 / ab) / 5, 0.0],
        [-1.0 / a, (2 * -1.75 / b + 3 * -1.5 / ab) / 5, 0.5 / a],
        [-0.75 / b, 1.25 / b, 0.0],
    ]
    torch.testing.assert_close(per_turn(HGPO(gamma=0.5), batch), torch.tensor(want))
    for alpha, second in ((0.0, (1.25 / b + 1.5 / ab) / 2), (5e3, 1.5 / ab), (1e308, 1.5 / ab), (-1e308, 1.25 / b)):
        assert float(per_turn(HGPO(gamma=0.5, alpha=alpha), batch)[0, 1]) == pytest.approx(second)


def test_gagpo_by_hand():
    """V(a) = 1.5, V(b) = 2.75, V(c) = 8, with gamma 0.5. Lambda 0 leaves the differences alone."""
    batch = batch_of_turns([ONE, TWO, THREE], [0, 0, 0])
    deltas = [0.5 * 2.75 - 1.5, 0.5 * 8 - 2.75, 0.0, 0.5 * 2.75 - 1.5, 0.5 * 1.5 - 2.75, 0.5, 0.5 * 2.75 - 2.75, 1.25]
    got = per_turn(GAGPO(gamma=0.5, gae_lambda=0.0), batch)
    want = [(delta - fmean(deltas)) / (stdev(deltas) + 1e-6) for delta in deltas]
    torch.testing.assert_close(got[batch.mask[:, ::2] > 0], torch.tensor(want), rtol=1e-5, atol=1e-6)
    full = per_turn(GAGPO(gamma=0.5, gae_lambda=1.0), batch)  # lambda 1: the return minus the value
    gains = [2 - 1.5, 4 - 2.75, 0.0, 0.5 - 1.5, 1 - 2.75, 0.5, 2 - 2.75, 1.25]
    want = [(gain - fmean(gains)) / (stdev(gains) + 1e-6) for gain in gains]
    torch.testing.assert_close(full[batch.mask[:, ::2] > 0], torch.tensor(want), rtol=1e-5, atol=1e-6)


def test_graph_gpo_by_hand():
    """ONE wins by a -> b -> c: d(c) = 1, d(b) = 2, d(a) = 3. TWO goes b -> a and ends in `end`, at 4 without a path."""
    batch = batch_of_turns([ONE, TWO], [0, 0], [0.7, -0.7])
    got = per_turn(GraphGPO(omega=0.5, step_weight=2.0), batch)
    from_a, from_b = [10 / 2**2, 10 / 2**2, 10 / 2**4], [10 / 2**1, 10 / 2**3]
    a, b = ([(x - fmean(v)) / (stdev(v) + 1e-6) for x in v] for v in (from_a, from_b))
    want = [[0.7 + 2 * a[0], 0.7 + 2 * b[0], 0.7], [-0.7 + 2 * a[1], -0.7 + 2 * b[1], -0.7 + 2 * a[2]]]
    torch.testing.assert_close(got, torch.tensor(want), rtol=1e-5, atol=1e-5)
    lost = batch_of_turns([TWO, THREE], [0, 0], [0.3, -0.3])
    assert per_turn(GraphGPO(), lost).tolist() == [[pytest.approx(0.3)] * 3, [pytest.approx(-0.3)] * 2 + [0.0]]


def test_the_shortest_path_may_join_episodes():
    edges = [("s", "x"), ("x", "s"), ("s", "y"), ("y", "z"), ("z", SUCCESS), ("x", "z"), ("u", "v")]
    assert distances_to_success(edges) == {SUCCESS: 0, "z": 1, "y": 2, "x": 2, "s": 3}
    assert distances_to_success([("a", "b")]) == {}
    assert distances_to_success([(("a",), ("success",))]) == {}, "what an agent reads is no success"


def test_rloo_and_reinforce_by_hand():
    """Rewards 8, 2, 4; the fourth episode is alone in its group."""
    alone = episode_of(["q"], [1.0])
    batch = batch_of_turns([ONE, TWO, THREE, alone], [0, 0, 0, 1])
    got = per_turn(RLOO(), batch)
    assert got[:, 0].tolist() == [pytest.approx(x) for x in (8 - 3, 2 - 6, 4 - 5, 0)]
    tokens = [8.0] * 6 + [2.0] * 6 + [4.0] * 4 + [1.0] * 2
    plain = per_turn(ReinforcePlusPlus(baseline=False), batch)
    assert float(plain[0, 2]) == pytest.approx((8 - fmean(tokens)) / pstdev(tokens), rel=1e-5)
    tokens = [8 - 14 / 3] * 6 + [2 - 14 / 3] * 6 + [4 - 14 / 3] * 4 + [0.0] * 2
    based = per_turn(ReinforcePlusPlus(), batch)
    assert float(based[2, 1]) == pytest.approx((4 - 14 / 3 - fmean(tokens)) / pstdev(tokens), rel=1e-5)
    assert not based[2, 2], "padding has no advantage"


@pytest.mark.parametrize("kind", ALL)
def test_a_group_on_two_ranks_is_one_and_an_aborted_episode_is_in_none(kind):
    """Each rank sees what the whole batch has, after both have sent their parts."""
    broken = episode_of(["a", "b"], [50.0, 50.0], stop=StopReason.ABORTED)
    episodes, groups, given = [ONE, TWO, THREE, broken], [0, 0, 0, 0], [0.5, -0.2, -0.3, 0.0]
    whole = kind().credit(batch_of_turns(episodes, groups, given)).advantages
    without = kind().credit(batch_of_turns(episodes[:3], groups[:3], given[:3])).advantages
    torch.testing.assert_close(whole[:3], without, rtol=0, atol=0)
    assert not whole[3].any()
    parts = [batch_of_turns(episodes[rows], groups[rows], given[rows]) for rows in (slice(0, 1), slice(1, None))]
    found = run_on_ranks(lambda rank, comm: kind().credit(replace(parts[rank], ranks=comm)).advantages)
    torch.testing.assert_close(torch.cat(found), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "method",
    [GiGPO(gamma=1.0), HGPO(gamma=1.0), GAGPO(gamma=1.0), GraphGPO(), RLOO(), ReinforcePlusPlus(),
     ReinforcePlusPlus(baseline=False)],
    ids=lambda method: type(method).__name__,
)  # fmt: skip
def test_the_rounding_of_equal_returns_is_no_advantage(method):
    """Each wins 11 by other increments, as in ScienceWorld: 1 for the score, 10 for success."""
    draw, episodes = random.Random(0), []
    for i in range(8):
        scores = [0, *sorted(draw.sample(range(1, 100), 5)), 100]
        paid = [(after - before) / 100 for before, after in pairwise(scores)]
        seen = ["start", *(f"{i} {turn}" for turn in range(5))]
        episodes.append(episode_of(seen, [*paid[:-1], paid[-1] + 10], won=True))
    equal = method.credit(batch_of_turns(episodes, [0] * 4 + [1] * 4)).advantages
    assert equal.dtype == torch.float32 and not equal.any()
    if not isinstance(method, GraphGPO):  # it does not read rewards
        episodes[0] = episode_of(["start"] + ["better"] * 5, [0.0] * 5 + [11.001], won=True)
        assert method.credit(batch_of_turns(episodes, [0] * 4 + [1] * 4)).advantages.abs().max() > 5e-4


@pytest.mark.parametrize("kind", [GiGPO, HGPO, GAGPO, RLOO, ReinforcePlusPlus])
def test_the_rounding_of_rewards_that_cancel_is_no_advantage(kind):
    """Three penalties of 0.1 and 0.3 for success are 0, as no rewards are; float32 leaves 7e-9."""
    paid = [[-0.1, -0.1, -0.1, 0.3], [0.0] * 4, [0.0] * 4]
    episodes = [episode_of(["start", *(f"{i} {turn}" for turn in range(3))], row) for i, row in enumerate(paid)]
    method = kind() if kind in (RLOO, ReinforcePlusPlus) else kind(gamma=1.0)
    assert not method.credit(batch_of_turns(episodes, [0] * 3)).advantages[:, :2].any()


@pytest.mark.parametrize("kind", [GiGPO, HGPO, GAGPO, GraphGPO])
def test_a_state_key_takes_the_place_of_the_observation(kind):
    """The same texts in two states, and two texts in the same state."""
    rewards = ([0.0, 0.0, 8.0], [0.0, 0.0, 2.0])
    hidden = [
        episode_of(["dark"] * 3, paid, final="dark", keys=keys)
        for paid, keys in zip(rewards, (["s", "t", "u", "end"], ["s", "t", "s", "end"]), strict=True)
    ]
    shown = [episode_of(["s", "t", "u"], rewards[0]), episode_of(["s", "t", "s"], rewards[1])]
    got = kind(anchor="state").credit(batch_of_turns(hidden, [0, 0])).advantages
    assert torch.equal(got, kind().credit(batch_of_turns(shown, [0, 0])).advantages)
    with pytest.raises(ValueError, match="anchor: expected 'observation', got 'state'.*'train/0'.*state_key"):
        kind(anchor="state").credit(batch_of_turns([ONE], [0]))


def test_several_observations_must_be_equal():
    """With two observations, b after a and b after b differ; the first turn compares the one that it has."""
    batch = batch_of_turns([ONE, TWO, THREE], [0, 0, 0])
    got = per_turn(GiGPO(gamma=0.5, scale=False, anchor_turns=2), batch)
    want = [[0.75, 1.5, 0.0], [-0.75, -1.5, 0.0], [0.0, 0.0, 0.0]]  # a: 2, .5; ab: 4, 1; ba, bc, b, bb are alone
    torch.testing.assert_close(got, torch.tensor(want))


class KeyedHunt(TreasureHunt):
    """A hunt that names its state where it is asked to."""

    def reset(self, *, seed=None, options=None):
        self.keyed = options.get("state_key", False)
        return super().reset(seed=seed, options=options)

    def _info(self, state):
        key = {"state_key": f"{state.opened} {state.holding} {state.in_chest}"} if self.keyed else {}
        return super()._info(state) | key


class KeyedSuite(ToySuite):
    def make_env(self):
        return KeyedHunt()


def test_state_keys_are_asked_for_in_training_and_only_by_a_credit_that_compares_states(tmp_path):
    for settings, asked in (({}, False), ({"anchor": "state"}, True)):
        trainer = make_trainer(tmp_path, suite=KeyedSuite(), credit="gigpo", method_kwargs={"gigpo": settings})
        assert trainer.rules.eval_settings.env_options == {}
        (played,) = trainer.play([("train/0", 0)])
        assert bool(played.turns[0].state_key) == bool(played.final_info.get("state_key")) == asked
