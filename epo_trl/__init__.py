"""EPO (arXiv 2509.22576) for multi-turn LLM agents, as TRL trainers.

Heavy modules load on first use: ``import epo_trl`` is instant and needs neither a game nor torch.
"""

import epo_trl.threads  # noqa: F401 - before torch, if that is not loaded yet

from typing import TYPE_CHECKING

from epo_trl.lazy import load_on_use

__version__ = "0.1.0"

if TYPE_CHECKING:
    from epo_trl.cli.imitation import DemonstrationArguments, ImitationConfig, imitate
    from epo_trl.trainers.config import EPOConfig
    from epo_trl.trainers.epo_trainer import EPOTrainer
    from epo_trl.trainers.ppo_config import EPOPPOConfig
    from epo_trl.trainers.ppo_trainer import EPOPPOTrainer

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

__getattr__ = load_on_use(
    __name__,
    {
        "epo_trl.cli.imitation": ["DemonstrationArguments", "ImitationConfig", "imitate"],
        "epo_trl.trainers.config": ["EPOConfig"],
        "epo_trl.trainers.epo_trainer": ["EPOTrainer"],
        "epo_trl.trainers.ppo_config": ["EPOPPOConfig"],
        "epo_trl.trainers.ppo_trainer": ["EPOPPOTrainer"],
    },
)
