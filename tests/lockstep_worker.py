"""One rank of `test_lockstep.py`: `python lockstep_worker.py MODE,MODE,... FOLDER ROLLOUTS`, with torch's variables.

In every mode a run of so many RL steps, whose games, errors and response lengths are drawn at random for each rank. It
keeps the episodes and the gradient of every step. After them comes a step in which too many episodes are aborted.
"""

import os
import pickle
import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import torch.distributed as dist
from distributed_worker import WORLD, ZERO3, forget_the_mode, start
from trainer_kit import ROWS, make_trainer

from epo_trl.envs.toy import ToySuite, TreasureHunt
from epo_trl.rollout import parsing
from epo_trl.runs.guards import TooManyAborted
from epo_trl.trainers import EPOTrainer

TURNS = 5
SHARE = ROWS // WORLD
SETTINGS: dict[str, Any] = {
    "num_generations": ROWS,  # one group, spread over the ranks
    "optim": "sgd",
    "learning_rate": 0.0,  # every step starts from the same weights, which one process has as well
    "lr_scheduler_type": "constant",
    "epo_lambda": 0.3,
    "smoothing_alpha": 0.7,
    "kappa_high": 1.0,
    "max_turns": TURNS,
    "env_reward_weight": 1.0,
    "tokens_per_pass": 120,
    "max_aborted_share": 1.0,
}
ZERO2 = {**ZERO3, "zero_optimization": {"stage": 2}}
MODES = {"ddp": None, "zero2": ZERO2, "zero3": ZERO3}  # to DeepSpeed's config


# ------------------------------------------------------------------------------------------------------ what happens


@dataclass(frozen=True)
class Game:
    """How one episode goes: after `turns` steps the game is over, unless `error` comes first, in step `turns`."""

    turns: int
    error: str = ""  # "", "reset", "step" or "parser"


def random_games(rng: random.Random) -> list[Game]:
    """Returns the games of one rank in one rollout."""
    kind = rng.choice(["mixed", "mixed", "mixed", "dead", "aborted", "short", "long"])
    return games_of(kind, rng)


def games_of(kind: str, rng: random.Random) -> list[Game]:
    if kind == "dead":
        return [Game(0, "reset")] * SHARE
    if kind == "aborted":
        return [Game(rng.randint(1, TURNS), rng.choice(["step", "parser"])) for _ in range(SHARE)]
    if kind == "mixed":
        errors = ["", "", "", "reset", "step", "parser"]
        return [Game(rng.randint(1, TURNS), rng.choice(errors)) for _ in range(SHARE)]
    return [Game({"short": 1, "long": TURNS}[kind])] * SHARE


def games(rollout: int, rank: int) -> list[Game]:
    """Returns the games of a rank. The first rollouts are the worst ones; the others are random."""
    worst = [("dead", "long"), ("aborted", "short"), ("dead", "dead"), ("long", "dead"), ("short", "aborted")]
    rng = random.Random(f"{rollout} {rank}")
    return games_of(worst[rollout][rank], rng) if rollout < len(worst) else random_games(rng)


def as_for_a_server(rollout: int) -> bool:
    """Whether the rollout asks for the prompts that a vLLM server needs: equally many from every rank."""
    return rollout % 2 == 1


class Unparsable(tuple):
    """Admissible actions at which the parser raises."""


class PlannedHunt(TreasureHunt):
    def __init__(self, suite: "PlannedSuite", number: int) -> None:
        super().__init__()
        self.suite, self.number = suite, number

    def reset(self, **kwargs):
        self.game, self.moves = self.suite.games[self.number], 0
        if self.game.error == "reset":
            raise OSError("no such game")
        return self.seen(*super().reset(**kwargs))

    def step(self, action):
        self.moves += 1
        if self.game.error == "step" and self.moves == self.game.turns:
            raise RuntimeError("the engine died")
        observation, _, _, _, info = super().step(action)
        reward = self.suite.rng.uniform(-1, 1)
        return *self.seen(observation, info)[:1], reward, False, self.moves >= self.game.turns, self.seen("", info)[1]

    def seen(self, observation, info):
        if self.game.error == "parser" and self.moves == self.game.turns - 1:
            info = {**info, "admissible_actions": Unparsable(info["admissible_actions"])}
        return observation + " coin" * self.suite.rng.randrange(20), info


class PlannedSuite(ToySuite):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rng = random.Random(rank)
        self.games = [Game(1)] * SHARE
        self.made = 0

    def make_env(self) -> PlannedHunt:
        self.made += 1
        return PlannedHunt(self, self.made - 1)


def parse_or_raise(text: str, admissible: Any, **kwargs: Any) -> Any:
    if isinstance(admissible, Unparsable):
        raise ValueError("the parser broke")
    return parse_response(text, admissible, **kwargs)


parse_response, parsing.parse_response = parsing.parse_response, parse_or_raise


# ------------------------------------------------------------------------------------------------------ what is kept


class Record:
    """Drives a trainer through the plan and keeps what it does."""

    def __init__(self, trainer: EPOTrainer, rank: int, rollouts: int) -> None:
        self.trainer, self.rank, self.rollouts = trainer, rank, rollouts
        self.episodes: list[Any] = []  # of each rollout
        self.prompts: list[list[int]] = []  # of each rollout, the prompts of each generation
        self.passes: list[list[int]] = []  # of each rollout, forward passes with a loss, backward passes
        self.gradients: list[dict[str, torch.Tensor]] = []
        self._lengths = random.Random(f"lengths {rank}")
        play, generate, step = trainer.play, trainer._generate_single_turn, trainer.training_step
        needed = trainer.engine.prompts_needed
        trainer.play = lambda tasks, **kwargs: self._play(play, tasks, **kwargs)
        trainer._generate_single_turn = lambda prompts, *rest: self._generate(generate, prompts, *rest)
        trainer.training_step = lambda *args, **kwargs: self._count(1, step, *args, **kwargs)
        forward = trainer.model.forward
        trainer.model.forward = lambda *args, **kwargs: self._count(
            0 if "labels" in kwargs else None, forward, *args, **kwargs
        )
        trainer.engine.prompts_needed = lambda running: self._needed(needed, running)

    def _play(self, play, tasks, **kwargs):
        rollout = len(self.episodes)
        self.trainer.suite.games = games(rollout, self.rank)
        if rollout == self.rollouts:  # the last: one rank loses everything
            self.trainer.args.max_aborted_share = 0.4
            self.trainer.suite.games = games_of(("long", "dead")[self.rank], random.Random(0))
        self.prompts.append([])
        self.passes.append([0, 0])
        self.episodes.append(play(tasks, **kwargs))
        return self.episodes[-1]

    def _generate(self, generate, prompts, *rest):
        self.prompts[-1].append(len(prompts))
        self.trainer.generation_config.max_new_tokens = self._lengths.choice([1, 1, 2, 4, 6])
        return generate(prompts, *rest)

    def _count(self, which, function, *args, **kwargs):
        result = function(*args, **kwargs)
        if which is not None:
            self.passes[-1][which] += 1
        return result

    def _needed(self, needed, running):
        self.trainer.use_vllm = as_for_a_server(len(self.prompts) - 1)
        try:
            return needed(running)
        finally:
            self.trainer.use_vllm = False

    def keep_gradients_of(self, model: Any) -> None:
        """Called before every optimizer step. Collective under ZeRO."""
        from deepspeed.utils import safe_get_full_grad

        named = {name.removeprefix("module."): p for name, p in model.named_parameters()}
        self.gradients.append({name: safe_get_full_grad(p).detach().clone() for name, p in named.items()})


def train(mode: str, rank: int, folder: Path, rollouts: int) -> None:
    trainer = make_trainer(
        folder / mode,
        suite=PlannedSuite(rank),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=rollouts + 1,
        deepspeed=MODES[mode],
        **SETTINGS,
    )
    assert trainer.accelerator.num_processes == WORLD, trainer.accelerator.state
    record = Record(trainer, rank, rollouts)
    keep_before_each_step(trainer, record)
    try:
        trainer.train()
    except TooManyAborted as error:
        message = str(error)
    kept = {name: vars(record)[name] for name in ("prompts", "passes", "gradients")}
    # Without the last info, which may hold what only this program can read.
    kept["episodes"] = [[replace(episode, final_info={}) for episode in rollout] for rollout in record.episodes]
    kept |= {"kind": str(trainer.accelerator.distributed_type), "error": message}
    (folder / f"{mode}{rank}.pkl").write_bytes(pickle.dumps(kept))
    dist.barrier()


def keep_before_each_step(trainer: EPOTrainer, record: Record) -> None:
    """DeepSpeed steps and clears the gradients within its backward pass, so it is asked there."""
    from transformers import TrainerCallback

    class BeforeStep(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            if trainer.is_deepspeed_enabled:
                engine = trainer.model_wrapped
                step = engine.step
                engine.step = lambda *a, **k: (record.keep_gradients_of(engine), step(*a, **k))[1]

        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            if not trainer.is_deepspeed_enabled:
                record.keep_gradients_of(model)

    trainer.add_callback(BeforeStep())


if __name__ == "__main__":
    modes, folder, rollouts = sys.argv[1:]
    rank = start(with_deepspeed=True)
    for mode in modes.split(","):
        train(mode, rank, Path(folder), int(rollouts))
        forget_the_mode()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
