"""ArCHer: targets, updates and advantages by hand, and features of turns against plain forward passes."""

from dataclasses import replace

import pytest
import torch
from method_batches import batch_of_turns, episode_of, record_calls
from run_kit import assert_bit_equal, logged, weights
from trainer_kit import difference, make_episodes, make_model, make_trainer, saved

from epo_trl.methods import Comm, StepSummary, TurnFeatures
from epo_trl.methods.archer import ArCHer, Transitions, TwinCritics, transitions
from epo_trl.types import StopReason

WIDTH = 3


def settings(**changes):
    return ArCHer(**{"hidden_size": 16, "critic_epochs": 2, "batch_size": 4, "replay_size": 100, **changes})


def some_transitions(count=6, seed=0):
    draw = torch.Generator().manual_seed(seed)
    states, actions, following = (torch.randn(count, WIDTH, generator=draw) for _ in range(3))
    return Transitions(states, actions, torch.rand(count, generator=draw), following, torch.arange(count) % 3 == 2)


class Known:
    """Heads whose values are given."""

    def __init__(self, q, v):
        self.values = torch.tensor(q), torch.tensor(v)

    def q(self, states, actions):
        return self.values[0]

    def v(self, states):
        return self.values[1]


# ------------------------------------------------------------------------------------------------------- the critics


def test_goals_by_hand():
    """0.9 * 3 + 1 = 3.7; nothing comes after the second turn; V is drawn to what the targets' Q is, twin by twin."""
    critics = TwinCritics(settings(), some_transitions(2))
    critics.targets = Known([[5.0, 1.0], [4.0, 2.0]], [[3.0, 9.0], [5.0, 9.0]])
    some = Transitions(*(torch.zeros(2, WIDTH),) * 2, torch.tensor([1.0, 2.0]), torch.zeros(2, WIDTH),
                       torch.tensor([False, True]))  # fmt: skip
    q_goal, v_goal = critics.regression_targets(some)
    torch.testing.assert_close(q_goal, torch.tensor([[3.7, 2.0], [5.5, 2.0]]))
    assert torch.equal(v_goal, torch.tensor([[5.0, 1.0], [4.0, 2.0]]))


def test_all_values_are_zero_at_first_so_the_first_losses_are_those_of_the_rewards():
    some = some_transitions()
    critics = TwinCritics(settings(), some)
    assert not critics.q(some.states, some.actions).any() and not critics.v(some.states).any()
    losses = critics.update(some)
    assert losses.tolist() == pytest.approx([some.rewards.square().mean().item(), 0.0])
    assert critics.q(some.states, some.actions).any() and not critics.v(some.states).any()


def test_targets_move_a_tenth_of_the_way():
    critics = TwinCritics(settings(), some_transitions())
    for _ in range(3):
        before = [p.clone() for p in critics.targets.parameters()]
        critics.update(some_transitions())
        for old, target, own in zip(before, critics.targets.parameters(), critics.heads.parameters(), strict=True):
            torch.testing.assert_close(target, 0.9 * old + 0.1 * own)
    assert any((a != b).any() for a, b in zip(before, critics.targets.parameters(), strict=True))


def test_an_update_is_adams_on_the_squared_errors_of_both_twins():
    some, step = some_transitions(), 1e-2
    critics, plain = (TwinCritics(settings(learning_rate=step), some) for _ in range(2))
    for one in (critics, plain):
        one.heads.load_state_dict({k: v + 0.1 for k, v in one.heads.state_dict().items()})
    q_goal, v_goal = plain.regression_targets(some)
    adam = torch.optim.Adam(plain.heads.parameters(), lr=step)
    q_losses = ((plain.q(some.states, some.actions) - q_goal) ** 2).mean(1)
    v_losses = ((plain.v(some.states) - v_goal) ** 2).mean(1)
    (q_losses.sum() + v_losses.sum()).backward()
    adam.step()
    assert critics.update(some).tolist() == pytest.approx([q_losses.mean().item(), v_losses.mean().item()], rel=1e-5)
    for mine, theirs in zip(critics.heads.parameters(), plain.heads.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_the_replay_holds_the_newest():
    critics = TwinCritics(settings(replay_size=5), some_transitions(4))
    parts = [some_transitions(4, seed) for seed in (0, 1)]
    for part in parts:
        critics.add(part)
    assert torch.equal(critics.replay.rewards, torch.cat([parts[0].rewards[3:], parts[1].rewards]))
    assert torch.equal(critics.replay.ends, torch.tensor([False, False, False, True, False]))


def test_features_are_seen_in_deviations_of_the_first_batch():
    """Two turns at 1 and 3: mean 2, deviation 1. The third feature has none of its own: a tenth of the typical one."""
    states = torch.tensor([[1.0, 10.0, 4.0], [3.0, 30.0, 4.0]])
    first = some_transitions(2)._replace(states=states, actions=torch.zeros(2, WIDTH))
    critics = TwinCritics(settings(), first)
    typical = ((1 + 100) / 3) ** 0.5
    assert critics.center[0].tolist() == [2.0, 20.0, 4.0]
    assert critics.scale[0].tolist() == pytest.approx([max(1.0, 0.1 * typical), 10.0, 0.1 * typical])
    seen = []
    critics.heads.v = lambda states: seen.append(states) or torch.zeros(2, len(states))
    critics.v(torch.tensor([[2.0, 30.0, 400.0]]))
    assert seen[0].tolist() == [[0.0, 1.0, 5.0]], "never further away than five deviations"


def test_copies_that_are_fed_equally_stay_equal_and_draw_no_random_number_of_others():
    copies = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        state = torch.random.get_rng_state()
        critics = TwinCritics(settings(), some_transitions())
        for rl_step in range(3):
            critics.add(some_transitions(seed=rl_step))
            critics.learn(rl_step)
        assert torch.equal(state, torch.random.get_rng_state())
        copies.append(critics.heads.state_dict())
    assert_bit_equal(*copies)
    other = TwinCritics(settings(seed=1), some_transitions())
    assert difference(other.heads.state_dict(), copies[0]) > 0.01


# --------------------------------------------------------------------------------------------------------- the credit


EPISODES = [
    episode_of("ab", [0.5, 10.0], stop=StopReason.WON),
    episode_of("ab", [-0.1, 0.0], stop=StopReason.TURN_LIMIT),
    episode_of("a", [7.0], stop=StopReason.ABORTED),
    episode_of("a", [1.0], stop=StopReason.LOST),
]


def batch_of(episodes=EPISODES, **changes):
    """Returns a batch with 10 i + k as the features of turn k of episode i, and 100 more of its action."""
    batch = batch_of_turns(episodes, [0] * len(episodes))
    there = batch.mask[:, ::2].bool()
    number = 10.0 * torch.arange(len(episodes)).unsqueeze(1) + torch.arange(there.shape[1])
    states = (number * there).unsqueeze(2).expand(-1, -1, WIDTH)
    features = TurnFeatures(states, (states + 100) * there.unsqueeze(2), there)
    return replace(batch, turn_features=features, **changes)


def test_what_came_of_each_turn_by_hand():
    got = transitions(batch_of(), cut_ends=True)
    assert got.states[:, 0].tolist() == [0, 1, 10, 11, 30]
    assert got.actions[:, 2].tolist() == [100, 101, 110, 111, 130]
    assert got.rewards.tolist() == pytest.approx([0.5, 10.0, -0.1, 0.0, 1.0])
    assert got.ends.tolist() == [False, True, False, True, True]
    assert [state for state, end in zip(got.next_states[:, 1].tolist(), got.ends, strict=True) if not end] == [1, 11]
    open_end = transitions(batch_of(), cut_ends=False)
    assert open_end.states[:, 0].tolist() == [0, 1, 10, 30] and open_end.ends.tolist() == [False, True, False, True]


def known_credit(monkeypatch):
    """Lets five turns have known values."""
    q, v = (
        [[5.0, 1.0, 0.0, 3.0, 3.0], [4.0, 2.0, 1.0, 3.0, 4.0]],
        [[2.0, 0.0, 4.0, 1.0, 1.0], [3.0, 1.0, 4.0, 1.0, 0.0]],
    )
    monkeypatch.setattr(TwinCritics, "learn", lambda self, rl_step: (0.25, 0.75))
    monkeypatch.setattr(TwinCritics, "q", lambda self, states, actions: torch.tensor(q))
    monkeypatch.setattr(TwinCritics, "v", lambda self, states: torch.tensor(v))


def test_advantages_and_metrics_by_hand(monkeypatch):
    """min Q is 4, 1, 0, 3, 3, min V 2, 0, 4, 1, 0."""
    method = ArCHer()
    known_credit(monkeypatch)
    got = method.credit(batch_of()).advantages
    assert got.tolist() == [[2, 2, 1, 1], [-4, -4, 2, 2], [0, 0, 0, 0], [3, 3, 0, 0]]
    mean, square = 4 / 5, (4 + 1 + 16 + 4 + 9) / 5
    wanted = {"q_loss": 0.25, "v_loss": 0.75, "q": 11 / 5, "v": 7 / 5, "advantage": mean,
              "advantage_std": (square - mean**2) ** 0.5, "replay_turns": 5.0}  # fmt: skip
    two_alike = Comm(sum=lambda own: 2 * own, count=2)
    metrics = method.end_rl_step(StepSummary(1.0, {}, two_alike))
    assert metrics == pytest.approx({f"archer/{k}": x for k, x in wanted.items()})


def test_during_the_warm_up_the_critics_learn_alone(monkeypatch):
    method = ArCHer(warmup_rl_steps=2)
    known_credit(monkeypatch)
    assert not method.credit(batch_of(rl_step=1)).advantages.any()
    assert len(method.critics.replay.rewards) == 5
    assert method.credit(batch_of(rl_step=2)).advantages.any()


def test_a_batch_without_a_turn_teaches_nothing():
    method = ArCHer()
    assert not method.credit(batch_of(EPISODES[2:3])).advantages.any()
    assert method.critics is None and method.state_dict() == {}
    assert method.end_rl_step(StepSummary(1.0, {}))["archer/replay_turns"] == 0.0
    method.credit(batch_of())
    before = method.end_rl_step(StepSummary(1.0, {}))["archer/q_loss"]
    assert not method.credit(batch_of(EPISODES[2:3])).advantages.any(), "later ones still train the critics"
    assert 0 < method.end_rl_step(StepSummary(1.0, {}))["archer/q_loss"] < before


# ------------------------------------------------------------------------------------------------------- in a trainer

SMALL = {"critic_epochs": 5, "learning_rate": 0.01, "hidden_size": 32}


def trainer_of(folder, **changes):
    given = {"credit": "archer", "epo_lambda": 0.0, "method_kwargs": {"archer": SMALL}, **changes}
    trainer = make_trainer(folder, **given)
    trainer.play = lambda tasks, **kwargs: make_episodes(trainer.rl_step)
    return trainer


def plain_features(model, episodes, context):
    """Returns for each turn of each usable episode the hidden state before it and the mean of those of its tokens."""
    found = []
    for one in episodes:
        past: list[int] = []
        for turn in one.turns * one.is_usable:
            prompt = [*(past if context == "concatenated" else []), *turn.prompt_ids]
            past = [*prompt, *turn.response_ids]
            hidden = model.base_model(torch.tensor([past])).last_hidden_state[0]
            found.append((hidden[len(prompt) - 1], hidden[len(prompt) :].mean(0)))
    return [torch.stack(column) for column in zip(*found, strict=True)]


@pytest.mark.parametrize("context", ["windowed", "concatenated"])
@pytest.mark.parametrize("adapter", [False, True])
def test_features_are_hidden_states_of_the_policy_at_the_start(tmp_path, context, adapter):
    """Whatever the policy has become."""
    from peft import LoraConfig

    lora = {"peft_config": LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")} if adapter else {}
    trainer = trainer_of(tmp_path, context=context, per_device_train_batch_size=2, gradient_accumulation_steps=4,
                         max_steps=3, learning_rate=0.05, **lora)  # fmt: skip
    trainer.play = lambda tasks, **kwargs: make_episodes()
    before, calls = weights(trainer), record_calls(trainer.methods["archer"], "credit")
    trainer.train()
    assert difference(before, weights(trainer)) > 1e-3
    model = saved(make_model(), tmp_path / "again")
    with torch.no_grad():
        states, actions = plain_features(model, make_episodes(), context)
    for features in (calls[0][0][0].features, calls[-1][0][0].features):
        torch.testing.assert_close(features.states[features.turn_mask], states, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(features.actions[features.turn_mask], actions, rtol=1e-4, atol=1e-5)
        assert not features.states[~features.turn_mask].any() and not features.actions[~features.turn_mask].any()
        assert features.turn_mask.sum(1).tolist() == [len(e.turns) * e.is_usable for e in make_episodes()]


def test_replay_grows_over_rl_steps(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=3)
    trainer.train()
    turns = sum(len(e.turns) * e.is_usable for e in make_episodes())
    assert logged(trainer, "archer/replay_turns") == [turns, 2 * turns, 3 * turns]
