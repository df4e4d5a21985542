"""What three of the task types ask for on the way: an object cleaned, heated or cooled."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Treatment:
    """What a piece of furniture can do to an object.

    Args:
        task_type: The task type that asks for it.
        verb: The agent's word for it.
        tool: Class of the furniture that does it, for example `"SinkBasin"`.
        ability: What an object must be, for example `"Cleanable"`.
        state: What the object is then.
        undoes: The state that ends; `""` if none does.
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
