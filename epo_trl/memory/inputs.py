"""The inputs of a plan besides the config: the machines and the assumptions."""

from __future__ import annotations

import math
from dataclasses import dataclass

from epo_trl.memory.hardware import Hardware


@dataclass(frozen=True)
class Assumed:
    """Assumptions used where nothing is measured. `None` falls back to the config or the GPU's data sheet.

    Args:
        turns: Mean number of turns per episode.
        prompt_tokens: Mean prompt tokens per turn; with concatenated context, the tokens that a turn adds.
        response_tokens: Mean response tokens per turn.
        tokens_per_second: Sampling speed of one GPU, summed over all its episodes.
        bandwidth_share: Share of the memory bandwidth that sampling reaches; used if `tokens_per_second` is `None`.
        mfu: Model FLOPs utilization: share of peak compute that the update and prompt processing reach.
        env_seconds: Seconds per turn in the environment.
        eval_episodes: Episodes per evaluation, over all lists.
        rl_steps: RL steps of the run.
    """

    turns: float | None = None
    prompt_tokens: float | None = None
    response_tokens: float | None = None
    tokens_per_second: float | None = None
    bandwidth_share: float = 0.5
    mfu: float = 0.3
    env_seconds: float = 0.005
    eval_episodes: int | None = None
    rl_steps: int | None = None

    def __post_init__(self) -> None:
        for name in ("bandwidth_share", "mfu"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}: expected a number above 0, at most 1, got {getattr(self, name)}")
        for name in ("turns", "prompt_tokens", "response_tokens", "tokens_per_second", "rl_steps"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}: expected a number > 0, got {value}")
        for name in ("env_seconds", "eval_episodes"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name}: expected a number >= 0, got {value}")


@dataclass(frozen=True)
class Machines:
    """The machines of a run.

    Args:
        gpu: GPU model.
        gpus: Number of training GPUs; they also generate unless there is a vLLM server.
        server_gpus: Number of GPUs of a vLLM server.
        zero_stage: ZeRO stage, see `Run`.
        offload: Whether ZeRO-3 offloads to the CPU, see `Run`.
    """

    gpu: Hardware
    gpus: int
    server_gpus: int = 0
    zero_stage: int = 3
    offload: bool = False
