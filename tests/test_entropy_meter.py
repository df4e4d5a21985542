"""Entropy statistics against hand numbers. Entropies are chosen so that a sum tells which tokens are in it."""

from statistics import fmean

import pytest
import torch
from plain_steps import TEMPERATURE, plain_tokens
from run_kit import logged
from trainer_kit import make_episodes, make_model, make_trainer, with_episodes

from epo_trl.methods.entropy_meter import EntropyMeter


def feed(meter, entropy, turn_ids, mask):
    meter.add(torch.as_tensor(entropy).float(), torch.tensor(turn_ids), torch.tensor(mask))
    return meter


# Three turns, an environment token (entropy 1000) before the second and the third, padding (entropy 5000).
ENTROPY = [[1.0, 2.0, 1000.0, 4.0, 1000.0, 8.0, 16.0, 5000.0]]
TURNS = [[0, 0, 1, 1, 2, 2, 2, -1]]
MASK = [[1, 1, 0, 1, 0, 1, 1, 0]]


def test_the_first_half_of_the_turns_is_early_and_the_middle_one_belongs_to_it():
    means = feed(EntropyMeter(max_turns=3), ENTROPY, TURNS, MASK).means()
    assert means["all_tokens"] == (1 + 2 + 4 + 8 + 16) / 5
    assert means["early_turns"] == (1 + 2 + 4) / 3
    assert means["late_turns"] == (8 + 16) / 2


@pytest.mark.parametrize(
    ("turns", "early", "late"),
    [
        ([0], 1.0, None),
        ([0, 1], 1.0, 2.0),
        ([0, 1, 2], 1.5, 4.0),
        ([0, 1, 2, 3], 1.5, 6.0),
        ([0, 1, 2, 3, 4], 7 / 3, 12.0),
    ],
)
def test_early_and_late_turns_for_any_number_of_turns(turns, early, late):
    entropy = [2.0**turn for turn in turns]  # one token a turn: 1, 2, 4, 8, 16
    means = feed(EntropyMeter(max_turns=5), [entropy], [turns], [[1] * len(turns)]).means()
    assert means["early_turns"] == pytest.approx(early)
    assert means.get("late_turns") == late


@pytest.mark.parametrize(
    ("turns", "thirds"),
    [
        ([0], [1.0, None, None]),
        ([0, 1], [1.0, 2.0, None]),
        ([0, 1, 2], [1.0, 2.0, 4.0]),
        ([0, 1, 2, 3], [1.5, 4.0, 8.0]),  # 2 + 1 + 1 turns
        ([0, 1, 2, 3, 4], [1.5, 6.0, 16.0]),  # 2 + 2 + 1
        ([0, 1, 2, 3, 4, 5], [1.5, 6.0, 24.0]),
    ],
)
def test_thirds_for_any_number_of_turns(turns, thirds):
    entropy = [2.0**turn for turn in turns]
    means = feed(EntropyMeter(max_turns=6), [entropy], [turns], [[1] * len(turns)]).means()
    assert [means.get(f"{name}_third") for name in ("first", "middle", "last")] == thirds


def test_thirds_are_means_over_the_tokens_of_each_episodes_own_thirds():
    """Row 0 has three turns, with two tokens in the last; row 1 one turn of two tokens. Environment tokens are 1000."""
    entropy = [[1.0, 1000.0, 2.0, 1000.0, 4.0, 8.0], [16.0, 32.0, 5000.0, 5000.0, 5000.0, 5000.0]]
    turns = [[0, 1, 1, 2, 2, 2], [0, 0, -1, -1, -1, -1]]
    mask = [[1, 0, 1, 0, 1, 1], [1, 1, 0, 0, 0, 0]]
    means = feed(EntropyMeter(max_turns=3), entropy, turns, mask).means()
    assert means["first_third"] == pytest.approx((1 + 16 + 32) / 3)
    assert (means["middle_third"], means["last_third"]) == (2.0, 6.0)


def test_each_episode_has_its_own_half():
    """Row 0 has one turn, row 1 two: turn 0 is early in both, turn 1 of row 1 is late."""
    meter = feed(EntropyMeter(max_turns=2), [[1.0, 9.0], [2.0, 4.0]], [[0, -1], [0, 1]], [[1, 0], [1, 1]])
    assert meter.means()["early_turns"] == 1.5
    assert meter.means()["late_turns"] == 4.0


def test_first_and_last_ten_tokens_are_counted_within_each_turn():
    """A turn of 12 tokens and one of 3: the first ten are 0..9 and all three, the last ten 2..11 and all three."""
    entropy = [[*range(12), 777, 100, 200, 300]]
    turns = [[0] * 12 + [1] * 4]
    mask = [[1] * 12 + [0] + [1] * 3]
    means = feed(EntropyMeter(max_turns=2), entropy, turns, mask).means()
    assert means["first10_tokens"] == pytest.approx((sum(range(10)) + 600) / 13)
    assert means["last10_tokens"] == pytest.approx((sum(range(2, 12)) + 600) / 13)


def test_turns_without_environment_tokens_between_them_are_still_two():
    entropy = [[float(i) for i in range(24)]]
    turns = [[0] * 12 + [1] * 12]
    means = feed(EntropyMeter(max_turns=2), entropy, turns, [[1] * 24]).means()
    assert means["first10_tokens"] == (sum(range(10)) + sum(range(12, 22))) / 20
    assert means["last10_tokens"] == (sum(range(2, 12)) + sum(range(14, 24))) / 20


def test_turn_means_and_the_last_index_takes_what_lies_beyond():
    assert feed(EntropyMeter(max_turns=4), ENTROPY, TURNS, MASK).turn_means() == {0: 1.5, 1: 4.0, 2: 12.0}
    assert feed(EntropyMeter(max_turns=2), ENTROPY, TURNS, MASK).turn_means() == {0: 1.5, 1: (4 + 8 + 16) / 3}


def test_the_mean_is_over_tokens_not_over_micro_batches():
    """One token of entropy 1 in the first micro-batch, three of entropy 5 in the second: 4, not 3."""
    meter = EntropyMeter(max_turns=1)
    feed(meter, [[1.0, 0.0]], [[0, -1]], [[1, 0]])
    feed(meter, [[5.0, 5.0, 5.0]], [[0, 0, 0]], [[1, 1, 1]])
    assert meter.means()["all_tokens"] == 4.0
    assert meter.turn_means() == {0: 4.0}


def test_sums_add_up_over_micro_batches_and_ranks_and_can_be_forgotten():
    meter = EntropyMeter(max_turns=3)
    for _ in range(2):
        feed(meter, ENTROPY, TURNS, MASK)
    meter.reduce(lambda sums: 2 * sums)  # two ranks that saw the same
    assert meter.means()["all_tokens"] == 31 / 5
    assert meter.turn_means() == {0: 1.5, 1: 4.0, 2: 12.0}
    meter.clear()
    assert meter.means() == {}


def test_sums_of_a_run_with_fewer_turns_are_those_of_its_batch_alone():
    """A run resumed inside a batch with a larger `max_turns`: the next batch has longer episodes."""
    meter = EntropyMeter(max_turns=4)
    meter.load_state_dict(feed(EntropyMeter(max_turns=1), [[3.0]], [[0]], [[1]]).state_dict())
    assert feed(meter, [[5.0]], [[0]], [[1]]).turn_means() == {0: 4.0}
    meter.clear()
    assert feed(meter, ENTROPY, TURNS, MASK).turn_means() == {0: 1.5, 1: 4.0, 2: 12.0}


def test_ranks_are_weighted_by_their_tokens():
    """This rank has one token of entropy 1, the other three of entropy 5."""
    here = feed(EntropyMeter(max_turns=1), [[1.0]], [[0]], [[1]])
    there = feed(EntropyMeter(max_turns=1), [[5.0, 5.0, 5.0]], [[0, 0, 0]], [[1, 1, 1]])
    sums = []
    there.reduce(lambda flat: sums.append(flat) or flat)
    here.reduce(lambda flat: flat + sums[0])
    assert here.means()["all_tokens"] == 4.0


def test_nothing_sampled_gives_no_means():
    meter = feed(EntropyMeter(max_turns=2), [[7.0, 7.0]], [[0, -1]], [[0, 0]])
    assert meter.means() == {} and meter.turn_means() == {}


def test_the_meter_holds_no_graph():
    meter = EntropyMeter(max_turns=1)
    entropy = torch.ones(1, 2, requires_grad=True)
    meter.add(entropy, torch.zeros(1, 2).long(), torch.ones(1, 2))
    assert meter.means()["all_tokens"] == 1.0
    assert not any(value.requires_grad for value in vars(meter).values() if isinstance(value, torch.Tensor))


def test_a_run_logs_the_means_of_plain_forwards_before_the_first_update(tmp_path):
    """Two updates on the batch; no response has more than ten tokens."""
    cut = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "steps_per_generation": 2}
    trainer = with_episodes(make_trainer(tmp_path, temperature=TEMPERATURE, max_steps=2, **cut))
    trainer.train()
    with torch.no_grad():
        tokens = plain_tokens(make_model(), "windowed")
    counts = [len(episode.turns) for episode in make_episodes()]
    late = [2 * token.turn >= counts[token.row] for token in tokens]
    thirds = [3 * token.turn // counts[token.row] for token in tokens]
    every = [True] * len(tokens)
    parts = {
        "all_tokens": every, "first10_tokens": every, "last10_tokens": every,
        "early_turns": [not one for one in late], "late_turns": late,
        **{f"{name}_third": [third == i for third in thirds] for i, name in enumerate(("first", "middle", "last"))},
    }  # fmt: skip
    for name, chosen in parts.items():
        mean = fmean(token.entropy for token, inside in zip(tokens, chosen, strict=True) if inside)
        assert logged(trainer, f"entropy/{name}") == [pytest.approx(mean, rel=1e-5)], name
