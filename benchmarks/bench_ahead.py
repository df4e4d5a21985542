"""Time of an RL step with the rollout in turn and one batch ahead, with a server on other devices.

    python benchmarks/bench_ahead.py                 # games that answer after 0.5 s
    python benchmarks/bench_ahead.py --answer 0.1

The server is a stand-in that needs no processor, like one on other GPUs: it answers after `--token` seconds for each
token, with random tokens and geometric lengths. Games wait too. So the rollout sleeps, the update computes, and an RL
step should take the longer of the two instead of their sum. `rollout` and `update` are what each takes by itself.
"""

from __future__ import annotations

import random
import statistics
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

from bench_rollout import SlowGames, make_template, make_tokenizer
from bench_update import make_model
from harness import Work, measure, parser, table, trainer_settings, write

from epo_trl.trainers import EPOConfig, EPOTrainer
from epo_trl.trainers.ahead import RolloutAhead
from epo_trl.trainers.engines import VllmServerEngine

SIZES = {
    "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
STEPS = 5  # RL steps of a run; the first one has no batch that was played before
NAMES = ("step_time", "time/wait_for_rollout", "time/wait_for_update")


class Server:
    """Stands in for TRL's connection to a vLLM server."""

    base_url = "a stand-in"
    min_p = None
    temperature, repetition_penalty, top_p, top_k, logprobs = 1.0, 1.0, 1.0, 0, 0

    def __init__(self, tokens: int, end: int, length: float, seconds: float, most: int) -> None:
        self.tokens, self.end, self.length, self.seconds = tokens, end, length, seconds
        self.max_completion_length, self.generation_kwargs = most, {}

    def sync_weights(self) -> None:
        """Does nothing: the tokens do not depend on the weights."""

    def generate(self, prompts: list[list[int]], n: int, *, max_tokens: int, **settings: Any) -> dict[str, Any]:
        """Sleeps for as long as decoding would take, and returns random tokens."""
        ids: list[int] = []
        while len(ids) < max_tokens and self.end not in ids:
            ids.append(self.end if random.random() < 1 / self.length else random.randrange(self.tokens))
        time.sleep(self.seconds * len(ids))
        return {"completion_ids": [ids], "logprobs": [[[-1.0]] * len(ids)]}


def make_trainer(ahead: int, given: dict[str, Any]) -> EPOTrainer:
    """Builds a trainer of a few RL steps with the stand-in of a server."""
    tokenizer, episodes = make_tokenizer(), given["episodes"]
    model = make_model({**SIZES, "vocab_size": len(tokenizer)})
    args = EPOConfig(
        **trainer_settings(bf16=False, gradient_checkpointing=True), per_device_train_batch_size=episodes,
        num_generations=episodes, max_turns=given["turns"], context="concatenated", max_prompt_length=512,
        max_completion_length=round(4 * given["length"]), require_think=False, prompt_template=make_template(),
        max_steps=STEPS, logging_steps=1,
    )  # fmt: skip
    trainer = EPOTrainer(model, SlowGames(given["answer"]), args=args, processing_class=tokenizer)
    trainer.use_vllm, trainer.vllm_mode, trainer._last_loaded_step = True, "server", -1
    server = Server(len(tokenizer), tokenizer.eos_token_id, given["length"], given["token"], args.max_completion_length)
    trainer.vllm_generation = server
    trainer.engine = engine = VllmServerEngine(trainer)
    engine._client = SimpleNamespace(base_url=server.base_url, generate=server.generate)
    args.rollout_ahead = ahead
    trainer.ahead = RolloutAhead(trainer) if ahead else None
    return trainer


def make(ahead: int, given: dict[str, Any]) -> Work:
    """Builds a benchmark of a few RL steps, which returns the metrics of each but the first."""

    def work() -> list[dict[str, float]]:
        trainer = make_trainer(ahead, given)
        trainer.train()
        found = []
        for log in [log for log in trainer.state.log_history if "step_time" in log][1:]:
            rollout = sum(log[f"time/{part}"] for part in ("generate", "env", "text"))
            found.append(
                {"rollout": rollout, "update": log["time/update"], **{name: log.get(name, 0) for name in NAMES}}
            )
        return found

    return work


def main() -> None:
    """Measures both ways and prints a table."""
    options = parser(__doc__)
    options.add_argument("--answer", type=float, default=0.5, help="seconds that a game takes for an answer")
    options.add_argument("--token", type=float, default=0.005, help="seconds that the server takes for a token")
    options.add_argument("--turns", type=int, default=4)
    options.add_argument("--episodes", type=int, default=8)
    options.add_argument("--length", type=float, default=60.0, help="mean number of tokens of a response")
    given = options.parse_args()
    settings = {name: getattr(given, name) for name in ("answer", "token", "turns", "episodes", "length")}
    ways = {"in turn": partial(make, 0, settings), "one batch ahead": partial(make, 1, settings)}
    results = measure(ways, given.rounds, warmup=0)
    rows = []
    for way, result in results.items():
        steps = [step for found in result.results for step in found]
        medians = {name: statistics.median(step[name] for step in steps) for name in steps[0]}
        longer = max(medians["rollout"], medians["update"])
        cells = [f"{medians[name]:.2f}" for name in ("rollout", "update", *NAMES)]
        rows.append((way, *cells, f"{medians['step_time'] / longer:.2f}"))
    print(table(("way", "rollout", "update", "RL step", "trainer waits", "engine waits", "step / longer"), rows))
    write(given.json, **settings, results=results)


if __name__ == "__main__":
    main()
