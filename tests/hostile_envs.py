"""A suite whose tasks break the contract, each in its way. Worker processes can import it."""

import numpy as np

from epo_trl.envs import TextEnv
from epo_trl.envs.base import TaskSuite


def raising(make):
    def answer(observation, info):
        raise make()

    return answer


# What an environment does, and what the log must say of it.
HOSTILE = {
    "text score": (lambda o, i: (o, {**i, "score": "high"}), "info['score']: expected a number, got the str"),
    "NaN score": (lambda o, i: (o, {**i, "score": float("nan")}), "info['score']: expected a finite number"),
    "bytes": (lambda o, i: (b"old", i), "observation: expected a str, got the bytes"),
    "actions of numbers": (
        lambda o, i: (o, {**i, "admissible_actions": (1, 2)}),
        "info['admissible_actions']: expected",
    ),
    "not a tuple": (lambda o, i: 7, ""),
    "error of much text": (raising(lambda: ValueError("x" * 1_000_000)), " characters)"),
    "SystemExit": (raising(lambda: SystemExit(0)), "SystemExit: 0"),
}
# The same of what only a step returns.
HOSTILE_STEPS = {
    "reward of text": ({"reward": "1.0"}, "reward: expected a number, got the str"),
    "NaN reward": ({"reward": float("nan")}, "reward: "),
    "done is an array": ({"terminated": np.array([True, False])}, "terminated: expected a bool, got the ndarray"),
    "won is a text": ({"info": {"won": "False"}}, "info['won']: expected a bool, got the str 'False'"),
}
# What is odd and does no harm.
ODD_STEPS = {
    "reward is NumPy's": {"reward": np.float32(0.5)},
    "done is NumPy's": {"terminated": np.bool_(False)},
    "much to see": {"observation": "look " * 100_000},
    "actions in a list": {"info": {"admissible_actions": ["go"]}},
}


# Tasks -> what the log must say of them.
ABORTED = {f"{when}/{name}": says for when in ("reset", "step") for name, (_, says) in HOSTILE.items()}
ABORTED |= {f"step/{name}": says for name, (_, says) in HOSTILE_STEPS.items()}
ODD = [f"step/{name}" for name in ODD_STEPS]


class HostileEnv(TextEnv):
    def reset(self, *, seed=None, options=None):
        self.when, _, self.kind = options["task_id"].partition("/")
        return HOSTILE[self.kind][0]("start", good_info()) if self.when == "reset" else ("start", good_info())

    def step(self, action):
        info = good_info()
        answer = {"observation": "look", "reward": 0.0, "terminated": False, "truncated": False, "info": info}
        if self.kind in HOSTILE:
            observation, info, *more = HOSTILE[self.kind][0]("look", info)
            return (observation, 0.0, False, False, info, *more)
        changes = HOSTILE_STEPS[self.kind][0] if self.kind in HOSTILE_STEPS else ODD_STEPS.get(self.kind, {})
        return tuple((answer | changes | {"info": info | changes.get("info", {})}).values())


def good_info():
    return {"admissible_actions": ("go",), "won": False, "task": "go on", "task_type": "t", "score": 1.0}


class HostileSuite(TaskSuite):
    name = "hostile"
    splits = ("train",)

    def task_ids(self, split):
        return ["good", *ABORTED, *ODD]

    def make_env(self):
        return HostileEnv()
