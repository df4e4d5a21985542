"""Two ranks with a device each: what test_distributed.py asks of DDP, in which no CPU tensor is sent."""

import gpu
import pytest
from distributed_worker import TABLE, WORLD
from launcher import launched_once, start_program
from test_distributed import (  # noqa: F401
    critic,
    left_by,
    test_an_exception_in_one_ranks_game_aborts_that_episode_alone,
    test_evaluation_spreads_lists_that_do_not_divide_evenly,
    test_groups_of_equal_outcomes_are_replaced_on_both_ranks_until_the_limit_is_reached,
    test_loss_gradient_and_history_are_those_of_one_process,
    test_policy_and_critic_after_three_steps_are_those_of_one_process,
    test_ranks_that_replace_groups_resume_bit_equal_inside_a_batch,
    test_the_history_is_the_same_on_every_rank,
    test_the_weights_are_the_same_on_every_rank,
)
from trainer_kit import difference, make_model

pytestmark = pytest.mark.skipif(gpu.COUNT == 1, reason="needs two GPUs, or the stand-in")
RUNS = ["ddp-grpo", "ddp-ppo-separate", "ddp-ppo-value_head", "ddp-dapo-30", "ddp-again-30", "ddp-dapo-1", "ddp-table"]


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Returns a function that gives the folder of a run, and what both ranks wrote there."""
    folder = launched_once(tmp_path_factory, "device/ranks.py", RUNS, timeout_seconds=1200, start=start_program)
    return lambda run: left_by(folder / run)


@pytest.fixture
def ranks(launched):
    """Returns what both ranks wrote, and the folder."""
    folder, results, weights = launched("ddp-grpo")
    assert [r["kind"] for r in results] == ["DistributedType.MULTI_GPU"] * WORLD
    return results, weights, folder


@pytest.fixture
def ppo(critic, launched):  # noqa: F811
    """Returns the mode, the kind of critic, what both ranks wrote, and the folder."""
    folder, results, weights = launched(f"ddp-ppo-{critic}")
    return "ddp", critic, [result["log"] for result in results], weights, folder


def test_every_method_trains_and_the_ranks_agree(launched):
    _, _, (one, other) = launched("ddp-table")
    start = {name: p.detach() for name, p in make_model().named_parameters()}
    assert one.keys() == other.keys() == set(TABLE)
    for name in TABLE:
        assert difference(one[name], other[name]) == 0.0, name
        assert difference(start, {key: one[name][key] for key in start}) > 0.0, name  # a critic's weights aside
