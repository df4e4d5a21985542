"""A complete custom environment: find a hidden number. Copy this folder and change it (docs/environments.md)."""

import random
from dataclasses import dataclass

from epo_trl.bounds import option
from epo_trl.envs import EnvError, TaskSuite, TextEnv, split_task_id
from epo_trl.evaluation import Protocol, register_protocol

TASKS = {"train": 200, "iid": 20, "ood": 20}
# The rules of an evaluation, by name: `epo-trl evaluate` reports success under one.
PROTOCOL = register_protocol(
    Protocol(name="guess4", max_turns=4, history_length=4, temperature=1.0, invalid_action="skip")
)


class GuessEnv(TextEnv):
    def __init__(self, size: int):
        self.size, self.hidden = size, 0

    def reset(self, *, seed=None, options=None):
        task_id = (options or {}).get("task_id")
        split_task_id(task_id, TASKS)  # raises EnvError for an unknown id
        self.hidden = random.Random(task_id).randint(1, self.size)  # the same in every process
        return f"The number is hidden between 1 and {self.size}.", self.info(won=False)

    def step(self, action: str):
        if not self.hidden:
            raise EnvError("step: call reset(options={'task_id': ...}) first")
        number = int(action.removeprefix("guess ")) if action in self.info(won=False)["admissible_actions"] else 0
        won = number == self.hidden
        answer = "Right!" if won else "Too low." if number < self.hidden else "Too high."
        return answer if number else "Nothing happens.", float(won), won, False, self.info(won)

    def info(self, won: bool):
        actions = tuple(f"guess {number}" for number in range(1, self.size + 1))
        return {"admissible_actions": actions, "won": won, "task": "find the number", "task_type": "guess"}


class GuessSuite(TaskSuite):
    name = "guess"
    protocol = PROTOCOL.name

    def __init__(self, size: int = 4):
        self.size = size

    def task_ids(self, split: str):
        self.check_split(split)
        return [f"{split}/{number}" for number in range(TASKS[split])]

    def make_env(self):
        return GuessEnv(self.size)

    def make_expert(self, seed: int = 0):  # needed for the warm start and for `tiny` only
        return Expert()


class Expert:
    def reset(self, observation, info):
        self.left = list(info["admissible_actions"])

    def act(self, observation, info):
        return "I try the next one.", self.left.pop(0)


@dataclass
class GuessArguments:  # each field is an option of the recipes and a line of the YAML
    numbers: int = option(4, "Number of hidden numbers to choose from.")

    def make_suite(self):
        return GuessSuite(self.numbers)
