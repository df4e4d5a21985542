"""`epo-trl memory`: estimates the memory of a config's run per GPU by the formula of docs/running.md."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from epo_trl.cli.base import at_least, make_parser, say
from epo_trl.errors import InputError

GB = 1e9
BF16, FP32 = 2, 4
OVERHEAD_BYTES = 4 * GB  # CUDA context, communication buffers, fragmentation
# bf16 numbers stored per token and hidden unit, and per unit of the inner width of the feed-forward block: while the
# backward pass recomputes one layer (the inputs of its matrix products, norms and residual sums), and, as measured,
# where all layers are stored.
RECOMPUTED_LAYER, STORED_LAYER = (8, 3), (11, 4)
HEAD_CHUNK = 256  # the fused head computes the logits of this many tokens at a time, in fp32, with their gradient
# Fields of a config with the number of experts, whose activations the formula does not count.
EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"}
# Layers, hidden size, inner size, heads, key-value heads, vocabulary; whether the head is the embedding. Known offline.
PRESETS = {
    "Qwen2.5-1.5B": (28, 1536, 8960, 12, 2, 151936, True),
    "Qwen2.5-3B": (36, 2048, 11008, 16, 2, 151936, True),
    "Qwen2.5-7B": (28, 3584, 18944, 28, 4, 152064, False),
}


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a decoder-only transformer with a gated feed-forward block."""

    name: str
    layers: int
    hidden: int
    inner: int
    vocabulary: int
    backbone: int  # parameters that text reaches, without those of an LM head of its own
    head: int  # parameters of that LM head
    linear: int  # sum of inputs and outputs of all linear layers but the head, for LoRA
    frozen: int = 0  # parameters that text never reaches


def measure_model(name: str, model: Any) -> ModelSizes:
    """Measures a model, whose weights may be on the meta device; `InputError` for a mixture of experts."""
    from torch import nn

    from epo_trl.models.families import unread_by_text

    config = model.config.get_text_config().to_dict()
    for experts in EXPERTS & config.keys():
        if config[experts] and config.get("is_moe", True):
            raise InputError(f"model: expected one without experts, got {name!r} ({experts}: {config[experts]})")
    head = 0 if config.get("tie_word_embeddings") else config["vocab_size"] * config["hidden_size"]
    frozen = sum(weight.numel() for weight in unread_by_text(model))
    linear = [layer for layer in model.get_decoder().modules() if isinstance(layer, nn.Linear)]
    return ModelSizes(
        name,
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        inner=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        backbone=model.num_parameters() - frozen - head,
        head=head,
        linear=sum(layer.in_features + layer.out_features for layer in linear),
        frozen=frozen,
    )


def read_model(model: str) -> tuple[ModelSizes, int]:
    """Returns the sizes of a local folder, a preset or a Hub id, or of an adapter's base model and the adapter's rank.

    No weights are loaded.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config

    from epo_trl.models.adapters import Adapter
    from epo_trl.models.families import without_weights

    name = f"{model.rpartition('/')[2]}-"  # such as Qwen/Qwen2.5-3B-Instruct
    preset = next((preset for preset in PRESETS if name.startswith(f"{preset}-")), None)
    if preset is not None and not Path(model).is_dir():
        layers, hidden, inner, heads, kv_heads, vocabulary, tied = PRESETS[preset]
        config = Qwen2Config(
            num_hidden_layers=layers, hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads,
            num_key_value_heads=kv_heads, vocab_size=vocabulary, tie_word_embeddings=tied,
        )  # fmt: skip
        whole, model = None, preset
    elif (adapter := Adapter.find(model)) is not None:
        return read_model(adapter.base)[0], adapter.settings["r"]
    else:
        config, whole = AutoConfig.from_pretrained(model), without_weights(model)
    with torch.device("meta"):
        return measure_model(model, whole or AutoModelForCausalLM.from_config(config)), 0


@dataclass(frozen=True)
class Run:
    """The settings of a run that determine its memory."""

    gpus: int = 8
    zero_stage: int = 3  # 0 is DDP
    batch_tokens: int = 16384  # of one micro-batch on one GPU, padding included
    pass_tokens: int = 16384  # of one forward pass over a part of it
    reference: bool = True
    critic: bool = False  # a separate one
    gradient_checkpointing: bool = True
    recompute_passes: bool = False  # whether only one pass at a time keeps activations
    lora_rank: int = 0  # above 0: of adapters on every linear layer; the reference is the model without them
    critic_lora: bool = False  # whether the critic is an adapter too
    vllm_bytes: float = 0.0  # what a vLLM that shares the GPU keeps during the update


def memory_per_gpu(model: ModelSizes, run: Run) -> dict[str, float]:
    """Returns the bytes of each part on one GPU at the peak, during the update; `"total"` is their sum."""
    one_pass = min(run.batch_tokens, run.pass_tokens)
    kept = one_pass if run.recompute_passes else run.batch_tokens
    per_hidden, per_inner = RECOMPUTED_LAYER if run.gradient_checkpointing else STORED_LAYER
    layer = per_hidden * model.hidden + per_inner * model.inner
    if run.gradient_checkpointing:  # each layer's input, and the activations of the layer that is recomputed
        activations = kept * model.layers * model.hidden + one_pass * layer
    else:
        activations = kept * model.layers * layer
    embedding = model.vocabulary * model.hidden
    of_weights, of_states = (run.gpus if run.zero_stage >= least else 1 for least in (3, 2))
    shards = {"weights": of_weights, "gradients": of_states, "optimizer": of_states, "reference": of_weights}
    parts = {name: size / shards[name] for name, size in _state_bytes(model, run).items()} | {
        "gathered layers": BF16
        * (2 * (model.backbone - embedding) // model.layers + embedding)
        * (run.zero_stage == 3),
        "activations": BF16 * activations * (2 if run.critic else 1),
        "logits": 2 * FP32 * min(HEAD_CHUNK, run.batch_tokens) * model.vocabulary,
        "overhead": OVERHEAD_BYTES,
    }
    if run.vllm_bytes:
        parts["vLLM beside it"] = run.vllm_bytes
    return {**parts, "total": sum(parts.values())}


def _state_bytes(model: ModelSizes, run: Run) -> dict[str, float]:
    """Returns the bytes of weights, gradients, optimizer state and reference model, before sharding.

    Full training keeps bf16 weights, with an fp32 copy and two moments in the optimizer. Adapters are in fp32 and sit
    beside frozen bf16 weights.
    """
    policy, adapter = model.backbone + model.head, run.lora_rank * model.linear
    models = [(policy, run.lora_rank > 0)]
    if run.critic:
        models.append((model.backbone + model.hidden, run.lora_rank > 0 and run.critic_lora))
    return {
        "weights": sum(BF16 * (size + model.frozen) + FP32 * adapter * adapted for size, adapted in models),
        "gradients": sum(FP32 * adapter if adapted else BF16 * size for size, adapted in models),
        "optimizer": sum(2 * FP32 * adapter if adapted else 3 * FP32 * size for size, adapted in models),
        "reference": BF16 * (policy + model.frozen) if run.reference and not run.lora_rank else 0.0,
    }


def read_run(
    settings: Mapping[str, Any], run: Run, gpu_gb: float, prompt: float | None = None, response: float | None = None
) -> Run:
    """Returns a run with the settings of a config: fields of `EPOConfig` or `EPOPPOConfig` and `ModelConfig`.

    A colocated vLLM takes its share of `gpu_gb` (10^9 bytes). `prompt` and `response` are mean tokens of a turn, by
    default the limits of the config; with concatenated context, `prompt` is what a turn adds.
    """
    if prompt is None and settings.get("context") == "concatenated":
        raise InputError("--prompt-tokens: expected the mean number of tokens that a turn adds, got nothing")
    per_turn = (prompt or settings["max_prompt_length"]) + (response or settings["max_completion_length"])
    tokens = math.ceil(settings["per_device_train_batch_size"] * settings["max_turns"] * per_turn)
    colocated = settings.get("use_vllm") and settings.get("vllm_mode") != "server"
    share = settings["vllm_gpu_memory_utilization"] if colocated else 0.0
    # transformers' new name for it, where its version has it, else TRL's
    checkpoints = bool(settings.get("activation_checkpointing", settings.get("gradient_checkpointing")))
    slots = (settings.get(slot) or [] for slot in ("credit", "entropy_method", "policy_method"))
    methods = {name for names in slots for name in ([names] if isinstance(names, str) else names)}
    adapted = bool(settings.get("use_peft"))
    one_pass = adapted and run.zero_stage == 3 and checkpoints
    return replace(
        run,
        batch_tokens=tokens,
        pass_tokens=tokens if one_pass else settings.get("tokens_per_pass") or Run.pass_tokens,
        reference=bool(settings.get("beta")) or not methods.isdisjoint({"ref-nucleus", "archer"}),
        critic=settings.get("algorithm") == "ppo" and settings.get("critic") == "separate",
        gradient_checkpointing=checkpoints,
        recompute_passes=bool(settings.get("recompute_passes")),
        lora_rank=settings["lora_r"] if adapted else 0,
        critic_lora=bool(settings.get("critic_use_peft")),
        vllm_bytes=0.0 if settings.get("vllm_enable_sleep_mode") else share * gpu_gb * GB,
    )


def main(argv: Sequence[str]) -> int:
    """Prints the estimate for each number of GPUs and returns the exit code."""
    parser = make_parser(
        "memory",
        "Estimates the memory of training per GPU, by the formula in docs/running.md. Fields of the config can be "
        "overridden, for example --model_name_or_path or --max_turns.",
    )
    parser.allow_abbrev = False
    add = parser.add_argument
    add("--config", metavar="YAML", required=True, help="a training config, or the name of a shipped one")
    add("--gpus", type=at_least(1), nargs="+", default=(1, 4, 8), metavar="N", help="GPU counts (default: 1 4 8)")
    add("--gpu-gb", type=float, default=80.0, metavar="GB", help="memory of a GPU (default: 80)")
    add("--zero-stage", type=int, choices=(0, 2, 3), help="ZeRO stage; 0 is DDP (default: 0 on one GPU, else 3)")
    add("--prompt-tokens", type=float, metavar="N", help="mean prompt length (default: max_prompt_length)")
    add("--response-tokens", type=float, metavar="N", help="mean response length (default: max_completion_length)")
    args, options = parser.parse_known_args(argv)

    from trl import ModelConfig

    from epo_trl.cli.options import AlgorithmArguments, read_command_line, read_settings
    from epo_trl.cli.train import StartArguments, find_algorithm

    line = read_command_line(["--config", args.config, *options], program="epo-trl memory")
    settings = read_settings(line, AlgorithmArguments, StartArguments, find_algorithm(line.algorithm)[0], ModelConfig)
    model, rank = read_model(str(settings["model_name_or_path"]))
    settings |= {"lora_r": rank or settings["lora_r"]}  # an adapter is trained on as it is
    frozen = f" and {model.frozen / 1e9:.2f} frozen, which text never reaches" if model.frozen else ""
    stages = {gpus: (0 if gpus == 1 else 3) if args.zero_stage is None else args.zero_stage for gpus in args.gpus}
    lengths = args.prompt_tokens, args.response_tokens
    runs = [read_run(settings, Run(*started), args.gpu_gb, *lengths) for started in stages.items()]
    size = f"{(model.backbone + model.head) / 1e9:.2f} billion parameters{frozen}"
    say(f"{model.name}: {size}, {runs[0].batch_tokens:,} tokens in a micro-batch\nGB per GPU:")
    parts = [memory_per_gpu(model, run) for run in runs]
    rows = {part: [f"{each[part] / GB:.1f}" for each in parts] for part in parts[0]}
    fits = ["yes" if each["total"] <= args.gpu_gb * GB else "no" for each in parts]
    for name, cells in {"number of GPUs": stages, **rows, f"fits {args.gpu_gb:g} GB": fits}.items():
        say(f"{name:<16}" + "".join(f"{cell:>9}" for cell in cells))
    return 0
