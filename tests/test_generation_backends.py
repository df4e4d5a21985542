"""The engines over a trainer's policy: in step by TRL's `_generate_single_turn`, or without a barrier."""

import copy
import socket
import sys
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import requests
import torch
from peft import LoraConfig
from trainer_kit import make_model, make_trainer
from trl.generation.vllm_generation import VLLMGeneration

from epo_trl.errors import InputError
from epo_trl.trainers.engines import VllmEngine, VllmServerEngine, limit_requests, make_engine
from epo_trl.trainers.generation import TurnGenerator
from epo_trl.types import StopReason


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
    with pytest.raises(KeyError), trainer.engine.keeping_vllm_awake():
        assert not engine.enable_sleep_mode
        raise KeyError
    assert engine.asked == [*["sync"] * (not loaded), "kv_cache", "sleep 2"]
    assert engine.enable_sleep_mode and engine._llm_weights_sleeping


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
        trainer.engine.load_weights()
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
    monkeypatch.setenv("MASTER_PORT", "")
    for seed in (1, 2, 2):
        make_trainer(tmp_path, use_vllm=True, vllm_mode="colocate", seed=seed)
        found = torch.rand(3).tolist()
        assert drawn.setdefault(seed, found) == found
    assert drawn[1] != drawn[2]


# ------------------------------------------------------------------------------------------- without a barrier


@pytest.mark.parametrize(
    ("changes", "engine"),
    [
        ({}, "TurnGenerator"),
        ({"use_vllm": True}, "VllmEngine"),
        ({"use_vllm": True, "parallel": 2}, "TurnGenerator"),
        ({"use_vllm": True, "mode": "server", "parallel": 2}, "VllmServerEngine"),
        ({"use_vllm": True, "mode": "server", "regex": "a+"}, "TurnGenerator"),
        ({"use_vllm": True, "kwargs": {"structured_outputs": {"regex": "a+"}}}, "TurnGenerator"),
    ],
    ids=str,
)
def test_generation_is_in_step_without_vllm_and_where_it_is_collective(changes, engine):
    given = {"use_vllm": False, "mode": "colocate", "parallel": 1, "regex": None, "kwargs": {}, **changes}
    trainer = SimpleNamespace(
        use_vllm=given["use_vllm"],
        vllm_generation=SimpleNamespace(
            structured_outputs_regex=given["regex"],
            generation_kwargs=given["kwargs"],
            llm=SimpleNamespace(llm_engine=None),
        ),
        args=SimpleNamespace(vllm_mode=given["mode"], vllm_tensor_parallel_size=given["parallel"], request_seeds=False),
    )
    assert type(make_engine(trainer)).__name__ == engine
    trainer.args.request_seeds = True
    if engine.startswith("Vllm"):
        assert type(make_engine(trainer)).__name__ == engine
    else:
        with pytest.raises(InputError, match="request_seeds: expected False, .* got True"):
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
        logprobs = None if settings["logprobs"] is None else [[[-1.0], [-2.0]]]
        return {"completion_ids": [[17, 3]], "logprobs": logprobs}


def test_a_server_is_asked_for_all_episodes_at_once_and_a_refused_one_is_aborted_alone(tmp_path):
    trainer = make_trainer(tmp_path, max_turns=2, temperature=0.7)
    trainer.use_vllm, trainer.vllm_mode, trainer._last_loaded_step = True, "server", 0
    trainer.vllm_generation = SimpleNamespace(
        repetition_penalty=1.0, temperature=0.7, top_p=1.0, top_k=0, min_p=None, max_completion_length=8, logprobs=0,
        generation_kwargs={"detokenize": False},
    )  # fmt: skip
    trainer.engine = engine = VllmServerEngine(trainer)
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
    trainer.vllm_generation.structured_outputs_regex = None
    with engine.sampling(1.0, 0):
        (episode,) = trainer.play([("train/0", 0)])
    assert [turn.logprobs for turn in episode.turns] == [None, None] and client.settings[-1]["logprobs"] is None


class Scheduler:
    """A vLLM in the process: answers each request at the next step, with what it was asked for."""

    def __init__(self):
        self.llm_engine, self.asked, self.waiting = self, [], []

    def add_request(self, request_id, prompt, params):
        self.asked.append(params)
        self.waiting.append((request_id, params["logprobs"]))

    def step(self):
        flat = SimpleNamespace(logprobs=[-1.0, -0.5, -2.0], start_indices=[0, 2])  # the sampled token is the first one
        (request_id, logprobs), *self.waiting = self.waiting
        answer = SimpleNamespace(token_ids=(17, 3), logprobs=None if logprobs is None else flat)
        return [SimpleNamespace(request_id=request_id, finished=True, outputs=[answer])]

    def abort_request(self, request_ids):
        assert request_ids == []


@pytest.mark.parametrize(
    ("settings", "is_read"),
    [
        ({}, True),
        ({"vllm_importance_sampling_correction": False}, False),
        ({"vllm_importance_sampling_correction": False, "off_policy_mask_threshold": 0.5}, True),
    ],
    ids=str,
)
def test_vllm_in_the_process_makes_no_text_and_log_probabilities_only_where_the_loss_reads_them(
    tmp_path, monkeypatch, settings, is_read
):
    kinds = SimpleNamespace(RequestOutputKind=SimpleNamespace(FINAL_ONLY="final only"))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict, sampling_params=kinds))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", kinds)
    trainer = make_trainer(tmp_path, max_turns=2, temperature=0.7, **settings)
    trainer.use_vllm, trainer.vllm_mode, trainer._last_loaded_step = True, "colocate", 0
    trainer.vllm_generation = vllm = SimpleNamespace(
        repetition_penalty=1.0, temperature=0.7, top_p=1.0, top_k=0, min_p=None, max_completion_length=8, logprobs=0,
        generation_kwargs={"skip_special_tokens": True}, structured_outputs_regex=None, enable_sleep_mode=False,
        _llm_weights_sleeping=False, llm=Scheduler(),
    )  # fmt: skip
    trainer.engine = VllmEngine(trainer)
    (trained,) = trainer.play([("train/0", 0)])
    assert [turn.logprobs for turn in trained.turns] == [(-1.0, -2.0) if is_read else None] * 2
    assert vllm.llm.asked[0] == {
        "repetition_penalty": 1.0, "temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 8,
        "logprobs": 0 if is_read else None, "skip_special_tokens": True,
        "detokenize": False, "flat_logprobs": True, "output_kind": "final only",
    }  # fmt: skip
    with trainer.engine.sampling(0.4, 0):
        (evaluated,) = trainer.play([("train/0", 0)])
    assert [turn.logprobs for turn in evaluated.turns] == [None, None]
    vllm.generation_kwargs = {"detokenize": True}  # for a setting of vLLM's that reads the text
    trainer.play([("train/0", 0)])
    assert vllm.llm.asked[-1]["detokenize"] and vllm.llm.asked[-1]["logprobs"] == (0 if is_read else None)


def test_a_server_that_does_not_answer_in_time_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as silent, requests.Session() as session:
        limit_requests(session, 0.2)
        with pytest.raises(requests.exceptions.ReadTimeout):
            session.post(f"http://127.0.0.1:{silent.getsockname()[1]}/v1/completions", json={})
