"""The critic's own learning rate, warm-up and clipping, in the optimizer that it shares with the policy."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

PART, CRITIC = "part", "critic"  # a parameter group of the critic has group["part"] == "critic"


def split_off_critic(optimizer: Any, critic: nn.Module, rate: float | None) -> None:
    """Moves the critic's parameters into groups of their own.

    Args:
        optimizer: What TRL has made for policy and critic together.
        critic: The critic.
        rate: Its learning rate, or `None` for the policy's.

    Raises:
        ValueError: If the optimizer does not hold the critic's parameters, or is DeepSpeed's own.
    """
    if type(optimizer).__name__ == "DummyOptim":  # Accelerate's; the name is there only with DeepSpeed
        raise ValueError(
            "deepspeed: got a configuration with an optimizer of its own, which gives policy and critic one "
            "learning rate; take the `optimizer` and `scheduler` blocks out, the trainer makes both"
        )
    if any(group.get(PART) == CRITIC for group in optimizer.param_groups):
        return
    own = {id(p) for p in critic.parameters() if p.requires_grad}
    if not own <= {id(p) for group in optimizer.param_groups for p in group["params"]}:
        raise ValueError(
            "optimizers: got an optimizer that was made before the trainer added the critic; set optim and "
            "learning_rate instead"
        )
    for group in list(optimizer.param_groups):
        params = [p for p in group["params"] if id(p) in own]
        if params:
            group["params"] = [p for p in group["params"] if id(p) not in own]
            changes = {"params": params, PART: CRITIC, **({"lr": rate} if rate is not None else {})}
            optimizer.add_param_group({**group, **changes})


def hold_policy(scheduler: Any, steps: int, kind: Any) -> None:
    """Makes the policy's learning rate 0 for the first optimizer steps, then what it would be.

    Args:
        scheduler: What TRL has made.
        steps: How many.
        kind: `lr_scheduler_type`, for the message.

    Raises:
        ValueError: If the schedule is not a function of the step.
    """
    if not steps:
        return
    if not isinstance(scheduler, LambdaLR):
        raise ValueError(
            f"critic_warmup_steps: got {steps} with lr_scheduler_type={kind!r}, takes a schedule that is a function of "
            "the step, such as 'cosine' or 'constant', or 0"
        )
    for i, group in enumerate(scheduler.optimizer.param_groups):
        if group.get(PART) != CRITIC:
            scheduler.lr_lambdas[i] = _zero_before(steps, scheduler.lr_lambdas[i])
            group["lr"] = scheduler.base_lrs[i] * scheduler.lr_lambdas[i](scheduler.last_epoch)
            scheduler._last_lr[i] = group["lr"]


def _zero_before(start: int, schedule: Any) -> Any:
    return lambda step: 0.0 if step < start else schedule(step)


def critic_rate(optimizer: Any) -> float:
    """Returns the critic's learning rate."""
    return float(next(group["lr"] for group in optimizer.param_groups if group.get(PART) == CRITIC))


def clip_apart(accelerator: Any, model: nn.Module, critic: nn.Module, limit: float) -> Any:
    """Clips policy and critic apart, so that a large error of the critic does not shrink the policy's step.

    Returns the policy's norm before clipping, or the critic's if that is not finite.

    Args:
        accelerator: Unscales the gradients.
        model: The policy with the critic in it.
        critic: The critic.
        limit: Largest norm of each.
    """
    own = {id(p) for p in critic.parameters()}
    policy = [p for p in model.parameters() if id(p) not in own]
    norm = accelerator.clip_grad_norm_(policy, limit)  # unscales all gradients, only once
    critic_norm = torch.nn.utils.clip_grad_norm_(critic.parameters(), limit)
    return norm if critic_norm.isfinite() else critic_norm
