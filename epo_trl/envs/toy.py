"""TreasureHunt: a text game like ALFWorld, small enough for tests and notebooks. Standard library only.

A hall has a chest and two to five coloured boxes. One box holds the target object, which has to be brought to the
chest; some hold another object. In tasks of the type `hidden` the boxes are shut and have to be searched (3 to 7 turns
for the expert); in `visible` they are open from the start (2 turns).
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from epo_trl.envs.base import NOT_RUNNING, EnvError, Expert, Info, TaskSuite, TextEnv, split_task_id

THINGS = ("coin", "ring", "key", "pearl", "ticket")
COLOURS = ("red", "blue", "green", "white", "black")
MIDDLE = "the middle of the hall"
EMPTY_HANDS = "nothing"
_SPLIT_SIZES = {"train": 200, "iid": 40, "ood": 40}


@dataclass(slots=True)
class Hunt:
    """One game: the target object, what the boxes hold, and what has happened so far."""

    wanted: str
    contents: dict[str, str | None]
    task_type: str  # "visible" or "hidden"
    opened: list[str] = field(default_factory=list)
    here: str = MIDDLE
    holding: str = EMPTY_HANDS
    in_chest: list[str] = field(default_factory=list)
    moves: int = 0
    over: bool = False


def build_hunt(task_id: Any) -> Hunt:
    """Builds the start of the task with the id `"<split>/<number>"`; the same in every process.

    `train` and `iid` share their (object, colour of its box) pairs and differ in everything else. The pairs of `ood`
    occur in neither.
    """
    split, _ = split_task_id(task_id, _SPLIT_SIZES)
    rng = random.Random(f"treasure hunt {task_id}")
    pairs = [(t, c) for t in range(len(THINGS)) for c in range(len(COLOURS)) if ((t + c) % 5 == 0) == (split == "ood")]
    thing, colour = rng.choice(pairs)
    others = [name for name in COLOURS if name != COLOURS[colour]]
    boxes = [f"{name} box" for name in [COLOURS[colour], *rng.sample(others, rng.randint(1, 4))]]
    decoys = [name for name in THINGS if name != THINGS[thing]]
    contents: dict[str, str | None] = {box: rng.choice([None, *decoys]) for box in boxes}
    contents[boxes[0]] = THINGS[thing]
    rng.shuffle(boxes)
    is_visible = rng.random() < 0.25
    hunt = Hunt(THINGS[thing], {box: contents[box] for box in boxes}, "visible" if is_visible else "hidden")
    hunt.opened += boxes if is_visible else []
    return hunt


class TreasureHunt(TextEnv):
    """An environment that plays any task of `ToySuite`.

    Besides the required fields, `info` has those of ALFWorld: `visited` and `unvisited` (tuples of boxes), `holding`
    and `here` (texts) and `actions_here` (what can be taken or put down now).
    """

    is_deterministic = True

    def __init__(self, *, move_limit: int = 30) -> None:
        self.move_limit = move_limit
        self._state: Hunt | None = None

    def copy(self) -> TreasureHunt:
        """Returns an independent game in the same state."""
        twin = copy.copy(self)
        twin._state = copy.deepcopy(self._state)
        return twin

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        """Returns the first observation and info; only the task id decides both."""
        self._state = state = build_hunt((options or {}).get("task_id"))
        info = self._info(state)
        return f"You are in a hall with a chest. {_look(state)} Your task is to: {info['task']}.", info

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        """Performs the action; an action that is not admissible changes nothing."""
        state = self._state
        if state is None or state.over:
            raise EnvError(NOT_RUNNING)
        state.moves += 1
        observation = _act(state, action) if action in _admissible(state) else "Nothing happens."
        won = state.wanted in state.in_chest
        truncated = not won and state.moves >= self.move_limit
        state.over = won or truncated
        return observation, float(won), won, truncated, self._info(state)

    def _info(self, state: Hunt) -> Info:
        return {
            "admissible_actions": _admissible(state),
            "won": state.wanted in state.in_chest,
            "task": f"put the {state.wanted} into the chest",
            "task_type": state.task_type,
            "visited": tuple(state.opened),
            "unvisited": tuple(box for box in state.contents if box not in state.opened),
            "holding": state.holding,
            "here": state.here,
            "actions_here": tuple(action for action in _admissible(state) if not action.startswith(("open ", "look"))),
        }


def _admissible(state: Hunt) -> tuple[str, ...]:
    actions = [f"open {box}" for box in state.contents if box not in state.opened]
    if state.holding != EMPTY_HANDS:
        actions.append(f"put {state.holding} into chest")
    else:
        actions += [
            f"take {thing} from {box}" for box, thing in state.contents.items() if thing and box in state.opened
        ]
    return (*actions, "look")


def _act(state: Hunt, action: str) -> str:
    verb, _, rest = action.partition(" ")
    if verb == "open":
        state.opened.append(rest)
        state.here = rest
        return f"You open the {rest}. {_inside(state, rest)}"
    if verb == "take":
        thing, _, box = rest.partition(" from ")
        state.contents[box], state.holding, state.here = None, thing, box
        return f"You take the {thing} from the {box}."
    if verb == "put":
        thing, state.holding, state.here = state.holding, EMPTY_HANDS, "chest"
        state.in_chest.append(thing)
        return f"You put the {thing} into the chest."
    return _look(state)


def _inside(state: Hunt, box: str) -> str:
    thing = state.contents[box]
    return f"In it you see a {thing}." if thing else "It is empty."


def _look(state: Hunt) -> str:
    return " ".join(
        f"The {box} is open. {_inside(state, box)}" if box in state.opened else f"The {box} is shut."
        for box in state.contents
    )


class ToyExpert(Expert):
    """Opens the boxes in the order of the list until it sees the target object."""

    def act(self, observation: str, info: Info) -> tuple[str, str]:
        """Returns `(thought, action)`."""
        wanted = info["task"].removeprefix("put the ").removesuffix(" into the chest")
        for action in info["admissible_actions"]:
            if action.startswith(f"put {wanted} "):
                return f"I hold the {wanted}.", action
            if action.startswith(f"take {wanted} "):
                return f"I see the {wanted}.", action
        if info["holding"] != EMPTY_HANDS:
            return f"The {info['holding']} is not wanted.", f"put {info['holding']} into chest"
        box = info["unvisited"][0]
        return f"The {wanted} may be in the {box}.", f"open {box}"


class ToySuite(TaskSuite):
    """The fixed task lists of `TreasureHunt`: 200 tasks in `train`, 40 in `iid`, 40 in `ood`."""

    name = "treasure-hunt"
    prompt_template = "alfworld"

    def __init__(self, *, move_limit: int = 30) -> None:
        self.move_limit = move_limit

    def task_ids(self, split: str) -> Sequence[str]:
        """Returns the task ids of a split."""
        self.check_split(split)
        return tuple(f"{split}/{number}" for number in range(_SPLIT_SIZES[split]))

    def make_env(self) -> TreasureHunt:
        """Creates a fresh game."""
        return TreasureHunt(move_limit=self.move_limit)

    def make_expert(self, seed: int = 0) -> ToyExpert:
        """Creates an expert that wins every task within 7 turns."""
        return ToyExpert()
