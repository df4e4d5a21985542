"""Time of a whole RL step, rollout and update, with and without the terms of EPO.

    python benchmarks/bench_epo_overhead.py

The learning rate is 0, so that all variants play and learn from the same episodes. `TRL's loss` leaves out the terms,
their metrics and the history; `lambda = 0` still measures them.
"""

from __future__ import annotations

import tempfile
import threading
from functools import partial
from typing import Any

from harness import Work, device, measure, parser, table, write
from transformers import TrainerCallback
from trl import GRPOTrainer, ModelConfig

from epo_trl.envs.alfworld import GeneratedAlfworld
from epo_trl.models import load_policy
from epo_trl.trainers import EPOConfig, EPOTrainer


class WithoutEPO(EPOTrainer):
    """The same rollout and the same forward pass, TRL's loss."""

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As TRL's, on turns."""
        from epo_trl.trainers.turn_forward import TurnLayout

        self._layout = TurnLayout(inputs["turn_ids"], inputs["tool_mask"] * (inputs["turn_ids"] >= 0), self._windowed)
        return GRPOTrainer.compute_loss(self, model, inputs, *args, **kwargs)


class Gate(TrainerCallback):
    """Lets one step at a time pass."""

    def __init__(self) -> None:
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Waits for the word."""
        self.go.acquire()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Says that it is done."""
        self.done.release()


def make(kind: type[EPOTrainer], epo_lambda: float, steps: int) -> Work:
    """Returns one RL step."""
    suite = GeneratedAlfworld(n_train=256, n_iid=0, n_ood=0, task_types=["pick_and_place_simple"])
    model, tokenizer = load_policy(ModelConfig("tiny"), suite, "compact")
    config = EPOConfig(
        tempfile.mkdtemp(), epo_lambda=epo_lambda, learning_rate=0.0, max_steps=steps, num_generations=8,
        per_device_train_batch_size=8, gradient_accumulation_steps=4, turn_buckets=3, max_turns=10,
        max_prompt_length=512, max_completion_length=20, prompt_template="compact", use_cpu=device() == "cpu",
        bf16=False, gradient_checkpointing=False, save_strategy="no", report_to=[], disable_tqdm=True, seed=0,
    )  # fmt: skip
    trainer, gate = kind(model, suite, args=config, processing_class=tokenizer), Gate()
    trainer.add_callback(gate)
    threading.Thread(target=trainer.train, daemon=True).start()

    def work() -> float:
        gate.go.release()
        gate.done.acquire()
        return sum(len(turn.response_ids) for episode in trainer._episodes for turn in episode.turns)

    return work


def main() -> None:
    """Measures and prints a table."""
    given = parser(__doc__).parse_args()
    steps = given.rounds + 2
    measured = measure(
        {
            "TRL's loss": partial(make, WithoutEPO, 0.0, steps),
            "lambda = 0": partial(make, EPOTrainer, 0.0, steps),
            "EPO": partial(make, EPOTrainer, 0.001, steps),
        },
        given.rounds,
    )
    base = measured["TRL's loss"]
    ratios = {
        name: sorted(one / other for one, other in zip(m.seconds, base.seconds, strict=True))
        for name, m in measured.items()
    }
    rows = [
        [
            name, f"{m.median:.2f} s ± {m.spread / 2:.0%}", f"{m.median / base.median:.3f}x",
            f"{ratios[name][len(m.seconds) // 4]:.3f} to {ratios[name][-1 - len(m.seconds) // 4]:.3f}", m.results[-1],
        ]
        for name, m in measured.items()
    ]  # fmt: skip
    print(table(["loss", "RL step", "ratio", "middle half of the rounds' ratios", "sampled tokens, last step"], rows))
    write(given.json, options=vars(given), results=measured)


if __name__ == "__main__":
    main()
