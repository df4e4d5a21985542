"""Builds the methods named in a configuration and rejects invalid combinations."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any, get_args, get_type_hints

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
    """Builds the methods named in a configuration.

    Args:
        args: An `EPOConfig`.
        critic: Whether the trainer has a critic.

    Raises:
        InputError: If a name or a setting is unknown, a required input is missing, or methods are incompatible.
    """
    named = {"credit": [args.credit], "entropy_method": args.entropy_method, "policy_method": args.policy_method}
    made: dict[str, Method] = {}
    for slot, names in named.items():
        for name in names:
            method_class = load_class(slot, name)
            if name in made:
                raise InputError(f"{slot}: expected each method once, got {name!r} twice")
            _check_needs(slot, name, method_class, args, critic)
            made[name] = _build(name, method_class, args)
    for name in args.method_kwargs:
        if name not in made:
            raise InputError(f"method_kwargs: expected settings of {list(made)}, got settings of {name!r}, not in use")
    methods = Methods(made, args.max_turns)
    _check_together(methods, args, critic)
    for method in methods.values():
        method.check(args)
    methods.model_card_text()  # a wrong name in a card fails here, not at the end of the run
    return methods


def _build(name: str, method_class: type[Any], args: Any) -> Method:
    given = args.method_kwargs.get(name, {})
    if not isinstance(given, Mapping):
        raise InputError(f"method_kwargs: expected a mapping from setting to value for {name!r}, got {given!r}")
    hints, own = get_type_hints(method_class), sorted(field.name for field in fields(method_class) if field.init)
    settings = {setting: getattr(args, setting) for setting in method_class.config_fields}
    for setting, value in given.items():
        if setting in settings:
            raise InputError(
                f"method_kwargs: expected no {name}.{setting}, which is a field of the configuration. Set {setting}."
            )
        if setting not in own:
            raise InputError(f"method_kwargs: expected one of {own} for {name!r}, got {setting!r}")
        if isinstance(value, str) and float in (hints[setting], *get_args(hints[setting])):
            with suppress(ValueError):
                given = {**given, setting: float(value)}  # YAML parses `1e-3` as a string
    try:
        signature(method_class).bind(**settings, **given)
    except TypeError as error:
        raise InputError(f"method_kwargs, {name!r}: {error}") from error
    try:
        return method_class(**settings, **given)
    except ValueError as error:
        raise InputError(f"method_kwargs, {name!r}: {error}" if given else str(error)) from error


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


def _check_needs(slot: str, name: str, method: type[Method], args: Any, critic: bool) -> None:
    if Need.VALUES in method.needs and not critic:
        raise InputError(
            f"{slot}: got {name!r}, which needs a critic, but this trainer has none. Use EPOPPOConfig and "
            "EPOPPOTrainer, or another method."
        )
    if Need.GROUPS in method.needs and (args.num_generations or 0) < 2:
        raise InputError(
            f"num_generations: expected >= 2 with {slot} {name!r}, got {args.num_generations}. {name!r} compares the "
            "episodes of a task."
        )


def _check_together(methods: Methods, args: Any, critic: bool) -> None:
    """Rejects methods that exclude each other, and fields that conflict with a ratio or a reference policy."""
    if critic and Need.VALUES not in methods[args.credit].needs:
        raise InputError(
            f"credit: expected one that uses the critic of this trainer, got {args.credit!r}. Use EPOConfig and "
            "EPOTrainer, or another credit."
        )
    if (credits := methods.overriding("credit")) != [args.credit]:
        raise InputError(f"credit: expected {args.credit!r} alone to override `credit`, got {credits}")
    ratios = methods.overriding("ratio")
    if len(ratios) > 1:
        raise InputError(f"policy_method: expected one method with `ratio`, got {ratios}")
    if len(variants := [name for name, method in methods.items() if isinstance(method, EPO)]) > 1:
        raise InputError(f"entropy_method: expected one variant of EPO, got {variants}")
    clashes = {
        "beta": args.beta != 0,  # the KL term would use the log-probabilities that the ratio changes
        "importance_sampling_level": args.importance_sampling_level != "token",
        "loss_type": args.loss_type in ("cispo", "vespo"),  # no clipped ratio
    }
    for field, is_clash in clashes.items():
        if ratios and is_clash:
            raise InputError(f"{field}: got {getattr(args, field)!r}, which is incompatible with the ratio of {ratios}")
    if methods.readers_of_reference and args.sync_ref_model:
        raise InputError(
            f"sync_ref_model: expected False with {methods.readers_of_reference[0]!r}, got True: the reference policy "
            "stays fixed for the whole run"
        )


def as_names(slot: str, given: str | Sequence[str] | None) -> list[str]:
    """Returns the value of a field, one name or several, as a list."""
    if given is not None and not isinstance(given, str | list | tuple):
        raise InputError(f"{slot}: expected a name or a list of names, got {given!r}")
    return [given] if isinstance(given, str) else list(given or ())
