"""Time and memory of one micro-batch of an update (forward and backward) on windowed episodes.

    python benchmarks/bench_update.py --turns 5 15 50
    python benchmarks/bench_update.py --turns 15 --prompt 700 --response 64 --real  # on a GPU

Ways to update on the same turns, with the same loss:

- ours: `EPOTrainer`, which splits an episode into its turns, sorted by length, in passes of `--tokens-per-pass`; the
  LM head sees responses only;
- ours, layers run again: the same with `gradient_checkpointing`;
- ours, passes run again: the same with `recompute_passes` instead;
- whole rows: stock `GRPOTrainer` on the same rows. It attends over the whole episode and scores every position of it.
  Its log-probabilities differ: each turn sees the earlier turns, including prompts with their histories;
- whole rows, responses scored: the same, but the LM head sees responses only, like TRL's on a GPU;
- a row per turn: stock `GRPOTrainer` on a batch with every turn as a row, padded to the longest prompt and the
  longest response, as in trainers that split episodes. Same log-probabilities as ours.

Prompts grow with the history over the first turns, then have `--prompt` tokens, plus or minus a quarter.
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from harness import Work, device, measure, parser, table, trainer_settings, write
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from epo_trl.envs.toy import ToySuite
from epo_trl.models import build_tokenizer
from epo_trl.models.load import corpus
from epo_trl.rollout import episode_to_row
from epo_trl.scoring.fused_head import compact_scoring
from epo_trl.scoring.turn_forward import Passes
from epo_trl.trainers import EPOConfig, EPOTrainer
from epo_trl.trainers.step import RLStep
from epo_trl.types import Episode, StopReason, Turn

HISTORY = 2
WAYS = (
    "ours", "ours, layers run again", "ours, passes run again", "whole rows", "whole rows, responses scored",
    "a row per turn",
)  # fmt: skip
# Qwen2.5-0.5B
REAL = {
    "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2,
}  # fmt: skip


def make_episodes(count: int, turns: int, prompt: int, response: int, vocabulary: int) -> list[Episode]:
    """Creates episodes of random tokens."""
    rng = random.Random(0)

    def tokens(mean: int) -> tuple[int, ...]:
        return tuple(rng.randrange(10, vocabulary) for _ in range(rng.randint(mean * 3 // 4, mean * 5 // 4)))

    def turn(index: int) -> Turn:
        return Turn(tokens(prompt * (1 + min(index, HISTORY)) // (1 + HISTORY)), tokens(response), "", "", "", True)

    return [Episode("", "", "", tuple(turn(i) for i in range(turns)), StopReason.TURN_LIMIT) for _ in range(count)]


def make_model(sizes: dict[str, int]) -> Qwen2ForCausalLM:
    """Creates Qwen2 with random weights."""
    torch.manual_seed(0)
    config = Qwen2Config(**sizes, tie_word_embeddings=True, max_position_embeddings=2**17)
    return Qwen2ForCausalLM(config).to(device(), torch.bfloat16 if device() == "cuda" else torch.float32)


def build_episode_rows(episodes: list[Episode]) -> dict[str, torch.Tensor]:
    """Builds TRL's batch of the episodes: one row each."""
    rows = [episode_to_row(episode, 0) for episode in episodes]
    batch = _padded([row.prompt_ids for row in rows], [row.completion_ids for row in rows])
    return batch | {"tool_mask": _right([row.env_mask for row in rows]), "row": torch.arange(len(rows))}


def build_turn_rows(episodes: list[Episode]) -> dict[str, torch.Tensor]:
    """Builds a batch with one row per turn."""
    turns = [turn for episode in episodes for turn in episode.turns]
    return _padded([list(turn.prompt_ids) for turn in turns], [list(turn.response_ids) for turn in turns])


def _padded(prompts: list[list[int]], completions: list[list[int]]) -> dict[str, torch.Tensor]:
    def left(rows: list[list[int]]) -> torch.Tensor:
        return pad_sequence([torch.tensor(row[::-1]) for row in rows], batch_first=True).flip(1).to(device())

    ones = [[1] * len(row) for row in prompts], [[1] * len(row) for row in completions]
    return {
        "prompt_ids": left(prompts), "prompt_mask": left(ones[0]),
        "completion_ids": _right(completions), "completion_mask": _right(ones[1]),
    }  # fmt: skip


def _right(rows: list[list[int]], value: int = 0) -> torch.Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value).to(device())


def make(
    way: str,
    episodes: list[Episode],
    sizes: dict[str, int],
    tokens: int | None = None,
    checkpointing: bool = False,
    passes: Passes | None = None,
) -> Work:
    """Builds a benchmark of one forward and backward pass in the given way."""
    model, tokenizer = make_model(sizes), build_tokenizer(corpus(ToySuite(), "compact"))
    settings = trainer_settings(
        per_device_train_batch_size=8, num_generations=8, loss_type="dapo", max_steps=1, beta=0.0
    )
    trainer: GRPOTrainer
    is_ours, again = way.startswith("ours"), way == "ours, passes run again"
    if is_ours:
        options = {"tokens_per_pass": tokens, "recompute_passes": again, "prompt_template": "compact"}
        config = EPOConfig(**settings, **options, epo_lambda=0.0)
        trainer = ours = EPOTrainer(model, ToySuite(), args=config, processing_class=tokenizer)
        ours.scorer = replace(ours.scorer, passes=passes or ours.scorer.passes)
    else:
        config = GRPOConfig(**settings)
        tasks = Dataset.from_dict({"prompt": ["a", "b"]})
        trainer = GRPOTrainer(model, lambda **_: [], config, tasks, processing_class=tokenizer)
    batch: dict[str, Any] = build_turn_rows(episodes) if way == "a row per turn" else build_episode_rows(episodes)
    advantages = torch.linspace(-1, 1, len(episodes), device=device())
    if way == "a row per turn":
        advantages = advantages.repeat_interleave(len(episodes[0].turns))
    if is_ours:
        advantages = advantages.unsqueeze(1).expand_as(batch["tool_mask"])
        context, ranks = ours.rules.context, ours.ranks
        ours.step = RLStep.lay_out(episodes, context, len(episodes), ranks, placeholder_id=0, multiple=None)
        ours.step.num_episodes = torch.tensor(float(len(episodes)))
    batch["advantages"] = advantages
    batch["num_items_in_batch"] = (batch["completion_mask"] * batch.get("tool_mask", 1)).sum()
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    if (checkpointing or way == "ours, layers run again") and not again:
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})

    head = compact_scoring if way == "whole rows, responses scored" else nullcontext

    def work() -> float:
        trainer.model.zero_grad()
        with head():
            loss = trainer.compute_loss(trainer.model, dict(batch))
        loss.backward()
        return float(trainer.model.model.layers[0].mlp.up_proj.weight.grad.float().norm())

    return work


def main() -> None:
    """Benchmarks all lengths and prints a table."""
    args = parser(__doc__)
    args.add_argument("--turns", type=int, nargs="+", default=[5, 15, 50])
    args.add_argument("--episodes", type=int, default=2, help="episodes per micro-batch")
    args.add_argument("--prompt", type=int, default=100, help="mean number of tokens per prompt")
    args.add_argument("--response", type=int, default=20, help="mean number of tokens per response")
    args.add_argument("--tokens-per-pass", type=int, help="default: that of the device")
    args.add_argument("--hidden", type=int, default=256)
    args.add_argument("--layers", type=int, default=4)
    args.add_argument("--vocabulary", type=int, default=16384)
    args.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="the first is the baseline")
    args.add_argument("--real", action="store_true", help="the sizes of Qwen2.5-0.5B, and gradient checkpointing")
    given = args.parse_args()
    sizes = REAL if given.real else {
        "vocab_size": given.vocabulary, "hidden_size": given.hidden, "intermediate_size": 4 * given.hidden,
        "num_hidden_layers": given.layers, "num_attention_heads": max(4, given.hidden // 64),
        "num_key_value_heads": max(2, given.hidden // 256),
    }  # fmt: skip
    results, rows = {}, []
    for turns in given.turns:
        episodes = make_episodes(given.episodes, turns, given.prompt, given.response, sizes["vocab_size"])
        works = {way: partial(make, way, episodes, sizes, given.tokens_per_pass, given.real) for way in given.ways}
        measured = measure(works, given.rounds)
        ours, results[turns] = measured[given.ways[0]], measured
        for way, one in measured.items():
            rows.append([
                turns, way, f"{one.median:.2f} s ± {one.spread / 2:.0%}", f"{one.median / ours.median:.2f}x",
                f"{one.peak_mb:,.0f} MB", f"{one.peak_mb / ours.peak_mb:.2f}x", f"{one.results[-1]:.3e}",
            ])  # fmt: skip
    print(table(["turns", "way", "time", "time / first", "peak memory", "memory / first", "a gradient's norm"], rows))
    write(given.json, sizes=sizes, options=vars(given), results=results)


if __name__ == "__main__":
    main()
