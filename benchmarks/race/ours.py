"""This package's trainers in the race: GRPO, or PPO with credit per turn, in concatenated context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clock import Clock, TickTrainer
from games import PROMPT, RESPONSE_TOKENS, RULES, TURNS, make_suite
from settings import trainer_settings
from transformers import AutoModelForCausalLM, AutoTokenizer

from epo_trl.trainers import EPOConfig, EPOPPOConfig, EPOPPOTrainer, EPOTrainer

# Of recipes/alfworld/ppo_tiny_cpu.yaml: critic's rate, no clipping of values, lambda of GAE.
PPO = {
    "num_generations": 1, "critic_learning_rate": 5e-4, "value_clip": None, "gae_lambda": 0.9, "critic_warmup_steps": 0
}  # fmt: skip


def make_trainer(algorithm: str, model: Path, folder: Path, seed: int) -> EPOTrainer:
    """Builds the trainer.

    Args:
        algorithm: `"grpo"` or `"ppo"`.
        model: The warm start.
        folder: Folder of the run.
        seed: Seed of the run.
    """
    settings: dict[str, Any] = {
        **trainer_settings(folder, seed),
        "context": "concatenated",
        "prompt_template": PROMPT,
        "max_turns": TURNS,
        "max_prompt_length": 512,
        "max_completion_length": RESPONSE_TOKENS,
        "require_think": False,
        "success_reward": RULES.success_reward,
        "invalid_action_penalty": RULES.invalid_action_penalty,
        "epo_lambda": 0.0,
        "keep_episodes": 0,
    }
    if algorithm == "ppo":
        settings |= PPO
    kind, config = (EPOPPOTrainer, EPOPPOConfig) if algorithm == "ppo" else (EPOTrainer, EPOConfig)
    return kind(
        AutoModelForCausalLM.from_pretrained(model),
        make_suite(),
        args=config(**settings),
        processing_class=AutoTokenizer.from_pretrained(model),
    )


def race(algorithm: str, model: Path, clock: Clock, seed: int) -> None:
    """Trains until the clock stops it."""
    trainer = make_trainer(algorithm, model, clock.folder, seed)
    trainer.add_callback(TickTrainer(clock, lambda: [episode.won for episode in trainer.last_episodes]))
    trainer.train()
    trainer.close_envs()
