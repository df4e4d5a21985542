"""The configs of recipes/tools and recipes/textworld_express are read as the recipes read them."""

import re
import sys
from pathlib import Path

import pytest
from trl import ModelConfig

from epo_trl.cli.command_line import AlgorithmArguments
from epo_trl.cli.imitation import DemonstrationArguments, ImitationConfig
from epo_trl.cli.options import parse_recipe
from epo_trl.trainers import EPOConfig

RECIPES = Path(__file__).parents[1] / "recipes"
CONFIGS = [path for folder in ("tools", "textworld_express") for path in sorted((RECIPES / folder).glob("*.yaml"))]


@pytest.fixture(autouse=True)
def from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    yield
    for name in ("high_low", "twx_env"):
        sys.modules.pop(name, None)


def test_there_are_configs():
    assert len(CONFIGS) == 4


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_config_has_only_known_keys(path):
    if "sft" in path.stem:
        types = DemonstrationArguments, ImitationConfig, ModelConfig
    else:
        types = AlgorithmArguments, EPOConfig, ModelConfig
    suite, *_ = parse_recipe(*types, argv=["--config", str(path), "--bf16", "false"])
    assert suite.name == ("HighLow" if path.parent.name == "tools" else "textworld-express")
    assert len(suite.task_ids("train")) >= 200


@pytest.mark.parametrize(("name", "installed"), [("gymnasium", "gymnasium"), ("openenv", "'epo-trl[openenv]'")])
def test_a_package_that_is_not_installed_is_named(name, installed, monkeypatch):
    from epo_trl.envs import EnvError
    from epo_trl.envs.registry import environment_arguments

    monkeypatch.setitem(sys.modules, name, None)  # as if it were not there
    monkeypatch.setattr("epo_trl.envs.adapters.openenv.find_spec", lambda name: None)
    with pytest.raises(
        EnvError, match=re.escape(f"environment: '{name}' needs the package {name}; pip install {installed}")
    ):
        environment_arguments(name)().make_suite()
