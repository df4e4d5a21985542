"""The smoothing term of EPO and schedules of its weight (arXiv 2509.22576, Eq. 5 to 7)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

PENALTIES = ("hinge", "indicator")


def beta_schedule(rl_step: int, total_rl_steps: int, *, start: float, end: float, decay: float) -> float:
    """Returns beta_k, the weight of the smoothing term at RL step k (Eq. 7).

    It moves exponentially from `start` towards 1 in the first half of the run (k <= K // 2) and from 1 towards `end`
    in the second half. With K = 1 the midpoint is step 0, where the value is `start`. Past step K, in a run resumed
    for more steps than its schedule, it keeps the value of step K.

    Args:
        rl_step: k, counted from 0. One RL step is one batch of collected episodes.
        total_rl_steps: K.
        start: beta_start.
        end: beta_end.
        decay: lambda_d, the rate of both exponentials.
    """
    middle = total_rl_steps // 2
    if rl_step <= middle:
        progress = rl_step / middle if middle else 0.0
        return start + (1.0 - start) * (1.0 - math.exp(-decay * progress))
    progress = min(1.0, (rl_step - middle) / (total_rl_steps - middle))
    return 1.0 + (end - 1.0) * (1.0 - math.exp(-decay * progress))


def falling_beta(rl_step: int, total_rl_steps: int, *, start: float, decay: float) -> float:
    """Returns beta_k of the paper's second version, `1 + (start - 1) * exp(-decay * k / k_mid)` with k_mid = K // 2.

    Up to k_mid it equals `beta_schedule`; after k_mid it continues towards 1 without a jump. With K = 1 it is `start`.
    Past step K it keeps the value of step K. See `beta_schedule` for arguments; the paper uses `start` 2.
    """
    middle = total_rl_steps // 2
    progress = min(rl_step, total_rl_steps) / middle if middle else 0.0
    return 1.0 + (start - 1.0) * math.exp(-decay * progress)


def smoothing_penalty(
    entropy: Tensor,
    reference: Tensor | float | None,
    *,
    kappa_low: float,
    kappa_high: float,
    alpha: float,
    kind: str = "hinge",
) -> Tensor:
    """Returns the penalty of each token for leaving the band around the historical entropy.

    `hinge` (Eq. 5): `alpha * (max(0, kappa_low * ref - H) + max(0, H - kappa_high * ref))`, with gradient to H.
    `indicator` (Definition 9, and the authors' release): `alpha` outside the band, 0 inside. It is built from
    constants and therefore carries **no gradient**. It is included for comparison.

    Args:
        entropy: H, any shape, in nats.
        reference: The historical mean entropy, in nats; not differentiated. `None`, or NaN at a position, means that
            there is no history, and the penalty is 0 there (Algorithm 1 at step 0).
        kappa_low: Lower edge of the band, in units of the reference.
        kappa_high: Upper edge of the band, in units of the reference.
        alpha: Scale of the penalty.
        kind: `"hinge"` or `"indicator"`.
    """
    if reference is None:
        return torch.zeros_like(entropy)
    reference = _like(entropy, reference).detach()
    has_history = ~torch.isnan(reference)
    reference = torch.nan_to_num(reference)
    below = kappa_low * reference - entropy
    above = entropy - kappa_high * reference
    if kind == "hinge":
        penalty = torch.relu(below) + torch.relu(above)
    else:
        penalty = ((below > 0) | (above > 0)).to(entropy.dtype)
    return alpha * penalty * has_history


def band_shares(
    entropy: Tensor, reference: Tensor | float | None, mask: Tensor, *, kappa_low: float, kappa_high: float
) -> Tensor:
    """Returns a (3,) tensor: the number of masked tokens below, inside and above the band.

    Tokens without history count as inside. For arguments see `smoothing_penalty`; `mask` has the shape of `entropy`.
    """
    if reference is None:
        reference = float("nan")
    reference = _like(entropy, reference)
    below = (entropy < kappa_low * reference) & mask.bool()  # a comparison with NaN is false
    above = (entropy > kappa_high * reference) & mask.bool()
    inside = mask.bool() & ~below & ~above
    return torch.stack([below.sum(), inside.sum(), above.sum()])


def _like(entropy: Tensor, reference: Tensor | float) -> Tensor:
    """Returns the reference as a tensor on the device of the entropy. A float is filled in, not copied from the CPU."""
    return reference.to(entropy) if isinstance(reference, Tensor) else entropy.new_full((), reference)
