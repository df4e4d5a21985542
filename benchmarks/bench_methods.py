"""The cost of each method in an RL step compared with GRPO: building the batch from episodes, then its update.

    python benchmarks/bench_methods.py

The rollout is left out: it is the same for all methods except those that replace groups. Methods that need the scores
of the behaviour policy pay for one forward pass over the batch; TRL needs that pass anyway where a batch serves several
updates, as `kl-cov` requires. `ref-nucleus` and `archer` pay for a pass of the frozen policy, `siren` for the nucleus
of every token. One update of a windowed batch is measured, all methods in turns in one process: a method's time is
compared with GRPO's in the same round.
"""

from __future__ import annotations

import random
import statistics
import sys
from pathlib import Path
from typing import Any

from bench_update import make_model
from harness import now, parser, table, trainer_settings, write
from tqdm.auto import tqdm

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from method_table import CASES  # noqa: E402 - configs that enable each method
from trainer_kit import saved  # noqa: E402

from epo_trl.envs.toy import ToySuite  # noqa: E402
from epo_trl.methods import METHODS, Need  # noqa: E402
from epo_trl.models import build_tokenizer  # noqa: E402
from epo_trl.models.load import corpus  # noqa: E402
from epo_trl.trainers import EPOConfig, EPOPPOConfig, EPOPPOTrainer, EPOTrainer  # noqa: E402
from epo_trl.types import Episode, StopReason, Turn  # noqa: E402

GRPO = "grpo"


def make_episodes(count: int, turns: int, prompt: int, response: int, vocabulary: int) -> list[Episode]:
    """Creates episodes of random tokens with rewards, in shared rooms."""
    rng = random.Random(0)

    def tokens(mean: int) -> tuple[int, ...]:
        return tuple(rng.randrange(10, vocabulary) for _ in range(rng.randint(mean * 3 // 4, mean * 5 // 4)))

    def turn(reward: float) -> Turn:
        return Turn(tokens(prompt), tokens(response), "", f"room {rng.randrange(4)}", "go", True, reward)

    played = []
    for i in range(count):
        won = rng.random() < 0.5
        rewards = [rng.choice([0.0, -0.1]) for _ in range(turns - 1)] + [10.0 * won]
        stop = StopReason.WON if won else StopReason.TURN_LIMIT
        played.append(Episode(f"train/{i}", "", "", tuple(map(turn, rewards)), stop, won=won))
    return played


def make(name: str, episodes: list[Episode], sizes: dict[str, int]) -> Any:
    """Builds one RL step without its rollout."""
    slot = next(slot for slot, names in METHODS.items() if name in names)
    case = CASES[name]
    ppo = name in ("turn", "token", "outcome", "vetta")
    kind, config = (EPOPPOTrainer, EPOPPOConfig) if ppo else (EPOTrainer, EPOConfig)
    changes = {"entropy_method": [], "num_generations": 1 if ppo else len(episodes) // 2, **case.fields}
    changes |= {"method_kwargs": {name: dict(case.settings)}} if case.settings else {}
    changes |= {"bootstrap_truncated": False} if ppo else {}
    changes |= {slot: name if slot == "credit" else [name]}
    settings = trainer_settings(use_cpu=True, bf16=False, per_device_train_batch_size=len(episodes), max_steps=100)
    turns = len(episodes[0].turns)
    args = config(**settings, prompt_template="compact", max_turns=turns, **changes)
    tokenizer = build_tokenizer(corpus(ToySuite(), "compact"))
    model = saved(make_model(sizes), Path(args.output_dir) / "start")
    trainer: Any = kind(model, ToySuite(), args=args, processing_class=tokenizer)
    trainer.play = lambda tasks, **kwargs: list(episodes)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    if hasattr(trainer.methods[name], "history"):
        trainer.methods[name].history.append(1.0)

    def work() -> None:
        trainer.model.zero_grad()
        batch = trainer._generate_and_score_completions([{"prompt": "train/0"} for _ in episodes])
        trainer.compute_loss(trainer.model, batch).backward()
        trainer.methods.end_rl_step(trainer.ranks, trainer.rl_step, trainer.total_rl_steps)

    method = trainer.methods[name]
    return work, bool(method.needs & {Need.SCORES, Need.FEATURES} or method.reference_statistics)


def main() -> None:
    """Benchmarks all methods and prints a table."""
    args = parser(__doc__)
    args.add_argument("--methods", nargs="+", choices=sorted(CASES), default=list(CASES))
    args.add_argument("--episodes", type=int, default=8)
    args.add_argument("--turns", type=int, default=8)
    args.add_argument("--prompt", type=int, default=60, help="mean number of tokens per prompt")
    args.add_argument("--response", type=int, default=20, help="mean number of tokens per response")
    args.add_argument("--vocabulary", type=int, default=8192)
    given = args.parse_args()
    sizes = {
        "vocab_size": given.vocabulary, "hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    episodes = make_episodes(given.episodes, given.turns, given.prompt, given.response, given.vocabulary)
    works = {name: make(name, episodes, sizes) for name in dict.fromkeys([GRPO, *given.methods])}
    seconds: dict[str, list[float]] = {name: [] for name in works}
    rounds = [(i, name) for i in range(-1, given.rounds) for name in works]
    for i, name in tqdm(rounds, unit="step", leave=False):
        start = now()
        works[name][0]()
        if i >= 0:
            seconds[name].append(now() - start)
    rows = []
    for name, taken in seconds.items():
        ratios = sorted(one / grpo for one, grpo in zip(taken, seconds[GRPO], strict=True))
        quarter = len(ratios) // 4
        middle = f"{ratios[quarter]:.2f} to {ratios[-1 - quarter]:.2f}"
        scored = "a pass" if works[name][1] else ""
        rows.append([f"`{name}`", f"{statistics.median(ratios):.2f}x", middle, scored])
    print(table(["method", "RL step without rollout / GRPO's", "middle half", "forward at collection"], rows))
    write(given.json, options=vars(given), seconds=seconds)


if __name__ == "__main__":
    main()
