"""Validates settings of transformers that it checks late or never."""

from __future__ import annotations

from typing import Annotated, Any

from accelerate.utils import DistributedType
from transformers.integrations import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations

from epo_trl.bounds import NonNegative, Range, read_bounds
from epo_trl.errors import InputError

_Beta = Annotated[float, Range(least=0, below=1)]
BOUNDS = {
    **dict.fromkeys(("learning_rate", "weight_decay", "adam_epsilon"), NonNegative),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), _Beta),
}
# For these, the list of transformers does not reliably show whether they are installed.
_NOT_LISTED = {"azure_ml", "comet_ml", "flyte"}


def check_training_arguments(args: Any) -> None:
    """Raises `InputError` for an unknown or missing tracker, or an invalid optimizer setting or seed.

    Args:
        args: Arguments of the transformers trainer, after their own checks.
    """
    for name, bounds in read_bounds(BOUNDS).items():
        bounds.check(name, getattr(args, name))
    if args.max_grad_norm is not None and not args.max_grad_norm >= 0:
        raise InputError(f"max_grad_norm: expected a number >= 0 (0: no clipping), got {args.max_grad_norm}")
    if not 0 <= args.seed < 2**32:
        raise InputError(f"seed: expected an integer from 0 to 2**32 - 1, got {args.seed}")
    for name in args.report_to:
        if name not in INTEGRATION_TO_CALLBACK:
            known = ", ".join(map(repr, INTEGRATION_TO_CALLBACK))
            raise InputError(f"report_to: expected 'all', 'none', or one or several of {known}, got {name!r}")
        if name not in {*get_available_reporting_integrations(), *_NOT_LISTED}:
            raise InputError(f"report_to: expected an installed tracker, got {name!r}; install it or use 'none'")


def check_deepspeed_runs(args: Any, kind: DistributedType) -> None:
    """Raises `InputError` if DeepSpeed is configured but accelerate silently runs without it.

    Args:
        args: Arguments of the transformers trainer, after their own checks.
        kind: Accelerate's distributed type.
    """
    if args.deepspeed_plugin is not None and kind != DistributedType.DEEPSPEED:
        raise InputError(
            "use_cpu: expected false in accelerate's settings (its config, ACCELERATE_USE_CPU) for a run with "
            f"DeepSpeed, got true, with which accelerate runs {kind.value} without DeepSpeed; set it to false there "
            "and use_cpu: true in the training config (docs/multi_node.md, A rehearsal on a CPU)"
        )
