"""The memory formula on numbers computed by hand, and the table of the docs."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config
from trl import ModelConfig

from epo_trl.cli.options import AlgorithmArguments, read_command_line, read_settings
from epo_trl.cli.train import StartArguments
from epo_trl.lab.memory.config import read_run
from epo_trl.lab.memory.sizes import (
    PRESETS,
    ModelShape,
    Run,
    format_memory,
    format_memory_table,
    host_bytes,
    memory_per_gpu,
    shape_of,
)
from epo_trl.trainers import EPOPPOConfig

SETTINGS = {
    "per_device_train_batch_size": 2, "context": "windowed", "max_turns": 6, "max_prompt_length": 10,
    "max_completion_length": 5, "beta": 0.0,
}  # fmt: skip
VLLM = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.2}
DOCS = Path(__file__).parents[1] / "docs"
# One layer: attention 2 * 4 * 4 + 2 * 4 * 2 = 48, biases 4 + 2 * 2 = 8, feed-forward 3 * 4 * 10 = 120, norms 8: 184.
# Two of them, the embedding of 100 * 4 and the last norm of 4: 368 + 400 + 4 = 772; with a head of its own 1172.
SHAPE = ModelShape("small", 2, 4, 10, 4, 2, 100, tied_embeddings=False)


@pytest.mark.parametrize(
    ("name", "parameters"), [("1.5B", 1_543_714_304), ("3B", 3_085_938_688), ("7B", 7_615_616_512)]
)
def test_the_presets_have_as_many_parameters_as_the_models(name, parameters):
    assert PRESETS[name].parameters == parameters


def test_parameters_are_counted_as_by_hand():
    assert (SHAPE.backbone_parameters, SHAPE.parameters) == (772, 1172)
    assert dataclasses.replace(SHAPE, tied_embeddings=True).parameters == 772
    assert dataclasses.replace(SHAPE, attention_bias=False).parameters == 1172 - 2 * 8


def test_every_part_is_as_computed_by_hand():
    """ZeRO-3 on 4 GPUs, with a reference, 10 tokens: 2 bytes a weight and gradient, 12 of optimizer."""
    parts = memory_per_gpu(SHAPE, Run(gpus=4, batch_tokens=10))
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


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"zero_stage": 2}, {"weights": 2344, "gradients": 586, "optimizer": 3516, "reference": 2344}),
        ({"zero_stage": 0}, {"weights": 2344, "gradients": 2344, "optimizer": 14064, "gathered layers": 0}),
        ({"reference": False}, {"reference": 0, "weights": 586}),
        ({"offload": True}, {"weights": 0, "gradients": 0, "optimizer": 0, "reference": 0, "gathered layers": 1544}),
        # the critic is another backbone with a head of one row: 772 + 4
        ({"critic": True}, {"weights": 974, "optimizer": 5844, "reference": 586, "activations": 2800}),
        ({"gradient_checkpointing": False}, {"activations": 2 * 10 * 2 * (11 * 4 + 4 * 10)}),
        ({"recompute_passes": True, "pass_tokens": 3}, {"activations": 2 * 3 * (2 * 4 + 62)}),
        (
            {"recompute_passes": True, "gradient_checkpointing": False, "pass_tokens": 3},
            {"activations": 2 * 3 * 2 * (11 * 4 + 4 * 10)},
        ),
        ({"batch_tokens": 1000}, {"activations": 140_000, "logits": 2 * 4 * 256 * 100}),
    ],
    ids=lambda value: next(iter(value)),
)
def test_each_setting_changes_its_parts(changes, expected):
    parts = memory_per_gpu(SHAPE, Run(**{"gpus": 4, "batch_tokens": 10, **changes}))
    assert {name: parts[name] for name in expected} == expected


def test_offloaded_states_are_in_the_memory_of_the_machine():
    assert host_bytes(SHAPE, Run(offload=True)) == 16 * 1172 + 2 * 1172
    assert host_bytes(SHAPE, Run()) == 0


def test_a_shape_is_read_from_a_config():
    config = {
        "model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 3584, "intermediate_size": 18944,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
    }  # fmt: skip
    assert shape_of("Qwen2.5-7B", config) == PRESETS["7B"]
    llama = shape_of("llama", {**config, "model_type": "llama", "num_key_value_heads": None, "head_dim": 64})
    assert (llama.attention_bias, llama.query_size, llama.key_value_size) == (False, 28 * 64, 28 * 64)
    with pytest.raises(ValueError, match="model: expected .*got 'bert', whose config has no vocab_size"):
        shape_of("bert", {name: value for name, value in config.items() if name != "vocab_size"})
    for experts in ("num_experts", "moe_num_experts"):
        with pytest.raises(ValueError, match=rf"model: expected one without experts, got 'moe' \({experts}: 128\)"):
            shape_of("moe", {**config, experts: 128, "moe_intermediate_size": 768})
    assert shape_of("Qwen2.5-7B", {**config, "num_experts": 128, "is_moe": False}) == PRESETS["7B"]  # as Doge's configs


@pytest.mark.parametrize("config", [Qwen3Config, LlamaConfig])
def test_a_shape_whose_heads_are_larger_than_the_hidden_size_has_the_model_s_own_parameters(config):
    """Two layers of the sizes of Qwen3-0.6B, whose 16 heads of 128 are twice its hidden size."""
    sizes = config(
        num_hidden_layers=2, hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, vocab_size=1000, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(sizes)
    shape = shape_of("own", sizes.to_dict())
    norms = sum(p.numel() for name, p in model.named_parameters() if "q_norm" in name or "k_norm" in name)
    assert shape.parameters == model.num_parameters() - norms and norms <= 2 * 2 * 128
    linear = [layer for layer in model.model.modules() if isinstance(layer, torch.nn.Linear)]
    assert shape.adapter_parameters(4) == sum(4 * (layer.in_features + layer.out_features) for layer in linear)


def test_only_zero_3_offloads():
    with pytest.raises(ValueError, match="offload: expected False unless zero_stage is 3, got True with zero_stage=2"):
        Run(offload=True, zero_stage=2)


@pytest.mark.parametrize("changes", [{}, {"critic": True}], ids=["GRPO", "PPO"])
def test_the_table_of_the_docs_is_that_of_the_command(changes, command):
    code, table, _ = command("memory", *(["--critic"] if changes else []))
    assert (code, table) == (0, format_memory_table(**changes) + "\n")
    assert table in (DOCS / "memory.md").read_text(encoding="utf-8")


def test_the_command_tells_what_fits(command):
    code, out, _ = command("memory", "--model", "7B", "--gpus", "1", "8")
    assert code == 0 and out.count("does not fit on 80 GB") == 1 and out.count("\nfits on 80 GB") == 1


GPU_CONFIGS = sorted((DOCS.parent / "recipes").glob("*/*qwen2.5-*gpu.yaml"))


@pytest.mark.parametrize("path", GPU_CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_config_fits_on_its_gpus_with_turns_of_usual_length(path, command):
    gpus = ["--gpus", "8"] if "8gpu" in path.stem else ["--gpus", "1", "--zero-stage", "0"]
    turn = ["--prompt-tokens", "1000", "--response-tokens", "200"]
    code, out, _ = command("memory", "--config", path, *gpus, *turn)
    assert code == 0 and "\nfits on 80 GB" in out


def test_adapters_take_their_own_memory():
    """Rank 2 on each linear layer: 2 layers x 2 x (4 x 4 + 2 x 6 + 3 x 14) = 280 weights in fp32, of 4 bytes."""
    assert SHAPE.adapter_parameters(2) == 280
    parts = memory_per_gpu(SHAPE, Run(gpus=1, zero_stage=0, batch_tokens=10, lora_rank=2))
    assert [parts[name] for name in ("weights", "gradients", "optimizer", "reference")] == [
        2 * 1172 + 4 * 280, 4 * 280, 8 * 280, 0,
    ]  # fmt: skip
    both = memory_per_gpu(SHAPE, Run(gpus=1, zero_stage=0, batch_tokens=10, lora_rank=2, critic=True))
    assert both["gradients"] == 4 * 280 + 2 * 776  # a critic that is trained whole
    both = memory_per_gpu(SHAPE, Run(gpus=1, zero_stage=0, batch_tokens=10, lora_rank=2, critic=True, critic_lora=True))
    assert both["gradients"] == 2 * 4 * 280


# ---------------------------------------------------------------------------------------------------------- a config


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"batch_tokens": 2 * 6 * 15, "reference": False, "critic": False, "lora_rank": 0, "vllm_bytes": 0.0}),
        ({"beta": 0.01, "activation_checkpointing": True}, {"reference": True, "gradient_checkpointing": True}),
        ({"gradient_checkpointing": True}, {"gradient_checkpointing": True}),  # all that older transformers have
        (
            {
                "gradient_checkpointing": True,
                "activation_checkpointing": False,
            },  # TRL's default, and what was asked for
            {"gradient_checkpointing": False},
        ),
        ({"entropy_method": ["epo", "ref-nucleus"]}, {"reference": True}),
        ({"credit": "archer"}, {"reference": True}),
        ({"entropy_method": "epo", "credit": "gigpo"}, {"reference": False, "gradient_checkpointing": False}),
        ({"use_peft": True, "lora_r": 64, "critic_use_peft": True}, {"lora_rank": 64, "critic_lora": True}),
        ({"algorithm": "ppo", "critic": "separate"}, {"critic": True}),
        ({"algorithm": "ppo", "critic": "value_head"}, {"critic": False}),
        (VLLM, {"vllm_bytes": 0.2 * 5e9}),
        ({**VLLM, "vllm_enable_sleep_mode": True}, {"vllm_bytes": 0.0}),
        ({**VLLM, "vllm_mode": "server"}, {"vllm_bytes": 0.0}),
    ],
    ids=lambda value: ",".join(value) or "-",
)
def test_a_config_says_what_its_run_needs(changes, expected):
    run, tokens = read_run(SETTINGS | changes, gpus=2, gpu_gb=5)
    assert {name: getattr(run, name) for name in expected} == expected
    assert (run.gpus, run.zero_stage, run.offload) == (2, 3, False)
    assert tokens == (
        "tokens of a micro-batch: 180 = per_device_train_batch_size 2 x max_turns 6 x (10 + 5) tokens of a turn"
    )


def test_means_replace_the_limits_of_a_turn():
    run, _ = read_run(SETTINGS, gpus=1, gpu_gb=5, prompt_tokens=7.3, response_tokens=2)
    assert run.batch_tokens == 112  # 2 x 6 x 9.3 = 111.6
    run, _ = read_run(SETTINGS | {"context": "concatenated"}, gpus=1, gpu_gb=5, prompt_tokens=3)
    assert run.batch_tokens == 2 * 6 * 8


def test_a_vllm_beside_the_training_counts():
    """4 GB of overhead, and 1 GB of vLLM, do not fit on 5 GB with anything else."""
    run, _ = read_run(SETTINGS | VLLM, gpus=2, gpu_gb=5)
    alone = dataclasses.replace(run, vllm_bytes=0.0)
    assert memory_per_gpu(SHAPE, run)["total"] == memory_per_gpu(SHAPE, alone)["total"] + 1e9
    assert "does not fit on 5 GB" in format_memory(SHAPE, run, 5)
    assert "\nfits on 5 GB" in format_memory(SHAPE, alone, 5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_turns": "many"}, "max_turns: expected an integer >= 1.*got 'many'"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size: expected an integer >= 1, got 0"),
        ({"context": "concatenated"}, "prompt_tokens: expected .*got nothing"),
    ],
)
def test_a_missing_or_impossible_setting_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        read_run(SETTINGS | changes, gpus=1, gpu_gb=5)


def test_the_settings_of_a_config_are_its_values_the_options_and_the_defaults():
    line = read_command_line(["--config", "alfworld/ppo_qwen2.5-3b_8gpu", "--max_turns", "30", "--seed=7"])
    settings = read_settings(line, AlgorithmArguments, StartArguments, EPOPPOConfig, ModelConfig)
    assert (settings["algorithm"], settings["num_generations"], settings["max_turns"]) == ("ppo", 1, 30)
    assert (settings["max_prompt_length"], settings["critic"], settings["seed"]) == (2048, "separate", 7)


@pytest.mark.parametrize(("options", "message"), [(["--max_turn", "30"], "--max_turn: .*max_turns"), (["30"], "30: ")])
def test_the_command_refuses_an_option_that_no_config_has(options, message, command):
    code, _, error = command("memory", "--config", "alfworld/tiny_cpu", *options)
    assert code == 1 and re.search(message, error)


def test_the_command_reads_a_shipped_config(command):
    """1 x 50 turns x (2048 + 512) tokens, and 35 % of 80 GB for vLLM."""
    words = ["memory", "--config", "alfworld/qwen2.5-3b_8gpu", "--gpus", "8"]
    found = json.loads(command(*words, "--json")[1])
    assert (found["model"], found["gpus"], found["fits"]) == ("Qwen2.5-3B", 8, True)
    assert found["bytes"]["vLLM beside it"] == 0.35 * 80e9
    assert found["bytes"]["activations"] == 2 * (128_000 * 36 * 2048 + 16_384 * (8 * 2048 + 3 * 11008))
    for name in ("activation_checkpointing", "gradient_checkpointing"):  # the new name, and TRL's
        without = json.loads(command(*words, "--json", f"--{name}", "false")[1])["bytes"]
        assert without["activations"] == 2 * 128_000 * 36 * (11 * 2048 + 4 * 11008)
    _, out, _ = command(*words, "--max_turns", "10", "--prompt-tokens", "600", "--response-tokens", "100")
    assert "tokens of a micro-batch: 7,000 = " in out


def test_a_folder_that_is_named_like_a_preset_has_its_own_sizes(command, tmp_path):
    LlamaConfig(hidden_size=64, intermediate_size=128, num_attention_heads=4).save_pretrained(tmp_path / "base")
    words = ["memory", "--config", "alfworld/qwen2.5-3b_8gpu", "--gpus", "1", "--json", "--use_peft", "true"]
    found = []
    for name in ("mine", "Qwen2.5-3B-lora"):
        (tmp_path / name).mkdir()
        settings = {"base_model_name_or_path": str(tmp_path / "base"), "r": 7, "peft_type": "LORA"}
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(settings))
        found.append(json.loads(command(*words, "--model_name_or_path", str(tmp_path / name))[1]))
    assert found[0] == found[1] and found[1]["model"] == str(tmp_path / "base")


def test_the_critic_of_a_config_can_be_replaced(command):
    words = ["memory", "--config", "alfworld/ppo_qwen2.5-3b_8gpu", "--gpus", "8", "--json"]
    separate, head = (json.loads(command(*words, *more)[1])["bytes"] for more in ([], ["--critic", "value_head"]))
    assert separate["optimizer"] == pytest.approx(2 * head["optimizer"], rel=0.1)
    assert json.loads(command(*words, "--critic=value_head")[1])["bytes"] == head
    assert command("memory", "--critic", "value_head")[1] == command("memory")[1] != command("memory", "--critic")[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--json"], "--json: expected only with --config, got True"),
        (["--config", "trap/tiny_cpu", "--critic"], "--critic: expected a config of algorithm 'ppo', got 'grpo'"),
        (["--config", "trap/tiny_cpu", "--no-reference"], "--no-reference: expected only without --config"),
        (["--config", "trap/tiny_cpu"], "model_name_or_path: got 'runs/trap/sft', which cannot be read"),
        (
            ["--config", "trap/tiny_cpu", "--model_name_or_path", "tiny"],
            "model_name_or_path: expected a folder or a Hub id, got 'tiny'",
        ),
        (["--config", "no/such"], "--config: expected a YAML file"),
        (
            ["--model", "7B", "--offload", "--zero-stage", "2"],
            "offload: expected False unless zero_stage is 3, got True",
        ),
        (["--model", "."], "model: expected one that transformers can load, got '.'"),
        (["--model", ".."], "model_name_or_path: got '..', which cannot be read: it has no config.json"),
    ],
)
def test_a_wrong_word_is_one_line(words, message, command, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path / "here")
    code, _, error = command("memory", *words)
    assert code == 1 and error.startswith(f"epo-trl: error: {message}") and error.count("\n") == 1
