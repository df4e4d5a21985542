"""One line for each method of the registry: how the generic tests of test_method_table.py switch it on and off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer_kit import make_ppo, make_trainer, with_episodes

from epo_trl.methods import METHODS


@dataclass(frozen=True)
class Case:
    """How a method is tested.

    Args:
        settings: Its `method_kwargs`, strong enough to be seen in a gradient.
        neutral: Its `method_kwargs` with which a run is the one without it, bit for bit; `None` if there are none.
        fields: Fields of the configuration that it needs.
        neutral_fields: The same for the neutral run.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    neutral: Mapping[str, Any] | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    neutral_fields: Mapping[str, Any] = field(default_factory=dict)


EPO = Case(fields={"epo_lambda": 0.5}, neutral={}, neutral_fields={"epo_lambda": 0.0})
TWO_UPDATES = {"num_iterations": 2}  # on each batch

CASES = {
    # credit
    "grpo": Case(),
    "gigpo": Case(neutral={"step_weight": 0.0}),
    "hgpo": Case(),
    "gagpo": Case(),
    "graph-gpo": Case(neutral={"step_weight": 0.0}),
    "rloo": Case(),
    "reinforce++": Case(),
    "gated": Case({"threshold": 5.0, "weight": 1.0}, neutral={"threshold": 5.0, "weight": 0.0}),
    "rlvmr": Case({}, {"alpha": 1.0, "format_penalty": 0.0}, {"require_think": False}, {"require_think": False}),
    "archer": Case({"critic_epochs": 5, "learning_rate": 0.01, "hidden_size": 32}),
    "turn": Case(),
    "token": Case(),
    "outcome": Case(),
    "vetta": Case({"token_weight": 0.5, "token_lambda": 0.9}, neutral={"token_weight": 0.0}),
    # entropy_method
    "epo": EPO,
    "epo-base": EPO,
    "epo-decay": Case(
        {"over": "turns", "end_weight": 0.1}, {"over": "turns", "end_weight": 0.0}, EPO.fields, EPO.neutral_fields
    ),
    "epo-constant-beta": Case({"beta_k": 2.0}, {"beta_k": 2.0}, EPO.fields, EPO.neutral_fields),
    "epo-v2": EPO,
    "turn-band": EPO,
    "decision-bonus": Case({"weight": 0.5, "threshold": 3.0}, {"weight": 0.0, "threshold": 3.0}),
    "ea": Case(neutral={"alpha": 0.0}),
    "adaptive": Case({"target": 9.0, "start": 0.4, "delta": 0.05, "maximum": 0.6}, {"target": 9.0, "delta": 0.0}),
    "ref-nucleus": Case({"weight": 0.5}, neutral={"weight": 0.0}),
    "siren": Case({"weight": 5.0, "anchor": 0.0}, neutral={"weight": 0.0}),
    "aem": Case(neutral={"temperature": 0.0}),
    "empg": Case(neutral={"k": 0.0, "zeta": 0.0, "center": False}),
    "clip-cov": Case({"share": 0.2, "low": 0.1}, neutral={"share": 0.0}),
    "kl-cov": Case({"share": 0.2}, {"coefficient": 0.0}, TWO_UPDATES, TWO_UPDATES),
    "clip-b": Case({"mu": 0.1}, neutral={"mu": 1e9}),
    "clip-v": Case({"mu": 0.5, "max_share": 0.1}, neutral={"max_share": 0.0}),
    "high-entropy": Case(neutral={"share": 1.0}),
    "steer": Case({"min_weight": 0.2}, neutral={"min_weight": 1.0}),
    "entrocraft": Case(neutral={"low_start": 0.0, "low_end": 0.0, "high_start": 1e9, "high_end": 1e9}),
    "aepo": Case(neutral={"alpha": 0.0, "keep_clipped": False}),
    # policy_method
    "dapo": Case(fields={"max_resamples": 0}, neutral={"overlong_penalty": 0.0}, neutral_fields={"max_resamples": 0}),
    "gspo": Case(),
    "variance-filter": Case({"share": 0.5}, neutral={"share": 1.0}),
    "turn-mean": Case(),
}


SLOT = {name: slot for slot, names in METHODS.items() for name in names}
PPO = ("turn", "token", "outcome", "vetta")


def config_of(name, settings, fields):
    """Returns the changes of a configuration that switch a method on."""
    kwargs = {"method_kwargs": {name: dict(settings)}} if settings else {}
    return {"epo_lambda": 0.0, **fields, **kwargs, SLOT[name]: name if SLOT[name] == "credit" else [name]}


def without(name):
    """Returns the changes that leave it out."""
    return {"epo_lambda": 0.0, **({} if SLOT[name] == "credit" else {SLOT[name]: []})}


def trainer_of(folder, name, changes):
    if name in PPO:  # episodes made by hand have no state after the last turn
        return with_episodes(make_ppo(folder, **{"bootstrap_truncated": False, **changes}))
    return with_episodes(make_trainer(folder, **changes))
