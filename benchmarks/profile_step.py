"""A profile of an RL step by phase, not a comparison.

    python benchmarks/profile_step.py
    python benchmarks/profile_step.py --context concatenated

The tiny model on ALFWorld-style games, at learning rate 0. `first prefill, shared` is the cost of the first turn's
prefill beyond one row per group: what sharing it could save.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from harness import now, parser, table, trainer_settings, write
from trl import ModelConfig

from epo_trl.envs.alfworld import GeneratedAlfworld
from epo_trl.models import load_policy
from epo_trl.trainers import EPOConfig, EPOTrainer

GROUP = 8


class Clock:
    """Sums seconds by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def measuring(self, name: str) -> Iterator[None]:
        """Adds the time of a block."""
        start = now()
        yield
        self.seconds[name] += now() - start

    def wrapped(self, call: Callable[..., Any], name: str | Callable[..., str]) -> Callable[..., Any]:
        """Returns the function with its time measured. The name may depend on the arguments."""

        def measured(*args: Any, **kwargs: Any) -> Any:
            with self.measuring(name if isinstance(name, str) else name(*args, **kwargs)):
                return call(*args, **kwargs)

        return measured


def forward_name(trainer: EPOTrainer) -> Callable[..., str]:
    """Returns a function that names the kind of each forward pass."""

    def name(*args: Any, input_ids: torch.Tensor, past_key_values: Any = None, **kwargs: Any) -> str:
        if torch.is_grad_enabled():
            return "update: forward"
        if past_key_values is None:
            return "old log-probabilities"
        if input_ids.shape[1] == 1:
            return "rollout: decoding"
        is_first = trainer.first_turn
        trainer.first_turn = False
        return "rollout: first prefill" if is_first else "rollout: later prefills"

    return name


class Profiled(EPOTrainer):
    """Records whether a prefill is that of a first turn."""

    first_turn = False

    def play(self, *args: Any, **kwargs: Any) -> Any:
        self.first_turn = True
        return super().play(*args, **kwargs)


def main() -> None:
    """Runs the profile and prints a table."""
    args = parser(__doc__)
    args.add_argument("--context", choices=["windowed", "concatenated"], default="windowed")
    args.add_argument("--turns", type=int, default=20)
    given = args.parse_args()
    suite = GeneratedAlfworld(n_train=256, n_iid=0, n_ood=0, task_types=["pick_and_place_simple"])
    model, tokenizer = load_policy(ModelConfig("tiny"), suite, "compact")
    config = EPOConfig(
        **trainer_settings(bf16=False), learning_rate=0.0, max_steps=given.rounds, num_generations=GROUP, seed=0,
        per_device_train_batch_size=8, gradient_accumulation_steps=8, turn_buckets=3, max_turns=given.turns,
        max_prompt_length=512, max_completion_length=40, prompt_template="compact", context=given.context,
    )  # fmt: skip
    trainer, clock = Profiled(model, suite, args=config, processing_class=tokenizer), Clock()
    model.forward = clock.wrapped(model.forward, forward_name(trainer))
    trainer.accelerator.backward = clock.wrapped(trainer.accelerator.backward, "update: backward")
    play, times = trainer.play, []

    def play_and_note(*args: Any, **kwargs: Any) -> Any:
        times.append(kwargs["times"])
        return play(*args, **kwargs)

    trainer.play = clock.wrapped(play_and_note, "rollout")
    with clock.measuring("all"):
        trainer.train()
    seconds = dict(clock.seconds)
    total, rollout = seconds.pop("all"), seconds.pop("rollout")
    seconds["rollout: environments"] = sum(one.env for one in times)
    seconds["rollout: prompts and parsing"] = sum(one.text for one in times)
    seconds["rollout: sampling and the rest"] = rollout - sum(
        value for name, value in seconds.items() if name.startswith("rollout")
    )
    seconds["the rest"] = total - sum(seconds.values())
    rows = [[name, f"{value / given.rounds:.2f} s", f"{value / total:.1%}"] for name, value in sorted(seconds.items())]
    shared = seconds["rollout: first prefill"] * (1 - 1 / GROUP)
    print(table(["phase", "an RL step", "share"], rows))
    print(f"\nfirst prefill, shared: {shared / total:.1%} of the step could be saved")
    write(given.json, options=vars(given), seconds=seconds, total=total)


if __name__ == "__main__":
    main()
