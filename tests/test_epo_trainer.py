"""EPOTrainer as a whole on the toy game: history, schedule, checkpoints, faults, evaluation, metrics, bad input."""

import json
import math
import random
from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from run_kit import StopAt, assert_bit_equal, logged, lora, resumable, weights
from trainer_kit import (
    GROUP,
    ROWS,
    batches_of,
    catch_step,
    collected,
    difference,
    make_config,
    make_episode,
    make_episodes,
    make_model,
    make_trainer,
    results_of,
    saved,
    toy_tokenizer,
    with_episodes,
)

from epo_trl.envs.toy import ToySuite, TreasureHunt
from epo_trl.methods import Comm
from epo_trl.models.prefix_cache import CACHE
from epo_trl.types import StopReason

# ------------------------------------------------------------------------------------------ history and schedule


def spy_on_rollouts(trainer):
    """Returns a list that fills with the entropies of each rollout, by episode, turn and token: plain forwards of the
    policy that has just played."""
    seen = []
    original = trainer._collect

    def entropies(turn):
        with torch.no_grad():
            log_p = trainer.model(torch.tensor([turn.prompt_ids + turn.response_ids])).logits[0].log_softmax(-1)
        return (-(log_p.exp() * log_p).sum(-1)[len(turn.prompt_ids) - 1 : -1]).tolist()

    def spy(tasks):
        batch = original(tasks)
        seen.append([[entropies(turn) for turn in episode.turns] for episode in batch.episodes])
        return batch

    trainer._collect = spy
    return seen


def mean(values):
    return sum(values) / len(values)


def beta_of(trainer):
    return trainer.methods["epo"].beta(trainer.rl_step, trainer.total_rl_steps)


@pytest.mark.parametrize(
    ("accumulation", "steps_per_generation", "iterations", "max_steps"),
    [(2, 4, 2, 8), (3, 2, 1, 2)],
    ids=["4 updates on a batch", "an update in the middle of a batch"],
)
def test_history_and_schedule_belong_to_collected_batches_and_to_the_policy_that_played(
    tmp_path, accumulation, steps_per_generation, iterations, max_steps
):
    """4 micro-batches a collected batch, 2 an optimizer step, each batch used twice: 8 optimizer steps = 2 RL steps.

    2 micro-batches a collected batch, 3 an optimizer step: the first update comes in the middle of the second batch.
    """
    trainer = make_trainer(
        tmp_path, per_device_train_batch_size=ROWS // steps_per_generation, gradient_accumulation_steps=accumulation,
        steps_per_generation=steps_per_generation, num_iterations=iterations, max_steps=max_steps,
    )  # fmt: skip
    seen = spy_on_rollouts(trainer)
    betas = []
    original = trainer.compute_loss
    trainer.compute_loss = lambda *args, **kwargs: betas.append(beta_of(trainer)) or original(*args, **kwargs)
    trainer.train()
    steps = max_steps * accumulation // (steps_per_generation * iterations)
    assert trainer.state.global_step == max_steps
    assert trainer.rl_step == len(trainer.methods["epo"].history) == len(seen) == steps
    entries = [entry["0"] for entry in trainer.methods["epo"].history.state_dict()["entries"]]
    tokens = [mean([h for episode in batch for turn in episode for h in turn]) for batch in seen]
    assert entries == pytest.approx(tokens, rel=1e-5)
    assert abs(tokens[0] / tokens[1] - 1) > 1e-3, "the policy has moved"
    if iterations == 2:
        # K = 2, so k_mid = 1: beta_0 = 2, beta_1 = 1 + e^-3
        assert betas == pytest.approx([2.0] * 8 + [1 + math.exp(-3)] * 8)
        assert logged(trainer, "epo/beta") == pytest.approx([2.0, 1 + math.exp(-3)])
        bonus = [mean([mean([mean(turn) for turn in episode]) for episode in batch]) for batch in seen]  # Eq. 4
        assert logged(trainer, "epo/entropy_loss") == pytest.approx(bonus, rel=1e-5)
    shares = [logged(trainer, f"epo/share_{part}_band") for part in ("below", "inside", "above")]
    assert [sum(parts) for parts in zip(*shares, strict=True)] == pytest.approx([1.0] * len(shares[0]))


def test_the_schedule_counts_what_is_left_at_the_end_of_an_epoch(tmp_path):
    """An epoch of three batches is 6 micro-batches, taken as 4 and 2: two optimizer steps, three RL steps."""
    trainer = make_trainer(
        tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=4, steps_per_generation=2, max_steps=5,
        max_turns=1, train_dataset=Dataset.from_dict({"prompt": [f"train/{i}" for i in range(7)]}),
    )  # fmt: skip
    trainer.train()
    assert trainer.rl_step == trainer.args.total_rl_steps(5, tasks=7) == 8
    assert [trainer.args.total_rl_steps(steps, tasks=7) for steps in range(1, 5)] == [2, 3, 5, 6]
    # the second optimizer step is RL step 2 alone; K = 8, so k_mid = 4
    assert logged(trainer, "epo/beta")[1] == pytest.approx(2 - (1 - math.exp(-3 * 2 / 4)))


# ------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.slow
def test_a_resumed_run_is_bit_equal_to_one_that_was_never_stopped(tmp_path):
    """With a history per turn; test_method_table.py has one per step."""
    straight = resumable(tmp_path / "straight", entropy_history="turn")
    straight.train()
    stopped = resumable(tmp_path / "stopped", entropy_history="turn", callbacks=[StopAt(3)])
    stopped.train()
    assert stopped.state.global_step == 3
    resumed = resumable(tmp_path / "stopped", entropy_history="turn")
    resumed.train(resume_from_checkpoint=str(tmp_path / "stopped" / "checkpoint-3"))

    assert difference(weights(straight), weights(stopped)) > 1e-3
    assert_bit_equal(weights(resumed), weights(straight))
    assert resumed.methods.state_dict() == straight.methods.state_dict()
    assert resumed.rl_step == straight.rl_step == 6
    for name in ("loss", "grad_norm", "epo/beta", "epo/smoothing_loss", "entropy/early_turns", "env/return"):
        assert logged(resumed, name) == logged(straight, name), name
        assert len(logged(straight, name)) == 6


# ------------------------------------------------------------------------------------------------ faults and aborts


class FaultyHunt(TreasureHunt):
    """The third environment dies in the second step; each pays something else for every action."""

    def __init__(self, number):
        super().__init__()
        self.number, self.calls = number, 0

    def reset(self, **kwargs):
        self.calls = 0
        return super().reset(**kwargs)

    def step(self, action):
        self.calls += 1
        if self.number == 3 and self.calls == 2:
            raise RuntimeError("the engine died")
        observation, _, *rest = super().step(action)
        return observation, float(len(action) % 7 + 10 * self.number), *rest


class FaultySuite(ToySuite):
    made = 0

    def make_env(self):
        self.made += 1
        return FaultyHunt(self.made)


def test_an_aborted_episode_has_no_part_in_gradient_and_baseline_and_the_run_goes_on(tmp_path):
    trainer = make_trainer(tmp_path, suite=FaultySuite(), max_steps=3, env_reward_weight=1.0)
    rollouts, batches = results_of(trainer, "_collect"), batches_of(trainer)
    trainer.train()
    assert trainer.state.global_step == 3 and len(trainer.methods["epo"].history) == 3
    assert logged(trainer, "env/aborted") == logged(trainer, "stop/aborted") == [1 / ROWS] * 3
    for batch, episodes in zip(batches, (rollout.episodes for rollout in rollouts), strict=True):
        assert [e.stop is StopReason.ABORTED for e in episodes] == [i == 2 for i in range(ROWS)]
        assert episodes[2].error.startswith("RuntimeError: the engine died")
        assert batch["num_episodes"] == ROWS - 1
        assert not (batch["tool_mask"] * batch["completion_mask"])[2].any() and not batch["advantages"][2].any()
        for members in ([0, 1, 3], [4, 5, 6, 7]):
            returns = torch.tensor([episodes[i].total_reward for i in members])
            assert returns.std() > 0.1, "equal returns have no advantage anyhow"
            expected = (returns - returns.mean()) / (returns.std() + 1e-4)
            sampled = (batch["tool_mask"] * (batch["turn_ids"] >= 0)).bool()
            for i, advantage in zip(members, expected, strict=True):
                values = batch["advantages"][i][sampled[i]]
                torch.testing.assert_close(values, advantage.expand_as(values), rtol=1e-4, atol=1e-5)


def test_own_reward_functions_get_the_episodes_and_aborted_ones_do_not_enter_the_baseline(tmp_path):
    """Two functions: what they return for the aborted sixth episode is far off, and must not matter."""
    episodes = make_episodes()
    seen = []

    def fewest_turns(completions, episode, **kwargs):
        seen.extend(episode)
        return [100.0 if e.stop is StopReason.ABORTED else -float(len(e.turns)) for e in episode]

    def first_tokens(completions, episode, **kwargs):
        return [-50.0 if e.stop is StopReason.ABORTED else e.turns[0].response_ids[0] / 8 for e in episode]

    trainer = with_episodes(make_trainer(tmp_path, reward_funcs=[fewest_turns, first_tokens]), episodes)
    batch = collected(trainer)
    assert seen == episodes
    for members in ([0, 1, 2, 3], [4, 6, 7]):
        group = [episodes[i] for i in members]
        rewards = torch.tensor([e.turns[0].response_ids[0] / 8 - len(e.turns) for e in group])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        torch.testing.assert_close(batch["advantages"][members, 0], advantages, rtol=1e-4, atol=1e-4)
    assert not batch["advantages"][5].any()
    usable = [len(e.turns) for i, e in enumerate(episodes) if i != 5]
    assert trainer._metrics["train"]["rewards/fewest_turns/mean"] == [pytest.approx(-mean(usable))]


# ---------------------------------------------------------------------------------------------------------- contexts


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Returns, for each context, a trainer after four RL steps, its first weights and its batches of episodes."""
    result = {}
    for context in ("windowed", "concatenated"):
        trainer = make_trainer(
            tmp_path_factory.mktemp(context), context=context, max_steps=4, per_device_train_batch_size=4,
            gradient_accumulation_steps=2, epo_lambda=0.1,
        )  # fmt: skip
        batches, before = [], weights(trainer)
        original = trainer.play
        trainer.play = lambda tasks, original=original, batches=batches, **kw: (
            batches.append((list(tasks), original(tasks, **kw))) or batches[-1][1]
        )
        trainer.train()
        result[context] = trainer, before, batches
    return result


@pytest.mark.slow
@pytest.mark.parametrize("context", ["windowed", "concatenated"])
def test_both_contexts_learn_what_is_rewarded(tmp_path, context):
    """Rewarded is the share of sampled tokens in the lower half of the vocabulary: half of them at the start."""
    middle = len(toy_tokenizer()) // 2

    def low_tokens(completions, episode, **kwargs):
        ids = [[token for turn in e.turns for token in turn.response_ids] for e in episode]
        return [sum(token < middle for token in tokens) / len(tokens) for tokens in ids]

    model = make_model(sharpness=1.0)
    trainer = make_trainer(tmp_path, model=model, context=context, reward_funcs=low_tokens, max_steps=40, max_turns=2)
    trainer.train()
    shares = logged(trainer, "rewards/low_tokens/mean")
    assert shares[0] < 0.7 and sum(shares[-5:]) / 5 > 0.8, shares


@pytest.mark.parametrize("context", ["windowed", "concatenated"])
def test_members_of_a_group_start_from_the_identical_state(trained, context):
    for tasks, episodes in trained[context][2]:
        for start in range(0, ROWS, GROUP):
            group = episodes[start : start + GROUP]
            assert len({(e.task_id, e.seed, e.task, e.turns[0].observation, e.turns[0].prompt_ids) for e in group}) == 1
            assert len(set(tasks[start : start + GROUP])) == 1
            assert len({t.response_ids for e in group for t in e.turns[:1]}) > 1, "but they are not the same episode"
        assert episodes[0].task_id != episodes[GROUP].task_id


@pytest.mark.parametrize("context", ["windowed", "concatenated"])
def test_bf16_takes_nearly_the_same_step(tmp_path, context):
    """The weights and their update stay in float32; forward and backward run in bfloat16, on the same episodes."""
    logs = []
    for bf16 in (False, True):
        model = make_model(sharpness=4.0)
        dtypes = set()
        model.model.layers[0].mlp.register_forward_hook(lambda _, args, out, seen=dtypes: seen.add(out.dtype))
        trainer = make_trainer(tmp_path, model=model, context=context, bf16=bf16, max_steps=1, epo_lambda=0.1)
        with_episodes(trainer).train()
        assert (torch.bfloat16 in dtypes) == bf16
        assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
        logs.append({name: logged(trainer, name)[0] for name in ("entropy", "grad_norm", "epo/entropy_loss")})
    assert logs[0] != logs[1]
    assert logs[1] == pytest.approx(logs[0], rel=0.05)


@pytest.mark.parametrize("context", ["windowed", "concatenated"])
def test_a_pass_holds_so_many_tokens_whatever_the_size_of_the_batch(tmp_path, context):
    limit = 100 if context == "windowed" else 300  # longer than any sequence
    for micro_batches in (1, 6):
        model = make_model()
        tokens = []

        def note(module, args, kwargs, tokens=tokens):
            if kwargs.get(CACHE) is None:  # not generation
                tokens.append(kwargs["input_ids"].numel())

        model.register_forward_pre_hook(note, with_kwargs=True)
        # with two iterations the old log-probabilities need passes of their own
        trainer = make_trainer(
            tmp_path, model=model, context=context, per_device_train_batch_size=GROUP, num_iterations=2, max_steps=2,
            gradient_accumulation_steps=micro_batches, tokens_per_pass=limit,
        )  # fmt: skip
        trainer.train()
        assert len(tokens) >= 3 * micro_batches and limit / 2 < max(tokens) <= limit


@pytest.mark.parametrize("context", ["windowed", "concatenated"])
def test_lora_trains_the_adapter_alone_with_the_base_as_reference(tmp_path, context):
    trainer = make_trainer(tmp_path, max_steps=3, beta=0.01, epo_lambda=0.1, context=context, peft_config=lora())
    before = weights(trainer)
    trainer.train()
    moved = {name for name, value in weights(trainer).items() if not torch.equal(value, before[name])}
    assert moved and all("lora_" in name for name in moved)
    kl = logged(trainer, "kl")
    assert kl[0] == pytest.approx(0.0, abs=1e-6) and kl[2] > 1e-6


def test_dropout_of_an_adapter_does_not_make_a_ratio_before_any_update(tmp_path):
    adapter = lora(lora_dropout=0.5, init_lora_weights=False)
    trainer = with_episodes(make_trainer(tmp_path, peft_config=adapter, num_iterations=2, max_steps=1))
    scored = results_of(trainer, "_get_per_token_logps_and_entropies")
    trainer.train()
    (batch,) = trainer._buffered_inputs
    torch.testing.assert_close(scored[-1][0].detach(), batch["old_per_token_logps"])


def test_the_metrics_say_what_was_played(trained):
    trainer, _, batches = trained["windowed"]
    for k, (_, episodes) in enumerate(batches):
        turns = sum(len(e.turns) for e in episodes)
        assert logged(trainer, "env/turns")[k] == turns / ROWS
        assert logged(trainer, "env/return")[k] == pytest.approx(sum(e.total_reward for e in episodes) / ROWS)
        assert logged(trainer, "env/invalid_actions")[k] == sum(e.invalid_actions for e in episodes) / turns
        assert logged(trainer, "env/success_rate")[k] == sum(e.won for e in episodes) / ROWS
        assert sum(logged(trainer, f"stop/{reason}")[k] for reason in StopReason) == 1.0
        shares = [logged(trainer, f"epo/share_{part}_band")[k] for part in ("below", "inside", "above")]
        assert sum(shares) == pytest.approx(1.0)
        beta = logged(trainer, "epo/beta")[k]
        has_band = k > 0  # the first RL step has no history
        assert logged(trainer, "epo/net_coef_above_band")[k] == pytest.approx(0.1 * (1 - 0.1 * beta * has_band))
    entries = [entry["0"] for entry in trainer.methods["epo"].history.state_dict()["entries"]]
    assert logged(trainer, "epo/reference") == pytest.approx([sum(entries[:k]) / k for k in (1, 2, 3)])


# -------------------------------------------------------------------------------------------------------- evaluation


def test_evaluation_plays_the_whole_lists_once(tmp_path):
    trainer = make_trainer(tmp_path, eval_episodes=None, per_device_eval_batch_size=16, max_turns=1)
    rollouts = results_of(trainer, "play")
    metrics = trainer.evaluate()
    played = [episode.task_id for rollout in rollouts for episode in rollout]
    assert played == [*ToySuite().task_ids("iid"), *ToySuite().task_ids("ood")]
    assert [(r.split, r.episodes) for r in trainer.last_reports] == [("iid", 40), ("ood", 40)]
    for split in ("iid", "ood"):
        assert {f"eval_{split}/success_rate", f"eval_{split}/turns", f"eval_{split}/invalid_actions"} <= metrics.keys()
    (file,) = (tmp_path / "evaluations").iterdir()
    saved = json.loads(file.read_text())
    assert file.name == "step_000000.json" and saved["step"] == 0
    reports = [(r["split"], r["episodes"], r["protocol"]["temperature"]) for r in saved["reports"]]
    assert reports == [("iid", 40, 0.4), ("ood", 40, 0.4)]


@pytest.mark.parametrize("temperature", [0.3, 0.0], ids=["sampled", "greedy"])
def test_evaluation_changes_neither_random_state_nor_mode_nor_temperature_nor_what_is_to_be_logged(
    tmp_path, temperature
):
    filters = {"top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2}
    with pytest.warns(UserWarning, match="top_p, top_k, min_p, repetition_penalty: expected the defaults"):
        trainer = make_trainer(tmp_path, eval_temperature=temperature, **filters)
    used = []
    original = trainer.model.generate

    def generate(**kwargs):
        assert not trainer.model.training
        ids = original(**kwargs)
        config = kwargs["generation_config"]
        used.append(tuple(getattr(config, name) for name in ("temperature", "do_sample", *filters)))
        return ids

    trainer.model.generate = generate
    trainer.model.train()
    trainer._metrics["train"]["env/turns"] = [3.0]
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = trainer.evaluate()
    assert torch.equal(torch.get_rng_state(), before)
    assert trainer.model.training
    assert set(used) == {(0.3, True, 1.0, 0, None, 1.0) if temperature else (None, False, None, None, None, 1.0)}
    assert trainer.generation_config.temperature == trainer.generation_kwargs["temperature"] == 1.0
    assert trainer.generation_config.do_sample and trainer.generation_kwargs["do_sample"]
    for name, value in filters.items():
        assert getattr(trainer.generation_config, name) == trainer.generation_kwargs[name] == value
    assert trainer._metrics["train"] == {"env/turns": [3.0]} and "env/turns" not in first
    assert (trainer.rl_step, len(trainer.methods["epo"].history)) == (0, 0)
    torch.manual_seed(4)
    again = trainer.evaluate()
    for metrics in (first, again):
        metrics.pop("eval_iid/seconds"), metrics.pop("eval_ood/seconds")
    assert first == again, "the sampling of evaluation has its own seed"


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_of_an_evaluation_samples_with_a_seed_of_its_own(tmp_path, monkeypatch, rank):
    trainer = make_trainer(tmp_path, eval_seed=7)
    sampling, seeds, played = trainer.engine.sampling, [], []
    monkeypatch.setattr(trainer.engine, "sampling", lambda heat, seed: seeds.append(seed) or sampling(heat, seed))
    ranks = Comm(gather=lambda episodes: played.extend(episodes) or episodes, index=rank, count=2)
    replace(trainer.evaluator, ranks=ranks).report("iid", trainer.play)
    assert seeds == [7 + rank]
    assert [episode.task_id for episode in played] == trainer.evaluator.tasks["iid"][rank::2]


@pytest.mark.slow
def test_weights_are_the_same_with_and_without_evaluation(tmp_path):
    runs = []
    every = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}
    for name, changes in (("without", {}), ("with", every)):
        trainer = make_trainer(tmp_path / name, max_steps=3, **changes)
        trainer.train()
        runs.append(trainer)
    assert_bit_equal(weights(runs[0]), weights(runs[1]))
    assert logged(runs[0], "loss") == logged(runs[1], "loss")
    assert len(logged(runs[1], "eval_iid/success_rate")) == 4
    files = sorted(path.name for path in (tmp_path / "with" / "evaluations").iterdir())
    assert files == [f"step_{step:06d}.json" for step in range(4)]


# --------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"entropy_coef": 0.01}, "entropy_coef: expected 0 with epo_lambda=0.001, got 0.01"),
        ({"use_adaptive_entropy": True, "entropy_target": 1.0}, "epo_lambda.*use_adaptive_entropy=True"),
        ({"kappa_low": 1.5, "kappa_high": 1.0}, "kappa_high: expected a number >= kappa_low.*got 1.0"),
        ({"num_generations_eval": 4}, "num_generations_eval: expected 1 or null, got 4.*every task .* once"),
    ],
)
def test_a_bad_setting_is_named(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        make_config(tmp_path, **changes)


def test_trls_own_bonus_without_epo_is_epos_where_all_episodes_are_alike(tmp_path):
    """A mean over tokens and one over episodes are the same for episodes of one turn with four tokens."""

    def step(**changes):
        rng = random.Random(0)
        episodes = [make_episode([(5, 4)], float(i), rng) for i in range(ROWS)]
        return catch_step(with_episodes(make_trainer(tmp_path, **changes), episodes))[1]

    plain, epo = step(entropy_method=[]), step(epo_lambda=0.5, smoothing_alpha=0.0)
    assert difference(step(entropy_method=[], entropy_coef=0.5), epo) < 1e-5 < 1e-3 < difference(plain, epo)


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({"context": "windowed", "max_prompt_length": 96}, "got 96 . 6 = 102 in windowed"),
        ({"context": "concatenated", "max_prompt_length": 80, "max_turns": 4}, "got 80 . 4 x 6 = 104 in concatenated"),
    ],
)
def test_a_turn_budget_that_cannot_fit_is_named(tmp_path, changes, needed):
    with pytest.raises(ValueError, match=f"max_completion_length: .*max_position_embeddings = 100 tokens, {needed}"):
        make_trainer(tmp_path, model=make_model(max_position_embeddings=100), **changes)


def test_kl_needs_a_model_with_the_weights_of_its_files(tmp_path):
    """TRL loads the reference from the files, so it would be another policy than the one that RL starts from."""
    model = saved(make_model(), tmp_path / "start")
    trainer = make_trainer(tmp_path / "run", model=model, beta=0.01)
    assert_bit_equal(dict(trainer.ref_model.named_parameters()), weights(trainer))
    with torch.no_grad():
        model.model.norm.weight[0] += 1
    with pytest.raises(ValueError, match="model: expected the weights of its path .*start.* model.norm.weight; save"):
        make_trainer(tmp_path / "run", model=model, beta=0.01)
    make_trainer(tmp_path / "run", model=model)


def test_a_run_does_not_start_from_its_own_model(tmp_path):
    """An evaluation of it would replace the report of the policy before RL."""
    model = saved(make_model(), tmp_path / "checkpoint-2")
    for start in (model, str(tmp_path / "checkpoint-2")):
        with pytest.raises(ValueError, match="output_dir: expected another folder than that of the model, got"):
            make_trainer(tmp_path, model=start)
    make_trainer(tmp_path / "other", model=model)
