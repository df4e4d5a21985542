"""A suite whose tasks break the contract, each in its way. Worker processes can import it."""

import numpy as np

from epo_trl.envs import EnvError, TextEnv
from epo_trl.envs.base import TaskSuite


class Unshowable(Exception):
    def __str__(self):
        raise ValueError("no text")

    __repr__ = __str__


class ExitsWhenShown(Exception):
    def __str__(self):
        raise SystemExit(3)

    __repr__ = __str__


class OddText(str):
    def __str__(self):
        return self

    def __format__(self, spec):
        raise ValueError("no format")

    __len__ = __getitem__ = __format__


class NoBool:
    def __bool__(self):
        raise ValueError("no truth")


def cause_cycle():
    error, other = RuntimeError("in a circle"), RuntimeError("other")
    error.__cause__, other.__cause__ = other, error
    return error


def tensor():
    import torch  # the worker processes of the other tasks need none

    return torch.tensor(0.5)


def raising(make):
    def answer(observation, info):
        raise make()

    return answer


# What an environment does, and what the log must say of it.
HOSTILE = {
    "text score": (lambda o, i: (o, {**i, "score": "high"}), "info['score']: expected a number, got the str"),
    "score of digits": (lambda o, i: (o, {**i, "score": "1"}), "info['score']: expected a number, got the str"),
    "NaN score": (lambda o, i: (o, {**i, "score": float("nan")}), "info['score']: expected a finite number"),
    "infinite score": (lambda o, i: (o, {**i, "score": np.inf}), "info['score']: expected a finite number"),
    "key of a number": (
        lambda o, i: (o, {**i, "state_key": np.int64(7)}),
        "info['state_key']: expected a str, got the int64",
    ),
    "score of two": (lambda o, i: (o, {**i, "score": np.zeros(2)}), "TypeError"),
    "bytes": (lambda o, i: (b"old", i), "observation: expected a str, got the bytes"),
    "no observation": (lambda o, i: (None, i), "observation: expected a str, got the NoneType"),
    "generator": (lambda o, i: ((x for x in o), i), "generator"),
    "info list": (lambda o, i: (o, list(i)), "info: expected a dict, got the list"),
    "no info": (lambda o, i: (o, None), "info: expected a dict, got the NoneType"),
    "empty info": (lambda o, i: (o, {}), ""),
    "actions of numbers": (
        lambda o, i: (o, {**i, "admissible_actions": (1, 2)}),
        "info['admissible_actions']: expected",
    ),
    "actions in a text": (lambda o, i: (o, {**i, "admissible_actions": "go"}), "info['admissible_actions']: expected"),
    "one more value": (lambda o, i: (o, i, o), ""),
    "not a tuple": (lambda o, i: 7, ""),
    "task that cannot be shown": (lambda o, i: (o, {**i, "task": Unshowable()}), ""),
    "error without text": (raising(Unshowable), "Unshowable: (its text cannot be shown: ValueError)"),
    "error whose text exits": (raising(ExitsWhenShown), "ExitsWhenShown: (its text cannot be shown: SystemExit)"),
    "error of odd text": (raising(lambda: ValueError(OddText("odd"))), "ValueError: "),
    "error of much text": (raising(lambda: ValueError("x" * 1_000_000)), " characters)"),
    "EnvError without text": (raising(lambda: EnvError(Unshowable())), "cannot be shown"),
    "SystemExit": (raising(lambda: SystemExit(0)), "SystemExit: 0"),
    "GeneratorExit": (raising(GeneratorExit), "GeneratorExit"),
    "StopIteration": (raising(StopIteration), "StopIteration"),
    "RecursionError": (raising(RecursionError), "RecursionError"),
    "BaseException": (raising(lambda: BaseException("base")), "BaseException: base"),
    "group": (raising(lambda: BaseExceptionGroup("many", [SystemExit(1), ValueError()])), "BaseExceptionGroup: many"),
    "cause in a circle": (raising(cause_cycle), "RuntimeError: in a circle"),
}
# The same of what only a step returns.
HOSTILE_STEPS = {
    "reward of text": ({"reward": "1.0"}, "reward: expected a number, got the str"),
    "no reward": ({"reward": None}, "reward: expected a number, got the NoneType"),
    "NaN reward": ({"reward": float("nan")}, "reward: "),
    "reward of two": ({"reward": np.zeros(2)}, ""),
    "done is an array": ({"terminated": np.array([True, False])}, "terminated: expected a bool, got the ndarray"),
    "done without truth": ({"terminated": NoBool()}, "terminated: expected a bool"),
    "won without truth": ({"info": {"won": NoBool()}}, "info['won']: expected a bool"),
    "done is a text": ({"terminated": "False"}, "terminated: expected a bool, got the str 'False'"),
    "truncated is a number": ({"truncated": 0}, "truncated: expected a bool, got the int '0'"),
    "won is a text": ({"info": {"won": "False"}}, "info['won']: expected a bool, got the str 'False'"),
    "accepted without truth": ({"info": {"accepted": NoBool()}}, ""),
}
# What is odd and does no harm.
ODD_STEPS = {
    "reward is a tensor": lambda: {"reward": tensor()},
    "reward is NumPy's": {"reward": np.float32(0.5)},
    "done is NumPy's": {"terminated": np.bool_(False)},
    "observation of odd text": {"observation": OddText("look")},
    "much to see": {"observation": "look " * 100_000},
    "score of NumPy's": {"info": {"score": np.float64(3.0)}},
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
        changes = changes() if callable(changes) else changes
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
