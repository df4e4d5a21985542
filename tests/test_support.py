"""SUPPORT.md is true: what it names is taken, what it refuses is refused by field, its versions are those required."""

import inspect
import re
from configparser import ConfigParser
from dataclasses import fields
from pathlib import Path

import pytest
from peft import LoraConfig, PromptTuningConfig
from trainer_kit import make_config, make_ppo, make_trainer, toy_tokenizer
from transformers import T5Config, T5ForConditionalGeneration
from trl import GRPOTrainer, ModelConfig

from epo_trl.envs.toy import ToySuite
from epo_trl.errors import InputError
from epo_trl.models import load
from epo_trl.rollout.context import CONTEXTS
from epo_trl.trainers import EPOPPOConfig, support
from epo_trl.trainers.config import LOSSES

ROOT = Path(__file__).parents[1]
TABLES = [
    [cell.strip() for cell in line.split("|")[1:-1]]
    for line in (ROOT / "SUPPORT.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ")
]
ROWS = {row[0].strip("`"): row[1:] for row in TABLES if len(row) == 4 and row[0]}
VERSIONS = {name: bounds.strip("`") for name, bounds in (row for row in TABLES if len(row) == 2) if name != "package"}
VALUES = {"context": CONTEXTS, "loss_type": LOSSES}  # rows whose cells are the values of a field
NEEDS = {"cispo": {"epsilon_high": 5.0}}


def named(cell):
    """Returns the fields or values that a cell names."""
    return re.findall(r"`(\w+)`", cell)


NOT_HERE = sorted({field for _, _, refused in ROWS.values() for field in named(refused)})


def config(**changes):
    return lambda folder, monkeypatch: make_config(folder, **changes)


def trainer(**changes):
    return lambda folder, monkeypatch: make_trainer(folder, **changes)


def sharded(**changes):
    def refused(folder, monkeypatch):
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
        make_trainer(folder, **changes)

    return refused


def encoder(folder, monkeypatch):
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    make_trainer(folder, model=T5ForConditionalGeneration(T5Config(vocab_size=len(toy_tokenizer()), **sizes)))


def quantized(**asked):
    def refused(folder, monkeypatch):
        monkeypatch.setattr(load, "get_quantization_config", lambda _: asked)  # without bitsandbytes
        start = ModelConfig("tiny", dtype="float32", **asked)
        load.policy_for_training(start, make_config(folder), ToySuite(), "compact")

    return refused


def unmerged_adapter(folder, monkeypatch):
    found = load.Adapter("me/agent", "org/base", {})
    monkeypatch.setattr(load.Adapter, "find", lambda *_: found)
    monkeypatch.setattr(load, "load_tokenizer", lambda *_, **__: toy_tokenizer())
    load.policy_for_training(ModelConfig("me/agent"), make_config(folder), ToySuite(), "compact")


def tied_adapter(folder, monkeypatch):
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", lambda **_: None)
    make_trainer(folder, use_vllm=True, peft_config=LoraConfig(target_modules=["embed_tokens"]))


def from_elsewhere(folder, monkeypatch):
    make_trainer(folder / "run").train(resume_from_checkpoint=str(folder))


# By field: how the message goes on, and what is refused.
REFUSED = {
    "environment_factory": ("expected none;", trainer(environment_factory=ToySuite)),
    "epsilon_high": ("expected a number >= 1 with loss_type 'cispo', got None", config(loss_type="cispo")),
    "eval_dataset": ("expected none;", trainer(eval_dataset=[1])),
    "generation_kwargs": ("expected no seed, temperature", config(generation_kwargs={"temperature": 0.4, "seed": 5})),
    "load_in_4bit": ("got True without use_peft", quantized(load_in_4bit=True)),
    "load_in_8bit": ("got True without use_peft", quantized(load_in_8bit=True)),
    "model": ("expected a decoder-only model, got T5", encoder),
    "neftune_noise_alpha": ("expected null with disable_dropout, got 5", config(neftune_noise_alpha=5)),
    "num_generations_eval": ("expected 1 or null, got 4", config(num_generations_eval=4)),
    "peft_config": (
        "expected an adapter of layers, .*got PromptTuningConfig",
        trainer(peft_config=PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")),
    ),
    "recompute_passes": ("expected False with ZeRO-3 or FSDP, got True", sharded(recompute_passes=True)),
    "request_seeds": ("expected False, except with vLLM", trainer(request_seeds=True)),
    "resume_from_checkpoint": ("expected a folder in output_dir .*trust_checkpoint", from_elsewhere),
    "reward_funcs": (
        "expected none with 'turn', which reads the rewards",
        lambda folder, _: make_ppo(folder, reward_funcs=len),
    ),
    "rollout_ahead": ("expected false with an engine that shares", trainer(rollout_ahead=True)),
    "rollout_func": ("expected none;", trainer(rollout_func=len)),
    "save_only_model": ("expected false, got true", config(save_only_model=True)),
    "save_strategy": (
        "expected 'steps', 'epoch' or 'no', got 'best'",
        config(save_strategy="best", eval_strategy="steps", eval_steps=1, metric_for_best_model="reward"),
    ),
    "sync_ref_model": (
        "expected False with ZeRO-3 or FSDP, got True",
        sharded(sync_ref_model=True, beta=0.1, ref_model_sync_steps=1),
    ),
    "tools": ("expected none;", trainer(tools=[len])),
    "use_peft": ("expected True to train the adapter", unmerged_adapter),
    "use_transformers_continuous_batching": (
        "expected false, got true",
        config(use_transformers_continuous_batching=True),
    ),
    "use_vllm": ("expected False with an adapter on the embedding", tied_adapter),
}


@pytest.mark.parametrize("field", NOT_HERE)
def test_what_is_not_here_is_refused_by_its_field(tmp_path, monkeypatch, field):
    continues, ask = REFUSED[field]
    with pytest.raises(InputError, match=rf"^([\w, ]+, )?{field}(, [\w, ]+)?: {continues}"):
        ask(tmp_path, monkeypatch)


def test_every_refusal_of_support_py_is_on_the_page_and_no_other_is_tested():
    source = inspect.getsource(support)
    raised = {*re.findall(r'InputError\(\s*f?"(\w+):', source), *support._ARGUMENTS, *support._NEED_WHOLE_WEIGHTS}
    assert source.count("raise InputError(") == len(re.findall(r'InputError\(\s*f?"', source))
    assert {"use_vllm", "peft_config", "tools", "sync_ref_model"} <= raised <= {*NOT_HERE} == REFUSED.keys()


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in VALUES for value in VALUES[field]])
def test_every_value_of_a_field_has_one_place_and_is_taken(tmp_path, field, value):
    promised, passes, _ = map(named, ROWS[field])
    assert (promised + passes).count(value) == 1 and len(promised + passes) == len(VALUES[field])
    assert getattr(make_config(tmp_path, **{field: value}, **NEEDS.get(value, {})), field) == value


def test_the_page_names_fields_and_arguments_that_exist():
    known = {field.name for kind in (EPOPPOConfig, ModelConfig) for field in fields(kind)}
    known |= inspect.signature(GRPOTrainer.__init__).parameters.keys()
    found = {name for row, cells in ROWS.items() for cell in cells[2 if row in VALUES else 0 :] for name in named(cell)}
    assert "rollout_ahead" in found and found <= known, found - known


def test_the_versions_are_those_that_setup_cfg_asks_for():
    parser = ConfigParser()
    parser.read(ROOT / "setup.cfg")
    asked = parser["options"]["install_requires"] + parser["options.extras_require"]["vllm"]
    found = dict(re.findall(r"^([\w-]+)([<>=].*)$", asked, re.MULTILINE))
    found["python"] = parser["options"]["python_requires"]
    assert VERSIONS.keys() == {"python", "torch", "transformers", "trl", "peft", "vllm"}
    assert {name: found[name] for name in VERSIONS} == VERSIONS
