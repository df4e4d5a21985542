"""Methods: what a hook gets and what becomes of what it returns, composition, checkpoints."""

import math
import re

import pytest
import torch
from run_kit import logged, weights
from trainer_kit import (
    ROWS,
    catch_step,
    difference,
    largest,
    make_config,
    make_episodes,
    make_model,
    make_ppo,
    make_trainer,
    results_of,
    with_episodes,
)

from epo_trl.envs.toy import ToySuite
from epo_trl.errors import InputError
from epo_trl.methods import Comm, Method, Methods, Tally, build_methods
from epo_trl.scoring import row_scorer
from epo_trl.trainers import EPOPPOConfig, EPOTrainer
from epo_trl.trainers.collection import Collector
from epo_trl.types import Episode, StopReason, Turn


def trainer_of(folder, make=make_trainer, **changes):
    """Returns a trainer that "plays" the episodes made by hand."""
    ends = {"bootstrap_truncated": False} if make is make_ppo else {}
    return with_episodes(make(folder, **ends, **changes))


def named(method):
    return f"method_examples:{method}"


# ------------------------------------------------------------------------------------------------- names and refusals


def test_a_card_names_settings_of_the_class_and_a_wrong_name_fails_before_the_run(tmp_path):
    args = make_config(tmp_path, entropy_method=[named("Recarded")])
    assert build_methods(args, critic=False).model_card_text().endswith(" and a bonus of 0.5")
    with pytest.raises(KeyError, match="k"):
        make_config(tmp_path, policy_method=named("Carded"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy_method": "variance-filter"}, "with 'variance-filter'"),
        ({"credit": "archer"}, "with 'archer', which reads"),
        ({"policy_method": named("OneReward")}, "with '.*OneReward', which reads"),
    ],
)
def test_a_method_of_other_rewards_takes_no_reward_functions(tmp_path, changes, message):
    """A function that gives the episode something else would change one part of the advantage, or none."""
    with pytest.raises(ValueError, match=f"reward_funcs: expected none {message}"):
        make_trainer(tmp_path, reward_funcs=lambda completions, **_: [0.0], **changes)


def test_a_name_alone_is_a_list_of_one_and_null_is_none(tmp_path):
    args = make_config(tmp_path, entropy_method="epo", policy_method=named("OneReward"),
                       method_kwargs='{"method_examples:OneReward": {"scale": 3}}')  # fmt: skip
    methods = build_methods(args, critic=False)
    assert list(methods) == ["grpo", "epo", named("OneReward")] and methods[named("OneReward")].scale == 3
    assert make_config(tmp_path, entropy_method=None).entropy_method == []


def test_a_trainer_and_the_configuration_of_the_other_do_not_go_together(tmp_path):
    with pytest.raises(ValueError, match="credit: .*got 'turn', which needs a critic, but this trainer has none"):
        EPOTrainer(make_model(), ToySuite(), make_config(tmp_path, kind=EPOPPOConfig))


# --------------------------------------------------------------------------------------------------------- collection


def test_shapes_follow_each_other_in_the_order_of_the_configuration(tmp_path):
    """2 A + 1 and 2 (A + 1): the credit's advantages come first."""
    batches = {}
    for order in ((), ("Double", "AddOne"), ("AddOne", "Double")):
        trainer = trainer_of(tmp_path, policy_method=list(map(named, order)))
        trainer.model.train()
        batches[order] = trainer._generate_and_score_completions([{"prompt": "train/0"} for _ in range(ROWS)])
    mask = (batches[()]["completion_mask"] * batches[()]["tool_mask"]).bool()
    plain = batches[()]["advantages"][mask]
    assert plain.abs().max() > 0.5
    assert torch.equal(batches["Double", "AddOne"]["advantages"][mask], 2 * plain + 1)
    assert torch.equal(batches["AddOne", "Double"]["advantages"][mask], 2 * (plain + 1))


@pytest.mark.parametrize("make", [make_trainer, make_ppo])
@pytest.mark.parametrize("iterations", [1, 2], ids=["a pass of its own", "TRL's pass"])
def test_scores_at_collection_are_those_of_the_policy_that_played_and_marks_stay_with_their_tokens(
    tmp_path, monkeypatch, make, iterations
):
    """TRL shuffles the rows and splits them; the first micro-batches see the same policy, so the same numbers."""
    passes, original = [], row_scorer.score_turns
    monkeypatch.setattr(row_scorer, "score_turns", lambda *args, **kw: passes.append(1) or original(*args, **kw))
    trainer = trainer_of(
        tmp_path, make, policy_method=named("Marked"), per_device_train_batch_size=2, gradient_accumulation_steps=4,
        num_iterations=iterations, max_steps=iterations,
    )  # fmt: skip
    trainer.train()
    assert len(passes) == 1 + 4 * iterations, "the batch once, then the updates"
    seen = trainer.methods[named("Marked")].seen
    assert len(seen) == 4 * iterations
    for micro, logps, entropy in seen[:4]:
        mask = micro.mask.bool()
        torch.testing.assert_close(micro.logps[mask], logps[mask], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(micro.entropy[mask], entropy[mask], rtol=1e-4, atol=1e-4)
        assert micro.logps.requires_grad and not logps.requires_grad
    assert len({float(logps.sum()) for _, logps, _ in seen[:4]}) == 4


def test_rewards_of_turns_reach_credit_and_critic_and_the_log_keeps_the_rollouts(tmp_path):
    trainer = trainer_of(
        tmp_path, make_ppo, policy_method=named("OneReward"), method_kwargs={named("OneReward"): {"scale": 2.0}},
        normalize_advantages=False,
    )  # fmt: skip
    batches = results_of(trainer, "_method_batch")
    catch_step(trainer)
    episodes = make_episodes()
    rewards = torch.zeros_like(batches[0].turn_rewards)
    rewards[:, 0] = torch.tensor([2 * e.total_reward * e.is_usable for e in episodes])
    assert torch.equal(batches[0].turn_rewards, rewards) and rewards.abs().max() == 20
    usable = [e.total_reward for e in episodes if e.is_usable]
    assert logged(trainer, "env/return") == [pytest.approx(sum(usable) / len(usable))]


@pytest.mark.parametrize("reward", [math.nan, 1e13])
def test_a_reward_that_no_loss_can_be_made_of_is_refused(reward):
    class Extreme(Method):
        def turn_rewards(self, episode):
            return [1.0, reward, 1e12]

    episode = make_episodes()[0]
    text = rf"extreme: expected rewards from -1e\+12 to 1e\+12, got {re.escape(str(reward))} in {episode.task_id!r}"
    with pytest.raises(InputError, match=text):
        Methods({"extreme": Extreme()}, max_turns=3).with_rewards(episode)


# ------------------------------------------------------------------------------------------------- choosing of groups


def played(task, value):
    """Returns an episode of one turn with that reward."""
    return Episode(task, "", "", (Turn((1,), (2,), "", "", "", True, value),), StopReason.TURN_LIMIT)


def test_refused_groups_are_replaced_whole_and_the_draw_depends_on_run_and_step_alone(tmp_path):
    """Tasks with an even number give equal returns."""

    def play(tasks, **kwargs):
        return [played(task, float(i) if int(task.split("/")[1]) % 2 else 1.0) for i, (task, _) in enumerate(tasks)]

    def collect(rl_step, rounds=50):
        args = make_config(tmp_path, policy_method=named("KeepUnequal"), max_resamples=rounds)
        methods, spare = build_methods(args, critic=False), [f"train/{i}" for i in range(20)]
        tasks = ["train/2"] * 4 + ["train/3"] * 4 + ["train/4"] * 4
        return Collector(ToySuite(), methods, Comm(), spare, args, 4, (0,)).collect(tasks, play, rl_step)

    batch, metrics = collect(0)
    assert batch.tasks[4:8] == ["train/3"] * 4, "a group that is kept stays where it is"
    for first in (0, 4, 8):
        assert len(set(batch.tasks[first : first + 4])) == 1 and int(batch.tasks[first].split("/")[1]) % 2
    assert [e.task_id for e in batch.episodes] == batch.tasks
    assert metrics["rollout/resampled_groups"] == (len(batch.played) - 12) / 4 >= 2
    assert metrics["rollout/unwanted_groups"] == 0
    assert metrics["env/return"] == pytest.approx(sum(e.total_reward for e in batch.played) / len(batch.played))
    assert collect(0)[0].tasks == batch.tasks
    assert len({tuple(collect(step)[0].tasks) for step in range(5)}) > 1
    _, none = collect(0, rounds=0)
    assert none["rollout/unwanted_groups"] == 2, "what is left after the last round is trained on, and counted"


# --------------------------------------------------------------------------------------------------------------- loss


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "luspo"])
@pytest.mark.parametrize("passes", [4, 2], ids=["one update", "two updates"])
def test_a_term_made_of_the_policy_mean_counts_like_trls_own_policy_loss(tmp_path, loss_type, passes):
    """At ratio 1 the policy loss, its gradient too, is the mean of -ratio * A: the same by TRL and as a term."""
    settings = {"loss_type": loss_type, "per_device_train_batch_size": 2, "gradient_accumulation_steps": passes,
                "steps_per_generation": 4}  # fmt: skip
    loss, gradients = catch_step(trainer_of(tmp_path, **settings, epo_lambda=0.0))
    again, as_term = catch_step(
        trainer_of(tmp_path, **settings, epo_lambda=0.0, policy_method=named("PolicyLossAsTerm"))
    )
    assert largest(gradients) > 1e-2
    assert float(loss) == pytest.approx(float(again), abs=1e-6)
    assert difference(gradients, as_term) < 1e-5 * max(1.0, largest(gradients))


def test_with_a_critic_a_coefficient_of_zero_is_the_run_without_methods_bit_by_bit(tmp_path):
    runs = []
    for changes in ({"entropy_method": None}, {"epo_lambda": 0.0}, {"epo_lambda": 0.5}):
        trainer = make_ppo(tmp_path, max_steps=3, **changes)
        trainer.train()
        runs.append(weights(trainer))
    assert difference(runs[0], runs[1]) == 0.0 < difference(runs[0], runs[2])


# -------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("iterations", [1, 2])
def test_every_token_is_measured_once_and_state_goes_through_a_checkpoint_inside_a_batch(tmp_path, iterations):
    """Four micro-batches a batch, an optimizer step each: the checkpoint falls into the second batch."""
    settings = {
        "policy_method": [named("Counter")], "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1,
        "steps_per_generation": 4, "num_iterations": iterations, "max_steps": 12 * iterations,
        "save_strategy": "steps", "save_steps": 6 * iterations - 1, "trust_checkpoint": True,
    }  # fmt: skip
    straight = trainer_of(tmp_path / "straight", **settings)
    straight.train()
    tokens = sum(len(turn.response_ids) for e in make_episodes() if e.is_usable for turn in e.turns)
    assert set(logged(straight, "counter/tokens")) == {float(tokens)}
    assert max(logged(straight, "counter/steps")) == 3
    resumed = trainer_of(tmp_path / "resumed", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / f"checkpoint-{6 * iterations - 1}"))
    assert resumed.methods.state_dict() == straight.methods.state_dict()
    for metric in ("counter/tokens", "counter/collected"):
        assert logged(resumed, metric) == logged(straight, metric)
    assert logged(straight, "counter/collected") == [0.0, 1.0, 2.0]


def test_a_run_does_not_go_on_with_other_methods_unless_that_is_asked_for(tmp_path):
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    first = trainer_of(tmp_path, **settings)
    first.train()
    checkpoint = str(tmp_path / "checkpoint-2")
    others = {**settings, "max_steps": 4, "policy_method": [named("Counter")]}
    with pytest.raises(ValueError, match=r"policy_method: \[\] there, \['method_examples:Counter'\] now"):
        trainer_of(tmp_path, **others).train(resume_from_checkpoint=checkpoint)
    other = trainer_of(tmp_path, **others, resume_with_changes=True)
    with pytest.warns(UserWarning, match="is resumed with other settings"):
        other.train(resume_from_checkpoint=checkpoint)
    assert len(other.methods["epo"].history) == 4 and other.methods[named("Counter")].steps == 2


def test_a_tally_of_numbers_and_tensors_is_kept_on_the_tensors_device():
    tally = Tally("turns", "reward")
    tally.add(turns=2, reward=torch.ones((), device="meta"))
    assert tally.sums.device.type == "meta"
