"""A server of OpenEnv: `python openenv_server.py PORT`. The game: say the colour that the seed hides."""

import sys
import time

import uvicorn
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

COLOURS = ("red", "green", "blue")


class Say(Action):
    message: str = Field(max_length=100)


class Seen(Observation):
    messages: list[dict] = []
    accepted: bool = True


class Colours(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.hidden, self.turns = "", 0

    def reset(self, seed=None, episode_id=None, hint="", **kwargs):
        self._obey(hint)
        self.hidden, self.turns = COLOURS[seed % 3], 0
        return self._seen(f"Which colour is it?{hint}")

    def step(self, action, timeout_s=None, **kwargs):
        self.turns += 1
        self._obey(action.message)
        if action.message not in COLOURS:
            return self._seen("That is no colour.", accepted=False)
        right = action.message == self.hidden
        return self._seen("Yes." if right else "No.", done=right or self.turns == 3, reward=float(right))

    def _obey(self, word):
        if word == "crash":
            raise RuntimeError("the colours have run")
        if word == "wait":
            time.sleep(0.5)

    def _seen(self, text, **rest):
        return Seen(messages=[{"content": "old"}, {"content": text}], **rest)

    @property
    def state(self):
        return State(step_count=self.turns)


if __name__ == "__main__":
    app = create_fastapi_app(Colours, Say, Seen, max_concurrent_envs=int(sys.argv[2]))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
