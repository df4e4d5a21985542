"""The engines over a trainer's policy: in step by TRL's `_generate_single_turn`, or without a barrier."""

import copy
import socket
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import requests
import torch
from peft import LoraConfig
from trainer_kit import make_config, make_model, make_ppo, make_trainer
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
from trl.generation.vllm_generation import VLLMGeneration

from epo_trl.errors import InputError
from epo_trl.rollout import EngineError
from epo_trl.trainers.checks import check_half_precision
from epo_trl.trainers.engines import VllmServerEngine, _WithTimeout, make_engine
from epo_trl.trainers.generation import TurnGenerator, keeping_precision
from epo_trl.types import StopReason

CONTINUOUS = {
    "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {"num_blocks": 64, "page_size": 32, "max_batch_tokens": 512},
}


@pytest.mark.slow
def test_continuous_batching_answers_each_prompt_as_plain_generate_does(tmp_path):
    """At a temperature near zero both decode greedily, so the answers must agree, prompt by prompt."""
    answers = []
    for backend in ({}, CONTINUOUS):
        trainer = make_trainer(tmp_path, temperature=1e-4, **backend)
        prompts = [[5 + i, 9, 11 + 2 * i, *range(20, 20 + i)] for i in range(7)]
        answers.append(trainer._generate_single_turn(prompts, None, {}, 1)[0])
    assert answers[0] == answers[1]
    assert len({tuple(answer) for answer in answers[0]}) > 1  # the order could not be told otherwise


@pytest.mark.slow
@pytest.mark.parametrize("context", ["windowed", "concatenated"])
def test_rl_steps_and_greedy_evaluations_run_on_continuous_batching(tmp_path, context):
    """An evaluation before the logging step leaves what is to be logged of training where it is."""
    often = {"logging_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "eval_temperature": 0.0}
    trainer = make_trainer(tmp_path, max_steps=2, context=context, **often, **CONTINUOUS)
    trainer.train()
    first, trained, second = trainer.state.log_history[:3]
    assert trainer.rl_step == 2 and trained["step"] == 2 and trained["env/turns"] == 3.0
    for evaluated in (first, second):
        assert "eval_iid/success_rate" in evaluated and "env/turns" not in evaluated


def state_of(model):
    """Returns a copy of all weights and buffers, those that are not saved too."""
    return {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def assert_same_state(model, before):
    now = dict((*model.named_parameters(), *model.named_buffers()))
    assert now.keys() == before.keys()
    for name, tensor in now.items():
        assert tensor.dtype == before[name].dtype and torch.equal(tensor, before[name]), name


def changed_share(model, before):
    pairs = [(p, before[name]) for name, p in model.named_parameters() if p.requires_grad]
    return sum((p != old).sum().item() for p, old in pairs) / sum(p.numel() for p, _ in pairs)


def test_weights_gradients_and_buffers_are_bit_equal_after_a_cast():
    """The weights are no bf16 numbers, so that a cast and one back would change them."""
    model = make_model()
    model.tie_weights()
    frozen, *_ = model.parameters()
    frozen.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    model(input_ids=torch.tensor([[5, 6, 7]])).logits.sum().backward()
    objects, before = list(model.parameters()), state_of(model)
    gradients = [p.grad.clone() for p in trained]
    for _ in range(2):
        with pytest.raises(KeyError), keeping_precision(model):
            model.to(torch.bfloat16)
            assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
            raise KeyError
        assert_same_state(model, before)
    assert all(p is old for p, old in zip(model.parameters(), objects, strict=True))
    assert all(torch.equal(p.grad, old) for p, old in zip(trained, gradients, strict=True))
    torch.optim.SGD(model.parameters(), lr=1e-6).step()  # an optimizer sees the same weights as before
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for (name, p), gradient in zip(named, gradients, strict=True):
        torch.testing.assert_close(p.detach(), before[name] - 1e-6 * gradient, rtol=0, atol=1e-8)


def test_autocast_casts_the_weights_once_per_turn(tmp_path):
    """A block around a whole call keeps the casts of the first token for the next ones, with the same samples."""
    trainer, enabled = make_trainer(tmp_path, bf16=True), []
    trainer.model_wrapped = trainer.accelerator.prepare_model(trainer.model)  # as `train` does
    plain = trainer._generate_single_turn

    def recorded(*args):
        enabled.append(torch.is_autocast_enabled("cpu"))
        return plain(*args)

    trainer._generate_single_turn = recorded
    prompts = [[5, 6, 7], [8, 9]]
    torch.manual_seed(0)
    once = TurnGenerator(trainer)._generate_turn(prompts)
    torch.manual_seed(0)
    assert once == plain(prompts, None, {}, 1)
    assert enabled == [True] and not torch.is_autocast_enabled("cpu")


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", [{}, {"peft_config": LoraConfig(target_modules="all-linear")}], ids=["all", "lora"])
def test_continuous_batching_leaves_the_weights_as_they_are(tmp_path, wrapped):
    """TRL casts the policy to the precision of the run: rollouts, one after another, and evaluations change no bit."""
    trainer = make_trainer(tmp_path, bf16=True, **wrapped, **CONTINUOUS)
    policy, casts = trainer.accelerator.unwrap_model(trainer.model), []
    begin = policy.init_continuous_batching
    policy.init_continuous_batching = lambda *args: casts.append(policy.dtype) or begin(*args)
    before = state_of(trainer.model)
    assert torch.float32 in {tensor.dtype for tensor in before.values()}
    for _ in range(2):
        trainer.play([("train/0", 0)])
        assert_same_state(trainer.model, before)
    trainer.evaluate()
    assert_same_state(trainer.model, before)
    assert set(casts) == {torch.bfloat16}  # or there would have been nothing to restore


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1e-6, 1e-5])
def test_small_updates_reach_the_weights_with_continuous_batching(tmp_path, rate):
    """At 1e-6 an update is below bf16's resolution of most weights: with weights in bf16 .3 % of them changed."""
    shares = []
    for backend in ({}, CONTINUOUS):
        trainer = make_trainer(tmp_path, bf16=True, max_steps=3, learning_rate=rate, **backend)
        before = state_of(trainer.model)
        trainer.train()
        assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
        shares.append(changed_share(trainer.model, before))
    plain, continuous = shares
    assert plain > 0.9 and continuous == pytest.approx(plain, abs=0.03)


@pytest.mark.slow
def test_a_resumed_run_on_continuous_batching_is_the_uninterrupted_one(tmp_path):
    """A checkpoint holds the weights in float32, bit by bit; in bf16 the resumed run would begin with others."""
    settings = {"bf16": True, "max_steps": 3, "learning_rate": 1e-5, "save_strategy": "steps", "save_steps": 2}
    whole = make_trainer(tmp_path / "whole", **settings, **CONTINUOUS)
    whole.train()
    resumed = make_trainer(tmp_path / "whole", **settings, **CONTINUOUS)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert_same_state(resumed.model, state_of(whole.model))
    assert {p.dtype for p in resumed.model.parameters()} == {torch.float32}


def test_continuous_batching_is_refused_where_weights_would_stay_cast(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    check_half_precision(make_config(tmp_path, **CONTINUOUS))  # nothing is cast
    check_half_precision(make_config(tmp_path, bf16=True))
    with pytest.raises(ValueError, match="use_transformers_continuous_batching: expected False with bf16.*use_vllm"):
        check_half_precision(make_config(tmp_path, bf16=True, **CONTINUOUS))


@pytest.mark.slow
def test_continuous_batching_leaves_a_critic_its_precision(tmp_path):
    """TRL casts the policy to that of the run, and what is a part of it too; the critic is trained in float32."""
    trainer = make_ppo(tmp_path, bf16=True, **CONTINUOUS)
    trainer.play([("train/0", 0)])
    assert {p.dtype for p in trainer.critic.parameters()} == {torch.float32}
    assert trainer.critic in trainer.model.modules()


@pytest.mark.parametrize("wrapped", [{}, {"peft_config": LoraConfig(target_modules="all-linear")}])
def test_a_rollout_of_concatenated_turns_is_the_same_without_what_was_kept(tmp_path, monkeypatch, wrapped):
    from epo_trl.trainers import generation

    episodes, caches = [], []
    reuse = generation.reusing_prefixes
    monkeypatch.setattr(generation, "reusing_prefixes", lambda *args: caches.append(reuse(*args)) or caches[-1])
    for can_reuse in (generation.can_reuse, lambda *args: False):
        monkeypatch.setattr(generation, "can_reuse", can_reuse)
        trainer = make_trainer(
            tmp_path, context="concatenated", max_turns=4, model=make_model(sharpness=4.0), **wrapped
        )
        torch.manual_seed(0)
        episodes.append(trainer.play([(f"train/{i % 3}", 0) for i in range(6)]))
    assert len(caches) == 1 and episodes[0] == episodes[1]
    assert len({len(turn.response_ids) for episode in episodes[0] for turn in episode.turns}) > 1


@pytest.mark.parametrize("changes", [{"generation_kwargs": {"use_cache": False}}, {"cache_implementation": "static"}])
def test_concatenated_turns_are_played_with_another_cache_or_none(tmp_path, changes):
    episodes = []
    for settings in ({}, changes):
        model = make_model(sharpness=4.0)
        trainer = make_trainer(tmp_path, context="concatenated", max_turns=3, model=model, **settings)
        torch.manual_seed(0)
        episodes.append(trainer.play([(f"train/{i}", 0) for i in range(3)]))
    assert episodes[0] == episodes[1]


class SleepingEngine:
    """Writes down what is asked of it. `make test-vllm` has the real one."""

    enable_sleep_mode = _llm_weights_sleeping = True

    def __init__(self):
        self.asked = []
        self.llm = self

    def sync_weights(self):
        self.asked.append("sync")

    def wake_up(self, tags):
        self.asked += tags

    def sleep(self, level):
        self.asked.append(f"sleep {level}")


@pytest.mark.parametrize("loaded", [False, True], ids=["asleep", "awake and loaded by TRL"])
def test_a_sleeping_engine_is_awake_for_a_rollout_and_sleeps_again_even_after_an_error(tmp_path, loaded):
    trainer = make_trainer(tmp_path)
    trainer.vllm_generation = engine = SleepingEngine()
    trainer.use_vllm, trainer._last_loaded_step, engine._llm_weights_sleeping = True, 0, not loaded
    trainer.vllm_mode = "colocate"
    with pytest.raises(KeyError), trainer.player.engine.keeping_vllm_awake():
        assert not engine.enable_sleep_mode
        raise KeyError
    assert engine.asked == [*["sync"] * (not loaded), "kv_cache", "sleep 2"]
    assert engine.enable_sleep_mode and engine._llm_weights_sleeping


def test_a_server_is_left_to_itself_whatever_the_settings_say_about_sleep(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.vllm_generation = engine = SleepingEngine()
    trainer.use_vllm, trainer.vllm_mode, trainer._last_loaded_step = True, "server", 0
    engine._llm_weights_sleeping = False
    with trainer.player.engine.keeping_vllm_awake():
        assert engine.enable_sleep_mode and not engine.asked
    assert not engine.asked


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_sending_an_adapter_s_policy_to_vllm_leaves_the_base_as_it_is(tmp_path, dtype):
    """TRL merges the adapter into the base and unmerges it, which rounds: in bf16 the base drifts with every update."""
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    trainer = make_trainer(tmp_path, model=make_model().to(dtype), peft_config=lora)
    sent, model = [], trainer.model
    engine = VLLMGeneration.__new__(VLLMGeneration)
    engine.model, engine._dist = model, SimpleNamespace(gather_params=lambda _: nullcontext(), is_fsdp=False)
    engine.sync_weights = lambda: sent.append({name: p.clone() for name, p in engine._iter_named_params()})
    engine._llm_weights_sleeping = False
    trainer.vllm_generation, trainer.vllm_mode, trainer._last_loaded_step = engine, "colocate", -1
    names = [name for name, _ in model.named_parameters() if ".base_layer." in name]
    base = {name: model.get_parameter(name).detach().clone() for name in names}
    assert {p.dtype for p in base.values()} == {dtype} and len(names) > 8
    for step in range(1, 4):
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_" in name:
                    p.add_(1e-3)
        trainer.state.global_step = step
        trainer.player.engine.load_weights()
        assert all(torch.equal(model.get_parameter(name), value) for name, value in base.items())
        expected = copy.deepcopy(model).merge_and_unload().state_dict()
        assert len(sent) == step and all(torch.equal(sent[-1][name], expected[name]) for name in sent[-1])
    assert any(not torch.equal(sent[0][name], sent[2][name]) for name in sent[0])


def test_what_a_colocated_vllm_samples_depends_on_the_seed_of_the_run(tmp_path, monkeypatch):
    """vLLM seeds the process that it is built in, with the number of its engine."""
    drawn = {}

    def build(**_):
        torch.manual_seed(0)
        return SimpleNamespace(structured_outputs_regex="none", generation_kwargs={})

    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", build)
    for seed in (1, 2, 2):
        make_trainer(tmp_path, use_vllm=True, vllm_mode="colocate", seed=seed)
        found = torch.rand(3).tolist()
        assert drawn.setdefault(seed, found) == found
    assert drawn[1] != drawn[2]


# ------------------------------------------------------------------------------------------- without a barrier


def test_continuous_batching_serves_episodes_at_their_own_pace_and_plays_the_same(tmp_path):
    """At a temperature near zero the episodes are those of generation in step."""
    played, managers = [], []
    for backend in ({}, CONTINUOUS):
        trainer = make_trainer(tmp_path, temperature=1e-4, max_turns=4, **backend)
        begin = trainer.model.init_continuous_batching
        trainer.model.init_continuous_batching = lambda *args, begin=begin: managers.append(1) or begin(*args)
        played.append(trainer.play([(f"train/{i}", 0) for i in range(6)]))
    in_step, continuous = played
    assert continuous == in_step and len(managers) == 1, "one manager for the whole rollout"
    assert len({turn.response_ids for episode in in_step for turn in episode.turns}) > 1
    assert not trainer.player.engine.in_step
    assert trainer.play([]) == [], "a rank without episodes"


def test_a_cache_that_is_too_small_for_a_prompt_is_named(tmp_path):
    """64 blocks of 32 tokens."""
    trainer = make_trainer(tmp_path, max_turns=2, **CONTINUOUS)
    engine = trainer.player.engine
    submit = engine.submit
    engine.submit = lambda number, ids: submit(number, (ids * 3000)[:3000])
    with pytest.raises(EngineError, match="transformers_continuous_batching_config: .* got 64 blocks of 32 tokens"):
        trainer.play([("train/0", 0)])
    del engine.submit
    assert len(trainer.play([("train/0", 0)])[0].turns) == 2, "the next rollout begins anew"


def test_an_error_before_continuous_batching_has_begun_is_the_one_that_is_raised(tmp_path, monkeypatch):
    def warmup(self):
        raise torch.OutOfMemoryError("CUDA out of memory")

    trainer = make_trainer(tmp_path, max_turns=2, **CONTINUOUS)
    with monkeypatch.context() as full, pytest.raises(torch.OutOfMemoryError):
        full.setattr(ContinuousBatchingManager, "warmup", warmup)
        trainer.play([("train/0", 0)])
    assert len(trainer.play([("train/0", 0)])[0].turns) == 2, "the next rollout begins anew"


@pytest.mark.parametrize(
    ("changes", "engine"),
    [
        ({}, "TurnGenerator"),
        ({"continuous": True}, "ContinuousBatchingEngine"),
        ({"continuous": True, "is_deepspeed_enabled": True}, "TurnGenerator"),
        ({"continuous": True, "fsdp": "full_shard"}, "TurnGenerator"),
        ({"use_vllm": True}, "VllmEngine"),
        ({"use_vllm": True, "parallel": 2}, "TurnGenerator"),
        ({"use_vllm": True, "mode": "server", "parallel": 2}, "VllmServerEngine"),
        ({"use_vllm": True, "mode": "server", "regex": "a+"}, "TurnGenerator"),
        ({"use_vllm": True, "kwargs": {"structured_outputs": {"regex": "a+"}}}, "TurnGenerator"),
    ],
    ids=str,
)
def test_generation_stays_in_step_only_where_it_is_collective(changes, engine):
    given = {"continuous": False, "is_deepspeed_enabled": False, "fsdp": "", "use_vllm": False, "mode": "colocate",
             "parallel": 1, "regex": None, "kwargs": {}, **changes}  # fmt: skip
    trainer = SimpleNamespace(
        use_vllm=given["use_vllm"],
        is_deepspeed_enabled=given["is_deepspeed_enabled"],
        use_transformers_continuous_batching=given["continuous"],
        vllm_generation=SimpleNamespace(structured_outputs_regex=given["regex"], generation_kwargs=given["kwargs"]),
        args=SimpleNamespace(
            fsdp=given["fsdp"], vllm_mode=given["mode"], vllm_tensor_parallel_size=given["parallel"],
            request_seeds=False,
        ),
    )  # fmt: skip
    assert type(make_engine(trainer)).__name__ == engine
    trainer.args.request_seeds = True
    if engine.startswith("Vllm"):
        assert type(make_engine(trainer)).__name__ == engine
    else:
        with pytest.raises(InputError, match="request_seeds: expected False, .* got True.*env_workers to 0"):
            make_engine(trainer)


class Client:
    """A server's client: answers four requests only when all four are there, and refuses one prompt."""

    base_url = "http://localhost:1"

    def __init__(self):
        self.together, self.settings = threading.Barrier(4, timeout=60), []

    def generate(self, prompts, n, **settings):
        self.settings.append(settings)
        if len(self.settings) <= 4:
            self.together.wait()
        if len(prompts[0]) % 2:
            raise ConnectionError("refused")
        return {"completion_ids": [[17, 3]], "logprobs": [[[-1.0], [-2.0]]]}


def test_a_server_is_asked_for_all_episodes_at_once_and_a_refused_one_is_aborted_alone(tmp_path):
    trainer = make_trainer(tmp_path, max_turns=2, temperature=0.7)
    trainer.use_vllm, trainer.vllm_mode, trainer._last_loaded_step = True, "server", 0
    trainer.vllm_generation = SimpleNamespace(
        repetition_penalty=1.0, temperature=0.7, top_p=1.0, top_k=0, min_p=None, max_completion_length=8, logprobs=0,
        generation_kwargs={"detokenize": False},
    )  # fmt: skip
    trainer.player.engine = engine = VllmServerEngine(trainer)
    engine._client = client = Client()
    submit = engine.submit
    engine.submit = lambda number, ids: submit(number, ids + ids[-1:] * ((len(ids) + (number == 1)) % 2))
    episodes = trainer.play([(f"train/{i}", 0) for i in range(4)])
    assert [episode.stop is StopReason.ABORTED for episode in episodes] == [False, True, False, False]
    assert "EngineError: the vLLM server at http://localhost:1: refused" in episodes[1].error
    assert {(turn.response_ids, turn.logprobs) for episode in episodes for turn in episode.turns} == {
        ((17, 3), (-1.0, -2.0))
    }
    assert client.settings[0] == {
        "repetition_penalty": 1.0, "temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 8,
        "logprobs": 0, "generation_kwargs": {"detokenize": False},
    }  # fmt: skip


def test_a_server_that_does_not_answer_in_time_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as silent, requests.Session() as session:
        session.mount("http://", _WithTimeout(0.2))
        with pytest.raises(requests.exceptions.ReadTimeout):
            session.post(f"http://127.0.0.1:{silent.getsockname()[1]}/v1/completions", json={})
