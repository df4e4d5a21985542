"""EPO (arXiv 2509.22576) for multi-turn LLM agents, as TRL trainers.

Heavy modules load on first use: ``import epo_trl`` is instant and needs neither a game nor torch.
"""

import epo_trl.threads  # noqa: F401 - before torch, if that is not loaded yet

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from epo_trl.cli.imitation import DemonstrationArguments, ImitationConfig, imitate
    from epo_trl.trainers import EPOConfig, EPOPPOConfig, EPOPPOTrainer, EPOTrainer

__all__ = [
    "DemonstrationArguments",
    "EPOConfig",
    "EPOPPOConfig",
    "EPOPPOTrainer",
    "EPOTrainer",
    "ImitationConfig",
    "__version__",
    "imitate",
]


def __getattr__(name: str) -> Any:  # PEP 562: so that a command rejects invalid input before it loads torch
    if name in __all__:
        return getattr(import_module("epo_trl.trainers" if name.startswith("EPO") else "epo_trl.cli.imitation"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
