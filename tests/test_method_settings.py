"""A setting that a method does not take is refused when the configuration is made, with its name and its value."""

import math

import pytest
from method_table import SLOT
from trainer_kit import make_config

TURNS = {"over": "turns", "end_weight": 0.1}
GATE = {"threshold": 1, "weight": 1}
# A method, its settings, and the message.
SETTINGS = [
    ("aem", {"temperature": -1}, "temperature: expected a number >= 0.*got -1"),
    ("empg", {"k": math.inf}, "k: expected a number >= 0.*got inf"),
    ("empg", {"zeta": -0.1}, "zeta: expected a number >= 0.*got -0.1"),
    ("aepo", {"alpha": -1}, "alpha: expected a number >= 0.*got -1"),
    ("archer", {"gamma": 1.1}, "gamma: expected a number from 0 to 1.*got 1.1"),
    ("archer", {"polyak": 0.0}, "polyak: expected a number > 0 and <= 1.*got 0.0"),
    ("archer", {"learning_rate": 0.0}, "learning_rate: expected a number > 0.*got 0.0"),
    ("archer", {"critic_epochs": 0}, "critic_epochs: expected an integer >= 1.*got 0"),
    ("archer", {"replay_size": 0}, "replay_size: expected an integer >= 1.*got 0"),
    ("archer", {"batch_size": 0}, "batch_size: expected an integer >= 1.*got 0"),
    ("archer", {"hidden_size": 0}, "hidden_size: expected an integer >= 1.*got 0"),
    ("archer", {"warmup_rl_steps": -1}, "warmup_rl_steps: expected an integer >= 0.*got -1"),
    ("clip-cov", {"share": 1.5}, "share: expected a number from 0 to 1.*got 1.5"),
    ("clip-cov", {"low": 5.0}, "low, high: expected numbers with 0 <= low < high.*got 5.0 and 5.0"),
    ("kl-cov", {"share": -1}, "share: expected a number from 0 to 1.*got -1"),
    ("kl-cov", {"coefficient": -1}, "coefficient: expected a number >= 0.*got -1"),
    ("dapo", {"outcome": "score"}, "outcome: expected one of.*got 'score'"),
    ("dapo", {"overlong_share": 0}, "overlong_share: expected a number > 0 and <= 1.*got 0"),
    ("dapo", {"overlong_penalty": -1}, "overlong_penalty: expected a number >= 0.*got -1"),
    ("decision-bonus", {"weight": 0.1}, "threshold, top_share: expected exactly one of them, got None and None"),
    ("decision-bonus", {"weight": 0.1, "threshold": 1, "top_share": 0.1}, "threshold, top_share: .*got 1 and 0.1"),
    ("decision-bonus", {"weight": -1, "threshold": 1}, "weight: expected a number >= 0.*got -1"),
    ("decision-bonus", {"weight": 0.1, "threshold": "-1e0"}, "threshold: expected a number >= 0.*got -1.0"),
    ("decision-bonus", {"weight": 0.1, "top_share": 0}, "top_share: expected a number > 0 and <= 1.*got 0"),
    ("decision-bonus", {"weight": 0.1, "top_share": 1.1}, "top_share: .*got 1.1"),
    ("decision-bonus", {**GATE, "schedule": "cosine"}, "end_weight: expected a number >= 0.*got None"),
    ("entrocraft", {"low_start": 0.8}, "low_start, high_start: expected 0 <= low_start <= .*got 0.8 and 0.7"),
    ("entrocraft", {"high_end": 0.3}, "low_end, high_end: expected 0 <= low_end <= high_end.*got 0.4 and 0.3"),
    ("ea", {"alpha": -1}, "alpha: expected a number >= 0.*got -1"),
    ("ea", {"kappa": 1}, "kappa: expected a number > 1.*got 1"),
    ("adaptive", {"target": math.nan}, "target: expected a number >= 0.*got nan"),
    ("adaptive", {"target": 1, "delta": -1}, "delta: expected a number >= 0.*got -1"),
    ("adaptive", {"target": 1, "maximum": -1}, "maximum: expected a number >= 0.*got -1"),
    ("adaptive", {"target": 1, "start": 0.1}, r"start: expected a number <= maximum \(0.005\).*got 0.1"),
    ("clip-b", {"mu": -1}, "mu: expected a number >= 0.*got -1"),
    ("clip-v", {"mu": "inf"}, "mu: expected a number >= 0.*got inf"),
    ("clip-v", {"max_share": 1.5}, "max_share: expected a number from 0 to 1.*got 1.5"),
    ("epo-decay", {**TURNS, "over": "time"}, "over: expected one of.*got 'time'"),
    ("epo-decay", {**TURNS, "end_weight": 9}, "end_weight: expected at most.*got 9"),
    ("epo-decay", {**TURNS, "schedule": "constant"}, "end_weight: .*got 0.1"),
    ("epo-constant-beta", {"beta_k": -1}, "beta_k: expected a number >= 0.*got -1"),
    ("gated", {"threshold": math.nan, "weight": 1}, "threshold: expected a finite.*got nan"),
    ("gated", {"threshold": 1, "weight": -1}, "weight: expected a number >= 0.*got -1"),
    ("gigpo", {"gamma": 1.1}, "gamma: expected a number from 0 to 1.*got 1.1"),
    ("gigpo", {"step_weight": -1}, "step_weight: .*got -1"),
    ("gigpo", {"anchor": "text"}, "anchor: expected one of 'observation', 'state', got 'text'"),
    ("hgpo", {"anchor_turns": 0}, "anchor_turns: expected an integer >= 1, got 0"),
    ("hgpo", {"alpha": math.inf}, "alpha: expected a finite number, got inf"),
    ("gagpo", {"gae_lambda": 1.5}, "gae_lambda: expected a number from 0 to 1, got 1.5"),
    ("gagpo", {"gamma": -1}, "gamma: expected a number from 0 to 1, got -1"),
    ("graph-gpo", {"omega": 1}, "omega: expected a number > 0 and < 1, got 1"),
    ("graph-gpo", {"step_weight": -1}, "step_weight: expected a number >= 0, got -1"),
    ("high-entropy", {"share": 1.5}, "share: expected a number > 0 and <= 1.*got 1.5"),
    ("high-entropy", {"share": 0}, "share: expected a number > 0 and <= 1.*got 0"),
    ("ref-nucleus", {"cut": 0.5}, "cut: expected a number >= 0.001 and < 0.5.*got 0.5"),
    ("ref-nucleus", {"cut": 0.0}, "cut: .*got 0.0"),
    ("ref-nucleus", {"weight": -1.0}, "weight: expected a number >= 0.*got -1.0"),
    ("ref-nucleus", {"schedule": "linear"}, "end_weight: expected a number >= 0 with schedule 'linear'.*got None"),
    ("ref-nucleus", {"schedule": "step"}, "schedule: expected one of.*got 'step'"),
    ("rlvmr", {"alpha": 1.5}, "alpha: .*got 1.5"),
    ("rlvmr", {"format_penalty": -1}, "format_penalty: expected a number >= 0.*got -1"),
    ("siren", {"weight": -1.0}, "weight: expected a number >= 0.*got -1.0"),
    ("siren", {"top_p": 0.0}, "top_p: expected a number > 0 and <= 1.*got 0.0"),
    ("siren", {"top_p": 1.1}, "top_p: .*got 1.1"),
    ("siren", {"quantile": 1.0}, "quantile: expected a number >= 0 and < 1.*got 1.0"),
    ("siren", {"anchor": -0.1}, "anchor: expected a number >= 0.*got -0.1"),
    ("steer", {"min_weight": 0.0}, "min_weight: expected a number > 0 and <= 1.*got 0.0"),
    ("steer", {"min_weight": 1.2}, "min_weight: expected a number > 0 and <= 1.*got 1.2"),
    ("steer", {"floor": 0.0}, "floor: expected a number > 0.*got 0.0"),
    ("turn-mean", {"over": "tokens"}, "over: expected one of.*got 'tokens'"),
    ("variance-filter", {"share": 0}, "share: expected a number > 0 and <= 1, got 0"),
    ("variance-filter", {"share": 1.1}, "share: .*got 1.1"),
    ("variance-filter", {"most": 0}, "most: expected an integer >= 1 or null, got 0"),
]
# A method, its settings, fields of the configuration, and the message.
FIELDS = [
    ("aepo", {}, {"loss_type": "cispo", "epsilon_high": 5.0}, "loss_type: .*'cispo', which has no upper clip"),
    ("aepo", {}, {"importance_sampling_level": "sequence"}, "importance_sampling_level: expected .* and 'sequence'"),
    ("aepo", {}, {"policy_method": "gspo", "num_iterations": 2}, r"policy_method, .*: .*got \['gspo'\] and 'token'"),
    ("aepo", {}, {"top_entropy_quantile": 0.2}, "top_entropy_quantile: expected 1.0, got 0.2"),
    ("archer", {"seed": 1}, {}, "method_kwargs: expected no archer.seed, .*Set seed"),
    ("archer", {}, {"sync_ref_model": True, "beta": 0.1}, "sync_ref_model: expected False with 'archer', got True"),
    ("dapo", {"max_completion_length": 9}, {}, "dapo.max_completion_length, which is a field"),
    ("decision-bonus", {}, {}, "expected weight for 'decision-bonus', got {}"),
    ("decision-bonus", {**GATE, "threshold": "low"}, {}, "expected a number for decision-bonus.threshold, got 'low'"),
    ("epo-base", {}, {"entropy_method": ["epo", "epo-base"]}, "entropy_method: expected one .*'epo' and 'epo-base'"),
    ("epo-decay", {}, {}, "method_kwargs: expected over, end_weight for 'epo-decay', got {}"),
    ("epo-decay", {**TURNS, "max_turns": 9}, {}, "epo-decay.max_turns, which is a field"),
    ("epo-constant-beta", {}, {}, "expected beta_k for 'epo-constant-beta', got {}"),
    ("gated", {"weight": 1}, {}, "expected threshold for 'gated', got"),
    ("gated", GATE, {"env_reward_weight": 0.5}, "env_reward_weight: expected 0 with credit 'gated', got 0.5"),
    ("high-entropy", {}, {"top_entropy_quantile": 0.2}, "top_entropy_quantile: expected 1.0 with 'high-entropy'.*0.2"),
    ("ref-nucleus", {}, {"sync_ref_model": True, "beta": 0.1}, "sync_ref_model: expected False .*'ref-nucleus'.*True"),
    ("rlvmr", {}, {"require_think": True}, "require_think: expected False with credit 'rlvmr', got True"),
    ("turn-mean", {}, {"loss_type": "grpo"}, "loss_type: expected one of .*'dapo'.* with 'turn-mean', got 'grpo'"),
]


@pytest.mark.parametrize(("name", "settings", "message"), SETTINGS)
def test_a_setting_is_refused(tmp_path, name, settings, message):
    """With the other settings as the method takes them."""
    fields = {"num_iterations": 2, "require_think": False, "epo_lambda": 0.5}
    with pytest.raises(ValueError, match=f"^method_kwargs, '{name}': {message}"):
        make_config(tmp_path, **{SLOT[name]: name}, method_kwargs={name: settings}, **fields)


@pytest.mark.parametrize(("name", "settings", "fields", "message"), FIELDS)
def test_a_field_or_a_missing_setting_is_refused(tmp_path, name, settings, fields, message):
    with pytest.raises(ValueError, match=message):
        make_config(tmp_path, **{SLOT[name]: name, "method_kwargs": {name: settings} if settings else {}, **fields})


def test_aepo_takes_other_losses_where_it_keeps_no_clipped_token(tmp_path):
    for name, _, fields, _ in FIELDS:
        if name == "aepo":
            make_config(tmp_path, entropy_method="aepo", method_kwargs={"aepo": {"keep_clipped": False}}, **fields)
