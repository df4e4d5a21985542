"""Games that die, hang and raise on demand. A module of its own, so that a worker process imports nothing heavy."""

import os
import signal
import time
from pathlib import Path

from epo_trl.envs.toy import ToySuite, TreasureHunt


class WildSuite(ToySuite):
    """Its games obey "die", "hang", "slow", "raise" and "fork"; files order it of resets."""

    def __init__(self, folder):
        super().__init__()
        self.folder = str(folder)

    def make_env(self):
        return WildHunt(Path(self.folder))


class WildHunt(TreasureHunt):
    def __init__(self, folder):
        super().__init__()
        self.folder = folder
        self.child = 0

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
        *result, info = super().step(action)
        return *result, {**info, "pid": os.getpid(), "child": self.child}

    def obey(self, what):
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
