"""Worlds on one JVM do not disturb each other, whenever they come: the state that they share is handed on."""

import re
import zipfile

import pytest

from epo_trl.envs.scienceworld import ScienceWorldSuite
from epo_trl.envs.scienceworld.world import World

pytestmark = pytest.mark.games


@pytest.fixture(scope="module")
def envs():
    suite = ScienceWorldSuite(heldout_types=[])
    envs = [suite.make_env() for _ in range(4)]
    yield envs
    for env in envs:
        env.close()


def start(env, task_id):
    return env.reset(seed=0, options={"task_id": task_id})


def test_a_neighbour_that_loads_later_takes_nothing_away(envs):
    start(envs[0], "train/boil/1")
    alone = envs[0].step("teleport to outside")
    assert alone[4]["score"] == 3  # 2 with the neighbour's ids: one thing has vanished
    start(envs[0], "train/boil/1")
    start(envs[1], "train/grow-plant/2")
    assert envs[0].step("teleport to outside") == alone


def test_nothing_else_is_shared_by_the_worlds_of_a_jvm(envs):
    """Goes through the fields of all Scala objects of the jar: what is no constant is in the list of `shared.py`."""
    from scienceworld.constants import JAR_PATH

    start(envs[0], "train/boil/1")
    java = envs[0]._episode.world.jvm.java.java.lang
    files = [file.removesuffix(".class").replace("/", ".") for file in zipfile.ZipFile(JAR_PATH).namelist()]
    names = [name for name in files if re.fullmatch(r"(scienceworld|main|util|language)\..*\$", name)]
    assert len(names) > 200

    def fields():
        return [field.toString() for name in names for field in java.Class.forName(name).getDeclaredFields()]

    constant = ("java.lang.String", "int", "long", "float", "double", "boolean")
    found = set()
    for field in envs[0]._host.submit(fields).result():
        *modifiers, kind, name = field.split()
        if not name.endswith(".MODULE$") and not ("final" in modifiers and kind in constant):
            found.add(name)
    assert found == {
        "util.UniqueIdentifier$.count",
        "main.scala.scienceworld.runtime.SimplifierProcessor$.simplifications",
        "scienceworld.goldagent.PathFinder$.precomputedExhaustivePaths",
        "util.UniqueTypeID$.lut",
        "util.UniqueTypeID$.nextID",
        "scienceworld.input.InputParser$.stopWords",  # read only, like the next three
        "scienceworld.objects.misc.Picture$.artist",
        "scienceworld.objects.misc.Picture$.pictureTypes",
        "scienceworld.objects.misc.Picture$.subjects",
    }


@pytest.mark.slow
def test_a_gold_path_starts_without_the_ways_that_were_drawn_for_those_before_it(envs):
    start(envs[0], "train/boil/1")
    jvm = envs[0]._episode.world.jvm
    ways = jvm.java.scienceworld.goldagent.PathFinder.precomputedExhaustivePaths

    def kept():
        world = World(jvm)
        world.load("chemistry-mix", 5, "easy", gold_path=True)
        after_the_path = ways().size()
        world.load("test-conductivity", 5, "easy")
        world.release()
        return after_the_path, ways().size()

    assert envs[0]._host.submit(kept).result() == (1, 0)
