"""Games that die, hang and raise on demand. A module of its own, so that a worker process imports nothing heavy."""

import os
import signal
import time
from pathlib import Path

from epo_trl.envs.toy import ToySuite, TreasureHunt


class WildSuite(ToySuite):
    """Its games obey "die", "hang", "slow", "raise", "fork", "huge" and "spoil"; files order it of resets."""

    def __init__(self, folder):
        super().__init__()
        self.folder = str(folder)

    def make_env(self):
        return WildHunt(Path(self.folder))


class WildHunt(TreasureHunt):
    def __init__(self, folder):
        super().__init__()
        self.folder = folder
        self.child, self.is_spoiled = 0, False

    def reset(self, **kwargs):
        order = self.folder / kwargs["options"]["task_id"].replace("/", "_")
        if order.exists():
            what, times = order.read_text().split()
            order.write_text(f"{what} {int(times) - 1}")
            if int(times) > 0:
                self.obey(what)
        observation, info = super().reset(**kwargs)
        return observation, {**info, "pid": os.getpid()}

    def step(self, action):
        self.obey(action)
        observation, *rest, info = super().step(action)
        info |= {"pid": os.getpid(), "child": self.child, "python_path": os.environ.get("PYTHONPATH")}
        return observation * (100_000 if action == "huge" else 1), *rest, info

    def close(self):
        if self.is_spoiled:
            raise RuntimeError("spoiled")
        (self.folder / f"closed-{id(self)}").touch()

    def obey(self, what):
        self.is_spoiled = what == "spoil"
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "hang":
            time.sleep(1000)
        if what == "slow":
            time.sleep(1.5)
        if what == "fork":
            self.child = os.fork()
            if self.child == 0:
                time.sleep(1000)
                os._exit(0)
        if what == "raise":
            raise KeyError("fact")
