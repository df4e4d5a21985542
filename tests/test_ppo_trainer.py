"""EPOPPOTrainer: values, the value loss, warm-up, bootstrapping, epochs, adapters, checkpoints, bad input."""

import math
import random
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from ppo_kit import STATES, inject, is_critic, parts, step_on
from run_kit import StopAt, assert_bit_equal, logged, lora, resumable_ppo, weights
from trainer_kit import (
    ROWS,
    catch_step,
    difference,
    largest,
    make_config,
    make_episode,
    make_episodes,
    make_model,
    make_ppo,
    make_trainer,
    results_of,
    saved,
    toy_tokenizer,
    with_episodes,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from epo_trl.envs.toy import ToySuite
from epo_trl.methods import Credit
from epo_trl.models.critic import CRITIC_FILE, Critic, make_critic
from epo_trl.rollout import ContextBuilder, PromptTemplate
from epo_trl.rollout.context import TurnView
from epo_trl.trainers import EPOPPOConfig
from epo_trl.trainers.critic_values import final_states, final_values, value_statistics, whitened
from epo_trl.trainers.ppo_trainer import hide_critic
from epo_trl.types import StopReason

CRITICS = ["separate", "value_head"]
CONTEXTS = ["windowed", "concatenated"]


# ------------------------------------------------------------------------------------------------------------- values


def value_of(trainer, ids):
    """Returns the value after the last of these tokens, from a pass of its own."""
    backbone = trainer.critic.backbone if trainer.critic.backbone is not None else trainer.model.base_model
    with torch.no_grad():
        hidden = backbone(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0, -1]
        return float(hidden @ trainer.critic.head.weight[0] + trainer.critic.head.bias[0])


@pytest.mark.slow
@pytest.mark.parametrize("critic", CRITICS)
@pytest.mark.parametrize(("context", "passes"), [("windowed", {}), ("concatenated", {"tokens_per_pass": 40})])
def test_a_value_is_that_of_what_stood_before_the_token(tmp_path, critic, context, passes):
    """Windowed: the turn's own prompt and response so far; concatenated: all since the start. No other turn is seen."""
    trainer = make_ppo(tmp_path, critic=critic, context=context, per_device_train_batch_size=4,
                       gradient_accumulation_steps=2, **passes)  # fmt: skip
    batches = inject(trainer)
    catch_step(trainer)
    before = make_ppo(tmp_path, critic=critic, context=context)
    for row, episode in enumerate(make_episodes()):
        values = batches[0]["old_values"][row][(batches[0]["tool_mask"] * batches[0]["completion_mask"])[row].bool()]
        expected, sequence = [], []
        for turn in episode.turns if episode.is_usable else ():
            sequence = [*(sequence if context == "concatenated" else []), *turn.prompt_ids]
            for token in turn.response_ids:
                expected.append(value_of(before, sequence))
                sequence.append(token)
        torch.testing.assert_close(values, torch.tensor(expected), rtol=1e-4, atol=1e-4)
    assert batches[0]["old_values"].std() > 0.5


@pytest.mark.parametrize("critic", CRITICS)
def test_values_with_the_loss_are_the_old_values_before_any_update(tmp_path, critic):
    trainer = make_ppo(tmp_path, critic=critic, value_clip=None, tokens_per_pass=40, recompute_passes=True)
    inject(trainer)
    _, gradients = catch_step(trainer)
    (value_error,) = logged(trainer, "critic/value_loss")
    batch = inject(other := make_ppo(tmp_path, critic=critic))
    catch_step(other)
    points = batch[0]["value_points"]
    expected = 0.5 * (batch[0]["returns"] - batch[0]["old_values"])[points].square().mean()
    assert value_error == pytest.approx(float(expected), rel=1e-5)
    assert largest(parts(gradients)[1]) > 0.01


def test_values_are_float32_where_the_weights_are_bfloat16():
    """Half precision would round them to 8 significant bits: 10, and nothing between it and 10.0625."""
    critic = Critic(2, dtype=torch.bfloat16, token_head=True)
    for head, bias in ((critic.head, 10.0), (critic.token_head, 20.0)):
        torch.nn.init.constant_(head.bias, bias)
        torch.nn.init.ones_(head.weight)
    values = critic(torch.tensor([[[0.0, 0.03]]], dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.long))
    torch.testing.assert_close(values, torch.tensor([[[10.03, 20.03]]]), rtol=0, atol=1e-4)


def test_a_critic_starts_from_the_policy_and_shares_nothing_with_it(tmp_path):
    model = make_model()
    trainer = make_ppo(tmp_path, model=model)
    backbone, base = dict(trainer.critic.backbone.named_parameters()), dict(model.base_model.named_parameters())
    assert_bit_equal(backbone, base)
    assert not {p.data_ptr() for p in backbone.values()} & {p.data_ptr() for p in base.values()}


# ------------------------------------------------------------------------------------------------------ what comes next


def played(folder, suite=None, **changes):
    """Returns a trainer and the episodes of one rollout. Sampling with one seed, so a longer play begins the same."""
    trainer = make_ppo(folder, suite=suite, per_device_train_batch_size=4, **changes)
    torch.manual_seed(0)
    return trainer, trainer.play([(f"train/{i}", trainer.args.seed) for i in range(4)])


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize(("moves", "turns", "expected"), [(30, 2, StopReason.TURN_LIMIT), (2, 3, StopReason.TRUNCATED)])
def test_an_episode_is_cut_off_in_the_state_that_a_longer_one_goes_on_from(tmp_path, context, moves, turns, expected):
    trainer, episodes = played(tmp_path, ToySuite(move_limit=moves), context=context, max_turns=turns)
    _, longer = played(tmp_path, context=context, max_turns=3)
    assert {e.stop for e in episodes} == {expected}
    for state, short, long in zip(trainer._final_states(episodes), episodes, longer, strict=True):
        assert [t.response_ids for t in long.turns[:2]] == [t.response_ids for t in short.turns]
        next_prompt = list(long.turns[2].prompt_ids)
        before = [i for t in short.turns for i in (*t.prompt_ids, *t.response_ids)]
        assert state == (before + next_prompt if context == "concatenated" else next_prompt)


def test_the_value_of_a_cut_off_episode_is_that_of_its_final_state(tmp_path):
    trainer, episodes = played(tmp_path, max_turns=2)
    states = trainer._final_states(episodes)
    states[1] = []
    with torch.no_grad():
        found = final_values(trainer.model, states, 4, torch.device("cpu"), trainer.accelerator.autocast)
    values = found.tolist()
    expected = [value_of(trainer, state) if state else 0.0 for state in states]
    assert values == pytest.approx(expected, abs=1e-4)
    assert values[1] == 0.0 and min(map(abs, [values[0], *values[2:]])) > 1e-3


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_next_prompt_that_does_not_fit_loses_its_beginning(context):
    limits = {"windowed": {"max_prompt_tokens": 12}, "concatenated": {"max_context_tokens": 20}}[context]
    builder, whole = (
        ContextBuilder(toy_tokenizer(), PromptTemplate.load("compact"), mode=context, **given) for given in (limits, {})
    )
    episode = make_episode([(5, 3), (4, 2)], 0.0, random.Random(0), stop=StopReason.CONTEXT_FULL)
    info = ToySuite().make_env().reset(options={"task_id": "train/0"})[1]
    episode = replace(episode, final_info=info)
    (state,) = final_states([episode], builder)
    (full,) = final_states([episode], whole)
    limit = next(iter(limits.values()))
    assert len(full) > len(state) == limit and state == full[-limit:]
    view = TurnView("", info, [(t.observation, t.action) for t in episode.turns], (1,))
    assert builder.build([view])[0] is None or context == "concatenated"


# -------------------------------------------------------------------------------------------------------------- batch


def test_the_returns_of_a_batch_by_hand(tmp_path):
    """gamma 1, lambda 1, one chain per episode: the rest of its rewards plus the value of its final state."""
    trainer = make_ppo(tmp_path)
    batches = inject(trainer)
    seen = results_of(trainer, "_method_batch")
    catch_step(trainer)
    batch, finals = batches[0], seen[0].final_values
    for row, episode in enumerate(make_episodes()):
        points = batch["value_points"][row]
        assert int(points.sum()) == len(episode.turns) * episode.is_usable
        expected = [episode.total_reward + float(finals[row])] * int(points.sum())
        torch.testing.assert_close(batch["returns"][row][points], torch.tensor(expected))
    assert [bool(value) for value in finals] == [bool(state) for state in STATES]


def test_normalization_by_hand():
    """Mean 3, deviation 2 over the masked entries."""
    advantages, mask = torch.tensor([[1.0, 100.0, 5.0]]), torch.tensor([[1, 0, 1]])
    torch.testing.assert_close(whitened(advantages, mask, lambda sums: sums), torch.tensor([[-1.0, 0.0, 1.0]]))
    assert not whitened(advantages, torch.zeros_like(mask), lambda sums: sums).any()


@pytest.mark.parametrize("critic", CRITICS)
def test_the_gradient_does_not_depend_on_how_the_batch_is_cut(tmp_path, critic):
    """With bootstrapped values; test_method_table.py has each credit without them."""
    runs = []
    for size, steps in ((ROWS, 1), (2, 4)):
        trainer = make_ppo(
            tmp_path, critic=critic, credit="token", per_device_train_batch_size=size, gamma=0.9, gae_lambda=0.8,
            gradient_accumulation_steps=steps, epo_lambda=0.3,
        )  # fmt: skip
        inject(trainer)
        runs.append(catch_step(trainer))
    (loss, whole), (other_loss, cut) = runs
    assert float(loss) == pytest.approx(float(other_loss), rel=1e-5)
    for part, other in zip(parts(whole), parts(cut), strict=True):
        assert difference(part, other) < 2e-5 * largest(part)
        assert largest(part) > 1e-3


def test_two_optimizer_steps_on_one_batch_average_to_one_step_on_it(tmp_path):
    """steps_per_generation 4, gradient_accumulation_steps 2: each optimizer step sees half of the decision points."""
    changes = {"credit": "token", "gamma": 0.9, "gae_lambda": 0.8, "epo_lambda": 0.0}
    trainer = make_ppo(tmp_path, per_device_train_batch_size=ROWS, **changes)
    inject(trainer)
    _, whole = catch_step(trainer)
    trainer = make_ppo(
        tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2, steps_per_generation=4, max_steps=2,
        **changes,
    )  # fmt: skip
    inject(trainer)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 2
    trainer.state.max_steps = 2
    for _ in range(4):
        inputs = trainer._prepare_inputs([{"prompt": "train/0"} for _ in range(ROWS)])
        trainer.compute_loss(trainer.model, inputs).backward()
        trainer._step += 1
    halves = {name: p.grad / 2 for name, p in trainer.model.named_parameters() if p.grad is not None}
    for part, other in zip(parts(whole), parts(halves), strict=True):
        assert difference(part, other) < 2e-5 * largest(part)
        assert largest(part) > 1e-3


@pytest.mark.parametrize(("make", "changes"), [(make_trainer, {}), (make_ppo, {"credit": "token"})])
def test_an_aborted_episode_reaches_neither_policy_nor_critic(tmp_path, make, changes):
    gradients = []
    for seed in (0, 7):
        trainer = make(tmp_path, **changes)
        inject(trainer)
        episodes = make_episodes()
        episodes[5] = make_episodes(seed)[5]
        gradients.append(catch_step(with_episodes(trainer, episodes))[1])
    assert difference(*gradients) == 0.0 and largest(gradients[0]) > 0.01


def test_a_value_head_moves_the_backbone_and_a_separate_critic_does_not(tmp_path):
    for critic in CRITICS:
        without, with_value_loss = (
            parts(step_on(tmp_path, make_episodes(), critic=critic, value_coef=coefficient)[2])[0]
            for coefficient in (0.0, 1.0)
        )
        moved = difference(without, with_value_loss)
        assert moved > 1e-3 if critic == "value_head" else moved == 0.0


def test_the_entropy_terms_do_not_touch_a_separate_critic(tmp_path):
    runs = (parts(step_on(tmp_path, make_episodes(), epo_lambda=each)[2]) for each in (0.0, 0.5))
    (policy, critic), (other_policy, other_critic) = runs
    assert difference(policy, other_policy) > 1e-3 and difference(critic, other_critic) == 0.0


@pytest.mark.parametrize("critic", CRITICS)
def test_old_log_probs_and_values_are_those_of_the_collecting_policy_in_every_epoch(tmp_path, critic):
    """Two epochs of two mini-batches: four optimizer steps on one batch."""
    trainer = make_ppo(
        tmp_path, critic=critic, per_device_train_batch_size=4, steps_per_generation=2, num_iterations=2, max_steps=4,
        optim="sgd", learning_rate=1e-3, lr_scheduler_type="constant", gradient_accumulation_steps=1,
    )  # fmt: skip
    batches = inject(trainer)
    seen = []
    original = trainer.compute_loss

    def spy(model, inputs, *args, **kwargs):
        loss = original(model, inputs, *args, **kwargs)
        part = trainer.step.part(inputs, trainer.args, trainer.current_gradient_accumulation_steps)
        with torch.no_grad():
            again = trainer.scorer.values(trainer.model, part.input_ids, part.layout)
            now = trainer.scorer.score(trainer.model, part.input_ids, part.layout)[0].logps
        targets = part.targets
        own = {"old_values": targets.values, "returns": targets.returns, "value_points": targets.points}
        seen.append(({**inputs, **own}, again, now))
        return loss

    trainer.compute_loss = spy
    trainer.train()
    assert len(batches) == 1 and len(seen) == 4
    for first, second in ((0, 2), (1, 3)):
        (inputs, values, logps), (again, new_values, new_logps) = seen[first], seen[second]
        for name in ("old_values", "returns", "value_points", "old_per_token_logps", "advantages"):
            assert torch.equal(inputs[name], again[name])
        assert (new_values - again["old_values"]).abs().max() > 1e-2, "the critic has moved, its old values not"
        assert (new_logps - again["old_per_token_logps"]).abs().max() > 1e-4
        if first == 0:  # nothing was updated before the first mini-batch
            torch.testing.assert_close(values, inputs["old_values"], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(logps, inputs["old_per_token_logps"], rtol=1e-4, atol=1e-4)


def test_the_value_loss_and_the_share_that_was_clipped_are_those_of_a_loop(tmp_path):
    """Values that have moved by 1 since the batch was collected, every other one down, where 0.25 is allowed."""
    cut = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    trainer = make_ppo(tmp_path, value_clip=0.25, max_steps=2, **cut)
    batches = inject(trainer)
    collect = trainer._generate_and_score_completions

    def moved(inputs):
        output, step = collect(inputs), trainer.step
        step.targets = replace(step.targets, values=step.targets.values + 1 - 2 * (step.layout.turn_ids % 2))
        return output

    trainer._generate_and_score_completions = moved
    trainer.train()
    for k, batch in enumerate(batches):
        points, losses, clipped = batch["value_points"], [], 0
        columns = (batch[name][points].tolist() for name in ("old_values", "returns", "turn_ids"))
        for value, target, turn in zip(*columns, strict=True):
            allowed = value + (0.75 if turn % 2 == 0 else -0.75)
            losses.append(max((value - target) ** 2, (allowed - target) ** 2) / 2)
            clipped += (allowed - target) ** 2 > (value - target) ** 2
        assert 0 < clipped < len(losses)
        assert logged(trainer, "critic/value_loss")[k] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
        assert logged(trainer, "critic/value_clip_share")[k] == clipped / len(losses)
    assert len(batches) == 2


# ---------------------------------------------------------------------------------------------- rates and warm-up


def moved(trainer, before):
    policy, critic = parts({name: now - before[name] for name, now in weights(trainer).items()})
    return largest(policy), largest(critic)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw_torch", "sgd"])
def test_in_the_warm_up_the_critic_alone_is_trained(tmp_path, optimizer):
    settings = {"critic_warmup_steps": 2, "weight_decay": 0.1, "optim": optimizer, "lr_scheduler_type": "constant"}
    trainer = make_ppo(tmp_path, max_steps=3, callbacks=[StopAt(2)], **settings)
    before = weights(trainer)
    trainer.train()
    policy, critic = moved(trainer, before)
    assert policy == 0.0 and critic > 1e-3
    trainer = make_ppo(tmp_path, max_steps=3, **settings)
    trainer.train()
    assert moved(trainer, before)[0] > 1e-3
    assert logged(trainer, "learning_rate") == [0.0, 0.0, 0.01]
    assert logged(trainer, "critic/learning_rate") == [0.01] * 3


def test_the_critic_has_its_own_learning_rate(tmp_path):
    steps = {}
    for rate in (1e-2, 3e-2):
        trainer = make_ppo(tmp_path, max_steps=1, optim="sgd", learning_rate=1e-2, critic_learning_rate=rate,
                           lr_scheduler_type="constant")  # fmt: skip
        inject(trainer)
        before = weights(trainer)
        trainer.train()
        steps[rate] = moved(trainer, before)
        assert logged(trainer, "critic/learning_rate") == [rate] and logged(trainer, "learning_rate") == [1e-2]
    assert steps[1e-2][0] == pytest.approx(steps[3e-2][0], rel=1e-6)
    assert 3 * steps[1e-2][1] == pytest.approx(steps[3e-2][1], rel=1e-3)


def test_a_large_error_of_the_critic_does_not_shrink_the_policys_step(tmp_path):
    gradients = [
        parts(step_on(tmp_path, make_episodes(), value_coef=coefficient, max_grad_norm=0.1)[2])
        for coefficient in (1.0, 1000.0)
    ]
    for policy, critic in gradients:
        for part in (policy, critic):
            norm = math.sqrt(sum(float(g.square().sum()) for g in part.values()))
            assert norm == pytest.approx(0.1, rel=1e-3)
    assert difference(gradients[0][0], gradients[1][0]) == 0.0


def test_every_trained_parameter_is_in_one_group_only(tmp_path):
    trainer = make_ppo(tmp_path, weight_decay=0.1)
    optimizer = trainer.create_optimizer()
    assert trainer.create_optimizer() is optimizer
    ids = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert len(ids) == len(set(ids)) == len([p for p in trainer.model.parameters() if p.requires_grad])
    critic = {id(p) for group in optimizer.param_groups if group.get("part") == "critic" for p in group["params"]}
    assert critic == {id(p) for p in trainer.critic.parameters()}
    assert {group["weight_decay"] for group in optimizer.param_groups if group.get("part") == "critic"} == {0.1, 0.0}


# ----------------------------------------------------------------------------------------------------------- adapters


@pytest.mark.slow
@pytest.mark.parametrize(("critic", "adapter"), [("separate", False), ("separate", True), ("value_head", False)])
def test_a_policy_with_an_adapter_trains_with_every_critic(tmp_path, critic, adapter):
    trainer = make_ppo(tmp_path, critic=critic, critic_use_peft=adapter, peft_config=lora(), max_steps=3, beta=0.01)
    before = weights(trainer)
    trainer.train()
    names = {name for name, value in weights(trainer).items() if not torch.equal(value, before[name])}
    policy = {name for name in names if not is_critic(name)}
    assert policy and all("lora_" in name for name in policy)
    inside = {name.partition("critic.")[2] for name in names - policy}
    assert {"head.weight", "head.bias"} <= inside
    backbone = {name for name in inside if name.startswith("backbone.")}
    assert bool(backbone) == (critic == "separate")
    assert all("lora_" in name for name in backbone) == (adapter or not backbone)
    kl = logged(trainer, "kl")
    assert kl[0] == pytest.approx(0.0, abs=1e-6) and kl[2] > 1e-7


# -------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["separate", "two adapters"])
def test_a_resumed_run_is_bit_equal_to_one_that_was_never_stopped(tmp_path, kind):
    straight = resumable_ppo(tmp_path / "straight", kind)
    before = weights(straight)
    straight.train()
    stopped = resumable_ppo(tmp_path / "stopped", kind, callbacks=[StopAt(3)])
    stopped.train()
    resumed = resumable_ppo(tmp_path / "stopped", kind)
    resumed.train(resume_from_checkpoint=str(tmp_path / "stopped" / "checkpoint-3"))
    assert min(moved(straight, weights(stopped))) > 1e-4 and min(moved(straight, before)) > 1e-4
    assert_bit_equal(weights(resumed), weights(straight))
    states = [trainer.optimizer.state_dict() for trainer in (resumed, straight)]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    for key, state in states[1]["state"].items():
        assert all(torch.equal(value, states[0]["state"][key][name]) for name, value in state.items())
    for name in ("loss", "grad_norm", "critic/value_loss", "critic/value", "critic/learning_rate", "epo/beta"):
        assert logged(resumed, name) == logged(straight, name), name
        assert len(logged(straight, name)) == 6


def weight_files(folder):
    """Returns the names of the files that vLLM reads as the weights of a model without an index."""
    return [path.name for path in folder.glob("*.safetensors")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["separate", "value head"])
def test_the_saved_policy_loads_alone_and_has_no_critic(tmp_path, kind):
    trainer = resumable_ppo(tmp_path, kind, max_steps=3)
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    text = "go to drawer 3 <action> look </action><|im_end|>"
    for folder in (tmp_path / "checkpoint-3", tmp_path / "final"):
        assert AutoTokenizer.from_pretrained(folder)(text)["input_ids"] == trainer.processing_class(text)["input_ids"]
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert weight_files(folder) == ["model.safetensors"]
        saved = safetensors.torch.load_file(folder / "model.safetensors")
        assert not any("critic" in name or "head." in name.replace("lm_head.", "") for name in saved)
        policy, critic = parts(weights(trainer))
        assert_bit_equal(dict(model.named_parameters()), policy)
        own = safetensors.torch.load_file(folder / CRITIC_FILE)
        assert_bit_equal(own, {name.partition("critic.")[2]: value for name, value in critic.items()})
        assert (kind == "separate") == any(name.startswith("backbone.") for name in own)


@pytest.mark.parametrize("make", [make_trainer, make_ppo])
def test_the_next_trainer_of_a_model_does_not_inherit_its_critic(tmp_path, make):
    model = make_model()
    names = dict(model.named_parameters()).keys()
    first = make_ppo(tmp_path / "first", model=model).critic
    model.save_pretrained(tmp_path / "plain")
    second = make(tmp_path / "second", model=model)
    second.save_model()
    for folder in ("plain", "second"):
        assert safetensors.torch.load_file(tmp_path / folder / "model.safetensors").keys() == names
    critics = [module for module in model.modules() if isinstance(module, Critic)]
    assert critics == [second.critic] and second.critic is not first if make is make_ppo else critics == []


def test_a_saved_adapter_has_no_critic_and_an_adapted_critic_saves_what_it_trains(tmp_path):
    trainer = resumable_ppo(tmp_path, "two adapters", max_steps=3)
    trainer.train()
    assert weight_files(tmp_path / "checkpoint-3") == ["adapter_model.safetensors"]
    adapter = safetensors.torch.load_file(tmp_path / "checkpoint-3" / "adapter_model.safetensors")
    assert len(adapter) == 8 and not any("critic" in name for name in adapter)  # 2 layers, q and v, A and B
    critic = safetensors.torch.load_file(tmp_path / "checkpoint-3" / CRITIC_FILE)
    assert len(critic) == 10 and {"head.weight", "head.bias"} <= critic.keys()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["separate", "two adapters"])
def test_the_best_policy_is_loaded_with_its_own_critic(tmp_path, kind):
    """The first of two evaluations is the best."""
    trainer = resumable_ppo(
        tmp_path, kind, max_steps=2, save_steps=1, eval_strategy="steps", eval_steps=1, load_best_model_at_end=True,
        metric_for_best_model="eval_iid/turns", greater_is_better=False, critic_warmup_steps=0,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    trainer.save_model()
    best, last = (safetensors.torch.load_file(tmp_path / f"checkpoint-{step}" / CRITIC_FILE) for step in (1, 2))
    assert difference(best, last) > 1e-3
    assert_bit_equal(safetensors.torch.load_file(tmp_path / CRITIC_FILE), best)


@pytest.mark.parametrize("adapter", [False, True])
def test_the_trained_weights_of_a_critic_beside_a_quantized_policy_are_float32(tmp_path, adapter):
    """The policy's own precision is that of its computation; AdamW's updates would be rounded away in it."""
    peft = pytest.importorskip("peft")
    base = saved(make_model().bfloat16(), tmp_path / "base")
    base.hf_quantizer = object()
    config = make_config(tmp_path, kind=EPOPPOConfig, num_generations=1, critic_use_peft=adapter)
    critic = make_critic(peft.get_peft_model(base, lora()), config)
    assert {p.dtype for p in critic.parameters() if p.requires_grad} == {torch.float32}
    frozen = {p.dtype for p in critic.parameters() if not p.requires_grad}
    assert frozen == ({torch.bfloat16} if adapter else set())


def test_a_run_with_gradient_checkpointing_is_bit_equal(tmp_path):
    runs = []
    for checkpointing in (False, True):
        trainer = make_ppo(tmp_path, gradient_checkpointing=checkpointing, max_steps=2)
        trainer.train()
        assert trainer.critic.backbone.is_gradient_checkpointing == checkpointing
        runs.append(weights(trainer))
    assert_bit_equal(*runs)


def test_vllm_is_sent_the_policy_alone(tmp_path):
    """The engine needs a GPU; what it is sent is what the model lists while `sync_weights` runs."""
    trainer = make_ppo(tmp_path)
    sent = []

    class Engine:
        def sync_weights(self):
            sent.extend(name for name, _ in trainer.model.named_parameters())

    trainer.vllm_generation, trainer.use_vllm = Engine(), True
    hide_critic(trainer)
    trainer.vllm_generation.sync_weights()
    assert sent and not any(is_critic(name) for name in sent)
    assert any(is_critic(name) for name, _ in trainer.model.named_parameters())


# ------------------------------------------------------------------------------------------------------------ metrics


def test_value_statistics_by_hand():
    """Returns 0, 2, 4 (variance 8/3) against values 0, 1, 2: the errors 0, 1, 2 have variance 2/3."""
    points = torch.tensor([[True, False, True], [True, False, False]])
    estimate = Credit(
        advantages=torch.tensor([[1.0, 9.0, 2.0], [3.0, 9.0, 9.0]]),
        returns=torch.tensor([[0.0, 9.0, 2.0], [4.0, 9.0, 9.0]]),
        value_mask=points,
    )
    values = torch.tensor([[0.0, 9.0, 1.0], [2.0, 9.0, 9.0]])
    turn_ids = torch.tensor([[0, 1, 3], [0, 0, -1]])
    metrics = value_statistics(estimate, values, turn_ids, 4, lambda sums: sums)
    assert metrics == pytest.approx(
        {
            "critic/return": 2.0, "critic/value": 1.0, "critic/explained_variance": 0.75,
            "gae/value_turns_1": 1.0, "gae/advantage_turns_1": 2.0, "gae/advantage_std_turns_1": 1.0,
            "gae/value_turns_3_4": 1.0, "gae/advantage_turns_3_4": 2.0, "gae/advantage_std_turns_3_4": 0.0,
        }
    )  # fmt: skip
    doubled = value_statistics(estimate, values, turn_ids, 4, lambda sums: 2 * sums)
    assert doubled == pytest.approx(metrics), "two ranks with the same batch"
    equal = Credit(estimate.advantages, torch.full((2, 3), 0.1), points)
    assert "critic/explained_variance" not in value_statistics(equal, values, turn_ids, 4, lambda sums: sums)
    nothing = Credit(estimate.advantages, estimate.returns, torch.zeros_like(points))
    assert value_statistics(nothing, values, turn_ids, 4, lambda sums: sums) == {}


# ---------------------------------------------------------------------------------------------------------- bad input


def test_a_bad_setting_is_named(tmp_path):
    with pytest.raises(ValueError, match="credit: expected .*'turn', 'token', 'outcome', 'vetta', or .*got 'step'"):
        make_config(tmp_path, kind=EPOPPOConfig, num_generations=1, credit="step")
    for critic in CRITICS:
        with pytest.raises(ValueError, match="critic_use_peft: expected False without .*value head, got True"):
            make_ppo(tmp_path, critic=critic, critic_use_peft=True)
