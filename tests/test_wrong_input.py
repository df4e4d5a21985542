"""Wrong input is one line that names the option, and a model's name is checked before anything is loaded."""

import re

import pytest
from trl import ModelConfig

from epo_trl.models import load_policy
from epo_trl.models.load import check_model_name
from epo_trl.runs.files import STATE_FILE

# A command line, and its error.
WRONG = [
    ("train --config alfworld/tiny", "--config: expected a YAML file.*got 'alfworld/tiny'"),
    ("train --config broken.yaml", "--config: expected a readable YAML file, got broken.yaml"),
    ("train --config list.yaml", "--config: expected a YAML file with 'name: value' pairs, got list.yaml"),
    ("train --config trap/tiny_cpu --use_cpu true --accelerator_config no.json", "No such file .*no.json"),
    ("train --config trap/tiny_cpu --epo_lambda -1", "epo_lambda: expected a number >= 0, got -1.0"),
    ("train --config trap/tiny_cpu --num_generations 3", r"x steps_per_generation.*num_generations \(3\), got 64"),
    ("train --config trap/sft_tiny_cpu", "--episodes: no option of epo-trl train"),
    ("sft --config trap/tiny_cpu", "no option of epo-trl sft"),
    ("evaluate --config trap/tiny_cpu", "no option of epo-trl evaluate"),
    ("train --accelerate_config zero9 --config trap/tiny_cpu", "configuration file `zero9` does not exist"),
    ("train --config trap/tiny_cpu --max_step 3", "--max_step: no option of epo-trl train; did you mean --max_steps"),
    ("train --config typo.yaml", "--epo_lamda: no option of epo-trl train; did you mean --epo_lambda"),
    ("train --config trap/tiny_cpu --environment trip", "environment: expected 'alfworld'.*got 'trip'"),
    ("train --config trap/tiny_cpu --algorithm reinforce", "algorithm: expected one of.*got 'reinforce'"),
    ("train --config trap/tiny_cpu --epo_lambda=much", "epo_lambda.*: invalid float value: 'much'"),
    ("train --config trap/tiny_cpu --rooms many", "rooms: invalid int value: 'many'"),
    ("train --config trap/tiny_cpu --model_name_or_path runs/sft", "model_name_or_path: got 'runs/sft'"),
    ("train --accelerate_config cpu --config trap/tiny", "--config: expected .*got 'trap/tiny'"),
    ("sft --config trap/sft_tiny_cpu --model_name_or_path ./sft", "model_name_or_path: got './sft'"),
    ("evaluate --config alfworld/eval_tiny_cpu --model_name_or_path runs/sft/", "got 'runs/sft/'"),
    ("evaluate --config alfworld/eval_tiny_cpu", "model_name_or_path: expected a Hub id.*got nothing"),
    ("evaluate --environment trap --model_name_or_path ./sft", "model_name_or_path: got './sft'"),
    ("play trap --player stopped", "player: got 'stopped', .* checkpoint is stopped/checkpoint-20$"),
    ("play trap --player no_such_model", "model_name_or_path: got 'no_such_model', whose tokenizer cannot be read"),
    ("play alfworld", "alfworld_data or ALFWORLD_DATA: expected a folder.*--games generated"),
]


@pytest.mark.parametrize(("words", "message"), WRONG, ids=[words for words, _ in WRONG])
def test_wrong_input_is_one_line(words, message, tmp_path, monkeypatch, command):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # without a network it retries for minutes
    (tmp_path / "broken.yaml").write_text("a: [\n")
    (tmp_path / "list.yaml").write_text("- a\n- b\n")
    (tmp_path / "typo.yaml").write_text("environment: trap\nepo_lamda: 0.1\n")
    for step in (3, 20):
        (tmp_path / "stopped" / f"checkpoint-{step}").mkdir(parents=True)
        (tmp_path / "stopped" / f"checkpoint-{step}" / STATE_FILE).touch()
    (tmp_path / "stopped" / "checkpoint-30").mkdir()  # killed while it was saved
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    code, _, error = command(*words.split())
    (line,) = error.strip().splitlines()
    assert code == 1 and re.search(message, line), line


# ------------------------------------------------------------------------------------------------- names of models


def test_a_path_is_that_of_a_model(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "x").mkdir(parents=True)
    (tmp_path / "runs" / "x" / "config.json").touch()
    for name in ("runs/x", "tiny", "tiny:32x1", "owner/name"):
        check_model_name(name)
    for name in ("./y", "/y", "~/y", "runs/y/", "a/b/c"):
        with pytest.raises(ValueError, match="player: .*no folder with config.json"):
            check_model_name(name, "player")


def test_loading_checks_the_name_too(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="model_name_or_path: got 'a/b/c', which cannot be read"):
        load_policy(ModelConfig("a/b/c"), None, "general")
