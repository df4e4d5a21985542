"""The work that `make bench` measures runs, on tiny models, and is what its table says."""

import tempfile
import time
from argparse import Namespace

import pytest
from trl import GRPOTrainer

from epo_trl.trainers import EPOTrainer

pytestmark = pytest.mark.slow

SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def test_an_update_has_loss_and_gradient_of_a_row_per_turn(monkeypatch):
    import bench_update

    sizes, losses = {**SIZES, "vocab_size": 256}, []
    episodes = bench_update.make_episodes(2, 3, 20, 8, 256)
    for kind in (GRPOTrainer, EPOTrainer):
        original = kind.compute_loss
        monkeypatch.setattr(kind, "compute_loss", lambda *args, f=original: losses.append(f(*args)) or losses[-1])

    def update(way, checkpointing=False):
        norm = bench_update.make(way, episodes, sizes, 2, checkpointing)()
        return losses[-1].item(), norm

    whole = update("whole rows")
    assert update("ours") == pytest.approx(update("a row per turn"), rel=1e-4, abs=1e-6)
    assert update("ours", checkpointing=True) == pytest.approx(update("ours"), rel=1e-4, abs=1e-6)
    assert update("ours")[1] != pytest.approx(whole[1], rel=1e-4)  # there a turn attends to the turns before it
    assert update("whole rows, responses scored") == pytest.approx(whole, rel=1e-4, abs=1e-6)


def test_a_profile_counts_the_sampled_tokens_and_every_second_once():
    import profile_model

    suite = profile_model.Games(n_train=8, n_iid=0, n_ood=0)
    model, tokenizer = profile_model.load("tiny", suite)
    folder, given = tempfile.mkdtemp(), {"episodes": 8, "micro_batch": 4, "turns": 2, "rollout_turns": 1, "response": 3}
    model.save_pretrained(folder)
    given = Namespace(**given, rounds=1, attention="sdpa", model="tiny")
    start = time.perf_counter()
    variant = {"lora", "checkpointing"}
    trainer = profile_model.make(folder, tokenizer, suite, variant, given)
    measured = profile_model.measure(trainer, variant, given, 1e12)
    assert trainer.model.base_model.model.is_gradient_checkpointing
    assert measured["sums"]["sampled"] == 8 * 3 and measured["sums"]["response"] == 8 * 2 * 3
    seconds, named = measured["seconds"], {profile_model.PREFILL, profile_model.LOSS, profile_model.STEP}
    assert named < seconds.keys() and 0 < sum(seconds.values()) < time.perf_counter() - start
    assert measured["parts"]["gradients"] < measured["parts"]["weights"]


@pytest.mark.parametrize("ahead", [0, 1])
def test_rl_steps_are_timed_in_turn_and_one_batch_ahead(ahead, monkeypatch):
    import bench_ahead

    for name, value in {"SIZES": SIZES, "STEPS": 2}.items():
        monkeypatch.setattr(bench_ahead, name, value)
    given = {"answer": 0.0, "token": 0.0, "turns": 2, "episodes": 2, "length": 4.0}
    (step,) = bench_ahead.make(ahead, given)()
    assert step["step_time"] > 0 and (step["time/wait_for_rollout"] > 0) == bool(ahead)


@pytest.mark.parametrize(("name", "pays_for_a_pass"), [("grpo", False), ("turn", False), ("archer", True)])
def test_an_rl_step_of_a_method_runs_on_episodes_that_were_not_played(name, pays_for_a_pass):
    import bench_methods

    episodes = bench_methods.make_episodes(4, 2, 20, 8, 256)
    work, scored = bench_methods.make(name, episodes, {**SIZES, "vocab_size": 256})
    work()
    assert scored == pays_for_a_pass


def test_each_loss_of_the_overhead_is_measured(monkeypatch):
    import bench_epo_overhead

    config = bench_epo_overhead.EPOConfig
    tiny = {"max_turns": 1, "per_device_train_batch_size": 2, "num_generations": 2, "gradient_accumulation_steps": 1}
    monkeypatch.setattr(bench_epo_overhead, "EPOConfig", lambda **given: config(**{**given, **tiny}))
    trainer = bench_epo_overhead.make(1, 1, None)
    trainer.train()
    assert {way: len(seconds) for way, seconds in trainer.passes.items()} == dict.fromkeys(trainer.passes, 1)
    assert {"rollout", "history"} <= set(trainer.other)
