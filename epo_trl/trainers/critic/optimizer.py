"""Separate learning rate, warm-up and clipping of the critic, in the optimizer that it shares with the policy."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from epo_trl.errors import InputError

PART, CRITIC = "part", "critic"  # a parameter group of the critic has group["part"] == "critic"


def separate_critic_groups(optimizer: Any, critic: nn.Module, rate: float | None) -> None:
    """Moves the critic's parameters into their own parameter groups, with a learning rate of their own."""
    if type(optimizer).__name__ == "DummyOptim":  # Accelerate's class, which is only defined with DeepSpeed
        raise InputError(
            "deepspeed: expected a configuration without an optimizer, which would give policy and critic the same "
            "learning rate. Remove the `optimizer` and `scheduler` blocks; the trainer creates both."
        )
    if any(group.get(PART) == CRITIC for group in optimizer.param_groups):
        return
    own = {id(p) for p in critic.parameters() if p.requires_grad}
    if not own <= {id(p) for group in optimizer.param_groups for p in group["params"]}:
        raise InputError(
            "optimizers: expected none, got an optimizer created before the trainer added the critic. Set optim and "
            "learning_rate instead."
        )
    for group in list(optimizer.param_groups):
        params = [p for p in group["params"] if id(p) in own]
        if params:
            group["params"] = [p for p in group["params"] if id(p) not in own]
            changes = {"params": params, PART: CRITIC, **({"lr": rate} if rate is not None else {})}
            optimizer.add_param_group({**group, **changes})


def delay_policy(scheduler: Any, steps: int, kind: Any) -> None:
    """Sets the policy's learning rate to 0 for the first optimizer steps. Later steps are unchanged."""
    if not steps:
        return
    if not isinstance(scheduler, LambdaLR):
        raise InputError(
            f"critic_warmup_steps: expected 0 with lr_scheduler_type={kind!r}, got {steps}. Use a schedule that is a "
            "function of the step, such as 'cosine' or 'constant'."
        )
    for i, group in enumerate(scheduler.optimizer.param_groups):
        if group.get(PART) != CRITIC:
            scheduler.lr_lambdas[i] = _zero_before(steps, scheduler.lr_lambdas[i])
            group["lr"] = scheduler.base_lrs[i] * scheduler.lr_lambdas[i](scheduler.last_epoch)
            scheduler.get_last_lr()[i] = group["lr"]  # the list itself: logs read it


def _zero_before(start: int, schedule: Any) -> Any:
    return lambda step: 0.0 if step < start else schedule(step)


def critic_rate(optimizer: Any) -> float:
    """Returns the critic's learning rate."""
    return float(next(group["lr"] for group in optimizer.param_groups if group.get(PART) == CRITIC))


def clip_separately(accelerator: Any, model: nn.Module, critic: nn.Module, limit: float) -> Any:
    """Clips policy and critic separately, so that a large error of the critic does not shrink the policy's step.

    Returns the policy's norm before clipping, or the critic's if that is not finite.
    """
    own = {id(p) for p in critic.parameters()}
    policy = [p for p in model.parameters() if id(p) not in own]
    norm = accelerator.clip_grad_norm_(policy, limit)  # unscales all gradients, only once
    critic_norm = torch.nn.utils.clip_grad_norm_(critic.parameters(), limit)
    return norm if critic_norm.isfinite() else critic_norm
