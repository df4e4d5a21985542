"""Time of a rollout in one part and in two, with slow environments.

    python benchmarks/bench_waves.py --answer 0 0.2 0.6 1 3

All environments of a call answer in parallel, `--answer` seconds after the request, like worlds on other cores or
machines. With two parts, the model responds to one half while the other waits, at the cost of more generation calls.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from typing import Any

from bench_rollout import Game, Games, make_scripted_model, make_template, make_tokenizer
from harness import Work, device, measure, parser, table, write

from epo_trl.trainers import EPOConfig, EPOTrainer

SIZES = {
    "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


class SlowGame(Game):
    """A game that answers slowly without using the processor."""

    seconds = 0.0
    _due = 0.0

    def step_async(self, action: str) -> None:
        """Records when the answer is due."""
        self._due = time.perf_counter() + self.seconds

    def step_wait(self) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Waits until the answer is due."""
        time.sleep(max(0.0, self._due - time.perf_counter()))
        return self.step("")


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


def make(waves: int, seconds: float, turns: int, episodes: int) -> Work:
    """Builds a benchmark of one rollout."""
    tokenizer = make_tokenizer()
    model, script = make_scripted_model(tokenizer, SIZES)
    config = EPOConfig(
        tempfile.mkdtemp(), use_cpu=device() == "cpu", bf16=device() == "cuda", report_to=[], max_steps=1,
        per_device_train_batch_size=episodes, num_generations=episodes, gradient_checkpointing=False,
        disable_tqdm=True, max_turns=turns, max_completion_length=len(script), max_prompt_length=2**13,
        require_think=False, rollout_waves=waves, prompt_template=make_template(),
    )  # fmt: skip
    trainer = EPOTrainer(model, SlowGames(seconds), args=config, processing_class=tokenizer)
    trainer.model.train()
    return lambda: len(trainer.play([("train/0", 0)] * episodes))


def main() -> None:
    """Benchmarks every delay and prints a table."""
    args = parser(__doc__)
    args.add_argument("--answer", type=float, nargs="+", default=[0.0, 0.2, 0.6, 1.0, 3.0], help="seconds")
    args.add_argument("--turns", type=int, default=5)
    args.add_argument("--episodes", type=int, default=32)
    given = args.parse_args()
    rows, results = [], {}
    for seconds in given.answer:
        work = {str(waves): partial(make, waves, seconds, given.turns, given.episodes) for waves in (1, 2)}
        measured = results[seconds] = measure(work, given.rounds)
        one, two = measured["1"], measured["2"]
        times = [f"{m.median:.2f} s ± {m.spread / 2:.0%}" for m in (one, two)]
        rows.append([f"{seconds:g} s", *times, f"{one.median / two.median:.2f}x"])
    print(table(["an environment answers after", "in one part", "in two", "speed"], rows))
    write(given.json, options=vars(given), results=results)


if __name__ == "__main__":
    main()
