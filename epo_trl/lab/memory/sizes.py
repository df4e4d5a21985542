"""Estimates the GPU memory of a training run with the formula of docs/memory.md. No model is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from epo_trl.bounds import Count, CountOrZero, OneOf, check_bounds
from epo_trl.errors import InputError

GB = 1e9
BF16, FP32 = 2, 4
# CUDA context, communication buffers, fragmentation.
OVERHEAD_BYTES = 4 * GB
# bf16 numbers stored per token and hidden unit while the backward pass recomputes one transformer layer: the inputs of
# its matrix products, norms and residual sums. The feed-forward block adds 3 per unit of its inner width. Where all
# layers are stored, 11 and 4 were measured (docs/memory.md).
KEPT_PER_HIDDEN, ALL_PER_HIDDEN = 8, 11
KEPT_PER_INNER, ALL_PER_INNER = 3, 4
# The fused head computes the logits of this many tokens at a time, in fp32, with their gradient.
HEAD_CHUNK = 256
# Fields of a config with the number of experts, whose parameters the formula does not count.
EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"}


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only transformer with a gated feed-forward block.

    `query_size` is the number of heads times the head size, and `key_value_size` the same for key-value heads;
    `attention_bias` is whether the query, key and value projections have a bias, as in Qwen2.
    """

    name: str
    layers: int
    hidden_size: int
    inner_size: int
    query_size: int
    key_value_size: int
    vocabulary: int
    tied_embeddings: bool
    attention_bias: bool = True
    frozen: int = 0

    @property
    def backbone_parameters(self) -> int:
        """Parameters without the output head and norms of queries and keys."""
        h, q, kv = self.hidden_size, self.query_size, self.key_value_size
        attention = 2 * h * q + 2 * h * kv + (q + 2 * kv if self.attention_bias else 0)
        return self.vocabulary * h + self.layers * (attention + 3 * h * self.inner_size + 2 * h) + h

    @property
    def parameters(self) -> int:
        """Parameters of the policy that text reaches."""
        return self.backbone_parameters + (0 if self.tied_embeddings else self.vocabulary * self.hidden_size)

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of LoRA on every linear layer: rank x (inputs + outputs) of each."""
        h, f, q, kv = self.hidden_size, self.inner_size, self.query_size, self.key_value_size
        return self.layers * rank * (2 * (h + q) + 2 * (h + kv) + 3 * (h + f))


PRESETS = {
    "1.5B": ModelShape("Qwen2.5-1.5B", 28, 1536, 8960, 1536, 256, 151936, True),
    "3B": ModelShape("Qwen2.5-3B", 36, 2048, 11008, 2048, 256, 151936, True),
    "7B": ModelShape("Qwen2.5-7B", 28, 3584, 18944, 3584, 512, 152064, False),
}


def find_preset(model: str) -> ModelShape | None:
    """Returns the preset that a Hub id or a path refers to, such as `"Qwen/Qwen2.5-3B-Instruct"`, or `None`."""
    name = f"{model.rstrip('/').rpartition('/')[2]}-"
    return next((shape for shape in PRESETS.values() if name.startswith(f"{shape.name}-")), None)


def shape_of(name: str, config: Mapping[str, Any], frozen: int = 0) -> ModelShape:
    """Reads the shape from a model's `config.json`; `frozen` is as in `ModelShape`.

    Raises:
        ValueError: If a required size is missing, or the model is a mixture of experts.
    """
    for experts in EXPERTS & config.keys():
        if config[experts] and config.get("is_moe", True):
            raise InputError(f"model: expected one without experts, got {name!r} ({experts}: {config[experts]})")
    try:
        heads = config["num_attention_heads"]
        hidden = config["hidden_size"]
        head = config.get("head_dim") or hidden // heads
        return ModelShape(
            name,
            layers=config["num_hidden_layers"],
            hidden_size=hidden,
            inner_size=config["intermediate_size"],
            query_size=heads * head,
            key_value_size=(config.get("num_key_value_heads") or heads) * head,
            vocabulary=config["vocab_size"],
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", config.get("model_type") == "qwen2")),
            frozen=frozen,
        )
    except KeyError as error:
        raise InputError(
            f"model: expected the config of a decoder-only model, got {name!r}, whose config has no {error.args[0]}"
        ) from error


@dataclass(frozen=True)
class Run:
    """The settings of a run that determine its memory.

    `zero_stage` is 0 (DDP), 2 or 3; `offload` moves ZeRO-3's weights and optimizer state to host memory. `batch_tokens`
    is the number of tokens of one micro-batch on one GPU, including padding: `per_device_train_batch_size` x turns x
    tokens per turn. `pass_tokens` is that of one forward pass over a part of it (`tokens_per_pass`); with
    `recompute_passes`, only one pass at a time keeps activations. `reference`: whether there is a reference model
    (`beta` above 0, `ref-nucleus` or `archer`). `lora_rank` above 0 trains adapters of that rank on every linear layer
    of the policy, with `critic_lora` of the critic too; the reference is then the model without its adapter.
    `vllm_bytes` is what a vLLM that shares the GPU keeps during the update.
    """

    gpus: Count = 8
    zero_stage: Annotated[int, OneOf((0, 2, 3))] = 3
    offload: bool = False
    batch_tokens: Count = 16384
    pass_tokens: Count = 16384
    reference: bool = True
    critic: bool = False
    gradient_checkpointing: bool = True
    recompute_passes: bool = False
    lora_rank: CountOrZero = 0
    critic_lora: bool = False
    vllm_bytes: float = 0.0

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.offload and self.zero_stage != 3:
            raise InputError(
                f"offload: expected False unless zero_stage is 3, got True with zero_stage={self.zero_stage}"
            )


def memory_per_gpu(shape: ModelShape, run: Run) -> dict[str, float]:
    """Returns the bytes of each part on one GPU at the peak, during the update; `"total"` is their sum.

    See docs/memory.md for the formula.
    """
    weights, gradients, optimizer, reference = _states(shape, run)
    weights_over = run.gpus if run.zero_stage == 3 else 1
    states_over = run.gpus if run.zero_stage >= 2 else 1
    on_gpu = 0 if run.offload else 1
    parts = {
        "weights": on_gpu * weights / weights_over,
        "gradients": on_gpu * gradients / states_over,
        "optimizer": on_gpu * optimizer / states_over,
        "reference": on_gpu * reference / weights_over,
        "gathered layers": BF16 * _gathered(shape) if run.zero_stage == 3 else 0.0,
        "activations": BF16 * _activations(shape, run) * (2 if run.critic else 1),
        "logits": 2 * FP32 * min(HEAD_CHUNK, run.batch_tokens) * shape.vocabulary,
        "overhead": OVERHEAD_BYTES,
    }
    if run.vllm_bytes:
        parts["vLLM beside it"] = run.vllm_bytes
    return {**parts, "total": sum(parts.values())}


def _states(shape: ModelShape, run: Run) -> tuple[float, float, float, float]:
    """Returns the bytes of weights, gradients, optimizer state and reference model, before sharding.

    Full training keeps bf16 weights, with an fp32 copy and two moments in the optimizer. Adapters are in fp32 and sit
    beside frozen bf16 weights.
    """
    critic = shape.backbone_parameters + shape.hidden_size if run.critic else 0
    adapters = [(shape.parameters, run.lora_rank > 0), (critic, run.lora_rank > 0 and run.critic_lora)]
    weights = gradients = optimizer = 0.0
    for parameters, adapted in adapters:
        own = shape.adapter_parameters(run.lora_rank) if adapted and parameters else 0
        weights += BF16 * (parameters + shape.frozen * bool(parameters)) + FP32 * own
        gradients += FP32 * own if adapted else BF16 * parameters
        optimizer += 2 * FP32 * own if adapted else 3 * FP32 * parameters
    reference = BF16 * (shape.parameters + shape.frozen) if run.reference and not run.lora_rank else 0.0
    return weights, gradients, optimizer, reference


def _gathered(shape: ModelShape) -> int:
    """Weights that ZeRO-3 gathers at one time: two layers, the embedding and the head."""
    layer = (shape.backbone_parameters - shape.vocabulary * shape.hidden_size) // shape.layers
    return 2 * layer + shape.vocabulary * shape.hidden_size


def _activations(shape: ModelShape, run: Run) -> int:
    """Numbers stored for the backward pass: each layer's input, and the activations of the layer being recomputed; or
    those of all layers.
    """
    one_pass = min(run.batch_tokens, run.pass_tokens)
    kept = one_pass if run.recompute_passes else run.batch_tokens
    if run.gradient_checkpointing:
        layer = KEPT_PER_HIDDEN * shape.hidden_size + KEPT_PER_INNER * shape.inner_size
        return kept * shape.layers * shape.hidden_size + one_pass * layer
    return kept * shape.layers * (ALL_PER_HIDDEN * shape.hidden_size + ALL_PER_INNER * shape.inner_size)


def host_bytes(shape: ModelShape, run: Run) -> float:
    """Returns the host memory in bytes that `offload` needs for all GPUs together."""
    if not run.offload:
        return 0.0
    return sum(_states(shape, run))


def format_memory(shape: ModelShape, run: Run, gpu_gb: float) -> str:
    """Formats the memory of each part, and whether the total fits."""
    parts = memory_per_gpu(shape, run)
    more = f" and {shape.frozen / 1e9:.2f} frozen, which text never reaches" if shape.frozen else ""
    lines = [f"{shape.name}: {shape.parameters / 1e9:.2f} billion parameters{more}, {run.gpus} GPU(s), per GPU:"]
    lines += [f"  {name:<16}{size / GB:>8.1f} GB" for name, size in parts.items()]
    if run.offload:
        lines.append(f"  {'(machine)':<16}{host_bytes(shape, run) / GB:>8.1f} GB")
    fits = "fits" if parts["total"] <= gpu_gb * GB else "does not fit"
    return "\n".join([*lines, f"{fits} on {gpu_gb:g} GB"])


def format_memory_table(gpus: Sequence[int] = (1, 4, 8), gpu_gb: float = 80, **run: Any) -> str:
    """Formats a Markdown table of the presets for several GPU counts; bold entries fit."""
    lines = ["| model | " + " | ".join(f"{n} x {gpu_gb:g} GB" for n in gpus) + " |", "|---" * (len(gpus) + 1) + "|"]
    for shape in PRESETS.values():
        cells = []
        for n in gpus:
            total = memory_per_gpu(shape, Run(gpus=n, **run))["total"]
            cells.append(f"**{total / GB:.0f} GB**" if total <= gpu_gb * GB else f"{total / GB:.0f} GB")
        lines.append(f"| {shape.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
