"""LoRA from one run to the next: an adapter is found with its base, trained on, merged, evaluated and exported."""

import json
import os
import re
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from trainer_kit import make_config, make_model, make_trainer, toy_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import ModelConfig, SFTConfig

from epo_trl.cli import imitation, main
from epo_trl.cli.train import train
from epo_trl.envs.toy import ToySuite
from epo_trl.errors import InputError
from epo_trl.models import adapters, families, load, load_policy, policy_for_training
from epo_trl.runs.checkpoint_files import FINISHED, what_model
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
    adapters.save_whole(make_model(seed=3), toy_tokenizer(), folder / "base", "tiny")
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


def test_the_adapter_of_the_fixture_matters(adapter):
    base = AutoModelForCausalLM.from_pretrained(adapter.folder / "base")
    assert (logits(base) - adapter.logits).abs().max() > 0.1


def test_with_use_peft_an_adapter_is_trained_on_as_it_is(adapter, tmp_path):
    _, given = policy(adapter.path, tmp_path, use_peft=True)
    model = given["model"]
    torch.testing.assert_close(logits(model), adapter.logits)
    assert all(("lora_" in name) == parameter.requires_grad for name, parameter in model.named_parameters())
    assert given.keys() == {"model", "processing_class"} and not (tmp_path / "base").exists()


def test_what_a_new_adapter_cannot_be_put_on_is_named(adapter, tmp_path):
    base = str(adapter.folder / "base")
    with pytest.raises(ValueError, match="lora_r: expected an integer >= 1, got 0"):
        policy(base, tmp_path, use_peft=True, lora_r=0)
    args, given = policy(base, tmp_path, use_peft=True, lora_target_modules=["qproj"])
    with pytest.raises(ValueError, match="arget modules .*qproj.* not found"):
        EPOTrainer(suite=ToySuite(), args=args, **given)


def test_a_run_does_not_replace_the_model_that_it_starts_from(adapter):
    with pytest.raises(ValueError, match="output_dir: expected another folder than that of the model, got"):
        policy(f"{adapter.path}/.", adapter.folder)


def test_a_run_does_not_replace_the_base_of_its_adapter(adapter, tmp_path):
    with pytest.raises(ValueError, match="output_dir: expected another folder than that of the model, got"):
        policy(adapter.path, adapter.folder / "base", use_peft=True)
    settings = {"base_model_name_or_path": str(adapter.folder / "base")}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="output_dir: expected no folder base of yours in it, got .*run/base"):
        policy(str(tmp_path), adapter.folder)


@pytest.mark.parametrize("start", ["base", "elsewhere", "tiny:32x1"])
def test_a_folder_named_base_that_no_run_has_written_is_kept(adapter, tmp_path, start):
    """Of an earlier run or of the adapter itself: the run needs the name for its own base."""
    mine = shutil.copytree(adapter.folder, tmp_path / "base")
    path = {"base": str(mine), "elsewhere": adapter.path}.get(start, start)
    with pytest.raises(ValueError, match="output_dir: expected no folder base of yours in it, got .*base"):
        policy(path, tmp_path, use_peft=path == start)
    assert what_model(str(mine)) == what_model(adapter.path) and os.listdir(tmp_path) == ["base"]


def test_a_base_is_saved_beside_other_folders(adapter, tmp_path):
    (tmp_path / "base.part").mkdir()
    policy(adapter.path, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["base", "base.part"]


def test_without_use_peft_it_is_merged_into_a_checkpoint_that_the_run_begins_with(adapter, tmp_path):
    args, given = policy(adapter.path, tmp_path)
    assert given["model"] == str(tmp_path / "base") and given["peft_config"] is None
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(given["model"])), adapter.logits)
    assert "revision" not in args.model_init_kwargs and os.listdir(tmp_path) == ["base"]
    assert AutoTokenizer.from_pretrained(given["model"]).get_vocab() == toy_tokenizer().get_vocab()


def test_a_new_adapter_on_a_model_in_memory_is_warned_about(tmp_path):
    with pytest.warns(UserWarning, match="peft_config: expected a model with a path, .*policy_for_training"):
        make_trainer(tmp_path, peft_config=LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))


@pytest.mark.parametrize("given", [None, {"dtype": "auto"}])
def test_a_configuration_loads_a_second_model_with_its_own_settings(tmp_path, given):
    make_model().save_pretrained(tmp_path / "model")
    toy_tokenizer().save_pretrained(tmp_path / "model")
    args = make_config(tmp_path / "run", model_init_kwargs=given)
    for dtype, attention in (("bfloat16", "eager"), ("float32", "sdpa")):
        wanted = ModelConfig(str(tmp_path / "model"), dtype=dtype, attn_implementation=attention)
        policy_for_training(wanted, args, ToySuite(), "general_compact")
        asked = {"dtype": getattr(torch, dtype), "attn_implementation": attention, "revision": "main"}
        assert args.model_init_kwargs == {**asked, **(given or {})}
    policy_for_training(ModelConfig("tiny"), args, ToySuite(), "general_compact")
    assert args.model_init_kwargs == given


@pytest.mark.slow
@pytest.mark.parametrize("use_peft", [True, False])
@pytest.mark.parametrize(("kind", "trainer"), [(EPOConfig, EPOTrainer), (EPOPPOConfig, EPOPPOTrainer)])
def test_the_reference_of_the_kl_term_is_the_adapter_as_it_came(adapter, tmp_path, kind, trainer, use_peft):
    args, given = policy(adapter.path, tmp_path, kind, use_peft=use_peft)
    if kind is EPOPPOConfig:
        args.num_generations = 1
    made = trainer(suite=ToySuite(), args=args, **given)
    made.train()
    first, second = [line["kl"] for line in made.state.log_history if "kl" in line]
    # the base itself is far away, see above; a policy that has not moved has no divergence from where it began
    assert abs(first) < 1e-6 < second


@pytest.mark.slow
@pytest.mark.parametrize("use_peft", [True, False])
def test_a_run_that_was_interrupted_ends_like_one_that_was_not(adapter, tmp_path, use_peft):
    run = lambda: train(ToySuite(), policy(adapter.path, tmp_path, use_peft=use_peft)[0],  # noqa: E731
                        ModelConfig(adapter.path, use_peft=use_peft))  # fmt: skip
    run()
    name = "adapter_model.safetensors" if use_peft else "model.safetensors"
    whole = load_file(tmp_path / name)
    for gone in ("checkpoint-2", "evaluations", "runs"):
        shutil.rmtree(tmp_path / gone, ignore_errors=True)
    (tmp_path / name).unlink()
    run()
    again = load_file(tmp_path / name)
    assert whole.keys() == again.keys() and all(torch.equal(whole[key], again[key]) for key in whole)
    before = load_file(adapter.folder / name if use_peft else tmp_path / "base" / name)
    assert any(not torch.equal(whole[key], before[key]) for key in whole)


def test_an_adapter_on_a_model_from_scratch_is_saved_with_its_base_and_can_be_moved(tmp_path):
    folder = tmp_path / "run"
    args = make_config(folder, max_steps=1, save_strategy="steps", save_steps=1)
    trained = train(ToySuite(), args, ModelConfig("tiny", use_peft=True)).model
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(folder / "base")
    folder.rename(tmp_path / "moved")
    for place in ("moved", "moved/checkpoint-1"):
        model, _ = load_policy(ModelConfig(str(tmp_path / place)), ToySuite(), "compact")
        torch.testing.assert_close(logits(model), logits(trained))


def test_an_adapter_without_its_tokenizer_has_that_of_its_base(adapter, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(adapter.folder, bare, ignore=shutil.ignore_patterns("tokenizer*", "chat_template*"))
    adapters.save_whole(make_model(seed=3), toy_tokenizer(), bare / "base", "tiny")
    _, given = policy(str(bare), tmp_path / "run", use_peft=True)
    assert given["processing_class"].get_vocab() == toy_tokenizer().get_vocab()


def test_an_adapter_of_the_hub_without_its_tokenizer_has_that_of_its_base(monkeypatch):
    asked, missing = [], EntryNotFoundError("no such file")
    monkeypatch.setattr(load, "load_tokenizer", lambda name, **kwargs: asked.append((name, kwargs["revision"])))
    hub = adapters.Adapter("me/agent", "org/base", {"revision": "v2"})

    def tokenizer(download, cached=None):
        def hf_hub_download(*_, **__):
            if download is not None:
                raise download

        monkeypatch.setattr(load, "hf_hub_download", hf_hub_download)
        monkeypatch.setattr(load, "try_to_load_from_cache", lambda *_, **__: cached)
        load._load_own_tokenizer("me/agent", hub, ModelConfig("me/agent", model_revision="v1"), False)
        return asked.pop()

    unreachable = LocalEntryNotFoundError("no network")
    assert tokenizer(missing) == tokenizer(unreachable, cached=object()) == ("org/base", "v2")
    assert tokenizer(None) == tokenizer(unreachable, cached="a/file") == tokenizer(unreachable) == ("me/agent", "v1")


def test_merging_writes_a_plain_checkpoint(adapter, tmp_path, monkeypatch, capsys):
    (empty := tmp_path / "empty").mkdir()
    out = tmp_path / "merged"
    assert main(["merge", adapter.path, "--out", str(out)]) == 0
    assert not (out / "adapter_config.json").exists() and str(out) in capsys.readouterr().out
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(out)), adapter.logits)
    assert AutoTokenizer.from_pretrained(out).get_vocab() == toy_tokenizer().get_vocab()
    assert main(["merge", adapter.path, "--out", str(out)]) == 1
    assert "there already; expected a new folder" in capsys.readouterr().err
    monkeypatch.chdir(empty)
    for here in (".", "../empty", ""):
        assert main(["merge", "no_such_adapter", "--out", here]) == 1  # refused before anything is loaded
        assert "the current folder; name another" in capsys.readouterr().err
    assert main(["merge", "no_such_adapter", "--out", "run/base"]) == 1
    assert "out: expected another name than base, " in capsys.readouterr().err
    assert main(["merge", str(out), "--out", str(tmp_path / "again")]) == 1
    assert "there is no adapter_config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda folder: cut(folder / "adapter_model.safetensors"), "which cannot be put on .*base: "),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "which cannot be put on .*base: "),
        (lambda folder: cut(folder / "base" / "model.safetensors"), "whose base .*base cannot be read: "),
        (lambda folder: other_width(folder / "base"), "which cannot be put on .*base: .*size mismatch"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), "whose .*adapter_config.json is no JSON: "),
    ],
    ids=["cut", "gone", "base cut", "another base", "no JSON"],
)
def test_a_damaged_adapter_is_one_line(adapter, tmp_path, capsys, spoil, says):
    folder = tmp_path / "copy"
    shutil.copytree(adapter.folder, folder)
    spoil(folder)
    capsys.readouterr()
    assert main(["merge", str(folder), "--out", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.match(f"epo-trl: error: model_name_or_path: got the adapter {folder}, {says}", error)
    assert not (tmp_path / "out").exists()
    if "base" in says:
        with pytest.raises(ValueError, match=f"got the adapter {folder}, {says}"):
            policy(str(folder), tmp_path / "run", use_peft=True)


def cut(path):
    path.write_bytes(path.read_bytes()[:200])


def other_width(folder):
    shutil.rmtree(folder)
    config = make_model(seed=3).config
    config.hidden_size, config.intermediate_size = 2 * config.hidden_size, 2 * config.intermediate_size
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def test_the_weights_of_an_adapter_are_of_the_revision_that_was_asked_for(adapter, monkeypatch):
    asked = []
    load_weights = PeftModel.from_pretrained

    def noted(*args, **kwargs):
        asked.append(kwargs["revision"])
        return load_weights(*args, **kwargs)

    monkeypatch.setattr(PeftModel, "from_pretrained", noted)
    load_policy(ModelConfig(adapter.path, model_revision="v2"), ToySuite(), "compact")
    assert asked == ["v2"]


def test_an_adapter_notes_the_revision_of_its_base_and_goes_on_it_again(adapter, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(load.AutoConfig, "from_pretrained", lambda *_, **__: SimpleNamespace(model_type="llama"))
        for revision, noted in (("v2", "v2"), ("main", None)):
            new = load._peft_config(ModelConfig("an/id", model_revision=revision, use_peft=True), "an/id", False)
            assert new.revision == noted
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


def test_the_memory_of_an_adapter_is_that_of_its_base(adapter, capsys):
    assert main(["memory", "--model", adapter.path, "--gpus", "1"]) == 0
    shown = capsys.readouterr().out
    assert main(["memory", "--model", str(adapter.folder / "base"), "--gpus", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == shown.splitlines()[1:]


def test_an_adapter_that_is_trained_on_takes_the_memory_of_its_own_rank(adapter, capsys):
    def bytes_of(model, *options):
        words = ["--config", "trap/tiny_cpu", "--gpus", "1", "--json", "--model_name_or_path", str(model), *options]
        assert main(["memory", *words]) == 0
        return json.loads(capsys.readouterr().out)["bytes"]

    new = [bytes_of(adapter.folder / "base", "--use_peft", "--lora_r", rank) for rank in ("4", "16")]
    assert new[0] != new[1] and bytes_of(adapter.path, "--use_peft") == new[0]
    assert bytes_of(adapter.path) == bytes_of(adapter.folder / "base")


def test_a_base_that_is_gone_is_named(adapter, tmp_path):
    shutil.copy(adapter.folder / "adapter_config.json", tmp_path)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": "runs/a/gone"}))
    with pytest.raises(ValueError, match="model_name_or_path: got the adapter .*, whose base runs/a/gone is not there"):
        policy(str(tmp_path), tmp_path / "run", use_peft=True)


def test_the_relative_path_of_a_base_is_found_from_another_folder(adapter, tmp_path, monkeypatch):
    shutil.copytree(adapter.folder / "base", tmp_path / "runs" / "sft")
    (tmp_path / "runs" / "rl").mkdir()
    (tmp_path / "elsewhere").mkdir()
    settings = json.loads((adapter.folder / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = "runs/sft"
    (tmp_path / "runs" / "rl" / "adapter_config.json").write_text(json.dumps(settings))
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert adapters.Adapter.find("../runs/rl").base == str(tmp_path / "runs" / "sft")
    monkeypatch.chdir(tmp_path)
    assert adapters.Adapter.find("runs/rl").base == "runs/sft"
    shutil.copytree(tmp_path / "runs" / "sft", tmp_path / "elsewhere" / "runs" / "sft")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert adapters.Adapter.find("../runs/rl").base == str(tmp_path / "runs" / "sft")  # not that of another project
    (tmp_path / "runs" / "sft").rename(tmp_path / "gone")
    assert adapters.Adapter.find("../runs/rl").base == "runs/sft"


def with_other_weights(folder, factor=2.0):
    weights = load_file(folder / "adapter_model.safetensors")
    save_file({name: factor * value for name, value in weights.items()}, folder / "adapter_model.safetensors")


def test_an_adapter_that_is_not_finite_is_named(adapter, tmp_path):
    folder = shutil.copytree(adapter.folder, tmp_path / "copy")
    with_other_weights(folder, float("nan"))
    with pytest.raises(InputError, match="model_name_or_path: got the adapter .*copy, which cannot be merged into "):
        load_policy(ModelConfig(str(folder)), ToySuite(), "compact")


@pytest.mark.parametrize("left", ["checkpoint-1", FINISHED])
def test_a_run_does_not_go_on_with_another_adapter_than_it_began_with(adapter, tmp_path, left):
    policy(adapter.path, tmp_path)
    (tmp_path / left).mkdir()
    other = shutil.copytree(adapter.folder, tmp_path / "other")
    policy(str(other), tmp_path)  # the same, somewhere else
    with_other_weights(other)
    with pytest.raises(ValueError, match="model_name_or_path: got .*other, but .* was begun with "):
        policy(str(other), tmp_path)


def test_the_base_of_an_attempt_without_a_checkpoint_is_not_the_base_of_the_next(adapter, tmp_path):
    """The first attempt trains all weights. Its base holds the adapter's changes, which must not be applied twice."""
    policy(adapter.path, tmp_path)
    _, given = policy(adapter.path, tmp_path, use_peft=True)
    given["model"].save_pretrained(tmp_path)
    given["processing_class"].save_pretrained(tmp_path)
    (tmp_path / FINISHED).touch()
    loaded, _ = load_policy(ModelConfig(str(tmp_path)), ToySuite(), "compact")
    torch.testing.assert_close(logits(loaded), adapter.logits)


@pytest.mark.parametrize("left", ["checkpoint-1", FINISHED])
def test_a_start_without_a_base_keeps_that_of_a_run_and_the_model_that_it_starts_from(adapter, tmp_path, left):
    policy(adapter.path, tmp_path)
    policy(str(tmp_path / "base"), tmp_path, use_peft=True)
    (tmp_path / left).mkdir()
    policy(adapter.path, tmp_path, use_peft=True)
    assert (tmp_path / "base").is_dir()


def test_a_refused_command_keeps_the_base_of_a_finished_run(tmp_path):
    digests = set()
    for seed in (0, 1):
        args = make_config(tmp_path, seed=seed)
        policy_for_training(ModelConfig("tiny:32x1", use_peft=True), args, ToySuite(), "compact")
        digests.add(what_model(str(tmp_path / "base")))
        (tmp_path / FINISHED).touch()
    assert len(digests) == 1


def test_the_adapter_that_a_run_starts_from_is_one_of_its_settings(adapter, tmp_path):
    def seen(folder):
        args, given = policy(str(folder), tmp_path / "run", use_peft=True)
        return settings_of(EPOTrainer(suite=ToySuite(), args=args, **given))

    other = shutil.copytree(adapter.folder, tmp_path / "other")
    before, moved = seen(adapter.folder), seen(other)
    assert differences(before, moved) == []
    with_other_weights(other)
    (line,) = differences(before, seen(other))
    assert line.startswith("adapter_weights: 'a folder of weights, XXH3 ")


def test_only_a_checkpoint_finds_its_base_beside_it(adapter, tmp_path):
    shutil.copytree(adapter.folder / "base", tmp_path / "base")
    for name in ("run", "checkpoint-2", "last-checkpoint"):
        (tmp_path / name).mkdir()
        shutil.copy(adapter.folder / "adapter_config.json", tmp_path / name)
        found = adapters.Adapter.find(str(tmp_path / name))
        assert found.base == str((adapter.folder if name == "run" else tmp_path) / "base")


def test_a_checkpoint_behind_a_link_or_a_dot_finds_its_base_beside_it(adapter, tmp_path, monkeypatch):
    shutil.copytree(adapter.folder / "base", tmp_path / "base")
    (checkpoint := tmp_path / "checkpoint-2").mkdir()
    shutil.copy(adapter.folder / "adapter_config.json", checkpoint)
    (tmp_path / "links").mkdir()
    (link := tmp_path / "links" / "best").symlink_to(checkpoint)
    assert adapters.Adapter.find(str(link)).base == str(tmp_path / "base")
    monkeypatch.chdir(checkpoint)
    assert adapters.Adapter.find(".").base == str(tmp_path / "base")


def test_settings_that_an_adapter_does_not_have_are_refused(adapter, tmp_path):
    policy(adapter.path, tmp_path, use_peft=True, lora_r=4)
    with pytest.raises(ValueError, match="lora_r: expected 4, .*, got 64; .*epo-trl merge"):
        policy(adapter.path, tmp_path, use_peft=True, lora_r=64)
    policy(adapter.path, tmp_path, use_peft=True, lora_target_modules=["v_proj", "q_proj"])
    for name, other in (
        ("lora_target_modules", ["q_proj"]), ("lora_target_modules", ["all-linear"]), ("lora_dropout", 0.3),
        ("lora_modules_to_save", ["lm_head"]), ("lora_target_parameters", ["gate.weight"]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"{name}: expected .*, as in the adapter .*, got .*epo-trl merge"):
            policy(adapter.path, tmp_path, use_peft=True, **{name: other})


def test_the_settings_that_an_adapter_keeps_instead_of_the_defaults_are_printed(adapter, tmp_path):
    with pytest.warns(UserWarning, match=r"trained with its own settings: lora_r 4, not 16; lora_alpha 8, not 32$"):
        policy(adapter.path, tmp_path, use_peft=True)


def test_an_adapter_on_every_linear_layer_is_trained_on_with_all_linear(adapter, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(adapter.folder / "base")
    lora = LoraConfig(r=4, target_modules="all-linear", modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    get_peft_model(base, lora).save_pretrained(tmp_path / "all")
    toy_tokenizer().save_pretrained(tmp_path / "all")
    asked = {"use_peft": True, "lora_target_modules": ["all-linear"], "lora_modules_to_save": ["lm_head"]}
    assert policy(str(tmp_path / "all"), tmp_path / "run", **asked)[1]["model"] is not None


def test_a_model_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="model_name_or_path: got 'runs/no/model', which cannot be read"):
        policy("runs/no/model", tmp_path)
    with pytest.raises(ValueError, match="model_name_or_path: expected a Hub id, a local path or 'tiny', got nothing"):
        policy("", tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="model_name_or_path: got '.*empty', which cannot be read: ."):
        policy(str(tmp_path / "empty"), tmp_path)
    make_model().save_pretrained(tmp_path / "empty")
    with pytest.raises(ValueError, match="model_name_or_path: got '.*empty', .*: it has no tokenizer_config.json$"):
        policy(str(tmp_path / "empty"), tmp_path)


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


@pytest.mark.parametrize("program", ["train", "imitate"])
def test_a_second_call_with_the_same_configuration_loads_what_it_is_asked_to(adapter, tmp_path, monkeypatch, program):
    loaded = []

    class Trainer:
        preempted, close_envs = False, print
        model = SimpleNamespace(config=AutoConfig.from_pretrained(adapter.folder / "base"))

        def __init__(self, *_, args, **__):
            self.args = args

        def train_to_end(self):
            loaded.append({**self.args.model_init_kwargs})

    monkeypatch.setattr(imitation, "ImitationTrainer", Trainer)
    monkeypatch.setattr(imitation, "demonstrations", lambda *_: Dataset.from_dict({"input_ids": [[5]]}))
    given = {"use_cache": False}
    if program == "train":
        args = make_config(tmp_path, model_init_kwargs=given)
        start = partial(train, ToySuite(), args, trainer_class=Trainer)
    else:
        args = imitation.ImitationConfig(str(tmp_path), use_cpu=True, report_to=[], model_init_kwargs=given)
        start = partial(imitation.imitate, ToySuite(), imitation.DemonstrationArguments(), args)
    base = f"{adapter.path}/base"
    start(model_args=ModelConfig(base, dtype="bfloat16", attn_implementation="eager"))
    start(model_args=ModelConfig(base, dtype="float32"))
    assert [(one["dtype"], one["attn_implementation"], one["use_cache"]) for one in loaded] == [
        (torch.bfloat16, "eager", False),
        (torch.float32, None, False),
    ]
    assert args.model_init_kwargs == given


def test_four_bits_reach_every_loader(adapter, tmp_path, monkeypatch):
    """bitsandbytes is not here, so it stops where the model would be loaded."""
    asked, wish = [], object()

    def record(path, **kwargs):
        asked.append(kwargs["quantization_config"])
        raise LookupError

    monkeypatch.setattr(load, "build_quantization", lambda args: wish if args.load_in_4bit else None)
    monkeypatch.setattr(load, "create_model_from_path", record)
    monkeypatch.setattr(families, "create_model_from_path", record)
    four = {"load_in_4bit": True}
    assert policy(f"{adapter.path}/base", tmp_path, use_peft=True, **four)[1]["quantization_config"] is wish
    for begin in (
        lambda: policy(adapter.path, tmp_path, use_peft=True, **four),
        lambda: load_policy(ModelConfig(adapter.path, **four), ToySuite(), "compact"),
        lambda: load_policy(ModelConfig(f"{adapter.path}/base", **four), ToySuite(), "compact"),
    ):
        with pytest.raises(LookupError):
            begin()
    assert asked == [wish] * 3
    with pytest.raises(ValueError, match="load_in_4bit, load_in_8bit: got True without use_peft"):
        policy(adapter.path, tmp_path, **four)


def test_a_new_adapter_on_an_architecture_that_peft_does_not_know_is_on_every_linear_layer(adapter, tmp_path):
    config = json.loads((adapter.folder / "base" / "config.json").read_text())
    assert policy(f"{adapter.path}/base", tmp_path, use_peft=True)[1]["peft_config"].target_modules == [
        "q_proj",
        "v_proj",
    ]  # a llama
    other = shutil.copytree(adapter.folder / "base", tmp_path / "gpt")
    (other / "config.json").write_text(json.dumps({**config, "model_type": "ministral"}))
    assert policy(str(other), tmp_path / "run", use_peft=True)[1]["peft_config"].target_modules == "all-linear"


# --------------------------------------------------------------------------------------- 4 and 8 bit, and the Hub


def test_without_bitsandbytes_a_base_in_4_bit_is_an_error_in_one_line(adapter, tmp_path, monkeypatch):
    monkeypatch.setattr(load, "find_spec", lambda name: None)
    for asked in ("load_in_4bit", "load_in_8bit"):
        with pytest.raises(
            ValueError, match=rf"{asked}: got True, but bitsandbytes is not installed; pip install 'epo"
        ):
            policy(f"{adapter.path}/base", tmp_path, use_peft=True, **{asked: True})
    assert load.build_quantization(ModelConfig()) is None


def test_four_bits_need_a_type_to_compute_in(monkeypatch):
    monkeypatch.setattr(load, "find_spec", lambda name: object())
    with pytest.raises(ValueError, match="dtype: expected 'bfloat16', 'float16'.*got 'auto' with load_in_4bit"):
        load.build_quantization(ModelConfig(load_in_4bit=True, dtype="auto"))
