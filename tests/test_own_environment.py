"""Bring your own environment: it is found, it trains, and what it lacks is said before anything is trained."""

import re
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

import forked
import pytest
from rollout_parts import byte_tokenizer
from transformers.hf_argparser import HfArgumentParser
from trl import ModelConfig, SFTConfig
from typed import parse_recipe

from epo_trl.cli.imitation import DemonstrationArguments
from epo_trl.cli.options import AlgorithmArguments
from epo_trl.envs import EnvError, TaskSuite
from epo_trl.envs.registry import ENVIRONMENTS, build_suite, environment_arguments
from epo_trl.envs.testing import EnvContract
from epo_trl.envs.toy import ToySuite, TreasureHunt
from epo_trl.evaluation import Protocol
from epo_trl.evaluation.play import check_first_task
from epo_trl.models import load_policy
from epo_trl.rollout import ContextBuilder, PromptTemplate
from epo_trl.trainers import EPOConfig, EPOPPOConfig

RECIPES = Path(__file__).parents[1] / "recipes"
EXAMPLE = RECIPES / "my_env"


@pytest.fixture(autouse=True)
def example_folder(monkeypatch):
    """The example's folder is the current one, as for a user; what is imported from it is forgotten."""
    monkeypatch.chdir(EXAMPLE)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    yield
    sys.modules.pop("my_env", None)


class TestTheExample(EnvContract):
    expert_turns = 4

    def make_suite(self):
        return environment_arguments("my_env:GuessArguments")().make_suite()


SFT = (DemonstrationArguments, SFTConfig, ModelConfig)


def parse(*argv, types=(EPOConfig, ModelConfig)):
    return parse_recipe(*types, argv=[*argv, "--use_cpu", "true"])


def test_an_environment_of_the_current_folder_is_found_and_hides_no_library(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit('a file of the folder was taken for the library')\n")
    shutil.copy(EXAMPLE / "my_env.py", tmp_path / "env_of_this_folder.py")
    monkeypatch.chdir(tmp_path)
    suite, *_ = parse("--environment", "env_of_this_folder:GuessArguments", "--numbers", "7")
    assert (suite.size, suite.settings) == (7, {"numbers": 7})
    assert sys.path[-1] == str(tmp_path)


@pytest.mark.slow
def test_the_example_trains_from_any_folder_with_its_critic_in_workers_of_its_own(tmp_path):
    for name in ("my_env.py", "tiny_cpu.yaml"):
        shutil.copy(EXAMPLE / name, tmp_path)
    sizes = ["--max_steps", "2", "--num_generations", "1", "--per_device_train_batch_size", "2"]
    words = [RECIPES / "train.py", "--config", "tiny_cpu.yaml", "--algorithm", "ppo", "--report_to", "none", *sizes]
    words += ["--model_name_or_path", "tiny", "--from_scratch", "--env_workers", "1"]
    done = forked.run([*words, "--gradient_accumulation_steps", "1"], cwd=tmp_path, log=tmp_path / "log.txt")
    assert done.returncode == 0, done.stdout[-3000:]
    assert "step    2" in done.stdout
    assert (tmp_path / "runs" / "guess" / "grpo" / "model.safetensors").is_file()


# ------------------------------------------------------------------------------------------- settings that are wrong


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ("parse", r"expected a settings dataclass .*with `def make_suite\(self\)`.*got 'test_own"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_a_way_to_mend_them(settings, says):
    with pytest.raises(EnvError, match=f"^environment: .*{says}"):
        parse("--environment", f"{__name__}:{settings}")


@dataclass(frozen=True)
class Frozen(TaskSuite):
    name = "frozen"
    size: int = 3

    def task_ids(self, split):
        return [f"{split}/{number}" for number in range(self.size)]

    def make_env(self):
        return TreasureHunt()


@dataclass(frozen=True)
class Detailed(Frozen):
    MAY_CHANGE = frozenset({"cores"})
    words: tuple[str, ...] = ("crane", "slate")
    cores: int = 1
    rule: object = object()
    rows: tuple[str, ...] = ("a row",) * 1000
    api_key: str = field(default="", repr=False)
    note: str = field(default="", compare=False)
    _seen: list = field(default_factory=list)


def test_a_suite_made_in_python_has_the_settings_in_its_fields_and_no_other_suite_has_any():
    """What a dataclass does not show or compare, as a key, is in no card and no checkpoint."""
    assert Detailed(2).settings == {"size": 2, "words": ("crane", "slate")}
    assert not {"api_key", "note"} & build_suite(Detailed(2, api_key="secret", note="mine")).settings.keys()
    assert ToySuite().settings == {}


@pytest.mark.parametrize("config", [EPOConfig, EPOPPOConfig])
def test_the_environments_of_ours_clash_with_no_trainer(config, tmp_path, monkeypatch):
    (tmp_path / "json_2.1.1" / "train").mkdir(parents=True)
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    parse("--environment", "alfworld", types=(config, ModelConfig))
    for name in ENVIRONMENTS:
        for types in ((AlgorithmArguments, config, ModelConfig), SFT):
            HfArgumentParser((environment_arguments(name), *types))  # which refuses two fields of one name


@pytest.mark.parametrize(("name", "installed"), [("gymnasium", "gymnasium"), ("openenv", "'epo-trl[openenv]'")])
def test_a_package_that_is_not_installed_is_named(name, installed, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not there
    monkeypatch.setattr("epo_trl.envs.openenv.find_spec", lambda name: None)
    missing = re.escape(f"environment: '{name}' needs the package {name}; pip install {installed}")
    with pytest.raises(EnvError, match=missing):
        environment_arguments(name)().make_suite()


@pytest.mark.parametrize("text", ["import no_such_library\n", "def broken(:\n"])
def test_a_module_that_does_not_load_is_named_with_the_reason(text, tmp_path, monkeypatch):
    (tmp_path / "env_that_fails.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EnvError, match=r"'env_that_fails:X', which cannot be imported .*(no_such_library|SyntaxError)"):
        parse("--environment", "env_that_fails:X")


# ----------------------------------------------------------------------------------------------- info that is wrong


class Lacking(TreasureHunt):
    def step(self, action):
        *result, info = super().step(action)
        return *result, {name: value for name, value in info.items() if name != "won"}


def test_a_missing_key_of_info_is_named_before_training():
    rules = Protocol(name="p", max_turns=3, history_length=2, temperature=1.0)
    context = ContextBuilder(byte_tokenizer(), PromptTemplate.load("general"))
    with pytest.raises(EnvError, match=r"^step.*'train/0'.*info has no 'won'.* Fix: add info\['won'\]"):
        check_first_task(Lacking(), "train/0", 0, context, rules)


class NoExpert(ToySuite):
    make_expert = TaskSuite.make_expert


def test_a_tiny_model_of_an_environment_without_expert_is_refused_by_name():
    with pytest.raises(EnvError, match=r"^model_name_or_path: got 'tiny'.*no expert.*write make_expert\(\)"):
        load_policy(ModelConfig("tiny"), NoExpert(), "general_compact")
