"""Time of a rollout in step and without a barrier, on the same model, with responses of random lengths.

    python benchmarks/bench_barrier.py                 # games that answer at once
    python benchmarks/bench_barrier.py --answer 0.5    # games that take half a second

The model ends a response after each token with probability 1 / `--length`, so lengths are geometric, whatever the
engine. All games of a rollout answer in parallel, `--answer` seconds after the action, like games on other machines.

- generate, in step: transformers' `generate`, one call per turn of all episodes, keys and values cached between turns;
- continuous batching, in step: TRL's call per turn;
- continuous batching, no barrier: one scheduler for the whole rollout; an episode goes on when it has its response.

`steps` counts forward passes of the decoder and `busy` is the number of sampled tokens in each: on a CPU a pass costs
more the more tokens it has, on a GPU it hardly does, so there the ratio of the steps is nearer to that of the times.
"""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any

import torch
from bench_rollout import Game, Games, make_template, make_tokenizer
from bench_update import make_model
from harness import Work, measure, parser, table, trainer_settings, write

from epo_trl.trainers import EPOConfig, EPOTrainer
from epo_trl.trainers.engines import ContinuousBatchingEngine
from epo_trl.trainers.generation import TurnGenerator

SIZES = {
    "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
PLAIN, IN_STEP, FREE = "generate, in step", "continuous batching, in step", "continuous batching, no barrier"


class SlowGame(Game):
    """A game that takes its time for an answer, without using the processor."""

    seconds = 0.0
    _due = 0.0

    def step_async(self, action: str) -> None:
        """Records when the answer is due."""
        self._due = time.perf_counter() + self.seconds
        super().step_async(action)

    def has_answer(self) -> bool:
        """Whether the answer is due."""
        return time.perf_counter() >= self._due

    def step_wait(self) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Waits until the answer is due."""
        time.sleep(max(0.0, self._due - time.perf_counter()))
        return super().step_wait()


class SlowGames(Games):
    """A suite of slow games."""

    def __init__(self, seconds: float) -> None:
        super().__init__("go on", "you see a drawer and a shelf . " * 4)
        self.seconds = seconds

    def make_env(self) -> SlowGame:
        """Creates a game."""
        game = SlowGame(*self.made)
        game.seconds = self.seconds
        return game


def make_talking_model(vocabulary: int, end: int, length: float) -> Any:
    """Creates a model whose responses have random tokens and geometric lengths with the given mean."""
    model = make_model({**SIZES, "vocab_size": vocabulary})
    model.config.tie_word_embeddings = False
    head = torch.nn.Linear(SIZES["hidden_size"], vocabulary).to(model.device, model.dtype)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    head.bias.data[end] = math.log((vocabulary - 1) / (length - 1))
    model.lm_head = head
    return model


class Counted:
    """Counts the forward passes of a model."""

    def __init__(self, model: Any) -> None:
        self.passes = 0
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: Any, args: Any, kwargs: Any) -> None:
        self.passes += 1


def make(way: str, seconds: float, turns: int, episodes: int, length: float) -> Work:
    """Builds a benchmark of one rollout."""
    tokenizer = make_tokenizer()
    model = make_talking_model(len(tokenizer), tokenizer.eos_token_id, length)
    args = EPOConfig(
        **trainer_settings(bf16=False, per_device_train_batch_size=episodes, num_generations=episodes),
        max_turns=turns, context="concatenated", max_prompt_length=512, max_completion_length=round(4 * length),
        require_think=False, prompt_template=make_template(), use_transformers_continuous_batching=way != PLAIN,
        transformers_continuous_batching_config={"num_blocks": 4 * episodes * turns, "max_batch_tokens": 2048},
    )  # fmt: skip
    trainer = EPOTrainer(model, SlowGames(seconds), args=args, processing_class=tokenizer)
    engine = trainer.player.engine
    if way == IN_STEP:
        trainer.player.engine = TurnGenerator(trainer)
    assert isinstance(engine, ContinuousBatchingEngine) == (way != PLAIN)
    counted = Counted(model)

    def work() -> tuple[int, int]:
        counted.passes = 0
        played = trainer.play([("train/0", 0)] * episodes)
        assert all(len(episode.turns) == turns for episode in played)
        return counted.passes, sum(len(turn.response_ids) for episode in played for turn in episode.turns)

    return work


def main() -> None:
    """Measures all ways and prints a table."""
    options = parser(__doc__)
    options.add_argument("--answer", type=float, default=0.0, help="seconds that a game takes for an answer")
    options.add_argument("--turns", type=int, default=8)
    options.add_argument("--episodes", type=int, default=16)
    options.add_argument("--length", type=float, default=60.0, help="mean number of tokens of a response")
    given = options.parse_args()
    sizes = (given.answer, given.turns, given.episodes, given.length)
    results = measure({way: partial(make, way, *sizes) for way in (PLAIN, IN_STEP, FREE)}, given.rounds)
    rows, rates = [], {}
    for way, result in results.items():
        passes, tokens = (sum(counts) for counts in zip(*result.results, strict=True))
        rates[way] = tokens / sum(result.seconds)
        cells = f"{result.median:.2f}", f"{rates[way]:.0f}", f"{passes / given.rounds:.0f}", f"{tokens / passes:.1f}"
        rows.append(
            (way, *cells, f"{rates[way] / rates[PLAIN]:.2f}", f"{rates[way] / rates.get(IN_STEP, rates[way]):.2f}")
        )
    print(table(("way", "seconds", "tokens/s", "steps", "busy", "x generate", "x in step"), rows))
    write(given.json, answer=given.answer, turns=given.turns, episodes=given.episodes, results=results)


if __name__ == "__main__":
    main()
