"""Entropy statistics against hand numbers. Entropies are chosen so that a sum tells which tokens are in it."""

from statistics import fmean

import pytest
import torch
from plain_steps import TEMPERATURE, plain_tokens
from run_kit import logged
from trainer_kit import make_episodes, make_model, make_trainer, with_episodes

from epo_trl.methods.stack import EntropyMeter


def feed(meter, entropy, turn_ids, mask):
    meter.add(torch.as_tensor(entropy).float(), torch.tensor(turn_ids), torch.tensor(mask))
    return meter


def means_of(*rows, max_turns=6, sum_over_ranks=lambda sums: sums):
    """Returns the means of the parts, and of the turn indices, of a micro-batch."""
    return feed(EntropyMeter(max_turns), *rows).take(sum_over_ranks)


# Three turns, an environment token (entropy 1000) before the second and the third, padding (entropy 5000).
ENTROPY = [[1.0, 2.0, 1000.0, 4.0, 1000.0, 8.0, 16.0, 5000.0]]
TURNS = [[0, 0, 1, 1, 2, 2, 2, -1]]
MASK = [[1, 1, 0, 1, 0, 1, 1, 0]]


def test_the_first_half_of_the_turns_is_early_and_the_middle_one_belongs_to_it():
    means, turn_means = means_of(ENTROPY, TURNS, MASK)
    assert means["all_tokens"] == (1 + 2 + 4 + 8 + 16) / 5
    assert means["early_turns"] == (1 + 2 + 4) / 3
    assert means["late_turns"] == (8 + 16) / 2
    assert turn_means == {0: 1.5, 1: 4.0, 2: 12.0}
    assert means_of(ENTROPY, TURNS, MASK, max_turns=2)[1] == {0: 1.5, 1: (4 + 8 + 16) / 3}, "the last takes the rest"


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
    means, _ = means_of([entropy], [turns], [[1] * len(turns)])
    assert [means.get(f"{name}_third") for name in ("first", "middle", "last")] == thirds


def test_thirds_are_means_over_the_tokens_of_each_episodes_own_thirds():
    """Row 0 has three turns, with two tokens in the last; row 1 one turn of two tokens. Environment tokens are 1000."""
    entropy = [[1.0, 1000.0, 2.0, 1000.0, 4.0, 8.0], [16.0, 32.0, 5000.0, 5000.0, 5000.0, 5000.0]]
    turns = [[0, 1, 1, 2, 2, 2], [0, 0, -1, -1, -1, -1]]
    mask = [[1, 0, 1, 0, 1, 1], [1, 1, 0, 0, 0, 0]]
    means, _ = means_of(entropy, turns, mask)
    assert means["first_third"] == pytest.approx((1 + 16 + 32) / 3)
    assert (means["middle_third"], means["last_third"]) == (2.0, 6.0)


def test_the_mean_is_over_the_tokens_of_all_micro_batches_and_ranks():
    """One token of entropy 1 in the first micro-batch, three of entropy 5 in the second: 4, not 3."""
    meter = feed(EntropyMeter(max_turns=1), [[1.0, 0.0]], [[0, -1]], [[1, 0]])
    there = feed(EntropyMeter(max_turns=1), [[5.0, 5.0, 5.0]], [[0, 0, 0]], [[1, 1, 1]])
    assert feed(meter, [[5.0] * 3], [[0] * 3], [[1] * 3]).take(lambda sums: sums)[0]["all_tokens"] == 4.0
    assert meter.take(lambda sums: sums) == ({}, {}), "the sums begin anew"
    feed(meter, [[1.0]], [[0]], [[1]])
    assert meter.take(lambda sums: sums + there.sums)[1] == {0: 4.0}


def test_sums_of_a_run_with_fewer_turns_are_those_of_its_batch_alone():
    """A run resumed inside a batch with a larger `max_turns`: the next batch has longer episodes."""
    meter = EntropyMeter(max_turns=4)
    meter.sums = feed(EntropyMeter(max_turns=1), [[3.0]], [[0]], [[1]]).sums
    assert feed(meter, [[5.0]], [[0]], [[1]]).take(lambda sums: sums)[1] == {0: 4.0}
    assert feed(meter, ENTROPY, TURNS, MASK).take(lambda sums: sums)[1] == {0: 1.5, 1: 4.0, 2: 12.0}


def test_a_run_logs_the_means_of_plain_forwards_before_the_first_update(tmp_path):
    """Two updates on the batch."""
    cut = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "steps_per_generation": 2}
    trainer = with_episodes(make_trainer(tmp_path, temperature=TEMPERATURE, max_steps=2, **cut))
    trainer.train()
    with torch.no_grad():
        tokens = plain_tokens(make_model(), "windowed")
    counts = [len(episode.turns) for episode in make_episodes()]
    late = [2 * token.turn >= counts[token.row] for token in tokens]
    thirds = [3 * token.turn // counts[token.row] for token in tokens]
    parts = {
        "all_tokens": [True] * len(tokens), "early_turns": [not one for one in late], "late_turns": late,
        **{f"{name}_third": [third == i for third in thirds] for i, name in enumerate(("first", "middle", "last"))},
    }  # fmt: skip
    for name, chosen in parts.items():
        mean = fmean(token.entropy for token, inside in zip(tokens, chosen, strict=True) if inside)
        assert logged(trainer, f"entropy/{name}") == [pytest.approx(mean, rel=1e-5)], name
