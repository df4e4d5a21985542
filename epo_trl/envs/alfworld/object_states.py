"""Object states that three of the task types require: clean, hot or cool."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Treatment:
    """A state change of an object by a piece of furniture.

    Args:
        task_type: Task type that requires it.
        verb: Verb of the agent's action.
        tool: Class of the furniture that does it, for example `"SinkBasin"`.
        ability: Property that the object must have, for example `"Cleanable"`.
        state: State of the object afterwards.
        undoes: State that ends; `""` if none does.
    """

    task_type: str
    verb: str
    tool: str
    ability: str
    state: str
    undoes: str = ""


TREATMENTS = (
    Treatment("pick_clean_then_place_in_recep", "clean", "SinkBasin", "Cleanable", "clean"),
    Treatment("pick_heat_then_place_in_recep", "heat", "Microwave", "Heatable", "hot", undoes="cool"),
    Treatment("pick_cool_then_place_in_recep", "cool", "Fridge", "Coolable", "cool", undoes="hot"),
)
BY_TASK_TYPE = {treatment.task_type: treatment for treatment in TREATMENTS}
BY_STATE = {treatment.state: treatment for treatment in TREATMENTS}
