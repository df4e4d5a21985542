"""Small models of the families that people start from, and what is checked of each. `python tests/model_families.py`
writes the table of docs/models.md.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from trainer_kit import make_config, toy_tokenizer
from transformers import CONFIG_MAPPING
from trl import ModelConfig

from epo_trl.envs.toy import ToySuite
from epo_trl.models.families import load_model
from epo_trl.models.generate import SamplingPolicy
from epo_trl.models.load import load_policy, merge_adapter, policy_for_training
from epo_trl.scoring.turn_layout import TurnLayout
from epo_trl.trainers import EPOTrainer

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
BEGIN, END = "<!-- begin: python tests/model_families.py -->", "<!-- end -->"
CHECKS = ("trains", "scores", "generation", "adapter", "merge")
VOCABULARY = len(toy_tokenizer()) + 3  # more rows than tokens, as published models have
_ENDS = {
    "pad_token_id": toy_tokenizer().pad_token_id,
    "eos_token_id": toy_tokenizer().eos_token_id,
    "bos_token_id": None,
}
_TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "dtype": "float32", **_ENDS,
}  # fmt: skip
_TEXT_8 = {**_TEXT, "head_dim": 8}
_MOE = {**_TEXT_8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16}
_EYE = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 14}
_EYE |= {"image_size": 28}
_QWEN_EYE = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
_MARKS = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
_MIXED = ["sliding_attention", "full_attention"]
_WINDOW = {"sliding_window": 16, "query_pre_attn_scalar": 8}
_MLA = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "head_dim": 8,
    "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """Published models of a family, and the settings of a small one."""

    models: str
    kind: str
    settings: dict[str, Any]


FAMILIES = [
    Family("Qwen2, Qwen2.5", "qwen2", _TEXT),
    Family("Qwen3", "qwen3", _TEXT_8),
    Family("Qwen3 MoE", "qwen3_moe", {**_MOE, "num_experts": 4}),
    Family("Qwen3-Next", "qwen3_next", {**_MOE, **_LINEAR, "num_experts": 4, "shared_expert_intermediate_size": 16}),
    Family(
        "Qwen3.5", "qwen3_5", {
            "text_config": {**_TEXT_8, **_LINEAR, "tie_word_embeddings": True}, "vision_config": _QWEN_EYE,
            "tie_word_embeddings": True, **_MARKS,
        },
    ),
    Family(
        "Qwen3-VL", "qwen3_vl", {
            "text_config": {**_TEXT_8, "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2],
            }},
            "vision_config": {**_QWEN_EYE, "deepstack_visual_indexes": [0]}, **_MARKS,
        },
    ),
    Family("Llama 2, 3", "llama", _TEXT),
    Family("Gemma 2", "gemma2", {**_TEXT_8, **_WINDOW}),
    Family("Gemma 3 1B", "gemma3_text", {**_TEXT_8, **_WINDOW}),
    Family(
        "Gemma 3 4B and larger", "gemma3", {
            "text_config": {**_TEXT_8, **_WINDOW}, "vision_config": _EYE, "mm_tokens_per_image": 4,
            "image_token_index": 5, "boi_token_index": 6, "eoi_token_index": 7, **_ENDS,
        },
    ),
    Family(
        "Gemma 4", "gemma4", {
            "text_config": {**_TEXT_8, "sliding_window": 16, "global_head_dim": 8, "num_global_key_value_heads": 2,
                            "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY,
                            "num_kv_shared_layers": 0, "layer_types": _MIXED},
            "vision_config": {**_EYE, "head_dim": 16, "num_key_value_heads": 2}, "audio_config": None,
            "image_token_id": 5, "boi_token_id": 6, "eoi_token_id": 7, "audio_token_id": 8, **_ENDS,
        },
    ),
    Family("Mistral 7B", "mistral", {**_TEXT_8, "sliding_window": 16}),
    Family(
        "Mistral Small 3, Ministral 3", "mistral3", {
            "text_config": {**_TEXT_8, "model_type": "ministral3"}, "image_token_index": 5,
            "vision_config": {**_EYE, "model_type": "pixtral", "head_dim": 16}, **_ENDS,
        },
    ),
    Family("Mixtral", "mixtral", {**_TEXT_8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    Family("SmolLM3", "smollm3", _TEXT),
    Family("Granite 3", "granite", {**_TEXT, "logits_scaling": 2.0, "residual_multiplier": 0.5}),
    Family("Granite 3 MoE", "granitemoe", {**_TEXT, "num_local_experts": 4, "num_experts_per_tok": 2}),
    Family(
        "Granite 4.0", "granitemoehybrid", {
            **_TEXT, **_MAMBA, "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 64,
            "layer_types": ["mamba", "attention"],
        },
    ),
    Family("GLM-4", "glm4", _TEXT_8),
    Family(
        "GLM-4.5", "glm4_moe",
        {**_MOE, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    ),
    Family("DeepSeek-V3", "deepseek_v3", {**_MOE, **_MLA, "num_key_value_heads": 4, "n_routed_experts": 4}),
    Family(
        "gpt-oss", "gpt_oss", {
            **_TEXT_8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16,
            "layer_types": _MIXED,
        },
    ),
    Family("OLMo 3", "olmo3", {**_TEXT_8, "sliding_window": 16, "layer_types": _MIXED}),
    Family("LFM2", "lfm2", {**_TEXT, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    Family("Phi-2", "phi", _TEXT),
    Family("Phi-3, Phi-4", "phi3", _TEXT),
    Family("Seed-OSS", "seed_oss", {**_TEXT_8, "attention_dropout": 0.1, "residual_dropout": 0.1}),
    Family("HunYuan", "hunyuan_v1_dense", {**_TEXT_8, "attention_dropout": 0.1}),
    Family("Falcon-H1", "falcon_h1", {**_TEXT_8, **_MAMBA, "mamba_d_ssm": 64, "lm_head_multiplier": 0.5}),
    Family(
        "Mamba 2", "mamba2", {
            "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8,
            "state_size": 8, "n_groups": 1, "expand": 2, "chunk_size": 16, **_ENDS,
        },
    ),
    Family("OPT", "opt", {
        "vocab_size": VOCABULARY, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "word_embed_proj_dim": 32, "max_position_embeddings": 2048, **_ENDS,
    }),
]  # fmt: skip


def family_of(kind: str) -> Family:
    return next(family for family in FAMILIES if family.kind == kind)


def save_checkpoint(family: Family, folder: Path | str, **changes: Any) -> str:
    """Saves a random model with distributions that differ from token to token, as its class is published."""
    config = CONFIG_MAPPING[family.kind](**family.settings)
    for name, value in changes.items():
        setattr(config, name, value)
    for auto in (transformers.AutoModelForImageTextToText, transformers.AutoModelForCausalLM):
        if type(config) in auto._model_mapping:
            kind = auto._model_mapping[type(config)]
            break
    torch.manual_seed(0)
    model = kind(config).float()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(6)
    model.save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    return str(folder)


def spread(completions: list[Any], **_: Any) -> list[float]:
    """A reward that differs within groups, so that a random policy has a gradient."""
    return [float(i % 4) for i in range(len(completions))]


def make_family_trainer(start: str, folder: Path, *, lora: bool = False, **changes: Any) -> EPOTrainer:
    args = make_config(folder, **{"max_steps": 1, **changes})
    options = {"use_peft": True, "lora_r": 4, "lora_alpha": 64} if lora else {}
    made = policy_for_training(ModelConfig(start, dtype="float32", **options), args, ToySuite(), "compact")
    return EPOTrainer(suite=ToySuite(), args=args, reward_funcs=[spread], **made)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model.eval()(input_ids=torch.tensor([[5, 9, 11, 30, 12, 14, 9]])).logits[0].float()


def near(one: Tensor, other: Tensor) -> None:
    assert torch.isfinite(one).all(), "not finite"
    assert (gap := (one - other).abs().max()) < 5e-5, f"off by {gap:.1e}"


def check_family(family: Family, folder: Path) -> dict[str, str]:
    """Returns "yes" for each of `CHECKS` that holds, else what is wrong."""
    start = save_checkpoint(family, folder / "start")

    def reload(name: str) -> Tensor:
        return logits(load_policy(ModelConfig(str(folder / name), dtype="float32"), ToySuite(), "compact")[0])

    def trained(name: str, **options: Any) -> Tensor:
        trainer = make_family_trainer(start, folder / name, **options)
        before = logits(trainer.model)
        trainer.train()
        trainer.save_model()
        after = logits(trainer.model)
        assert (after - before).abs().max() > 1e-3, "RL changed nothing"
        return after

    def trains() -> None:
        after = trained("rl")
        near(reload("rl"), after)

    def scores() -> None:
        trainer = make_family_trainer(start, folder / "scores")
        ids, layout = _two_rows()
        plain, trained = load_model(start).eval(), trainer.model.train()
        found = trainer.scorer.score(trained, ids, layout)[0]
        for row, (first, last) in enumerate(((0, 12), (2, 9))):
            with torch.no_grad():
                log_p = plain(input_ids=ids[row : row + 1, first:last]).logits[0].float().log_softmax(-1)
            expected = log_p[:-1].gather(1, ids[row, first + 1 : last, None]).squeeze(1)[3 - first :]
            entropy = -(log_p.exp() * log_p).sum(-1)[3 - first : -1]
            near(found.logps[row, : last - 4].detach(), expected)
            near(found.entropy[row, : last - 4].detach(), entropy)

    def generation() -> None:
        policy = SamplingPolicy(load_model(start), toy_tokenizer(), max_new_tokens=8, temperature=0.0)
        prompts = [[9, 11, 30], [12, 14, 9, 15, 9, 11, 30, 12, 14]]
        assert policy(prompts)[0] == [policy([prompt])[0][0] for prompt in prompts], "padding changes the answer"

    def adapter() -> None:
        kept["adapter"] = trained("lora", lora=True)
        near(reload("lora"), kept["adapter"])

    def merge() -> None:
        merge_adapter(str(folder / "lora"), folder / "merged", dtype="float32")
        near(reload("merged"), kept["adapter"])

    kept: dict[str, Tensor] = {}
    return {check.__name__: _result(check) for check in (trains, scores, generation, adapter, merge)}


def _two_rows() -> tuple[Tensor, TurnLayout]:
    """Returns rows of 4 + 8 and 2 + 5 tokens, the prompts padded on the left to 4 and the answers on the right to 8."""
    ids = torch.randint(9, 40, (2, 12), generator=torch.Generator().manual_seed(0))
    turns = torch.tensor([[0] * 8, [0] * 5 + [-1] * 3])
    return ids, TurnLayout(turns, torch.ones_like(turns), torch.tensor([4, 2]), windowed=False)


def _result(check: Callable[[], None]) -> str:
    try:
        check()
    except Exception as error:
        return f"no: {type(error).__name__}: {' '.join(str(error).split())}"[:100].replace("|", "\\|")
    return "yes"


def row_of(family: Family, results: dict[str, str]) -> str:
    """Returns the row of the page's table."""
    failed = [f"{check}: {results[check]}" for check in CHECKS if results[check] != "yes"]
    return f"| {family.models} | `{family.kind}` | {'; '.join(failed) or 'none'} |"


def main() -> None:
    lines = ["| models | `model_type` | failed checks |", "|---|---|---|"]
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            lines.append(row_of(family, check_family(family, Path(folder))))
        print(lines[-1], flush=True)
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(
        before + BEGIN + "\n\n" + "\n".join(lines) + "\n\n" + END + rest.partition(END)[2], encoding="utf-8"
    )


if __name__ == "__main__":
    main()
