"""What holds for every method: it runs in both worlds, its gradient goes by the batch, and it can be switched off."""

import pytest
import torch
from method_table import CASES
from test_epo_trainer import logged
from trainer_kit import (
    GROUP,
    ROWS,
    catch_step,
    difference,
    largest,
    make_config,
    make_episodes,
    make_ppo,
    make_trainer,
    saved,
)

from epo_trl.envs.alfworld import GeneratedAlfworld
from epo_trl.envs.scienceworld import ScienceWorldSuite
from epo_trl.envs.wrapper import SuiteWrapper
from epo_trl.methods import METHODS, Need, build_methods
from epo_trl.models import build_model, build_tokenizer
from epo_trl.trainers import EPOConfig, EPOPPOConfig, EPOPPOTrainer, EPOTrainer

SLOT = {name: slot for slot, names in METHODS.items() for name in names}
PPO = ("turn", "token", "outcome")


def config_of(name, settings, fields):
    """Returns the changes of a configuration that switch a method on."""
    kwargs = {"method_kwargs": {name: dict(settings)}} if settings else {}
    return {"epo_lambda": 0.0, **fields, **kwargs, SLOT[name]: name if SLOT[name] == "credit" else [name]}


def without(name):
    """Returns the changes that leave it out."""
    return {"epo_lambda": 0.0, **({} if SLOT[name] == "credit" else {SLOT[name]: []})}


def trainer_of(folder, name, changes):
    trainer = (make_ppo if name in PPO else make_trainer)(folder, **changes)
    trainer.play = lambda tasks, **kwargs: make_episodes()
    return trainer


def test_every_method_has_its_line():
    missing = SLOT.keys() - CASES.keys()
    assert not missing, f"add a line for {sorted(missing)} to tests/method_table.py: how it is switched on and off"
    assert CASES.keys() <= SLOT.keys()


@pytest.mark.parametrize("name", CASES)
def test_its_gradient_does_not_depend_on_how_the_batch_is_cut(tmp_path, name):
    steps = []
    for size in (ROWS, 2):
        ends = {"bootstrap_truncated": False} if name in PPO else {}
        changes = config_of(name, CASES[name].settings, CASES[name].fields) | ends
        trainer = trainer_of(
            tmp_path,
            name,
            {**changes, "per_device_train_batch_size": size, "gradient_accumulation_steps": ROWS // size},
        )
        steps.append(catch_step(trainer, history=[1.0, 2.0]))
    (loss, whole), (again, cut) = steps
    assert float(loss) == pytest.approx(float(again), rel=1e-4, abs=1e-6)
    assert largest(whole) > 1e-3 and difference(whole, cut) < 2e-5 * largest(whole)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.neutral is not None])
def test_switched_off_it_leaves_every_bit_as_it_is(tmp_path, name):
    case, runs = CASES[name], {}
    for kind, changes in {
        "without": {**without(name), **case.neutral_fields},
        "off": config_of(name, case.neutral, case.neutral_fields),
        "on": config_of(name, case.settings, case.fields),
    }.items():
        trainer = trainer_of(tmp_path, name, {"max_steps": 3, **changes})
        trainer.train()
        runs[kind] = {parameter: p.detach().clone() for parameter, p in trainer.model.named_parameters()}
    assert difference(runs["without"], runs["off"]) == 0.0, "a coefficient of 0 is the run without the method"
    assert difference(runs["without"], runs["on"]) > 0.0, "the settings of the table show in the weights"


@pytest.mark.parametrize("name", CASES)
def test_what_it_needs_is_asked_for(tmp_path, name):
    """Without a critic, or with groups of one, it is refused before anything is played."""
    case = CASES[name]
    changes = config_of(name, case.settings, case.fields)
    needs = build_methods(make_config(tmp_path, kind=EPOPPOConfig if name in PPO else EPOConfig, **changes),
                       critic=name in PPO)[name].needs  # fmt: skip
    if Need.VALUES in needs:
        with pytest.raises(ValueError, match="needs a critic"):
            make_config(tmp_path, **changes)
    if Need.GROUPS in needs:
        credit = {} if SLOT[name] == "credit" else {"credit": "turn"}
        with pytest.raises(ValueError, match="uses the critic of this trainer|compares the episodes of a task"):
            make_config(tmp_path, kind=EPOPPOConfig, **{**changes, **credit, "num_generations": 1})


class Lending(SuiteWrapper):
    """Lends environments that were given back: a Java process takes seconds to start."""

    def __init__(self, suite):
        super().__init__(suite)
        self.idle = []

    def make_env(self):
        if self.idle:
            return self.idle.pop()
        env = self.suite.make_env()
        env.close = lambda: self.idle.append(env)
        return env


@pytest.fixture(scope="module", params=["alfworld", "scienceworld"])
def world(request):
    """Yields a suite and the rollout's settings in it."""
    if request.param == "alfworld":
        yield GeneratedAlfworld(n_train=8, n_iid=2, n_ood=0), {"prompt_template": "compact"}
        return
    suite = Lending(ScienceWorldSuite(jvms=1))
    yield suite, {"prompt_template": "scienceworld_compact"}
    for env in suite.idle:
        type(env).close(env)


@pytest.mark.slow
@pytest.mark.games
@pytest.mark.parametrize("name", CASES)
def test_it_trains_in_both_worlds(tmp_path, world, name):
    suite, rollout = world
    case = CASES[name]
    tokenizer = build_tokenizer(["look around , open door to kitchen"])
    kind, config = (EPOPPOTrainer, EPOPPOConfig) if name in PPO else (EPOTrainer, EPOConfig)
    steps = 2 * case.fields.get("num_iterations", 1)
    args = make_config(
        tmp_path, kind=config, per_device_train_batch_size=GROUP, max_steps=steps, max_turns=2, max_prompt_length=1200,
        max_completion_length=4, eval_episodes=1, **rollout, **config_of(name, case.settings, case.fields),
    )  # fmt: skip
    model = saved(build_model(tokenizer, hidden_size=32, heads=2), tmp_path / "start")
    trainer = kind(model, suite, args=args, processing_class=tokenizer)
    trainer.train()
    trainer.close_envs()
    assert trainer.rl_step == 2 and len(logged(trainer, "loss")) == steps
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
