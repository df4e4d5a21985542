"""A model that could run code is refused."""

import json
from pathlib import Path

import pytest
from trainer_kit import make_model, toy_tokenizer
from transformers import dynamic_module_utils
from trl import ModelConfig

from epo_trl import ImitationConfig
from epo_trl.cli import evaluation
from epo_trl.cli.evaluation import EvaluationArguments
from epo_trl.envs.toy import ToySuite
from epo_trl.evaluation import get_protocol


@pytest.fixture
def folder(tmp_path):
    make_model().save_pretrained(tmp_path)
    toy_tokenizer().save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def folder_with_code(folder, tmp_path_factory, monkeypatch):
    """A model whose class is defined in its folder; transformers copies the code to a cache and imports it there."""
    config = json.loads((folder / "config.json").read_text())
    config |= {"auto_map": {"AutoModelForCausalLM": "own_code.OwnModel"}, "architectures": ["OwnModel"]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own_code.py").write_text(
        "from transformers import LlamaForCausalLM\n\n\nclass OwnModel(LlamaForCausalLM):\n    pass\n"
    )
    cache = str(tmp_path_factory.mktemp("code"))
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", cache)
    monkeypatch.syspath_prepend(cache)
    return str(folder)


def test_code_of_a_model_that_is_trusted_runs_in_an_evaluation(folder_with_code):
    def loaded(**trust):
        args = EvaluationArguments(prompt_template="compact", **trust)
        policy, _, _ = evaluation.load(ToySuite(), args, ModelConfig(folder_with_code), get_protocol("alfworld50"))
        return type(policy.model).__name__

    assert loaded(trust_remote_code=True) == "OwnModel" != loaded()


def test_agent_evol_plays_with_a_model_whose_code_it_may_run(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "recipes"))
    import agent_evol

    for trust in (True, False):
        args = ImitationConfig(str(tmp_path), use_cpu=True, bf16=False, report_to=[], trust_remote_code=trust)
        playing = agent_evol.rollout_arguments(ToySuite(), agent_evol.EvolutionArguments(), args, 3)
        assert (playing.trust_remote_code, playing.seed) == (trust, 3)
