"""Environments of text for Gymnasium, as its documentation writes them. `gymnasium.make("gym_games:Keys-v0")`."""

import string

import gymnasium
import numpy as np
from gymnasium import spaces

COLOURS = ("red", "green", "blue")
LETTERS = string.ascii_letters + string.digits + string.punctuation + " "


class Keys(gymnasium.Env):
    """Which key opens the door? A text for an action; what is said depends on the settings."""

    observation_space = spaces.Text(200, charset=LETTERS)
    action_space = spaces.Text(40, charset=string.ascii_lowercase + " ")

    def __init__(self, listing=True, judging=False):
        self.listing, self.judging = listing, judging

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.right = COLOURS[self.np_random.integers(len(COLOURS))]
        return f"A door with a {self.np_random.choice(['big', 'small'])} lock.", self._said(True)

    def step(self, action):
        key = action.removeprefix("try ").removesuffix(" key")
        known = action == f"try {key} key" and key in COLOURS
        opened = known and key == self.right
        text = "It opens." if opened else "It does not fit." if known else "You see no such key."
        return text, self.np_random.random() * 0 + float(opened), opened, False, self._said(known)

    def _said(self, known):
        actions = [f"try {colour} key" for colour in COLOURS]
        return ({"admissible_actions": actions} if self.listing else {}) | ({"accepted": known} if self.judging else {})


class Doors(gymnasium.Env):
    """Numbers for actions, and an end that says itself whether it is good."""

    observation_space = spaces.Text(200, charset=LETTERS)
    action_space = spaces.Discrete(2, start=5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.options = options
        return "Two doors.", {}

    def step(self, action):
        return "", 3.0, True, False, {"is_success": bool(action == 6)}


class Tenths(gymnasium.Env):
    """Pays a tenth for each of ten steps."""

    observation_space = spaces.Text(200, charset=LETTERS)
    action_space = spaces.Text(40, charset=string.ascii_lowercase + " ")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return "Go on.", {"admissible_actions": np.array(["on", "off", " "])}

    def step(self, action):
        self.steps += 1
        return "Go on.", 0.1, self.steps == 10, False, {"admissible_actions": np.array(["on", "on"])}


class Grid(gymnasium.Env):
    """Speaks no text."""

    observation_space = spaces.Discrete(4)
    action_space = spaces.Discrete(2)


for kind in (Keys, Doors, Grid):
    gymnasium.register(f"{kind.__name__}-v0", kind, max_episode_steps=3)
gymnasium.register("Tenths-v0", Tenths)
