"""TRL reports runs to huggingface.co; those whose model is not of the Hub it reports to nobody."""

import subprocess
from pathlib import Path

import pytest
import trl.trainer.base_trainer as base_trainer
from peft import LoraConfig, get_peft_model
from trainer_kit import make_model, make_ppo, make_trainer, make_warm_start, saved

ROOT = Path(__file__).parents[1]


@pytest.fixture
def reports(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    sent = []
    monkeypatch.setattr(base_trainer, "send_telemetry", lambda **kwargs: sent.append(kwargs))
    return sent


@pytest.mark.parametrize("make", [make_trainer, make_ppo])
def test_a_run_of_a_model_made_here_or_of_a_folder_is_not_reported(tmp_path, reports, make):
    make(tmp_path / "memory")
    make(tmp_path / "folder", model=saved(make_model(), tmp_path / "model"))
    assert reports == []


def test_a_run_from_an_adapter_in_a_folder_is_not_reported_even_if_its_base_is_of_the_hub(tmp_path, reports):
    for name, source in {"folder": str(tmp_path), "hub": "an-organization/an-adapter@main"}.items():
        model = make_model()
        model.config.name_or_path = "an-organization/a-model"
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
        model.adapter_source = source
        make_trainer(tmp_path / name, model=model)
        assert len(reports) == (name == "hub")


def test_a_warm_start_of_a_model_made_here_is_not_reported(tmp_path, reports):
    make_warm_start(tmp_path, [[5, 6, 7]] * 4)
    assert reports == []


def test_a_run_of_a_model_of_the_hub_is_reported_by_trl(tmp_path, reports):
    """So that the tests above can fail."""
    model = make_model()
    model.config.name_or_path = "an-organization/a-model"
    make_trainer(tmp_path, model=model)
    assert [report["library_name"] for report in reports] == ["trl"]


def test_every_target_of_make_switches_telemetry_off():
    show = "show: ; @echo $$HF_HUB_DISABLE_TELEMETRY"
    done = subprocess.run(
        ["make", "-s", "-C", str(ROOT), f"--eval={show}", "show"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "1"
    names = [line for line in (ROOT / "Makefile").read_text().splitlines() if "HF_HUB_DISABLE_TELEMETRY" in line]
    assert names == ["export HF_HUB_DISABLE_TELEMETRY = 1"]  # no target changes it
