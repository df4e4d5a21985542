"""Settings of transformers that it looks at late are refused when a configuration is made, by name."""

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from distributed_worker import ZERO3, forget_the_mode
from peft import LoraConfig, get_peft_model
from trainer_kit import make_model
from transformers import TrainingArguments

from epo_trl.cli.imitation import ImitationConfig
from epo_trl.runs.run_settings import check_training_arguments, warn_rounded_updates
from epo_trl.trainers import EPOConfig
from epo_trl.trainers.setup import divide


def arguments(tmp_path, kind=TrainingArguments, **changes):
    return kind(str(tmp_path), use_cpu=True, bf16=False, **{"report_to": [], **changes})


@pytest.mark.parametrize(
    ("name", "value"), [("learning_rate", math.nan), ("max_grad_norm", -1.0), ("max_grad_norm", None)]
)
def test_what_no_optimizer_takes_is_refused(tmp_path, name, value):
    with pytest.raises(ValueError, match=f"{name}: expected a number >= 0, got {value}"):
        check_training_arguments(arguments(tmp_path, **{name: value}))


@pytest.mark.parametrize("kind", [EPOConfig, ImitationConfig])
def test_both_configurations_are_checked_when_they_are_made(tmp_path, kind):
    with pytest.raises(ValueError, match="learning_rate: expected a number >= 0.*got -1.0"):
        arguments(tmp_path, kind, learning_rate=-1.0)


def test_a_warm_start_without_a_step_is_refused(tmp_path):
    with pytest.raises(ValueError, match="gradient_accumulation_steps: expected an integer >= 1, got 0"):
        arguments(tmp_path, ImitationConfig, gradient_accumulation_steps=0)


@pytest.mark.parametrize(
    ("metric", "given", "is_greater"),
    [("iid/success_rate", None, True), ("ood/success_rate_low", None, True), ("iid/score", None, True),
     *((f"iid/{name}", None, False) for name in ("turns", "invalid_actions", "aborted", "wait_actions")),
     ("eval_iid/turns", None, False), ("iid/turns", True, True), ("loss", None, False), (None, None, None)],
)  # fmt: skip
def test_fewer_turns_and_faults_are_better_unless_a_config_says_otherwise(tmp_path, metric, given, is_greater):
    args = arguments(tmp_path, EPOConfig, metric_for_best_model=metric, greater_is_better=given)
    assert args.greater_is_better is is_greater


@pytest.mark.parametrize("kind", [EPOConfig, ImitationConfig])
def test_the_token_of_the_hub_is_not_saved_with_the_model(tmp_path, kind):
    args = arguments(tmp_path, kind, hub_token="hf_secret")
    torch.save(args, tmp_path / "training_args.bin")
    assert b"hf_secret" not in (tmp_path / "training_args.bin").read_bytes()
    saved = torch.load(tmp_path / "training_args.bin", weights_only=False)
    assert (saved.hub_token, saved.output_dir, args.hub_token) == (None, str(tmp_path), "hf_secret")


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "fsdp"), [(2, False), (3, False), (None, True)])
def test_checkpointing_by_length_is_refused_where_ranks_gather_weights_together(tmp_path, monkeypatch, stage, fsdp):
    """Two ranks with 20 and 90 tokens and a limit between them: gloo aborted, since one gathered weights once more."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", str(fsdp))
    monkeypatch.delenv("ACCELERATE_USE_DEEPSPEED", raising=False)
    if stage is not None:
        pytest.importorskip("deepspeed")
    deepspeed = None if stage is None else {**ZERO3, "zero_optimization": {"stage": stage}}
    make = partial(arguments, tmp_path, ImitationConfig, gradient_checkpointing=False, deepspeed=deepspeed)
    try:
        make()
        if stage == 2:
            make(gradient_checkpointing_above=50)
        else:
            with pytest.raises(ValueError, match="gradient_checkpointing_above: expected null with ZeRO-3 .*, got 50"):
                make(gradient_checkpointing_above=50)
    finally:
        forget_the_mode()


ONE_PASS = {"stage": 3, "tokens_per_pass": 40, "gradient_checkpointing": True, "recompute_passes": False}


def tokens(args, model, device):
    """Returns the limits of a pass with gradient, and without."""
    accelerator = SimpleNamespace(device=device, num_processes=1)
    return tuple(passes.tokens for passes in divide(args, model, accelerator))


@pytest.mark.parametrize("change", [{}, {"stage": 2}, {"stage": None}, {"gradient_checkpointing": False}])
def test_an_adapter_under_zero3_takes_one_pass_with_gradient_checkpointing(change):
    """With several, DeepSpeed's first backward pass ended in an AssertionError without a message."""
    settings = {**ONE_PASS, **change}
    stage = settings.pop("stage")
    plugin = None if stage is None else SimpleNamespace(zero_stage=stage)
    args, device = SimpleNamespace(deepspeed_plugin=plugin, **settings), torch.device("cpu")
    adapted = get_peft_model(make_model(), LoraConfig(target_modules="all-linear"))
    assert tokens(args, make_model(), device) == (40, 40)
    assert tokens(args, adapted, device) == ((40, 40) if change else (None, 40))


def test_passes_have_a_limit_by_the_kind_of_device():
    args = SimpleNamespace(deepspeed_plugin=None, tokens_per_pass=None, recompute_passes=False)
    assert [tokens(args, make_model(), torch.device(kind))[0] for kind in ("cpu", "cuda")] == [2_048, 16_384]


@pytest.mark.parametrize(
    ("dtype", "changes", "smallest"),
    [
        ("bfloat16", {}, "1/512 of a weight"),
        ("float16", {}, "1/4096 of a weight"),
        ("bfloat16", {"is_fsdp_enabled": True}, "1/512 of a weight"),
        ("bfloat16", {"is_fsdp_enabled": True, "mixed_precision": "bf16"}, ""),
        ("bfloat16", {"is_deepspeed_enabled": True}, ""),
        ("bfloat16", {"process_index": 1}, ""),
        ("bfloat16", {"frozen": True}, ""),
        ("bfloat16", {"is_loaded_in_4bit": True}, ""),
        ("float32", {"mixed_precision": "bf16"}, ""),
    ],
)
def test_updates_that_half_precision_rounds_to_nothing_are_announced(recwarn, dtype, changes, smallest):
    model: Any = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, dtype=getattr(torch, dtype))])
    model[1].requires_grad_("frozen" not in changes)
    model.is_loaded_in_4bit = "is_loaded_in_4bit" in changes
    trainer = SimpleNamespace(
        model=model,
        args=SimpleNamespace(learning_rate=5e-6, process_index=changes.get("process_index", 0)),
        accelerator=SimpleNamespace(mixed_precision=changes.get("mixed_precision", "no")),
        is_fsdp_enabled="is_fsdp_enabled" in changes,
        is_deepspeed_enabled="is_deepspeed_enabled" in changes,
    )
    warn_rounded_updates(trainer)
    messages = [str(warning.message) for warning in recwarn]
    assert len(messages) == bool(smallest)
    assert all(f"got {dtype}" in text and smallest in text and "(5e-06)" in text for text in messages)
