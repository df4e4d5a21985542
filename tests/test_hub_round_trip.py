"""A LoRA run on a chat model leaves what plain transformers and PEFT load, play the same with, and go on from."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers.trainer
from huggingface_hub.utils import filter_repo_objects
from peft import LoraConfig
from safetensors.torch import load_file
from trainer_kit import make_config, make_model, make_trainer, make_warm_start, saved, toy_tokenizer
from trl import ModelConfig

from epo_trl.cli import main
from epo_trl.cli.train import train
from epo_trl.envs.toy import ToySuite
from epo_trl.models import load_policy
from epo_trl.runs import guards
from epo_trl.runs.files import FINISHED, is_complete

# An id of the Hub or a folder: these tests with a real model, `make test-hub CHECKPOINT=...`.
CHECKPOINT = os.environ.get("EPO_TRL_CHECKPOINT")
QUESTION = [{"role": "user", "content": "open the red box"}]

# What a user has who has never heard of this library.
PLAIN = """
import sys
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

adapter, base, merged, out = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(adapter)
ids = tokenizer.apply_chat_template(
    [{"role": "user", "content": "open the red box"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
)
load = lambda path: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
models = {
    "base": load(base),
    "on the base": PeftModel.from_pretrained(load(base), adapter),
    "by itself": AutoPeftModelForCausalLM.from_pretrained(adapter, dtype=torch.float32),
    "merged": load(merged),
}
with torch.no_grad():
    logits = {name: model.eval()(**ids).logits for name, model in models.items()}
torch.save({"ids": ids["input_ids"], **logits}, out)
assert not [name for name in sys.modules if name.partition(".")[0] in ("epo_trl", "trl")]
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two optimizer steps of RL with a new adapter on a chat model, the adapter merged, and both in plain libraries."""
    root = tmp_path_factory.mktemp("hub")
    base = CHECKPOINT or str(root / "chat")
    if CHECKPOINT is None:
        saved(make_model(seed=3), base)
        toy_tokenizer().save_pretrained(base)
    folder, merged, out = root / "run", root / "merged", root / "plain.pt"
    trainer = train(
        ToySuite(),
        make_config(folder, max_steps=2, max_prompt_length=400, epo_lambda=0.1),
        ModelConfig(base, use_peft=True, lora_r=4, lora_target_modules="all-linear"),
    )
    assert main(["merge", str(folder), "--out", str(merged), "--dtype", "float32"]) == 0
    (root / "plain.py").write_text(PLAIN)
    words = [sys.executable, "plain.py", str(folder), base, str(merged), str(out)]
    hidden = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(words, cwd=root, check=True, env=hidden)
    return SimpleNamespace(base=base, folder=folder, merged=str(merged), plain=torch.load(out), trained=trainer.model)


def logits_of(model, ids):
    with torch.no_grad():
        return model.eval()(ids).logits


@pytest.mark.slow
def test_plain_libraries_compute_what_the_trainer_s_model_computes(run):
    ids = run.plain["ids"]
    expected = logits_of(run.trained, ids)
    assert (run.plain["base"] - expected).abs().max() > 1e-4, "the adapter has been trained"
    for name in ("on the base", "by itself", "merged"):
        torch.testing.assert_close(run.plain[name], expected, rtol=1e-4, atol=1e-4)
    model, tokenizer = load_policy(ModelConfig(str(run.folder)), ToySuite(), "compact")
    torch.testing.assert_close(logits_of(model, ids), expected, rtol=1e-4, atol=1e-4)
    assert tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)["input_ids"] == ids[0].tolist()


@pytest.mark.slow
def test_the_next_run_begins_with_the_adapter_and_keeps_its_base(run, tmp_path):
    train(
        ToySuite(),
        make_config(tmp_path, max_steps=1, max_prompt_length=400, learning_rate=0.0),
        ModelConfig(str(run.folder), use_peft=True),
    )
    name = "adapter_model.safetensors"
    before, after = load_file(run.folder / name), load_file(tmp_path / name)
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert f'"base_model_name_or_path": "{run.base}"' in (tmp_path / "adapter_config.json").read_text()


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the Hub, where repositories can be created; `private` says whether the last one is."""

    def create_repo(name, private=None, **_):
        created.private = private
        return SimpleNamespace(repo_id=f"me/{name}")

    created = SimpleNamespace(create_repo=create_repo)
    monkeypatch.setattr(transformers.trainer, "hf_api", lambda: created)
    return created


def test_what_is_pushed_is_the_whole_adapter_with_its_card(tmp_path, hub):
    """Looks into the folder at the moment of the upload."""
    pushed = []

    def upload_folder(*, repo_id, folder_path, ignore_patterns, **_):
        batch = [f"{guards.FOLDER}/step_3_rank0.pt", "checkpoint-1/optimizer.pt", "runs/a"]
        assert list(filter_repo_objects(batch, ignore_patterns=ignore_patterns)) == ["runs/a"]
        files = {path.name for path in Path(folder_path).iterdir()}
        pushed.append((repo_id, files, (Path(folder_path) / "README.md").read_text()))

    hub.upload_folder = upload_folder
    base = saved(make_model(seed=3), tmp_path / "chat")
    trainer = make_trainer(
        tmp_path / "agent", model=base, max_steps=1, push_to_hub=True, hub_private_repo=True,
        peft_config=LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"), hub_strategy="end",
    )  # fmt: skip
    trainer.train_to_end()
    [(repo, files, card)] = pushed
    assert repo == "me/agent" and hub.private is True
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "README.md"} <= files
    assert "a LoRA adapter on the base model" in card and "## Citation" in card


def test_an_uploaded_checkpoint_is_complete(tmp_path, hub):
    found = []

    def upload_folder(*, folder_path, path_in_repo=None, **_):
        if path_in_repo == "last-checkpoint":
            found.append((Path(folder_path).name, is_complete(folder_path)))
        return SimpleNamespace(done=lambda: True)

    hub.upload_folder = upload_folder
    make_warm_start(tmp_path / "agent", [[5, 6, 7, 8]], push_to_hub=True, hub_strategy="checkpoint").train()
    assert found == [("checkpoint-1", True), ("checkpoint-2", True)]


def test_a_failed_upload_is_repeated_without_training(tmp_path, monkeypatch, hub):
    outcomes, steps = [ConnectionError("no route"), None], []

    def upload_folder(**_):
        if (outcome := outcomes.pop(0)) is not None:
            raise outcome

    hub.upload_folder = upload_folder

    def run(**changes):
        settings = {"max_steps": 1, "push_to_hub": True, "hub_strategy": "end", **changes}
        trainer = make_warm_start(tmp_path / "agent", [[5, 6, 7, 8]], **settings)
        step = trainer.training_step
        monkeypatch.setattr(trainer, "training_step", lambda *args: steps.append(1) or step(*args))
        trainer.train_to_end()

    with pytest.raises(ConnectionError):
        run()
    assert (tmp_path / "agent" / FINISHED).exists()
    run()
    assert not outcomes, "uploaded by the second command"
    run()
    assert len(steps) == 1, "nothing is left to do for a third"
    outcomes.append(None)
    run(hub_model_id="other")
    assert not outcomes and len(steps) == 1, "another place"


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "kind"), [("load_in_4bit", "Linear4bit"), ("load_in_8bit", "Linear8bitLt")])
def test_an_adapter_is_trained_on_a_quantized_base_gone_on_with_and_loaded(tmp_path, asked, kind):
    """QLoRA. bitsandbytes also computes on a CPU, from 0.46 on."""
    pytest.importorskip("bitsandbytes")
    base, folder = str(tmp_path / "chat"), tmp_path / "run"
    saved(make_model(seed=3, hidden_size=64), base)
    toy_tokenizer().save_pretrained(base)
    wish = {asked: True, "use_peft": True}
    trained = train(
        ToySuite(), make_config(folder, max_steps=1, epo_lambda=0.1), ModelConfig(base, lora_r=4, **wish)
    ).model
    assert kind in {type(module).__name__ for module in trained.modules()}
    again = make_config(tmp_path / "again", max_steps=1, learning_rate=0.0)
    gone_on = train(ToySuite(), again, ModelConfig(str(folder), **wish)).model
    loaded, _ = load_policy(ModelConfig(str(folder), **{asked: True}), ToySuite(), "compact")
    ids = torch.tensor([[5, 9, 12, 7, 20, 11]])
    expected, bare = logits_of(trained, ids), load_policy(ModelConfig(base, **{asked: True}), ToySuite(), "compact")[0]
    torch.testing.assert_close(logits_of(gone_on, ids), expected)
    # In training TRL keeps the adapter of a quantized base in bfloat16; it is loaded as it was saved.
    off, effect = (float((logits_of(model, ids) - expected).abs().max()) for model in (loaded, bare))
    assert off < 0.2 * effect and effect > 0.1
