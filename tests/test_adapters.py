"""LoRA from one run to the next: an adapter is found with its base, trained on, merged, evaluated and exported."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from trainer_kit import make_config, make_model, toy_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import ModelConfig, SFTConfig

from epo_trl.cli import main
from epo_trl.cli.train import train
from epo_trl.envs.toy import ToySuite
from epo_trl.models import families, load_policy, policy_for_training
from epo_trl.runs.run_settings import differences, settings_of
from epo_trl.trainers import EPOConfig, EPOPPOConfig, EPOPPOTrainer, EPOTrainer

IDS = torch.tensor([[5, 9, 12, 7, 20, 11]])


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """A folder as a run leaves it: an adapter that matters, its tokenizer, and the base beside."""
    folder = tmp_path_factory.mktemp("sft") / "run"
    make_model(seed=3).save_pretrained(folder / "base")
    toy_tokenizer().save_pretrained(folder / "base")
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    torch.manual_seed(0)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(base, lora)
    model.save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    return SimpleNamespace(path=str(folder), folder=folder, logits=logits(model))


def policy(path, folder, kind=EPOConfig, **given):
    args = make_config(folder, kind=kind, max_steps=2, beta=0.1, save_strategy="steps", save_steps=1)
    return args, policy_for_training(ModelConfig(path, **given), args, ToySuite(), "compact")


def test_with_use_peft_an_adapter_is_trained_on_as_it_is(adapter, tmp_path):
    _, given = policy(adapter.path, tmp_path, use_peft=True)
    model = given["model"]
    torch.testing.assert_close(logits(model), adapter.logits)
    assert all(("lora_" in name) == parameter.requires_grad for name, parameter in model.named_parameters())
    assert given.keys() == {"model", "processing_class"}


def test_a_run_does_not_replace_the_model_that_it_starts_from(adapter, tmp_path):
    with pytest.raises(ValueError, match="output_dir: expected another folder than that of the model, got"):
        policy(f"{adapter.path}/.", adapter.folder / "base", use_peft=True)


def test_all_weights_are_trained_from_a_merged_adapter_only_and_an_adapter_from_trained_weights(adapter, tmp_path):
    with pytest.raises(ValueError, match="use_peft: expected False with 'tiny:32x1', whose weights are random"):
        policy("tiny:32x1", tmp_path, use_peft=True)
    with pytest.raises(ValueError, match="use_peft: expected True to train the adapter .*epo-trl merge .*run --out"):
        policy(adapter.path, tmp_path)


def test_an_adapter_of_another_model_is_named(adapter, tmp_path):
    folder = shutil.copytree(adapter.folder, tmp_path / "copy")
    weights = load_file(folder / "adapter_model.safetensors")
    weights.pop(first := next(iter(weights)))
    save_file(weights | {first.replace("layers.0", "layers.9"): torch.ones(1)}, folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="model_name_or_path: expected an adapter with the weights of its base"):
        policy(str(folder), tmp_path / "run", use_peft=True)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "trainer"), [(EPOConfig, EPOTrainer), (EPOPPOConfig, EPOPPOTrainer)])
def test_the_reference_of_the_kl_term_is_the_adapter_as_it_came(adapter, tmp_path, kind, trainer):
    args, given = policy(adapter.path, tmp_path, kind, use_peft=True)
    if kind is EPOPPOConfig:
        args.num_generations = 1
    made = trainer(suite=ToySuite(), args=args, **given)
    made.train()
    first, second = [line["kl"] for line in made.state.log_history if "kl" in line]
    # the base itself is far away, see above; a policy that has not moved has no divergence from where it began
    assert abs(first) < 1e-6 < second


@pytest.mark.slow
def test_a_run_that_was_interrupted_ends_like_one_that_was_not(adapter, tmp_path):
    def run():
        args, _ = policy(adapter.path, tmp_path, use_peft=True)
        train(ToySuite(), args, ModelConfig(adapter.path, use_peft=True))

    run()
    name = "adapter_model.safetensors"
    whole = load_file(tmp_path / name)
    for gone in ("checkpoint-2", "evaluations", "runs"):
        shutil.rmtree(tmp_path / gone, ignore_errors=True)
    (tmp_path / name).unlink()
    run()
    again = load_file(tmp_path / name)
    assert whole.keys() == again.keys() and all(torch.equal(whole[key], again[key]) for key in whole)
    before = load_file(adapter.folder / name)
    assert any(not torch.equal(whole[key], before[key]) for key in whole)


def test_merging_writes_a_plain_checkpoint(adapter, tmp_path, capsys):
    out = tmp_path / "merged"
    assert main(["merge", adapter.path, "--out", str(out)]) == 0
    assert not (out / "adapter_config.json").exists() and str(out) in capsys.readouterr().out
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(out)), adapter.logits)
    assert AutoTokenizer.from_pretrained(out).get_vocab() == toy_tokenizer().get_vocab()
    assert main(["merge", adapter.path, "--out", str(out)]) == 1
    assert "out: expected a new folder, got" in capsys.readouterr().err
    assert main(["merge", str(out), "--out", str(tmp_path / "again")]) == 1
    assert "there is no adapter_config.json" in capsys.readouterr().err


def test_an_adapter_goes_on_the_noted_revision_of_its_base(adapter, tmp_path, monkeypatch):
    folder = tmp_path / "copy"
    shutil.copytree(adapter.folder, folder)
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"revision": "v2"}))
    asked, load_base = [], families.create_model_from_path

    def base(name, **kwargs):
        asked.append(kwargs.get("revision"))
        return load_base(name, **kwargs)

    monkeypatch.setattr(families, "create_model_from_path", base)
    load_policy(ModelConfig(str(folder)), ToySuite(), "compact")
    load_policy(ModelConfig(adapter.path), ToySuite(), "compact")
    assert asked == ["v2", "main"]


def test_the_adapter_that_a_run_starts_from_is_one_of_its_settings(adapter, tmp_path):
    def seen(folder):
        args, given = policy(str(folder), tmp_path / "run", use_peft=True)
        return settings_of(EPOTrainer(suite=ToySuite(), args=args, **given))

    other = shutil.copytree(adapter.folder, tmp_path / "other")
    before, moved = seen(adapter.folder), seen(other)
    assert differences(before, moved) == []
    weights = load_file(other / "adapter_model.safetensors")
    save_file({name: 2.0 * value for name, value in weights.items()}, other / "adapter_model.safetensors")
    (line,) = differences(before, seen(other))
    assert line.startswith("adapter_weights: 'a folder of weights, XXH3 ")


def test_settings_that_an_adapter_does_not_have_are_refused(adapter, tmp_path):
    policy(adapter.path, tmp_path, use_peft=True, lora_r=4)
    with pytest.raises(ValueError, match="lora_r: expected 4, .*, got 64; .*epo-trl merge"):
        policy(adapter.path, tmp_path, use_peft=True, lora_r=64)
    policy(adapter.path, tmp_path, use_peft=True, lora_target_modules=["v_proj", "q_proj"])
    with pytest.raises(ValueError, match="lora_target_modules: expected .*, as in the adapter .*, got .*epo-trl merge"):
        policy(adapter.path, tmp_path, use_peft=True, lora_target_modules=["q_proj"])


def test_a_model_that_is_not_there_is_named(tmp_path):
    make_model().save_pretrained(tmp_path / "bare")
    for name, says in (
        ("runs/no/model", "got 'runs/no/model', w.* cannot be read"),
        (str(tmp_path / "bare"), "got '.*bare', whose tokenizer cannot be read"),
        ("", "expected a Hub id, a local path or 'tiny', got nothing"),
    ):
        with pytest.raises(ValueError, match=f"model_name_or_path: {says}"):
            policy(name, tmp_path)


# ---------------------------------------------------------------------------------- what a model is to be loaded as


@pytest.mark.parametrize("kind", [EPOConfig, SFTConfig])
def test_precision_and_attention_are_those_that_were_asked_for(adapter, tmp_path, kind):
    args = kind(str(tmp_path), use_cpu=True, bf16=False, activation_checkpointing=False, report_to=[])
    given = {"dtype": "bfloat16", "attn_implementation": "eager"}
    policy_for_training(ModelConfig(f"{adapter.path}/base", **given), args, ToySuite(), "compact")
    assert args.model_init_kwargs == {"revision": "main", "dtype": torch.bfloat16, "attn_implementation": "eager"}
    for path, use_peft in (("tiny", False), (adapter.path, True)):
        model = policy_for_training(ModelConfig(path, use_peft=use_peft, **given), args, ToySuite(), "compact")["model"]
        assert (
            model.config._attn_implementation == "eager" and model.get_input_embeddings().weight.dtype == torch.bfloat16
        )


def test_a_new_adapter_on_an_architecture_that_peft_does_not_know_is_on_every_linear_layer(adapter, tmp_path):
    config = json.loads((adapter.folder / "base" / "config.json").read_text())
    llama = policy(f"{adapter.path}/base", tmp_path, use_peft=True)[1]["peft_config"]
    assert llama.target_modules == ["q_proj", "v_proj"]
    other = shutil.copytree(adapter.folder / "base", tmp_path / "gpt")
    (other / "config.json").write_text(json.dumps({**config, "model_type": "ministral"}))
    assert policy(str(other), tmp_path / "run", use_peft=True)[1]["peft_config"].target_modules == "all-linear"
