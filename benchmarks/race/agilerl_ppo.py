"""AgileRL's turn-level PPO (`LLMPPO`) in the race, in its own environment.

    /path/to/venv-agilerl/bin/python benchmarks/race/agilerl_ppo.py --budget 240 --seeds 0 1 2

The games are AgileRL's local text environments. Of its settings, the learning rates and the
adapter's rank are those of its configs/debugging/ppo_grid_navigation.yaml, a tiny model in a game of several turns;
the others are the starting values of its tutorial on multi-turn fine-tuning.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from agilerl.algorithms import LLMPPO
from agilerl.llm_envs import RolloutHarness
from agilerl.training.llm import train_llm_rollout
from clock import Clock
from games import EPISODE_TOKENS, EPISODES, RESPONSE_TOKENS, TURNS, House, make_suite, read_action
from peft import LoraConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from settings import open_clock, parser
from transformers import AutoModelForCausalLM, AutoTokenizer

LORA = {"r": 8, "lora_alpha": 32, "target_modules": "all-linear", "lora_dropout": 0.0, "task_type": "CAUSAL_LM"}
SETTINGS: dict[str, Any] = {
    "lr_actor": 1e-4, "lr_critic": 1e-3, "beta": 0.01, "gamma": 0.99, "gae_lambda": 0.95, "vf_coef": 0.5,
    "clip_coef": 0.2, "max_grad_norm": 1.0, "update_epochs": 2,
    "temperature": 1.0, "top_k": 0, "max_output_tokens": RESPONSE_TOKENS, "max_model_len": EPISODE_TOKENS,
    "batch_size": EPISODES, "micro_batch_size_per_gpu": 8, "mini_batch_size": EPISODES,
    "use_liger_loss": False, "gradient_checkpointing": False, "advantage_granularity": "turn", "device": "cpu",
}  # fmt: skip


class TextGame:
    """A game as AgileRL's local text environment: seed i plays the training task i."""

    system_prompt = ""

    def __init__(self, suite: Any) -> None:
        self.house, self.tasks = House(suite), suite.task_ids("train")

    def reset(self, seed: int = 0) -> tuple[str, dict[str, Any]]:
        """Starts an episode."""
        return self.house.reset(self.tasks[seed * 2654435761 % len(self.tasks)], seed), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Takes an action."""
        before = self.house.reward
        seen = self.house.act(action)
        return seen, self.house.reward - before, self.house.done, False, {}


class Over(Exception):
    """The clock has stopped the run."""


class Ticking(LLMPPO):
    """LLMPPO that ends a step of the clock after every update."""

    clock: Any = None
    games: Any = ()
    warm: Any = None

    def learn(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Updates the policy, and stops when the clock is over."""
        found = super().learn(*args, **kwargs)
        type(self).clock.tick([game.house.won for game in type(self).games[:EPISODES]], self.save_merged)
        if type(self).clock.is_over:
            raise Over
        return found

    def save_merged(self, folder: Path) -> None:
        """Saves the policy as a whole model."""
        mine = self.actor.pretrained_model
        base = AutoModelForCausalLM.from_pretrained(type(self).warm)
        other = PeftModel(base, mine.peft_config["actor"], adapter_name="actor")
        set_peft_model_state_dict(other, get_peft_model_state_dict(mine, adapter_name="actor"), adapter_name="actor")
        other.merge_and_unload().save_pretrained(folder)
        AutoTokenizer.from_pretrained(type(self).warm).save_pretrained(folder)


def race(model: Path, clock: Clock, seed: int) -> None:
    """Trains until the clock stops it."""
    torch.manual_seed(seed)
    tokenizer, suite = AutoTokenizer.from_pretrained(model), make_suite()
    games: list[TextGame] = []

    def make_game() -> RolloutHarness:
        games.append(TextGame(suite))
        return RolloutHarness.local(
            games[-1], tokenizer, max_turns=TURNS, max_model_len=EPISODE_TOKENS, action_processor=read_action
        )

    agent = Ticking(
        model_name=str(model), model_config={"torch_dtype": torch.float32}, pad_token_id=tokenizer.pad_token_id,
        pad_token=tokenizer.pad_token, lora_config=LoraConfig(**LORA), seed=seed, **SETTINGS,
    )  # fmt: skip
    Ticking.clock, Ticking.games, Ticking.warm = clock, games, model
    clock.start()
    try:
        train_llm_rollout(
            [agent], max_turns=TURNS, env_factory=make_game, max_steps=10**9, evaluation_interval=10**9, verbose=False
        )
    except Over:
        return


def main() -> None:
    """Runs every seed that has not been run."""
    args = parser(__doc__).parse_args()
    for seed in args.seeds:
        clock = open_clock(args, "agilerl_ppo", seed)
        if clock is not None:
            race(args.folder / "warm", clock, seed)


if __name__ == "__main__":
    main()
