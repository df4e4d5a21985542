"""Wrong input is one line that names the option, and a model's name is checked before anything is loaded."""

import re

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, RemoteEntryNotFoundError, RepositoryNotFoundError
from trl import ModelConfig

from epo_trl.errors import InputError
from epo_trl.models import load_policy
from epo_trl.models.names import check_model_name
from epo_trl.runs.checkpoint_files import STATE_FILE

# A command line, and its error.
WRONG = [
    ("train --config alfworld/tiny", "--config: expected a YAML file.*got 'alfworld/tiny'"),
    ("train --config broken.yaml", "--config: expected a readable YAML file, got broken.yaml"),
    ("train --config list.yaml", "--config: expected a YAML file with 'name: value' pairs, got list.yaml"),
    ("train --config trap/tiny_cpu --environment", "argument --environment: expected one argument"),
    ("train --config trap/tiny_cpu --use_cpu true --accelerator_config no.json", "No such file .*no.json"),
    ("train --config trap/tiny_cpu --epo_lambda -1", "epo_lambda: expected a number >= 0, got -1.0"),
    ("train --config trap/tiny_cpu --num_generations 3", "generation_batch_size"),
    ("train --config trap/sft_tiny_cpu", "episodes: no option of epo-trl train, in trap/sft_tiny_cpu"),
    ("sft --config trap/tiny_cpu", "algorithm: no option of epo-trl sft, in trap/tiny_cpu"),
    ("evaluate --config trap/tiny_cpu", "no option of epo-trl evaluate, in trap/tiny_cpu"),
    ("train --accelerate_config zero9 --config trap/tiny_cpu", "expected a YAML file or one of cpu, fsdp2,"),
    ("train --config trap/tiny_cpu --algorithm", "argument --algorithm: expected one argument"),
    ("train --config trap/tiny_cpu --max_step 3", "--max_step: unknown option.*mean --max_steps"),
    ("train --config typo.yaml", "epo_lamda: no option of epo-trl train, in typo.yaml; did you mean epo_lambda"),
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
    ("play trap --player no_such_model", "player: got 'no_such_model', which cannot be read"),
    ("play alfworld", "alfworld_data: expected a folder of games.*--games generated"),
]


@pytest.mark.parametrize(("words", "message"), WRONG, ids=[words for words, _ in WRONG])
def test_wrong_input_is_one_line(words, message, tmp_path, monkeypatch, command):
    (tmp_path / "broken.yaml").write_text("a: [\n")
    (tmp_path / "list.yaml").write_text("- a\n- b\n")
    (tmp_path / "typo.yaml").write_text("environment: trap\nepo_lamda: 0.1\n")
    for step in (3, 20):
        (tmp_path / "stopped" / f"checkpoint-{step}").mkdir(parents=True)
        (tmp_path / "stopped" / f"checkpoint-{step}" / STATE_FILE).touch()
    (tmp_path / "stopped" / "checkpoint-30").mkdir()  # killed while it was saved
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    code, _, error = command(*words.split())
    (line,) = error.strip().splitlines()
    assert code == 1 and re.search(message, line), line


# ------------------------------------------------------------------------------------------------- names of models


class Refused(Exception):
    pass


Refused.__name__ = "ConnectError"


def answered(kind):
    return kind("no", response=httpx.Response(404, request=httpx.Request("HEAD", "https://localhost")))


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (Refused(), "the Hub cannot be reached, and its local cache does not have"),
        (RepositoryNotFoundError, "the Hub has no such model that you may read"),
        (GatedRepoError, None),
        (RemoteEntryNotFoundError, None),
        (TimeoutError(), None),
        (None, None),
    ],
)
def test_the_hub_is_asked_once_about_what_may_be_an_id(error, says, monkeypatch, tmp_path):
    asked = []

    def head(url):
        asked.append(url)
        if error is not None:
            raise answered(error) if isinstance(error, type) else error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", head)
    if says:
        with pytest.raises(ValueError, match=f"^model_name_or_path: got 'runs/x', .*no such folder, and {says}|{says}"):
            check_model_name("runs/x")
    else:
        check_model_name("runs/x")
    assert len(asked) == 1 and asked[0].endswith("/runs/x/resolve/main/config.json")


def test_the_hub_is_not_asked_about_a_path_a_folder_tiny_or_a_cached_model(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url: pytest.fail(url))
    (tmp_path / "runs" / "x").mkdir(parents=True)
    (tmp_path / "runs" / "x" / "config.json").touch()
    for name in ("runs/x", "tiny", "tiny:32x1"):
        check_model_name(name)
    for name in ("./y", "/y", "~/y", "runs/y/", "a/b/c", "a b/c"):
        with pytest.raises(ValueError, match="there is no such folder"):
            check_model_name(name)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file, revision: file)
    check_model_name("owner/name")


@pytest.mark.parametrize("file", ["config.json", "adapter_config.json"])
@pytest.mark.parametrize("name", ["tiny", "tiny:32x1"])
def test_a_folder_of_a_model_is_not_taken_for_a_tiny_model(name, file, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    check_model_name(name)  # there is nothing in it to read
    (tmp_path / name / file).touch()
    with pytest.raises(InputError, match=f"^player: got '{name}', .*; write ./{name} for the folder"):
        check_model_name(name, "player")
    check_model_name(f"./{name}")
    check_model_name(name, output_dir=str(tmp_path / name))  # the same command again, after the run has ended


def test_loading_checks_the_name_too(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match="model_name_or_path: got 'a/b/c', which cannot be read"):
        load_policy(ModelConfig("a/b/c"), None, "general")
