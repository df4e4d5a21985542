"""The overhead of EPO's terms in an RL step: rollout and update.

    python benchmarks/bench_epo_overhead.py
    python benchmarks/bench_epo_overhead.py --wide
    python benchmarks/bench_epo_overhead.py --real  # on a GPU

Rollouts do not depend on the terms, so they are played once. Every micro-batch then goes forward and backward with each
loss, several times, in turns and in one process: the overhead is smaller than the noise between two processes or two
seconds. `TRL's loss` omits the terms, their metrics and the history; `lambda = 0` still computes the metrics. EPO's
overhead is in the LM head: `--wide` uses a model whose head has as large a share of the work as that of Qwen2.5-0.5B,
`--real` a model of its sizes, with prompts of several hundred tokens and gradient checkpointing.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Any

import torch
from bench_update import REAL, make_model
from harness import now, parser, table, trainer_settings, write
from torch import Tensor
from trl import GRPOTrainer, ModelConfig

from epo_trl.envs.alfworld import GeneratedAlfworld
from epo_trl.models import load_policy
from epo_trl.trainers import EPOConfig, EPOTrainer
from epo_trl.trainers.epo_trainer import Scored

TRL, ZERO, EPO = "TRL's loss", "lambda = 0", "EPO"
LAMBDA = 0.001
WIDE = {
    "vocab_size": 16384, "hidden_size": 512, "intermediate_size": 2816, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2,
}  # fmt: skip


class Compared(EPOTrainer):
    """Runs every micro-batch through each loss without updating the model."""

    def watch(self, repeats: int) -> None:
        """Starts to measure; each loss processes a micro-batch `repeats` times."""
        self.repeats = repeats
        self.passes: dict[str, list[float]] = {TRL: [], ZERO: [], EPO: []}
        self.other: dict[str, list[float]] = defaultdict(list)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """Measures each loss, and returns a loss without gradient."""
        ways = list(self.passes)
        for i in range(self.repeats * len(ways)):
            turn, place = divmod(i, len(ways))
            way = ways[(turn + place) % len(ways)]  # each comes first equally often
            start = now()
            self._loss(way, model, inputs, *args, **kwargs).backward()
            self.passes[way].append(now() - start)
        return torch.zeros((), device=self.accelerator.device, requires_grad=True)

    def _loss(self, way: str, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        if way == TRL:
            part = self.step.part(inputs, self.args, self.current_gradient_accumulation_steps)
            scores, _ = self.scorer.score(model, part.input_ids, part.layout)
            scored = Scored(scores.logps, scores.entropy, None)
            return GRPOTrainer.compute_loss(self, scored, inputs, *args, **kwargs)
        self.methods["epo"].epo_lambda = LAMBDA if way == EPO else 0.0
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _close_rl_step(self) -> None:
        start = now()
        super()._close_rl_step()
        self.other["history"].append(now() - start)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        start = now()
        output = super()._generate_and_score_completions(inputs)
        self.other["rollout"].append(now() - start)
        return output


def make(steps: int, repeats: int, sizes: dict[str, int] | None) -> Compared:
    """Creates the measuring trainer, of a model with these sizes or the tiny one."""
    suite = GeneratedAlfworld(n_train=256, n_iid=0, n_ood=0, task_types=["pick_and_place_simple"])
    template = "alfworld" if sizes is REAL else "compact"
    model, tokenizer = load_policy(ModelConfig("tiny"), suite, template)
    if sizes:
        model = make_model(sizes)
    config = EPOConfig(
        **trainer_settings(bf16=False, gradient_checkpointing=sizes is REAL), learning_rate=0.0, max_steps=steps,
        per_device_train_batch_size=1 if sizes else 8, gradient_accumulation_steps=8 if sizes else 4,
        num_generations=8, seed=0, max_turns=10, max_prompt_length=1024 if sizes is REAL else 512,
        max_completion_length=20, prompt_template=template,
    )  # fmt: skip
    trainer = Compared(model, suite, args=config, processing_class=tokenizer)
    trainer.watch(repeats)
    return trainer


def main() -> None:
    """Runs the benchmark and prints a table."""
    args = parser(__doc__)
    args.add_argument("--repeats", type=int, default=3, help="times that each loss processes a micro-batch")
    model = args.add_mutually_exclusive_group()
    model.add_argument("--wide", action="store_true", help="a larger model with the proportions of Qwen2.5")
    model.add_argument("--real", action="store_true", help="a model with the sizes of Qwen2.5-0.5B")
    given = args.parse_args()
    trainer = make(given.rounds, given.repeats, WIDE if given.wide else REAL if given.real else None)
    trainer.train()
    passes, other = trainer.passes, {name: statistics.median(seconds) for name, seconds in trainer.other.items()}
    base = statistics.median(passes[TRL]) * trainer.args.gradient_accumulation_steps
    rows, results = [], {}
    for way, seconds in passes.items():
        ratios = [one / trl for one, trl in zip(seconds, passes[TRL], strict=True)]
        low, ratio, high = statistics.quantiles(ratios, n=4) if way != TRL else (1.0, 1.0, 1.0)
        history = other["history"] if way != TRL else 0.0
        step = (other["rollout"] + base * ratio + history) / (other["rollout"] + base)
        results[way] = {"seconds": seconds, "update_ratio": ratio, "quartiles": [low, high], "step_ratio": step}
        rows.append([way, f"{base * ratio:.2f} s", f"{ratio:.3f}x", f"{low:.3f} to {high:.3f}", f"{step:.3f}x"])
    print(table(["loss", "update", "ratio", "middle half", "RL step"], rows))
    print(f"\nrollout {other['rollout']:.2f} s; {len(passes[TRL])} passes with each loss")
    write(given.json, options=vars(given), results=results, other=trainer.other)


if __name__ == "__main__":
    main()
