"""RLVMR: tags and their rewards, advantages worked out by hand, and over ranks."""

import math

import pytest
import torch
from method_batches import batch_of_turns

from epo_trl.methods import Comm, StepSummary
from epo_trl.methods.rlvmr import RLVMR, find_tag, tag_rewards
from epo_trl.rollout import PromptTemplate
from epo_trl.types import Episode, StopReason, Turn


def said(tag, action="go north"):
    return f"<{tag}> so and so </{tag}> <action>{action}</action>"


def episode(*turns, won=False, stop=StopReason.TURN_LIMIT):
    """Returns an episode of `(tag, action, whether it is valid)` turns with two tokens each."""
    made = (Turn((1,), (2, 3), said(tag, action), "", action, valid) for tag, action, valid in turns)
    return Episode("train/0", "", "", tuple(made), stop, won=won)


@pytest.mark.parametrize(
    ("response", "tag"),
    [
        (said("planning"), "planning"),
        ("<Explore>What is here?</EXPLORE> then <Action>look</action>", "explore"),
        ("<think><monitor>fine</monitor></think><action>look</action>", "monitor"),
        ("<think>fine</think><action>look</action>", ""),
        ("<planning>a</planning><explore>b</explore><action>look</action>", ""),
        ("<planning>a</planning><planning>b</planning><action>look</action>", ""),
        ("<planning> </planning><action>look</action>", ""),
        ("<planning>never closed <action>look</action>", ""),
        ("<action>look</action><monitor>too late</monitor>", ""),
        ("", ""),
    ],
)
def test_a_response_has_exactly_one_tag_with_a_text_before_the_action(response, tag):
    assert find_tag(response) == tag


def test_what_each_tag_is_paid_for():
    """The second exploration repeats an action; the first reflection follows no failure, the last repeats one."""
    turns = [
        ("planning", "a", True), ("explore", "b", True), ("explore", "a", True), ("explore", "nonsense", False),
        ("reflection", "c", True), ("reflection", "d", True), ("monitor", "bad", False), ("reflection", "bad", False),
    ]  # fmt: skip
    for won in (True, False):
        assert [reward for _, reward in tag_rewards(episode(*turns, won=won))] == [won, 1, 0, 0, 1, 0, 0, 0]
    assert list(tag_rewards(episode(("think", "a", True)))) == [("", 0.0)]


def test_a_turn_that_is_not_valid_has_no_tag_and_earns_nothing():
    """Not in a won episode, not a new action; what it tried in vain is still new, and reflection needs a failure."""
    turns = [("planning", "a", False), ("explore", "a", True), ("explore", "a", True), ("explore", "b", False)]
    assert list(tag_rewards(episode(*turns, won=True))) == [("", 0), ("explore", 1), ("explore", 0), ("", 0)]
    assert list(tag_rewards(episode(("reflection", "a", True), won=True))) == [("reflection", 0)]


def test_the_penalty_is_for_valid_turns_without_a_tag():
    turns = episode(("planning", "a", True), ("think", "a", True), ("think", "a", False))
    assert RLVMR().turn_rewards(turns) == [0.0, -0.1, 0.0]


ONE = episode(("planning", "a", True), ("explore", "b", True), won=True)
TWO = episode(("planning", "a", True), ("explore", "a", True))
THREE = episode(("planning", "a", True), ("reflection", "a", True))


def test_by_hand():
    """Planning: 1, 0, 0, so mean 1/3 and deviation sqrt(1/3). Exploring: 1, 0. The reflection is alone."""
    got = RLVMR(alpha=0.25).credit(batch_of_turns([ONE, TWO, THREE], [0] * 3, [0.8, -0.4, -0.4])).advantages
    high, low, both = 2 / 3**0.5, -1 / 3**0.5, 1 / 2**0.5
    want = [
        [0.2 + 0.75 * high] * 2 + [0.2 + 0.75 * both] * 2,
        [-0.1 + 0.75 * low] * 2 + [-0.1 - 0.75 * both] * 2,
        [-0.1 + 0.75 * low] * 2 + [-0.1] * 2,
    ]
    torch.testing.assert_close(got, torch.tensor(want), rtol=0, atol=1e-5)


def test_metrics_by_hand():
    """Of twelve turns three plan (one is paid), two explore (one is paid), two have no valid tag."""
    four = episode(*[("monitor", "a", True)] * 4, ("think", "a", True), ("planning", "bad", False))
    method = RLVMR()
    method.credit(batch_of_turns([ONE, TWO, THREE, four], [0] * 4, [0.0] * 4))
    shares = {"planning": 3 / 12, "explore": 2 / 12, "reflection": 1 / 12, "monitor": 4 / 12, "reward": 2 / 12}
    assert method.end_rl_step(StepSummary(math.nan, {})) == {f"rlvmr/{name}": share for name, share in shares.items()}


def test_tags_are_compared_over_all_ranks_and_counted_over_them():
    whole = RLVMR().credit(batch_of_turns([ONE, TWO, THREE], [0] * 3, [0.8, -0.4, -0.4])).advantages
    there = [turn for e in (TWO, THREE) for turn in tag_rewards(e)]
    method = RLVMR()
    here = method.credit(batch_of_turns([ONE], [0] * 1, [0.8], Comm(gather=lambda seen: seen + there, count=2)))
    torch.testing.assert_close(here.advantages, whole[:1])
    two = Comm(sum=lambda counts: counts + torch.tensor([2.0, 0, 1, 1, 0, 0]), count=2)
    metrics = method.end_rl_step(StepSummary(math.nan, {}, two))
    shares = {"planning": 0.5, "explore": 0.5, "reflection": 0.0, "monitor": 0.0, "reward": 0.5}
    assert metrics == {f"rlvmr/{name}": share for name, share in shares.items()}


def test_the_template_that_ships_asks_for_the_tags():
    template = PromptTemplate.load("general_tags")
    for text in (template.first, template.next, template.followup):
        assert all(f"<{tag}> </{tag}>" in text for tag in ("planning", "explore", "reflection", "monitor"))
        assert "<think>" not in text and "<action> </action>" in text
