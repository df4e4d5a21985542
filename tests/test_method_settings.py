"""A setting that a method does not take is refused when the configuration is made, with its name and its value."""

import pytest
from method_table import SLOT
from trainer_kit import make_config

TURNS = {"over": "turns", "end_weight": 0.1}
GATE = {"threshold": 1, "weight": 1}
# A method, its settings, and the message.
SETTINGS = [
    ("clip-cov", {"low": 5.0}, "low, high: expected numbers with 0 <= low < high.*got 5.0 and 5.0"),
    ("decision-bonus", {"weight": 0.1}, "threshold, top_share: expected exactly one of them, got None and None"),
    ("decision-bonus", {"weight": 0.1, "threshold": 1, "top_share": 0.1}, "threshold, top_share: .*got 1 and 0.1"),
    ("decision-bonus", {"weight": 0.1, "threshold": "-1e0"}, "threshold: expected a number >= 0.*got -1.0"),
    ("decision-bonus", {**GATE, "schedule": "cosine"}, "end_weight: expected a number >= 0.*got None"),
    ("entrocraft", {"low_start": 0.8}, "low_start, high_start: expected 0 <= low_start <= .*got 0.8 and 0.7"),
    ("entrocraft", {"high_end": 0.3}, "low_end, high_end: expected 0 <= low_end <= high_end.*got 0.4 and 0.3"),
    ("adaptive", {"target": 1, "start": 0.1}, r"start: expected a number <= maximum \(0.005\).*got 0.1"),
    ("clip-v", {"mu": "inf"}, "mu: expected a number >= 0.*got inf"),
    ("epo-decay", {**TURNS, "end_weight": 9}, "end_weight: expected at most.*got 9"),
    ("epo-decay", {**TURNS, "schedule": "constant"}, "end_weight: .*got 0.1"),
    ("ref-nucleus", {"schedule": "linear"}, "end_weight: expected a number >= 0 with schedule 'linear'.*got None"),
]
# A method, its settings, fields of the configuration, and the message.
FIELDS = [
    ("aepo", {}, {"loss_type": "cispo", "epsilon_high": 5.0}, "loss_type: got 'cispo', with which 'aepo'"),
    ("aepo", {}, {"importance_sampling_level": "sequence"}, "importance_sampling_level: got 'sequence', with"),
    ("aepo", {}, {"policy_method": "gspo", "num_iterations": 2}, r"policy_method: got \['gspo'\], with"),
    ("aepo", {}, {"top_entropy_quantile": 0.2}, "top_entropy_quantile: got 0.2, with"),
    ("archer", {"seed": 1}, {}, "method_kwargs: expected no archer.seed, .*Set seed"),
    ("archer", {}, {"sync_ref_model": True, "beta": 0.1}, "sync_ref_model: expected False with 'archer', got True"),
    ("dapo", {"max_completion_length": 9}, {}, "dapo.max_completion_length, which is a field"),
    ("epo-base", {}, {"entropy_method": ["epo", "epo-base"]}, "entropy_method: expected one .*'epo', 'epo-base'"),
    ("epo-decay", {}, {}, "'epo-decay': missing a required argument: 'over'"),
    ("epo-decay", {**TURNS, "max_turns": 9}, {}, "epo-decay.max_turns, which is a field"),
    ("gated", GATE, {"env_reward_weight": 0.5}, "env_reward_weight: expected 0 with credit 'gated', got 0.5"),
    ("variance-filter", {}, {"loss_type": "bnpo"}, "loss_type: expected .*'variance-filter', got 'bnpo'"),
    ("ref-nucleus", {}, {"sync_ref_model": True, "beta": 0.1}, "sync_ref_model: expected False .*'ref-nucleus'.*True"),
    ("rlvmr", {}, {"require_think": True}, "require_think: expected False with credit 'rlvmr', got True"),
    (
        "rlvmr",
        {},
        {"require_think": False, "action_format": "tool_calls"},
        "action_format: expected 'tags' with credit 'rlvmr', got 'tool_calls'",
    ),
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
