"""RL begins with a warm start: the shipped configs name theirs, random weights are refused, the pair is listed."""

from pathlib import Path

import pytest
import yaml

import epo_trl
from epo_trl.cli.options import find_warm_start, list_configs
from epo_trl.cli.train import StartArguments, check_start, warn_of_other_prompts
from epo_trl.errors import InputError
from epo_trl.rollout.templates import PromptTemplate
from epo_trl.runs.files import FINISHED, write_state

TRAINED = list_configs("train")
AFTER_WARM_START = {name: find_warm_start(path) for name, path in TRAINED.items() if find_warm_start(path)}
REFUSED = "model_name_or_path: expected the folder of a warm start, got "


def test_every_config_of_a_small_model_has_a_warm_start():
    small = {name for name in TRAINED if "_cpu" in name or "smollm2" in name} | {"alfworld/pretrained"}
    assert set(AFTER_WARM_START) == small and len(small) > 9


@pytest.mark.parametrize("name", AFTER_WARM_START)
def test_a_config_begins_with_the_folder_that_its_warm_start_writes(name):
    rl, warm = (yaml.safe_load(path.read_text()) for path in (TRAINED[name], AFTER_WARM_START[name]))
    assert rl["model_name_or_path"] == warm["output_dir"]
    folder, stem = name.split("/")
    first = f"epo-trl sft --config {folder}/{AFTER_WARM_START[name].stem}"
    head = TRAINED[name].read_text()
    assert head.index(f"#   {first}\n") < head.index(f"#   epo-trl train --config {name}\n")
    assert AFTER_WARM_START[name].stem == "sft_" + stem.removeprefix("ppo_")


def test_without_its_warm_start_a_config_is_refused_with_the_command_that_makes_it(command, monkeypatch, tmp_path):
    name, model, warm_start = "alfworld/ppo_tiny_cpu", "runs/alfworld-tiny/sft", "alfworld/sft_tiny_cpu"
    monkeypatch.chdir(tmp_path)
    code, _, err = command("train", "--config", name)
    assert code == 1 and err.count("\n") == 1
    assert err.startswith(f"epo-trl train: error: {REFUSED}'{model}', which does not exist; ")
    assert err.endswith(f"; make it with: epo-trl sft --config {warm_start}\n")
    code, _, err = command("train", "--config", name, "--model_name_or_path", "tiny:32x1")
    assert code == 1
    assert f"{REFUSED}'tiny:32x1', random weights" in err and "--from_scratch" in err
    assert f"make it with: epo-trl sft --config {warm_start}, then add --model_name_or_path {model}; " in err


def test_a_folder_that_is_there_other_models_and_asked_for_random_weights_are_let_through(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = TRAINED["trap/tiny_cpu"]
    check_start("Qwen/Qwen2.5-0.5B-Instruct", StartArguments(), config)
    check_start("tiny", StartArguments(from_scratch=True), config)
    with pytest.raises(
        InputError, match=f"{REFUSED}'tiny'.*make it with: epo-trl sft --config FILE, .* FOLDER; .*from_scratch"
    ):
        check_start("tiny", StartArguments(), None)
    with pytest.raises(InputError, match=REFUSED):
        check_start("runs/trap/sft", StartArguments(), config)
    Path("runs/trap/sft").mkdir(parents=True)
    check_start("runs/trap/sft", StartArguments(), config)


def test_a_config_of_one_s_own_without_a_warm_start_is_refused_too(tmp_path):
    for config in (None, tmp_path / "tiny_cpu.yaml"):
        with pytest.raises(InputError, match=f"{REFUSED}'tiny'.*epo-trl sft --config FILE, .* FOLDER; .*from_scratch"):
            check_start("tiny", StartArguments(), config)


def test_a_warm_start_from_python_is_not_in_bf16_on_a_cpu(tmp_path):
    """TRL's own default is bf16 wherever nothing is said; on a CPU without units for it, ten times as slow."""
    assert epo_trl.ImitationConfig(str(tmp_path), use_cpu=True).bf16 is False
    assert epo_trl.ImitationConfig(str(tmp_path), use_cpu=True, bf16=True).bf16 is True


def test_a_template_other_than_the_warm_starts_is_warned_of(tmp_path, recwarn):
    for settings in ({}, {"template": PromptTemplate.load("compact").checksums()}):
        write_state(tmp_path / FINISHED, {"settings": settings})
        warn_of_other_prompts(str(tmp_path), "compact")
    warn_of_other_prompts("some/model", "general")
    assert not recwarn
    with pytest.warns(UserWarning, match=r"prompt_template: got 'general', but .* of another template"):
        warn_of_other_prompts(str(tmp_path), "general")
