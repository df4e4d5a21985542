"""Writes `epo_trl/envs/scienceworld/tasks.json`: the number of variations of each task type, and those that test.

    python benchmarks/make_scienceworld_tasks.py

Run it again for a new version of `scienceworld`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from epo_trl.envs.scienceworld.jvm import Jvm
from epo_trl.envs.scienceworld.tasks import DRAWN_PER_TYPE, FILE
from epo_trl.envs.scienceworld.world import World


def engine_sizes() -> dict[str, list[int]]:
    """Returns the engine's number of variations for training, development and test, by task type."""
    jvm = Jvm(512)
    world, sizes = World(jvm), {}
    server = world._server
    with jvm.calls():
        names = world._strings(server.getTaskNames())
    for task_type in names:
        world.load(task_type, 0, "easy")
        with jvm.calls():
            parts = [
                list(part()) for part in (server.getVariationsTrain, server.getVariationsDev, server.getVariationsTest)
            ]
        if [variation for part in parts for variation in part] != list(range(sum(map(len, parts)))):
            raise SystemExit(f"the variations of {task_type!r} are not contiguous, as the task lists require")
        sizes[task_type] = [len(part) for part in parts]
    jvm.close()
    return sizes


def draw_tests(sizes: Mapping[str, Sequence[int]], seed: int = 0) -> dict[str, Any]:
    """Draws the content of `tasks.json`: for each type, the number of training variations and the test variations.

    Args:
        sizes: Number of variations for training, development and test, by task type.
        seed: Seed of the draw.
    """
    content = {}
    for task_type, (train, dev, test) in sizes.items():
        rng = random.Random(f"scienceworld {task_type} {seed}")
        iid = rng.sample(range(train, train + dev), min(dev, DRAWN_PER_TYPE))
        ood = rng.sample(range(train + dev, train + dev + test), min(test, DRAWN_PER_TYPE))
        content[task_type] = {"variations": [train, dev, test], "iid": iid, "ood": ood}
    return content


def to_text(content: Mapping[str, Any]) -> str:
    """Formats the file: one line per task type."""
    return "{\n" + ",\n".join(f" {json.dumps(name)}: {json.dumps(row)}" for name, row in content.items()) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(to_text(draw_tests(engine_sizes())), encoding="utf-8")
