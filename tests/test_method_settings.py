"""A method or a setting that does not fit is refused when the configuration is made, by its field and its value."""

import pytest
from method_table import SLOT
from trainer_kit import make_config

from epo_trl.trainers import EPOPPOConfig

TURNS = {"over": "turns", "end_weight": 0.1}
# A method, its settings, and the message.
SETTINGS = [
    ("grpo", {"size": 1}, "'grpo': .* unexpected keyword argument 'size'"),
    ("grpo", 1, "'grpo': .* must be a mapping, not int"),
    ("epo", {"kappa_low": 1}, "'epo': .* multiple values for keyword argument 'kappa_low'"),
    ("ea", {"alpha": "much"}, "'ea': alpha: .*got 'much'"),
    ("adaptive", {}, "'adaptive': .* missing 1 required positional argument: 'target'"),
    ("clip-v", {"mu": float("inf")}, "'clip-v': mu: expected a number >= 0.*got inf"),
    ("decision-bonus", {"weight": 1, "threshold": 1, "schedule": "cosine"}, "end_weight: expected a .*got None"),
    ("entrocraft", {"low_start": 0.8}, "low_start, high_start: expected 0 <= low_start <= .*got 0.8 and 0.7"),
    ("epo-decay", {**TURNS, "schedule": "constant"}, "end_weight: .*got 0.1"),
]
EXAMPLES = "method_examples:"
# Fields of the configuration, and the message.
FIELDS = [
    ({"credit": "gippo"}, "credit: expected 'grpo', 'gigpo', .*or 'module:Class' for your own, got 'gippo'$"),
    ({"credit": "epo"}, r"credit: .*\('epo' belongs to entropy_method\), got 'epo'"),
    ({"credit": "turn"}, "credit: .*got 'turn', which needs a critic, but this trainer has none"),
    ({"credit": EXAMPLES + "Double"}, r"credit: expected 'method_examples:Double' alone .* got \[\]"),
    ({"credit": ["grpo"]}, r"credit: expected 'grpo', .*, got \['grpo'\]"),
    ({"entropy_method": ["epo", "epo-base"]}, "entropy_method: expected one .*'epo', 'epo-base'"),
    ({"policy_method": "epo_trl.methods.grpo:GRPO"}, "credit: expected 'grpo' alone .*'epo_trl"),
    ({"policy_method": "nowhere:X"}, "policy_method: .*got 'nowhere:X', which cannot be imported .*ModuleNotFound"),
    ({"policy_method": "json:Nothing"}, "policy_method: .*got 'json:Nothing', which cannot .*Attribute"),
    ({"policy_method": EXAMPLES + "NoDataclass"}, "expected a dataclass that derives from epo_trl.methods.Method"),
    ({"policy_method": EXAMPLES + "Stubborn", "temperature": 0.7}, "temperature: expected 1 with Stubborn, got 0.7"),
    ({"method_kwargs": {"ea": {"alpha": 1}}}, "method_kwargs: expected settings of .*, got settings of 'ea'"),
    ({"policy_method": "gspo", "beta": 0.1}, "beta: .*got 0.1, .* the ratio of"),
    ({"policy_method": "gspo", "loss_type": "cispo"}, "loss_type: .*got 'cispo', .* the ratio"),
    ({"entropy_method": "aepo", "policy_method": "gspo", "num_iterations": 2}, r"policy_method: .*\['gspo'\]"),
    ({"entropy_method": "kl-cov"}, "num_iterations: .*'kl-cov', got 1: with"),
    ({"credit": "archer", "sync_ref_model": True, "beta": 0.1}, "sync_ref_model: expected False with 'archer', got"),
    ({"entropy_method": "ref-nucleus", "sync_ref_model": True, "beta": 0.1}, "sync_ref_model: .*'ref-nucleus'"),
    ({"credit": "rlvmr", "require_think": True}, "require_think: expected False with credit 'rlvmr', got True"),
    ({"credit": "rlvmr", "action_format": "tool_calls"}, "action_format: expected 'tags' with credit 'rlvmr', got"),
    ({"policy_method": "turn-mean", "loss_type": "grpo"}, "loss_type: expected one of .* 'turn-mean', got 'grpo'"),
    (
        {"credit": "gated", "method_kwargs": {"gated": {"threshold": 1, "weight": 1}}, "env_reward_weight": 0.5},
        "env_reward_weight: expected 0 with credit 'gated', got 0.5",
    ),
]


@pytest.mark.parametrize(("name", "settings", "message"), SETTINGS)
def test_a_setting_is_refused(tmp_path, name, settings, message):
    with pytest.raises(ValueError, match=f"^method_kwargs(: |, ).*{message}"):
        make_config(tmp_path, **{SLOT[name]: name}, method_kwargs={name: settings}, epo_lambda=0.5)


@pytest.mark.parametrize(("fields", "message"), FIELDS)
def test_a_method_or_a_field_is_refused(tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        make_config(tmp_path, **{"require_think": False, **fields})


def test_a_critic_that_no_credit_uses_and_groups_of_one_are_refused(tmp_path):
    for credit in ("grpo", "archer"):
        with pytest.raises(ValueError, match=f"credit: .* uses the critic .*, got '{credit}'"):
            make_config(tmp_path, kind=EPOPPOConfig, credit=credit, num_generations=4)
    with pytest.raises(ValueError, match="num_generations: expected >= 2 with policy_method 'dapo', got 1"):
        make_config(tmp_path, kind=EPOPPOConfig, policy_method="dapo", num_generations=1)


def test_aepo_takes_a_ratio_per_turn_where_it_keeps_no_clipped_token(tmp_path):
    settings = {"method_kwargs": {"aepo": {"keep_clipped": False}}, "num_iterations": 2}
    make_config(tmp_path, entropy_method="aepo", policy_method="gspo", **settings)
