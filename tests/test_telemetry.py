"""TRL reports runs to huggingface.co; those whose model is not of the Hub it reports to nobody."""

from pathlib import Path

import pytest
import trl.trainer.base_trainer as base_trainer
from peft import LoraConfig, get_peft_model
from trainer_kit import make_model, make_ppo, make_trainer, make_warm_start, saved


@pytest.fixture
def reports(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    sent = []
    monkeypatch.setattr(base_trainer, "send_telemetry", lambda **kwargs: sent.append(kwargs["library_name"]))
    return sent


def test_a_run_of_a_model_made_here_or_of_a_folder_is_not_reported(tmp_path, reports):
    make_trainer(tmp_path / "memory")
    make_ppo(tmp_path / "folder", model=saved(make_model(), tmp_path / "model"))
    make_warm_start(tmp_path / "warm", [[5, 6, 7]] * 4)
    assert reports == []


@pytest.mark.parametrize(("source", "reported"), [("folder", []), ("org/adapter@main", ["trl"]), (None, ["trl"])])
def test_a_run_of_a_model_or_an_adapter_of_the_hub_is_reported(tmp_path, monkeypatch, reports, source, reported):
    """Not one of an adapter in a folder, even if its base is of the Hub."""
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    model = make_model()
    model.config.name_or_path = "an-organization/a-model"
    if source is not None:
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
        model.adapter_source = source
    make_trainer(tmp_path / "run", model=model)
    assert reports == reported
