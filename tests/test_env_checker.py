"""Each check of the checker is proven by an environment that breaks exactly that."""

import copy
import itertools
import math
import re

import pytest

from epo_trl.envs.checker import EnvCheckError, check_task_suite, check_text_env
from epo_trl.envs.testing import EnvContract
from epo_trl.envs.toy import ToySuite, TreasureHunt

TASKS = ("train/0", "iid/1")
COUNTER = itertools.count()


class Broken(TreasureHunt):
    """A TreasureHunt whose results pass through `spoil_reset` and `spoil_step`."""

    def spoil_reset(self, observation, info):
        return observation, info

    def spoil_step(self, action, observation, reward, terminated, truncated, info):
        return observation, reward, terminated, truncated, info

    def reset(self, *, seed=None, options=None):
        return self.spoil_reset(*super().reset(seed=seed, options=options))

    def step(self, action):
        return self.spoil_step(action, *super().step(action))


def on_reset(spoil):
    return type("BrokenReset", (Broken,), {"spoil_reset": lambda self, observation, info: spoil(observation, info)})


def on_step(spoil):
    return type("BrokenStep", (Broken,), {"spoil_step": lambda self, action, *result: spoil(action, *result)})


def on_info(spoil):
    """Spoils the info of reset and step alike."""
    return type(
        "BrokenInfo",
        (Broken,),
        {
            "spoil_reset": lambda self, observation, info: (observation, spoil(info)),
            "spoil_step": lambda self, action, *result: (*result[:4], spoil(result[4])),
        },
    )


def telling(**changes):
    return on_info(lambda info: {**info, **changes})


def without(info, key):
    return {name: value for name, value in info.items() if name != key}


class StepsBeforeReset(Broken):
    def step(self, action):
        return ("", 0.0, False, False, {}) if self._state is None else super().step(action)


class TakesAnyTask(Broken):
    def reset(self, *, seed=None, options=None):
        options = options or {"task_id": "train/0"}
        known = options["task_id"] in TASKS
        return super().reset(seed=seed, options=options if known else {"task_id": "train/0"})


class NeedsNoTask(Broken):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed, options=options or {"task_id": "train/0"})


class SharesItsInfo(Broken):
    def _info(self, state):
        self.info = getattr(self, "info", {})
        self.info.update(super()._info(state))
        return self.info


class SharesItsState(Broken):
    shared = None

    @property
    def _state(self):
        return SharesItsState.shared

    @_state.setter
    def _state(self, state):
        if state is not None or SharesItsState.shared is None:
            SharesItsState.shared = state


class RemembersEpisodes(Broken):
    episodes = 0

    def spoil_reset(self, observation, info):
        self.episodes += 1
        return f"{observation} (episode {self.episodes})", info


class NoisySteps(Broken):
    def spoil_step(self, action, observation, *rest):
        return f"{observation} {next(COUNTER)}", *rest


class StrangeInstances(Broken):
    def __init__(self):
        super().__init__()
        self.number = next(COUNTER)

    def spoil_reset(self, observation, info):
        return f"{observation} {self.number}", info


class ListsNothing(Broken):
    """Keeps the contract of an environment whose actions are too many to be listed."""

    def spoil_reset(self, observation, info):
        return observation, {**info, "admissible_actions": None, "accepted": True}

    def spoil_step(self, action, observation, *rest):
        info = {**rest[-1], "admissible_actions": None, "accepted": observation != "Nothing happens."}
        return observation, *rest[:-1], info


class AcceptsEverything(ListsNothing):
    def spoil_step(self, action, *result):
        *rest, info = super().spoil_step(action, *result)
        return *rest, {**info, "accepted": True}


class SometimesLists(ListsNothing):
    def spoil_step(self, action, *result):
        return *result[:4], {**result[4], "accepted": True}


class SharesItsStateWithCopies(Broken):
    def copy(self):
        return copy.copy(self)


class CopiesItsStart(Broken):
    def reset(self, **kwargs):
        self._start = kwargs
        return super().reset(**kwargs)

    def copy(self):
        twin = type(self)()
        twin.reset(**self._start)
        return twin


def looks_or_opens(info, rng):
    return rng.choice([f"open {box}" for box in info["unvisited"]] + ["look"])


BROKEN = {
    "step before reset was accepted": StepsBeforeReset,
    "unknown task id was accepted": TakesAnyTask,
    "reset without a task id was accepted": NeedsNoTask,
    "reset of 'train/0' returned 'You are": on_reset(lambda observation, info: observation),
    "reset of 'train/0' returned ('You are": on_reset(lambda observation, info: (observation, 0.0, info)),
    "info['won'] is True before the first action": on_reset(
        lambda observation, info: (observation, {**info, "won": True})
    ),
    "info has no 'task_type'": on_info(lambda info: without(info, "task_type")),
    "info['task'] is ''": telling(task=""),
    "info['admissible_actions'] is [": telling(admissible_actions=["open", "look"]),
    "info['admissible_actions'] is ('open', ' look')": telling(admissible_actions=("open", " look")),
    "info['admissible_actions'] is ('look', 'look')": telling(admissible_actions=("look", "look")),
    "admissible_actions is empty": telling(admissible_actions=()),
    "') in 'train/0' returned ('": on_step(lambda action, *result: result[:4]),
    "the observation is ''": on_step(lambda action, observation, *rest: ("", *rest)),
    "info['won'] is True, but terminated is False": on_step(
        lambda action, *result: (*result[:2], False, False, {**result[4], "won": True})
    ),
    "info lacks holding, which reset returned": on_step(
        lambda action, *result: (*result[:4], without(result[4], "holding"))
    ),
    "info['task'] changed": on_step(lambda action, *result: (*result[:4], {**result[4], "task": "another"})),
    "won the game": on_step(
        lambda action, *result: (
            (result[0], 1.0, True, False, {**result[4], "won": True}) if action.startswith("fly") else result
        )
    ),
    "changed the info that an earlier call had returned": SharesItsInfo,
    "differs when another environment plays": SharesItsState,
    "differs in the same environment, after an episode": RemembersEpisodes,
    "differs in another environment": StrangeInstances,
    "after the same actions: observation was": NoisySteps,
    "differs while a copy plays other actions": SharesItsStateWithCopies,
    "differs in a copy after the same actions": CopiesItsStart,
}


LISTING_NOTHING = {
    "'fly to the moon') in 'train/0': info['accepted'] is True": AcceptsEverything,
    "is sometimes None and sometimes a tuple": SometimesLists,
}


def with_its_fix(message):
    return pytest.raises(EnvCheckError, match=f"(?s){re.escape(message)}.*Fix: .")


@pytest.mark.parametrize(("message", "env_class"), {**BROKEN, **LISTING_NOTHING}.items())
def test_a_broken_environment_is_told_what_is_wrong_and_how_to_mend_it(message, env_class):
    SharesItsState.shared = None
    player = looks_or_opens if env_class in LISTING_NOTHING.values() else None
    with with_its_fix(message):
        check_text_env(env_class(), TASKS, make_env=env_class, player=player)


def test_an_environment_that_lists_nothing_can_be_checked_with_a_player():
    check_text_env(ListsNothing(), TASKS, make_env=ListsNothing, player=looks_or_opens)
    with pytest.raises(EnvCheckError, match="player="):
        check_text_env(ListsNothing(), TASKS, make_env=ListsNothing)


@pytest.mark.parametrize("spoil", [{"won": 0}, {"score": math.nan}, {"admissible_actions": {"go"}}, {"state_key": 7}])
def test_what_would_abort_an_episode_is_named_with_its_call(spoil):
    env_class = telling(**spoil)
    with pytest.raises(EnvCheckError, match=rf"^reset of 'train/0': info\['{next(iter(spoil))}'\]"):
        check_text_env(env_class(), TASKS)


def test_a_noisy_engine_may_say_so():
    check_text_env(NoisySteps(), TASKS, make_env=NoisySteps, deterministic=False)


class BrokenSuite(ToySuite):
    def task_ids(self, split):
        return self.spoil(split, super().task_ids(split))


SUITES = {
    "has no name": {"name": ""},
    ".splits is ('iid', 'train')": {"splits": ("iid", "train")},
    "has no task in the split 'train'": {"spoil": lambda self, split, ids: ()},
    "two different lists": {"spoil": lambda self, split, ids: (*ids, f"train/{next(COUNTER)}")},
    "did not raise EnvError": {
        "task_ids": lambda self, split: ToySuite.task_ids(self, split) if split in self.splits else ()
    },
    "occurs twice": {"spoil": lambda self, split, ids: [task_id.split("/")[1] for task_id in ids]},
}


@pytest.mark.parametrize(("message", "members"), SUITES.items())
def test_a_broken_suite_is_told_what_is_wrong_and_how_to_mend_it(message, members):
    suite = type("Spoilt", (BrokenSuite,), {"spoil": lambda self, split, ids: ids, **members})()
    with with_its_fix(message):
        check_task_suite(suite)


class ChosenByHash(ToySuite):
    def task_ids(self, split):
        return sorted(super().task_ids(split), key=hash)


def test_a_choice_by_hash_is_found_by_the_other_process():
    contract = type("Contract", (EnvContract,), {"make_suite": lambda self: ChosenByHash()})()
    with pytest.raises(AssertionError, match="two processes made different lists"):
        contract.test_another_process_sees_the_same_lists_and_starts()
