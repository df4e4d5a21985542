"""The memory formula on numbers computed by hand, and the tables of the docs."""

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from epo_trl.lab.memory import GB, ModelSizes, Run, measure_model, memory_per_gpu, read_model, read_run

SETTINGS = {
    "per_device_train_batch_size": 2, "context": "windowed", "max_turns": 6, "max_prompt_length": 10,
    "max_completion_length": 5, "beta": 0.0,
}  # fmt: skip
VLLM = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.2}
DOCS = Path(__file__).parents[1] / "docs"
# One layer: attention 2 * 4 * 4 + 2 * 4 * 2 = 48, biases 4 + 2 * 2 = 8, feed-forward 3 * 4 * 10 = 120, norms 8: 184.
# Two of them, the embedding of 100 * 4 and the last norm of 4: 368 + 400 + 4 = 772; with a head of its own 1172.
# Inputs and outputs of linear layers: 2 layers x (2 x 8 of queries and outputs + 2 x 6 + 3 x 14) = 140.
SMALL = ModelSizes("small", layers=2, hidden=4, inner=10, vocabulary=100, backbone=772, head=400, linear=140)


def test_a_model_is_measured_as_by_hand():
    sizes = {
        "num_hidden_layers": 2, "hidden_size": 4, "intermediate_size": 10, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 100,
    }  # fmt: skip
    for tied in (False, True):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(Qwen2Config(**sizes, tie_word_embeddings=tied))
        assert measure_model("small", model) == (dataclasses.replace(SMALL, head=0) if tied else SMALL)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("Qwen/Qwen2.5-1.5B-Instruct", 1_543_714_304), ("Qwen2.5-3B", 3_085_938_688), ("Qwen2.5-7B", 7_615_616_512)],
)
def test_the_presets_have_as_many_parameters_as_the_models(name, parameters):
    model, rank = read_model(name)
    assert (model.backbone + model.head, rank) == (parameters, 0)


def test_every_part_is_as_computed_by_hand():
    """ZeRO-3 on 4 GPUs, with a reference, 10 tokens: 2 bytes a weight and gradient, 12 of optimizer."""
    parts = memory_per_gpu(SMALL, Run(gpus=4, batch_tokens=10))
    assert parts == {
        "weights": 2 * 1172 / 4,
        "gradients": 2 * 1172 / 4,
        "optimizer": 12 * 1172 / 4,
        "reference": 2 * 1172 / 4,
        "gathered layers": 2 * (2 * 186 + 400),  # (772 - 400) / 2 a layer
        "activations": 2 * 10 * (2 * 4 + 8 * 4 + 3 * 10),
        "logits": 2 * 4 * 10 * 100,
        "overhead": 4e9,
        "total": 18 * 293 + 1544 + 1400 + 8000 + 4e9,
    }


LORA = {"gpus": 1, "zero_stage": 0, "lora_rank": 2}  # 280 weights in fp32, of 4 bytes


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"zero_stage": 2}, {"weights": 2344, "gradients": 586, "optimizer": 3516, "reference": 2344}),
        ({"zero_stage": 0}, {"weights": 2344, "gradients": 2344, "optimizer": 14064, "gathered layers": 0}),
        ({"reference": False}, {"reference": 0, "weights": 586}),
        # the critic is another backbone with a head of one row: 772 + 4
        ({"critic": True}, {"weights": 974, "optimizer": 5844, "reference": 586, "activations": 2800}),
        ({"gradient_checkpointing": False}, {"activations": 2 * 10 * 2 * (11 * 4 + 4 * 10)}),
        ({"recompute_passes": True, "pass_tokens": 3}, {"activations": 2 * 3 * (2 * 4 + 62)}),
        (
            {"recompute_passes": True, "gradient_checkpointing": False, "pass_tokens": 3},
            {"activations": 2 * 3 * 2 * (11 * 4 + 4 * 10)},
        ),
        ({"batch_tokens": 1000}, {"activations": 140_000, "logits": 2 * 4 * 256 * 100}),
        (LORA, {"weights": 2 * 1172 + 4 * 280, "gradients": 4 * 280, "optimizer": 8 * 280, "reference": 0}),
        ({**LORA, "critic": True}, {"gradients": 4 * 280 + 2 * 776}),  # a critic that is trained whole
        ({**LORA, "critic": True, "critic_lora": True}, {"gradients": 2 * 4 * 280}),
        ({"vllm_bytes": 1e9}, {"vLLM beside it": 1e9, "total": 18 * 293 + 1544 + 1400 + 8000 + 5e9}),
    ],
)
def test_each_setting_changes_its_parts(changes, expected):
    parts = memory_per_gpu(SMALL, Run(**{"gpus": 4, "batch_tokens": 10, **changes}))
    assert {name: parts[name] for name in expected} == expected


@pytest.mark.parametrize("critic", [False, True], ids=["GRPO", "PPO"])
def test_the_tables_of_the_docs_are_computed(critic):
    lines = []
    for name in ("Qwen2.5-1.5B", "Qwen2.5-3B", "Qwen2.5-7B"):
        runs = [Run(gpus, 0 if gpus == 1 else 3, critic=critic) for gpus in (1, 4, 8)]
        totals = [memory_per_gpu(read_model(name)[0], run)["total"] / GB for run in runs]
        cells = [f"**{total:.0f} GB**" if total <= 80 else f"{total:.0f} GB" for total in totals]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    assert "\n".join(lines) in (DOCS / "running.md").read_text(encoding="utf-8")


GPU_CONFIGS = sorted((DOCS.parent / "recipes").glob("*/*qwen2.5-*gpu.yaml"))


@pytest.mark.parametrize("path", GPU_CONFIGS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_shipped_config_fits_on_its_gpus_with_turns_of_usual_length(path, command):
    gpus = "8" if "8gpu" in path.stem else "1"
    turn = ["--prompt-tokens", "1000", "--response-tokens", "200"]
    code, out, _ = command("memory", "--config", path, "--gpus", gpus, *turn)
    assert code == 0 and "GB            yes" in out and ("gathered layers       0.0" in out) == (gpus == "1")


# ---------------------------------------------------------------------------------------------------------- a config


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"batch_tokens": 2 * 6 * 15, "reference": False, "critic": False, "lora_rank": 0, "vllm_bytes": 0.0}),
        ({"beta": 0.01, "activation_checkpointing": True}, {"reference": True, "gradient_checkpointing": True}),
        # TRL's default, and what was asked for
        ({"gradient_checkpointing": True, "activation_checkpointing": False}, {"gradient_checkpointing": False}),
        ({"entropy_method": ["epo", "ref-nucleus"]}, {"reference": True}),
        ({"credit": "archer"}, {"reference": True}),
        ({"entropy_method": "epo", "credit": "gigpo"}, {"reference": False, "gradient_checkpointing": False}),
        ({"use_peft": True, "lora_r": 64, "critic_use_peft": True}, {"lora_rank": 64, "critic_lora": True}),
        ({"algorithm": "ppo", "critic": "separate"}, {"critic": True}),
        ({"algorithm": "ppo", "critic": "value_head"}, {"critic": False}),
        (VLLM, {"vllm_bytes": 0.2 * 5e9}),
        ({**VLLM, "vllm_mode": "server"}, {"vllm_bytes": 0.0}),
    ],
)
def test_a_config_says_what_its_run_needs(changes, expected):
    run = read_run(SETTINGS | changes, Run(gpus=2), gpu_gb=5)
    assert {name: getattr(run, name) for name in expected} == expected
    assert (run.gpus, run.zero_stage) == (2, 3)


def test_means_replace_the_limits_of_a_turn():
    assert read_run(SETTINGS, Run(), 5, prompt=7.3, response=2).batch_tokens == 112  # 2 x 6 x 9.3 = 111.6
    concatenated = SETTINGS | {"context": "concatenated"}
    assert read_run(concatenated, Run(), 5, prompt=3).batch_tokens == 2 * 6 * 8
    with pytest.raises(ValueError, match="--prompt-tokens: expected .*got nothing"):
        read_run(concatenated, Run(), 5)


def test_the_docs_show_what_the_command_prints(command):
    code, out, _ = command("memory", "--config", "alfworld/qwen2.5-3b_8gpu")
    shown = "".join(f"    {line}\n" for line in out.strip().splitlines())
    assert code == 0 and shown in (DOCS / "running.md").read_text(encoding="utf-8")
