"""Two processes in step with each other, whatever their games do: no hang, equal passes, one process's gradient.

The number of rollouts in each mode is EPO_TRL_ROLLOUTS; all modes share one launch, since most of its time is imports.
"""

import json
import os
import pickle

import pytest
from launcher import WORLD, launched_once, needs_deepspeed
from lockstep_worker import MODES, SETTINGS, SHARE, as_for_a_server, games
from trainer_kit import ROWS, KeepGradients, difference, largest, make_trainer
from transformers import AutoModelForCausalLM

from epo_trl.runs.files import STATE_FILE
from epo_trl.types import StopReason

pytestmark = [pytest.mark.slow, needs_deepspeed]
ROLLOUTS = int(os.environ.get("EPO_TRL_ROLLOUTS", "4"))
SECONDS = 300 + 40 * ROLLOUTS  # of the whole launch; two ranks that wait for each other fail after 60


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    return launched_once(tmp_path_factory, "lockstep_worker.py", list(MODES), str(ROLLOUTS), timeout_seconds=SECONDS)


@pytest.fixture(params=MODES)
def mode(request):
    return request.param


@pytest.fixture
def ranks(mode, launched):
    """Returns what both ranks kept in one mode."""
    kept = [pickle.loads((launched / f"{mode}{rank}.pkl").read_bytes()) for rank in range(WORLD)]
    expected = "DEEPSPEED" if mode.startswith("zero") else "MULTI_CPU"
    assert [rank["kind"] for rank in kept] == [f"DistributedType.{expected}"] * WORLD
    assert [len(rank["episodes"]) for rank in kept] == [ROLLOUTS + 1] * WORLD
    return kept


def test_the_episodes_are_as_different_as_planned(ranks):
    lengths = set()
    for rollout in range(ROLLOUTS):
        for rank, kept in enumerate(ranks):
            for game, episode in zip(games(rollout, rank), kept["episodes"][rollout], strict=True):
                played = 0 if game.error == "reset" else game.turns - bool(game.error)
                assert len(episode.turns) == played
                assert (episode.stop is StopReason.ABORTED) == bool(game.error)
                lengths |= {len(turn.response_ids) for turn in episode.turns}
    assert {1, 6} <= lengths
    per_rank = [[sum(len(e.turns) for e in episodes) for episodes in kept["episodes"]] for kept in ranks]
    assert (0, SHARE * 5) in zip(*per_rank, strict=True)


def test_both_ranks_generate_and_pass_equally_often(ranks):
    one, other = ranks
    assert [len(calls) for calls in one["prompts"]] == [len(calls) for calls in other["prompts"]]
    # 2 micro-batches in passes of at most 120 tokens, as many as the rank with more of them needs
    assert one["passes"] == other["passes"] and one["passes"][-1] == [0, 0]  # the last rollout is not trained on
    assert len(set(map(tuple, one["passes"][:-1]))) > 1 and min(map(min, one["passes"][:-1])) >= 2


def test_a_vllm_server_gets_equally_many_prompts_from_every_rank(ranks):
    for rollout, (one, other) in enumerate(zip(*(kept["prompts"] for kept in ranks), strict=True)):
        assert one == other or not as_for_a_server(rollout)
    assert ranks[0]["prompts"][0] == [1] * 5 and ranks[1]["prompts"][0] == [SHARE] * 5
    assert ranks[0]["prompts"][3] == ranks[1]["prompts"][3] == [SHARE] * 5


def test_too_many_aborted_episodes_stop_all_ranks_with_one_error_and_a_checkpoint(ranks, launched, mode):
    one, other = (kept["error"] for kept in ranks)
    assert one == other
    for part in ("50% of the episodes", "40% are allowed", "rank 1, task 'train/", "OSError: no such game"):
        assert part in one
    checkpoint = launched / mode / f"checkpoint-{ROLLOUTS}"
    assert str(checkpoint) in one and json.loads((checkpoint / STATE_FILE).read_text())["rl_step"] == ROLLOUTS
    assert AutoModelForCausalLM.from_pretrained(checkpoint)


def test_the_gradient_of_every_step_is_that_of_one_process_on_the_same_episodes(ranks, tmp_path):
    keep = KeepGradients(ROLLOUTS)  # max_steps is part of the schedule of the smoothing term
    trainer = make_trainer(tmp_path, max_steps=ROLLOUTS + 1, callbacks=[keep], **SETTINGS)
    played = iter([one + other for one, other in zip(*(kept["episodes"] for kept in ranks), strict=True)])
    trainer.play = lambda tasks, **kwargs: next(played)
    trainer.train()
    for kept in ranks:
        assert len(kept["gradients"]) == len(keep.gradients) == ROLLOUTS
        for alone, together in zip(keep.gradients, kept["gradients"], strict=True):
            assert difference(alone, together) < 1e-5 * max(1.0, largest(alone))
    sizes = [largest(gradients) for gradients in keep.gradients]
    assert sum(size > 0.1 for size in sizes) > ROLLOUTS / 2
    usable = [sum(e.is_usable for kept in ranks for e in kept["episodes"][i]) for i in range(ROLLOUTS)]
    assert [size == 0.0 for size in sizes] == [count == 0 for count in usable]
    assert 0 in usable and max(usable) <= ROWS
