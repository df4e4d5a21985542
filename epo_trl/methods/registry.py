"""Builds the methods named in a configuration and rejects invalid combinations."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from epo_trl.errors import InputError
from epo_trl.methods.base import Method, Need
from epo_trl.methods.epo import EPO
from epo_trl.methods.stack import Methods

# Field of the configuration -> name -> location of the class. User-defined classes are named "module:Class".
METHODS: dict[str, dict[str, str]] = {
    "credit": {
        "grpo": "epo_trl.methods.grpo:GRPO",
        "gigpo": "epo_trl.methods.same_state:GiGPO",
        "hgpo": "epo_trl.methods.same_state:HGPO",
        "gagpo": "epo_trl.methods.same_state:GAGPO",
        "graph-gpo": "epo_trl.methods.same_state:GraphGPO",
        "rloo": "epo_trl.methods.reinforce:RLOO",
        "reinforce++": "epo_trl.methods.reinforce:ReinforcePlusPlus",
        "gated": "epo_trl.methods.gated:Gated",
        "rlvmr": "epo_trl.methods.rlvmr:RLVMR",
        "archer": "epo_trl.methods.archer:ArCHer",
        "turn": "epo_trl.methods.gae:TurnGAE",
        "token": "epo_trl.methods.gae:TokenGAE",
        "outcome": "epo_trl.methods.gae:OutcomeGAE",
        "vetta": "epo_trl.methods.gae:VETTA",
    },
    "entropy_method": {
        "epo": "epo_trl.methods.epo:EPO",
        "epo-base": "epo_trl.methods.epo:EPOBase",
        "epo-decay": "epo_trl.methods.epo:EPODecay",
        "epo-constant-beta": "epo_trl.methods.epo:EPOConstantBeta",
        "epo-v2": "epo_trl.methods.epo:EPOSecondVersion",
        "turn-band": "epo_trl.methods.epo:TurnBand",
        "decision-bonus": "epo_trl.methods.decision_bonus:DecisionBonus",
        "ea": "epo_trl.methods.ea:EntropyAdvantage",
        "adaptive": "epo_trl.methods.adaptive:AdaptiveEntropy",
        "ref-nucleus": "epo_trl.methods.ref_nucleus:ReferenceNucleus",
        "siren": "epo_trl.methods.siren:SIREN",
        "aem": "epo_trl.methods.aem:AEM",
        "empg": "epo_trl.methods.empg:EMPG",
        "clip-cov": "epo_trl.methods.covariance:ClipCov",
        "kl-cov": "epo_trl.methods.covariance:KLCov",
        "clip-b": "epo_trl.methods.entropy_discriminator:ClipB",
        "clip-v": "epo_trl.methods.entropy_discriminator:ClipV",
        "high-entropy": "epo_trl.methods.high_entropy:HighEntropy",
        "steer": "epo_trl.methods.steer:STEER",
        "entrocraft": "epo_trl.methods.entrocraft:Entrocraft",
        "aepo": "epo_trl.methods.aepo:AEPO",
    },
    "policy_method": {
        "dapo": "epo_trl.methods.dapo:DAPO",
        "gspo": "epo_trl.methods.gspo:TurnGSPO",
        "variance-filter": "epo_trl.methods.variance_filter:VarianceFilter",
        "turn-mean": "epo_trl.methods.turn_mean:TurnMean",
    },
}


def build_methods(args: Any, *, critic: bool) -> Methods:
    """Builds the methods named in an `EPOConfig`, for a trainer with or without a critic.

    Raises:
        InputError: If a name or a setting is unknown, a required input is missing, or methods are incompatible.
    """
    named = {"credit": [args.credit], "entropy_method": args.entropy_method, "policy_method": args.policy_method}
    made: dict[str, Method] = {}
    for slot, names in named.items():
        for name in names:
            method_class = load_class(slot, name)
            if Need.VALUES in method_class.needs and not critic:
                raise InputError(
                    f"{slot}: got {name!r}, which needs a critic, but this trainer has none. Use EPOPPOConfig and "
                    "EPOPPOTrainer, or another method."
                )
            made[name] = _build(name, method_class, args)
    methods = Methods(made, args.max_turns)
    for reason, applies in _refused(methods, named, args, critic).items():
        if applies:
            raise InputError(reason)
    for method in methods.values():
        method.check(args)
    methods.model_card_text()  # a wrong name in a card fails here, not at the end of the run
    return methods


def _build(name: str, method_class: type[Method], args: Any) -> Method:
    given = args.method_kwargs.get(name, {})
    settings = {setting: getattr(args, setting) for setting in method_class.config_fields}
    try:
        return method_class(**settings, **given)
    except (TypeError, ValueError) as error:
        is_of_settings = given or isinstance(error, TypeError)  # else a field of the configuration has the wrong value
        raise InputError(f"method_kwargs, {name!r}: {error}" if is_of_settings else str(error)) from error


def load_class(slot: str, name: str) -> type[Any]:
    """Imports the class of a method by its name in `METHODS[slot]`, or "module:Class". Raises `InputError`."""
    known = METHODS[slot]
    expected = ", ".join([*map(repr, known), "or 'module:Class' for your own"])
    module, _, attribute = known.get(str(name), str(name)).partition(":")
    if not module or not attribute:
        other = next((field for field, names in METHODS.items() if str(name) in names), None)
        hint = f" ({name!r} belongs to {other})" if other else ""
        raise InputError(f"{slot}: expected {expected}{hint}, got {name!r}")
    if str(Path.cwd()) not in sys.path:  # last, so that nothing in it hides a library
        sys.path.append(str(Path.cwd()))
    try:
        method_class = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise InputError(
            f"{slot}: expected {expected}, got {name!r}, which cannot be imported ({type(error).__name__}: {error})"
        ) from error
    if not (isinstance(method_class, type) and issubclass(method_class, Method) and is_dataclass(method_class)):
        raise InputError(f"{slot}: expected a dataclass that derives from epo_trl.methods.Method, got {name!r}")
    return method_class


def _refused(methods: Methods, named: Mapping[str, Sequence[str]], args: Any, critic: bool) -> dict[str, Any]:
    """Returns, by message, whether methods exclude each other or a field, or settings are those of no method."""
    credits, ratios, readers = methods.overriding("credit"), methods.overriding("ratio"), methods.readers_of_reference
    variants = [name for name, method in methods.items() if isinstance(method, EPO)]
    refused: dict[str, Any] = {
        f"num_generations: expected >= 2 with {slot} {name!r}, got {args.num_generations}. {name!r} compares the "
        "episodes of a task.": Need.GROUPS in methods[name].needs and (args.num_generations or 0) < 2
        for slot, names in named.items()
        for name in names
    }
    for name in args.method_kwargs:
        reason = f"method_kwargs: expected settings of {list(methods)}, got settings of {name!r}, not in use"
        refused[reason] = name not in methods
    refused |= {
        f"credit: expected one that uses the critic of this trainer, got {args.credit!r}. Use EPOConfig and "
        "EPOTrainer, or another credit.": critic and Need.VALUES not in methods[args.credit].needs,
        f"credit: expected {args.credit!r} alone to override `credit`, got {credits}": credits != [args.credit],
        f"policy_method: expected one method with `ratio`, got {ratios}": len(ratios) > 1,
        f"entropy_method: expected one variant of EPO, got {variants}": len(variants) > 1,
        f"sync_ref_model: expected False with {', '.join(map(repr, readers))}, got True: the reference policy stays "
        "fixed for the whole run": readers and args.sync_ref_model,
    }
    clashes = {
        "beta": args.beta != 0,  # the KL term would use the log-probabilities that the ratio changes
        "importance_sampling_level": args.importance_sampling_level != "token",
        "loss_type": args.loss_type in ("cispo", "vespo"),  # no clipped ratio
    }
    for field, is_clash in clashes.items():
        reason = f"{field}: got {getattr(args, field)!r}, which is incompatible with the ratio of {ratios}"
        refused[reason] = ratios and is_clash
    return refused
