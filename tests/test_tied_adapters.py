"""An adapter on the embedding or the head of a model that ties them: merged, each has its own weights."""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from trainer_kit import make_config, make_model, toy_tokenizer
from transformers import AutoModelForCausalLM
from trl import ModelConfig

from epo_trl.envs.toy import ToySuite
from epo_trl.models import load_policy, merge_adapter, policy_for_training
from epo_trl.trainers import EPOTrainer
from epo_trl.trainers.support import check_policy

IDS = torch.tensor([[5, 9, 12, 7, 20, 11]])
ON = {
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "both": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "both, one adapter": {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
    "neither": {"target_modules": "all-linear"},
    "saved whole": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.fixture(params=ON)
def adapter(request, tmp_path):
    folder = tmp_path / "adapter"
    make_model(seed=3).save_pretrained(folder / "base")
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    assert base.config.tie_word_embeddings
    model = get_peft_model(base, LoraConfig(r=4, task_type="CAUSAL_LM", **ON[request.param]))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    return SimpleNamespace(on=request.param, folder=folder, model=model, logits=logits(model))


@pytest.mark.slow
def test_wherever_an_adapter_is_merged_the_policy_is_the_same(adapter, tmp_path):
    """In memory, and in a checkpoint."""
    for model in (
        load_policy(ModelConfig(str(adapter.folder)), ToySuite(), "compact")[0],
        AutoModelForCausalLM.from_pretrained(merge_adapter(str(adapter.folder), tmp_path / "merged")),
    ):
        torch.testing.assert_close(logits(model), adapter.logits, rtol=1e-4, atol=1e-4)
        assert model.config.tie_word_embeddings == (adapter.on == "neither")


def test_vllm_is_refused_where_it_would_play_another_policy(adapter, tmp_path, monkeypatch):
    """TRL merges the adapter in place to send the weights, and vLLM has one matrix for embedding and head."""
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", lambda **_: None)
    start = ModelConfig(str(adapter.folder), use_peft=True)
    args = make_config(tmp_path / "run", use_vllm=True)
    given = policy_for_training(start, args, ToySuite(), "compact")
    torch.testing.assert_close(logits(given["model"]), adapter.logits)
    if adapter.on == "neither":
        check_policy(given["model"], vllm=True)
    else:
        ours = adapter.on in ("embedding", "saved whole")
        says = "use_vllm: expected False .*, got True: .*lora_target_modules" if ours else "adapter to `lm_head` is not"
        with pytest.raises(ValueError, match=says):  # TRL trains no LoRA on the head at all
            EPOTrainer(suite=ToySuite(), args=args, **given)
