"""Estimates the compute and memory traffic for the turns of a batch."""

from __future__ import annotations

from dataclasses import dataclass

from epo_trl.memory.sizes import BF16, ModelShape


@dataclass(frozen=True)
class Turn:
    """The mean turn of a run.

    Args:
        turns: Turns per episode.
        prompt: Prompt tokens of a turn; with concatenated context, the tokens that a turn adds.
        response: Response tokens of a turn.
        concatenated: Whether an episode is one sequence; otherwise each turn is.
    """

    turns: float
    prompt: float
    response: float
    concatenated: bool = False

    @property
    def sequence(self) -> float:
        """Tokens per sequence."""
        return (self.turns if self.concatenated else 1) * (self.prompt + self.response)

    @property
    def sequences(self) -> float:
        """Sequences per episode."""
        return 1 if self.concatenated else self.turns

    @property
    def context(self) -> float:
        """Mean number of tokens before the sampled one."""
        return self.sequence / 2 if self.concatenated else self.prompt + self.response / 2


def forward_flops(shape: ModelShape, turn: Turn, episodes: float, *, head: bool = True) -> float:
    """Returns the floating-point operations of a forward pass over the turns of episodes.

    Each weight costs 2 per token; the LM head runs on response tokens only. Causal attention costs 2 n² per layer and
    hidden unit for a sequence of n tokens (half of the scores, and half of their products with the values).

    Args:
        shape: Sizes of the model.
        turn: Turn sizes of the episodes.
        episodes: Number of episodes.
        head: Whether there is an LM head.
    """
    tokens = turn.turns * (turn.prompt + turn.response)
    on_responses = shape.vocabulary * shape.hidden_size * turn.turns * turn.response if head else 0.0
    attention = shape.layers * shape.hidden_size * turn.sequences * turn.sequence**2
    return 2 * episodes * (shape.matrix_parameters * tokens + on_responses + attention)


def reading_flops(shape: ModelShape, turn: Turn, episodes: float) -> float:
    """Returns the floating-point operations of one forward pass over all prompts, without responses and LM head."""
    prompts = Turn(turn.turns, turn.prompt, 0.0, turn.concatenated)
    return forward_flops(shape, prompts, episodes, head=False)


def sampling_speed(shape: ModelShape, turn: Turn, episodes: float, bandwidth: float, gpus: int = 1) -> float:
    """Estimates the sampling speed of an engine, in tokens per second and GPU.

    To sample one token of each episode, the engine reads all weights once, and the keys and values of all contexts.

    Args:
        shape: Sizes of the model.
        turn: Turn sizes of the episodes.
        episodes: Number of episodes that the engine samples together.
        bandwidth: Memory bandwidth of one GPU, in bytes per second.
        gpus: Number of GPUs over which weights, keys and values are split.
    """
    cache = 2 * BF16 * shape.layers * shape.key_value_size * turn.context
    seconds = (BF16 * shape.parameters + episodes * cache) / (bandwidth * gpus)
    return episodes / seconds / gpus
