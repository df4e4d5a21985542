"""Wrong input is refused before torch is loaded, and nothing is refused that the parser takes."""

import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, RemoteEntryNotFoundError, RepositoryNotFoundError
from trl import ModelConfig

from epo_trl.launch import early_check
from epo_trl.launch.builtin_configs import list_configs, with_config_path
from epo_trl.launch.early_check import check_early, option_types
from epo_trl.launch.evaluation_arguments import EvaluationArguments
from epo_trl.launch.first_options import ALGORITHM_NAMES, AlgorithmArguments, EnvironmentArguments
from epo_trl.launch.imitation import DemonstrationArguments, ImitationConfig
from epo_trl.launch.play import PlayArguments
from epo_trl.launch.training import ALGORITHMS
from epo_trl.launch.warm_start import StartArguments
from epo_trl.models import load_policy
from epo_trl.models.names import check_model_name
from epo_trl.trainers import EPOConfig, EPOPPOConfig

# A command line, and its error.
WRONG = [
    (["train", "--config", "alfworld/tiny"], "--config: expected a YAML file.*got 'alfworld/tiny'"),
    (["train", "--config", "broken.yaml"], "--config: expected a readable YAML file, got broken.yaml"),
    (["train", "--config", "trap/tiny_cpu", "--max_step", "3"], "--max_step: unknown option.*mean --max_steps"),
    (["train", "--config", "typo.yaml"], "epo_lamda: unknown in typo.yaml; did you mean epo_lambda"),
    (["train", "--config", "trap/tiny_cpu", "--environment", "trip"], "environment: expected 'alfworld'.*got 'trip'"),
    (["train", "--config", "trap/tiny_cpu", "--algorithm", "reinforce"], "algorithm: expected one of.*got 'reinforce'"),
    (["train", "--config", "trap/tiny_cpu", "--epo_lambda=much"], "epo_lambda: expected a number, got 'much'"),
    (["train", "--config", "trap/tiny_cpu", "--rooms", "many"], "rooms: expected a number, got 'many'"),
    (["train", "--config", "trap/tiny_cpu", "--model_name_or_path", "runs/sft"], "model_name_or_path: got 'runs/sft'"),
    (["train", "--accelerate_config", "cpu", "--config", "trap/tiny_cpu", "--max_step=3"], "--max_step: unknown"),
    (["sft", "--config", "trap/sft_tiny_cpu", "--model_name_or_path", "./sft"], "model_name_or_path: got './sft'"),
    (["evaluate", "--config", "alfworld/eval_tiny_cpu", "--model_name_or_path", "runs/sft/"], "got 'runs/sft/'"),
    (["evaluate", "--config", "alfworld/eval_tiny_cpu"], "model_name_or_path: expected a Hub id.*got nothing"),
    (["play", "trap", "--player", "no_such_model"], "player: got 'no_such_model', which cannot be read"),
    (["play", "alfworld"], "alfworld_data: expected a folder of games.*--games generated"),
]
SCRATCH = ("--model_name_or_path", "tiny", "--from_scratch")
SCRIPT = """
import contextlib, io, json, sys
from epo_trl.cli import main
for words in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code
    print(json.dumps([code, said.getvalue(), sorted({"torch", "trl", "transformers"} & set(sys.modules))]))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("typed")
    (folder / "broken.yaml").write_text("a: [\n")
    (folder / "typo.yaml").write_text("environment: trap\nepo_lamda: 0.1\n")
    environment = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(__file__).parents[1]), "HOME": str(folder)}
    typed = json.dumps([words for words, _ in WRONG])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, typed], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("at", range(len(WRONG)), ids=[" ".join(words) for words, _ in WRONG])
def test_wrong_input_is_one_line_before_torch_is_loaded(at, answers):
    """Loading torch and TRL takes five seconds and more; without them an answer takes half a second."""
    code, said, loaded = answers[at]
    lines = said.splitlines()
    assert code == 1 and loaded == []
    assert len(lines) == 1 or WRONG[at][0][0] == "train" and "needs a config:" in said
    assert re.search(WRONG[at][1], lines[0]), lines[0]


@pytest.mark.parametrize(
    ("command", "classes"),
    [
        ("train", (EnvironmentArguments, AlgorithmArguments, StartArguments, EPOPPOConfig, ModelConfig)),
        ("train", (EnvironmentArguments, AlgorithmArguments, StartArguments, EPOConfig, ModelConfig)),
        ("sft", (EnvironmentArguments, DemonstrationArguments, ImitationConfig, ModelConfig)),
        ("evaluate", (EnvironmentArguments, EvaluationArguments, ModelConfig)),
        ("play", (EnvironmentArguments, PlayArguments, ModelConfig)),
    ],
)
def test_the_options_that_are_read_from_source_files_are_those_of_the_parser(command, classes):
    real = {field.name for each in classes for field in fields(each) if field.init}
    found = set(option_types(command))
    assert real <= found
    own = {field.name for field in fields(EPOPPOConfig)} if EPOConfig in classes else set()
    assert {name for name in found - real - own if not name.startswith("_")} == set()


def test_the_names_of_algorithms_are_those_that_train():
    assert tuple(ALGORITHMS) == ALGORITHM_NAMES


def test_every_shipped_config_passes(monkeypatch, tmp_path):
    monkeypatch.setattr(early_check, "check_model_name", lambda *_: None)
    monkeypatch.setattr(early_check, "check_start", lambda *_: None)  # no warm start was made
    monkeypatch.setenv("ALFWORLD_DATA", str(Path(__file__).parent))
    count = 0
    for command in ("train", "sft", "evaluate"):
        for name in list_configs(command):
            if "real" not in name:
                check_early(
                    command,
                    with_config_path(["--config", name, "--games", "generated"][: 4 if "alf" in name else 2]),
                )
                count += 1
    assert count > 20


def test_switches_dashes_and_negative_numbers_pass():
    words = ["--config", "trap/tiny_cpu", *SCRATCH]
    words += ["--traceback", "--no_bf16", "--max-turns", "7", "--beta", "-1e-3", "--save_steps=0.5"]
    check_early("train", with_config_path(words))
    check_early("train", with_config_path([*words, "--no-require-think", "--help", "--nothing"]))


def test_where_a_base_class_has_moved_nothing_is_refused(monkeypatch):
    kept = [file for file in early_check.FILES if not file.endswith("base_config.py")]
    monkeypatch.setattr(early_check, "FILES", kept)
    option_types.cache_clear()
    try:
        assert option_types("train") == {} != option_types("play")
        check_early("train", with_config_path(["--config", "trap/tiny_cpu", *SCRATCH, "--max_step", "3"]))
    finally:
        option_types.cache_clear()


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
    for name in ("runs/x", "tiny", "tiny:32x1"):
        check_model_name(name)
    for name in ("./y", "/y", "~/y", "runs/y/", "a/b/c", "a b/c"):
        with pytest.raises(ValueError, match="there is no such folder"):
            check_model_name(name)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file, revision: file)
    check_model_name("owner/name")


def test_loading_checks_the_name_too(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match="model_name_or_path: got 'a/b/c', which cannot be read"):
        load_policy(ModelConfig("a/b/c"), None, "general")
