"""The families that people start from: the page of tested models, and what differs between them."""

import warnings
from pathlib import Path

import pytest
import torch
from model_families import (
    FAMILIES,
    PAGE,
    VOCABULARY,
    check_family,
    family_of,
    logits,
    make_family_trainer,
    row_of,
    save_checkpoint,
)
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from trainer_kit import make_config, make_ppo, make_trainer, toy_tokenizer
from transformers import (
    AutoConfig,
    FalconConfig,
    FalconForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from trl import ModelConfig

from epo_trl.cli.imitation import DemonstrationArguments, ImitationConfig, imitate
from epo_trl.envs.toy import ToySuite
from epo_trl.errors import InputError
from epo_trl.models import load_policy
from epo_trl.models.families import load_model, turn_off_noise, unread_by_text
from epo_trl.trainers import EPOTrainer

IDS = torch.tensor([[5, 9, 11, 30, 12, 14, 9, 8]])
WITH_EYES = ["qwen3_5", "qwen3_vl", "gemma3", "gemma4", "mistral3"]


def checkpoint(kind, folder, **changes):
    return save_checkpoint(family_of(kind), folder, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.kind)
def test_the_page_says_what_works_with_a_family(tmp_path, family):
    row = row_of(family, check_family(family, tmp_path))
    assert row in PAGE.read_text(encoding="utf-8").splitlines(), (
        f"{row}\nWrite the page: python tests/model_families.py"
    )


# ------------------------------------------------------------------------------------------------- what text reaches


@pytest.mark.parametrize("kind", WITH_EYES)
def test_what_has_no_gradient_from_text_is_frozen_and_nothing_else(tmp_path, kind):
    model = load_model(checkpoint(kind, tmp_path))
    model(input_ids=IDS).logits.square().sum().backward()
    without = {name for name, weight in model.named_parameters() if weight.grad is None}
    unread = {id(weight) for weight in unread_by_text(model)}
    assert without == {name for name, weight in model.named_parameters() if id(weight) in unread} != set()
    assert unread_by_text(load_model(checkpoint("llama", tmp_path / "llama"))) == []


@pytest.mark.parametrize("kind", WITH_EYES)
def test_an_adapter_does_not_land_where_text_does_not_go(tmp_path, kind):
    """Neither by default nor on all linear layers."""
    start = checkpoint(kind, tmp_path / "start")
    unread = {id(weight) for weight in unread_by_text(load_model(start))}
    for target in ("all-linear", ["q_proj", "v_proj", "qkv", "proj"]):
        trainer = EPOTrainer(
            start, ToySuite(), args=make_config(tmp_path / "rl"), processing_class=toy_tokenizer(),
            peft_config=LoraConfig(task_type="CAUSAL_LM", target_modules=target),
        )  # fmt: skip
        adapted = [name for name, _ in trainer.model.named_parameters() if "lora_" in name]
        assert adapted and not [name for name in adapted if "vis" in name or "embed_v" in name]
    assert unread


def test_the_log_names_what_is_frozen(tmp_path):
    start = checkpoint("qwen3_vl", tmp_path / "start")
    says = r"Qwen3VLForConditionalGeneration: frozen, since text never reaches it: visual \(0\.2 million weights\)"
    with pytest.warns(UserWarning, match=says):
        make_family_trainer(start, tmp_path / "rl")


@pytest.mark.slow
def test_a_separate_critic_freezes_its_tower_and_has_no_adapter_there(tmp_path):
    start = checkpoint("gemma3", tmp_path / "start")
    for lora in (False, True):
        kwargs = {"peft_config": LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")} if lora else {}
        trainer = make_ppo(
            tmp_path / str(lora), model=start, critic="separate", critic_use_peft=lora, max_steps=1, **kwargs
        )
        trained = [name for name in trainer.critic.trained_names() if "head" not in name]
        assert trained and not [name for name in trained if "vision" in name or "multi_modal" in name]
        trainer.train()


def test_an_encoder_is_refused_before_the_rollout(tmp_path):
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    T5ForConditionalGeneration(T5Config(**sizes)).save_pretrained(tmp_path / "t5")
    with pytest.raises(InputError, match="model: expected a decoder-only model, got T5ForConditionalGeneration"):
        make_trainer(tmp_path / "rl", model=str(tmp_path / "t5"))


# --------------------------------------------------------------------------------------------------- loading adapters


@pytest.mark.parametrize("kind", ["qwen3_5", "llama"])
def test_an_adapter_with_weights_that_have_no_place_is_an_error_that_names_them(tmp_path, kind):
    start, folder = checkpoint(kind, tmp_path / "start"), tmp_path / "adapter"
    get_peft_model(load_model(start), LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])).save_pretrained(
        folder
    )
    toy_tokenizer().save_pretrained(folder)
    load_policy(ModelConfig(str(folder)), ToySuite(), "compact")
    weights = load_file(folder / "adapter_model.safetensors")
    first = next(iter(weights))
    for changed in (
        {name: weight for name, weight in weights.items() if name != first},
        {**weights, f"{first}.x": weights[first].clone()},
    ):
        save_file(changed, folder / "adapter_model.safetensors")
        with pytest.raises(InputError, match="of its base .*start, got .*adapter, which does not fit 1 of them"):
            load_policy(ModelConfig(str(folder)), ToySuite(), "compact")


def test_a_base_that_auto_classes_know_by_another_name_gets_its_adapter_everywhere(tmp_path):
    """AutoModelForCausalLM loads Qwen3.5 as a class whose names no adapter of TRL's class fits."""
    start = checkpoint("qwen3_5", tmp_path / "start")
    trainer = make_family_trainer(start, tmp_path / "rl", lora=True)
    trainer.train()
    trainer.save_model()
    further = make_family_trainer(str(tmp_path / "rl"), tmp_path / "further", lora=True)
    torch.testing.assert_close(logits(further.model), logits(trainer.model), atol=1e-4, rtol=0)


# -------------------------------------------------------------------------------------------------------------- noise

_SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
NOISY = {
    "llama": ("llama", {"attention_dropout": 0.3}),
    "opt": ("opt", {"attention_dropout": 0.3, "dropout": 0.3, "layerdrop": 0.3}),
    "seed_oss": ("seed_oss", {"attention_dropout": 0.3, "residual_dropout": 0.3}),
    "hunyuan": ("hunyuan_v1_dense", {"attention_dropout": 0.3}),
    "granite": ("granite", {"attention_dropout": 0.3}),
    "gpt_oss": ("gpt_oss", {"attention_dropout": 0.3}),
    "phi": ("phi", {"attention_dropout": 0.3, "resid_pdrop": 0.3, "embd_pdrop": 0.3}),
    "falcon": (FalconForCausalLM, FalconConfig(**_SIZES, hidden_dropout=0.3, attention_dropout=0.3)),
    "phimoe": (
        PhimoeForCausalLM,
        PhimoeConfig(
            **_SIZES, intermediate_size=32, num_key_value_heads=2, num_local_experts=4, router_jitter_noise=0.3,
            input_jitter_noise=0.3, attention_dropout=0.3,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NOISY)
def test_nothing_random_is_left_in_training_mode(tmp_path, name):
    """Dropout by modules, by functions, LayerDrop and router jitter, read from attributes or from the configuration."""
    kind, settings = NOISY[name]
    torch.manual_seed(0)
    model = load_model(checkpoint(kind, tmp_path, **settings)) if isinstance(kind, str) else kind(settings)
    model.train()

    @torch.no_grad()
    def outputs():
        return model(input_ids=IDS.repeat(8, 4)).logits

    assert not torch.equal(outputs(), outputs())
    turn_off_noise(model)
    trained = outputs()
    assert torch.equal(trained, outputs())
    torch.testing.assert_close(logits(model), logits(model.eval()))


@pytest.mark.slow
def test_the_noise_is_off_in_policy_reference_and_critic_and_the_saved_configuration_is_as_published(tmp_path):
    start = checkpoint("opt", tmp_path / "start")
    published = AutoConfig.from_pretrained(start)
    assert published.dropout == 0.1
    trainer = make_ppo(tmp_path / "rl", model=start, critic="separate", beta=0.1, num_iterations=2, max_steps=2)
    for model in (trainer.model, trainer.ref_model, trainer.critic.backbone):
        model.train()
        read = {"input_ids": IDS.repeat(4, 4)}
        with torch.no_grad():
            first, second = (model(**read, use_cache=False)[0] for _ in range(2))
        assert torch.equal(first, second)
    trainer.train()
    first = [line["clip_ratio/region_mean"] for line in trainer.state.log_history if "clip_ratio/region_mean" in line][
        0
    ]
    assert first == 0.0
    trainer.save_model()
    assert AutoConfig.from_pretrained(tmp_path / "rl").dropout == 0.1
    assert trainer.model.config.dropout == 0.0
    on = make_trainer(tmp_path / "on", model=start, disable_dropout=False)
    assert on.model.config.dropout == 0.1


# -------------------------------------------------------------------------------------------------------------- experts


@pytest.mark.parametrize("kind", ["granitemoe", "mixtral", "gpt_oss"])
def test_the_router_loss_is_that_of_the_family_whatever_it_calls_its_experts(tmp_path, kind):
    trainer = make_family_trainer(checkpoint(kind, tmp_path / "start"), tmp_path / "rl")
    assert trainer.aux_loss_enabled
    with torch.no_grad():
        plain = trainer.model(input_ids=IDS, output_router_logits=True)
        fused = trainer.model(input_ids=IDS, labels=IDS, fused_lm_head=True, output_router_logits=True)
    expected = load_balancing_loss_func(plain.router_logits, 4, 2)
    assert expected > 1
    torch.testing.assert_close(fused.aux_loss, expected)
    trainer.train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.save_model()
    assert "num_experts" not in Path(tmp_path / "rl" / "config.json").read_text().replace("num_experts_per_tok", "")


@pytest.mark.slow
def test_a_dense_model_of_a_family_of_mixtures_has_no_router_loss_in_either_trainer(tmp_path):
    start = checkpoint("granitemoehybrid", tmp_path / "start")
    trainer = make_family_trainer(start, tmp_path / "rl")
    trainer.train()
    args = ImitationConfig(str(tmp_path / "sft"), use_cpu=True, bf16=False, report_to=[], max_steps=1)
    warm_start = imitate(ToySuite(), DemonstrationArguments(episodes=2), args, ModelConfig(start))
    assert not trainer.aux_loss_enabled and not warm_start.aux_loss_enabled


def test_dropout_on_packed_experts_is_off_in_rl_and_an_error_that_names_it_in_a_warm_start(tmp_path):
    start = checkpoint("qwen3_moe", tmp_path / "start")
    trainer = make_family_trainer(start, tmp_path / "rl", lora=True)  # TRL's default is 0.05
    assert trainer.model.peft_config["default"].lora_dropout == 0.0
    args = ImitationConfig(str(tmp_path / "sft"), use_cpu=True, bf16=False, report_to=[], max_steps=1)
    with pytest.raises(ValueError, match="lora_dropout != 0"):
        imitate(ToySuite(), DemonstrationArguments(episodes=2), args, ModelConfig(start, use_peft=True))
