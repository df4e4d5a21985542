"""What holds for every method: it ignores the cut of a batch, resumes and can be switched off."""

import pytest
from method_batches import check_two_ranks
from method_table import CASES, PPO, SLOT, config_of, trainer_of, without
from run_kit import assert_bit_equal, weights
from test_docs import NOT_METRICS, documented_metrics, matches
from trainer_kit import ROWS, catch_step, difference, largest, make_config

from epo_trl.methods import Method, Methods, build_methods
from epo_trl.methods.registry import load_class
from epo_trl.trainers import EPOConfig, EPOPPOConfig

# `ref-nucleus` marks tokens by the reference's scores, which batches made by hand do not have.
MODIFYING = [name for name in CASES if load_class(SLOT[name], name).modify_advantages is not Method.modify_advantages]
MODIFYING.remove("ref-nucleus")
KEEPS_STATE = [name for name in CASES if load_class(SLOT[name], name).state_dict is not Method.state_dict]
# The first method of each kind of state, then a critic, a tally, groups played again, a random draw and a reference.
RESUMED = [*{load_class(SLOT[name], name).state_dict: name for name in reversed(KEEPS_STATE)}.values()]
RESUMED += ["turn", "gated", "dapo", "clip-cov", "ref-nucleus"]


def method_of(folder, name):
    """Returns the method with the settings of its line."""
    changes = config_of(name, CASES[name].settings, CASES[name].fields)
    args = make_config(folder, kind=EPOPPOConfig if name in PPO else EPOConfig, **changes)
    return build_methods(args, critic=name in PPO)[name]


def remembered(method):
    """Returns all that a method holds besides its tally, of which every checkpoint has a copy."""
    return str({**vars(method), "tally": None})


def test_every_method_has_its_line():
    missing = SLOT.keys() - CASES.keys()
    assert not missing, f"add a line for {sorted(missing)} to tests/method_table.py: how it is switched on and off"
    assert CASES.keys() <= SLOT.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_its_gradient_does_not_depend_on_how_the_batch_is_cut(tmp_path, name):
    """One without a state of its own remembers nothing that a checkpoint would lack, and all metrics are documented."""
    steps = []
    for size in (ROWS, 2):
        changes = config_of(name, CASES[name].settings, CASES[name].fields)
        trainer = trainer_of(
            tmp_path,
            name,
            {**changes, "per_device_train_batch_size": size, "gradient_accumulation_steps": ROWS // size},
        )
        before = remembered(trainer.methods[name])
        steps.append(catch_step(trainer, history=[1.0, 2.0]))
        assert name in KEEPS_STATE or remembered(trainer.methods[name]) == before
    documented = documented_metrics()
    logged = {key for line in trainer.state.log_history for key in line} - NOT_METRICS
    assert [key for key in logged if not any(matches(key, known) for known in documented)] == []
    own = {key for key in documented if key.startswith(f"{name}/")} - {"kl-cov/marked"}  # of a second update
    assert own <= logged
    (loss, whole), (again, cut) = steps
    assert float(loss) == pytest.approx(float(again), rel=1e-4, abs=1e-6)
    assert largest(whole) > 1e-3 and difference(whole, cut) < 2e-5 * largest(whole)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Returns a function that gives the weights after three steps; most methods share the run without them."""
    runs = {}

    def train(name, changes):
        key = name in PPO, repr(sorted(changes.items()))
        if key not in runs:
            trainer = trainer_of(tmp_path_factory.mktemp(name), name, {"max_steps": 3, **changes})
            trainer.train()
            runs[key] = weights(trainer)
        return runs[key]

    return train


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.neutral is not None])
def test_switched_off_it_leaves_every_bit_as_it_is(trained, name):
    case = CASES[name]
    plain = trained(name, {**without(name), **case.neutral_fields})
    off = trained(name, config_of(name, case.neutral, case.neutral_fields))
    on = trained(name, config_of(name, case.settings, case.fields))
    assert difference(plain, off) == 0.0, "a coefficient of 0 is the run without the method"
    shared = {parameter: on[parameter] for parameter in plain}  # it may add a head to the critic
    assert difference(plain, shared) > 0.0, "the settings of the table show in the weights"


@pytest.mark.parametrize("cut", [2, 4])
@pytest.mark.parametrize("name", MODIFYING)
def test_two_ranks_modify_advantages_as_one_does(tmp_path, name, cut):
    """A cut at 2 splits the first group, and leaves ranks of unequal size, which the draw of `clip-cov` never has."""
    if (name, cut) == ("clip-cov", 2):
        return
    check_two_ranks(method_of(tmp_path, name), cut=cut)


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_it_resumes_bit_equal_inside_a_batch(tmp_path, name):
    """Two optimizer steps on a batch, or four; the checkpoint lies between them."""
    changes = {**config_of(name, CASES[name].settings, CASES[name].fields), "per_device_train_batch_size": 4,
               "steps_per_generation": 2, "max_steps": 6, "save_strategy": "steps", "save_steps": 3,
               "learning_rate": 0.05, "trust_checkpoint": True}  # fmt: skip
    straight, resumed = (trainer_of(tmp_path / folder, name, changes) for folder in ("run", "resumed"))
    straight.train()
    before = weights(resumed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert_bit_equal(weights(straight), weights(resumed))
    assert difference(before, weights(resumed)) > 1e-3
    logs = [
        [
            sorted((key, str(x)) for key, x in line.items() if not key.startswith(("time/", "train_", "step_time")))
            for line in lines
        ]
        for lines in (straight.state.log_history, resumed.state.log_history)
    ]
    assert len(logs[0]) == 7 and logs[0] == logs[1]


@pytest.mark.parametrize("name", CASES)
def test_its_text_in_the_model_card_has_its_settings(tmp_path, name):
    method = method_of(tmp_path, name)
    text = Methods({name: method}, 3).model_card_text()
    assert text not in (type(method).__name__, "") and "{" not in text
