"""GiGPO: advantages worked out by hand, and those of the authors' code."""

import json
from pathlib import Path

import pytest
import torch
from method_batches import batch_of_turns, episode_of

from epo_trl.methods.same_state import GiGPO

ONE = episode_of(["door", "hall"], [0.0, 10.0])  # returns with gamma 0.5: 5, 10
TWO = episode_of(["door", "door"], [1.0, 0.0])  # returns 1, 0
THREE = episode_of(["hall"], [2.0])  # of another group


def test_by_hand():
    """Anchor group `door` of group 0: returns 5, 1, 0; mean 2, deviation sqrt(7). `hall` is alone in each group."""
    batch = batch_of_turns([ONE, TWO, THREE], [0, 0, 1], [0.7, -0.7, 0.1])
    got = GiGPO(gamma=0.5, step_weight=2.0).credit(batch).advantages
    s = 7**0.5
    want = [
        [0.7 + 2 * 3 / s] * 2 + [0.7] * 2,
        [-0.7 + 2 * -1 / s] * 2 + [-0.7 + 2 * -2 / s] * 2,
        [0.1] * 2 + [0.0] * 2,
    ]
    torch.testing.assert_close(got, torch.tensor(want), rtol=0, atol=1e-5)
    plain = GiGPO(gamma=0.5, scale=False).credit(batch).advantages
    torch.testing.assert_close(plain[0], torch.tensor([3.7, 3.7, 0.7, 0.7]))


@pytest.mark.parametrize("scale", [True, False], ids=["mean_std_norm", "mean_norm"])
def test_step_advantages_are_those_of_the_authors_code(scale):
    """Six groups of 3 to 7 episodes with 1 to 9 turns; the file says how its numbers were made."""
    golden = json.loads((Path(__file__).parent / "gigpo_golden.json").read_text(encoding="utf-8"))
    turns = [list(zip(*made["turns"], strict=True)) for made in golden["episodes"]]
    episodes = [episode_of(seen, rewards) for seen, rewards, *_ in turns]
    groups = [made["group"] for made in golden["episodes"]]
    batch = batch_of_turns(episodes, groups, [0.0] * len(episodes))
    got = GiGPO(gamma=golden["gamma"], scale=scale).credit(batch).advantages[:, ::2]  # two tokens a turn
    want = torch.zeros_like(got)
    for i, made in enumerate(golden["episodes"]):
        for k, (_, _, scaled, plain) in enumerate(made["turns"]):
            want[i, k] = scaled if scale else plain
    assert (want != 0).sum() > 100 and want.abs().max() > 1
    torch.testing.assert_close(got, want, rtol=0, atol=5e-6)
