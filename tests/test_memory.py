"""The memory formula on numbers computed by hand, and the table of the docs."""

import dataclasses
from pathlib import Path

import pytest

from epo_trl.cli import main
from epo_trl.memory import PRESETS, ModelShape, Run, format_memory_table, host_bytes, memory_per_gpu, shape_of

DOCS = Path(__file__).parents[1] / "docs"
# One layer: attention 2 * 4 * 4 + 2 * 4 * 2 = 48, biases 4 + 2 * 2 = 8, feed-forward 3 * 4 * 10 = 120, norms 8: 184.
# Two of them, the embedding of 100 * 4 and the last norm of 4: 368 + 400 + 4 = 772; with a head of its own 1172.
SHAPE = ModelShape("small", 2, 4, 10, 2, 100, tied_embeddings=False)


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
        ({"gradient_checkpointing": False}, {"activations": 2 * 10 * 2 * 62}),
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
    assert (llama.attention_bias, llama.key_value_size) == (False, 28 * 64)
    with pytest.raises(ValueError, match="model: expected .*got 'bert', whose config has no vocab_size"):
        shape_of("bert", {name: value for name, value in config.items() if name != "vocab_size"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus": 0}, "gpus: expected an integer >= 1.*got 0"),
        ({"zero_stage": 1}, "zero_stage: expected 0, 2 or 3.*got 1"),
        (
            {"offload": True, "zero_stage": 2},
            "offload: expected False unless zero_stage is 3, got True with zero_stage=2",
        ),
    ],
)
def test_a_bad_setting_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        Run(**changes)


@pytest.mark.parametrize("changes", [{}, {"critic": True}], ids=["GRPO", "PPO"])
def test_the_table_of_the_docs_is_that_of_the_command(changes, capsys):
    assert main(["memory", *(["--critic"] if changes else [])]) == 0
    table = capsys.readouterr().out
    assert table == format_memory_table(**changes) + "\n"
    assert table in (DOCS / "memory.md").read_text(encoding="utf-8")


def test_the_command_tells_what_fits_and_what_is_wrong(capsys, tmp_path):
    assert main(["memory", "--model", "7B", "--gpus", "1", "8"]) == 0
    out = capsys.readouterr().out
    assert out.count("does not fit on 80 GB") == 1 and out.count("\nfits on 80 GB") == 1
    assert main(["memory", "--model", "7B", "--offload", "--zero-stage", "2"]) == 1
    assert "offload: expected False unless zero_stage is 3, got True with zero_stage=2" in capsys.readouterr().err
    assert main(["memory", "--model", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("epo-trl: error: ")
