"""Copies of a ScienceWorld environment: the episode played again in another world, and the audit that needs them."""

import gc
import json
import random

import pytest

from epo_trl.cli import main
from epo_trl.envs import EnvError
from epo_trl.envs.scienceworld import EngineRules, ScienceWorldSuite
from epo_trl.envs.scienceworld.env import ScienceWorldEnv
from epo_trl.models import build_model, build_tokenizer

pytestmark = pytest.mark.games

# Random events: seeds that are planted, a mixture, and what the animals do meanwhile.
TASKS = ("train/grow-plant/2", "train/find-animal/0", "train/chemistry-mix/1")


@pytest.fixture(scope="module")
def suite():
    """Its JVM runs on from test to test: a new one takes seconds to become fast."""
    suite = ScienceWorldSuite()
    keeper = suite.make_env()
    keeper.reset(options={"task_id": TASKS[0]})
    yield suite
    keeper.close()


def act(info, rng):
    """Returns a random action, now and then a number, which answers a question of the parser."""
    things = info["objects"]
    words = ("open {}", "pick up {}", "look at {}", "activate {}", "go to {}", "wait1", "move {} to {}", "0")
    return rng.choice(words).format(rng.choice(things), rng.choice(things))


@pytest.mark.parametrize("task", TASKS)
def test_a_copy_plays_on_alone_and_the_original_does_not_notice(suite, task):
    """A copy of a copy too; the others play something else in between."""
    rng, env = random.Random(0), suite.make_env()
    info = env.reset(seed=5, options={"task_id": task, "state_key": True})[1]
    for _ in range(4):
        first, second = env.copy(), env.copy().copy()
        for twin in (first, first.copy()):
            twin.step(act(info, rng))
        action = act(info, rng)
        result = env.step(action)
        assert second.step(action) == result
        info = result[4]
        for twin in (first, second):
            twin.close()
    env.close()


@pytest.mark.parametrize("ambiguity", ["agent", "first"])
def test_an_open_question_is_copied_too(suite, ambiguity):
    """An orange is in the bowl, another one in the inventory."""
    env = ScienceWorldEnv(suite._hosts[0], EngineRules(ambiguity=ambiguity))
    env.reset(options={"task_id": "train/boil/3"})
    env.step("teleport to kitchen")
    assert env.step("pick up orange")[0].startswith("Ambiguous request") == (ambiguity == "agent")
    twin = env.copy()
    assert twin.step("0") == env.step("0")
    for one in (twin, env):
        one.close()


def test_a_copy_has_no_world_before_it_is_used_and_none_after_it_is_gone(suite):
    host, env = suite._hosts[0], suite.make_env()
    env.reset(options={"task_id": TASKS[0]})
    before = len(host)
    copies = [env.copy() for _ in range(50)]
    assert len(host) == before
    copies[0].step("look around")
    copies[1].reset(options={"task_id": TASKS[1]})
    assert len(host) == before + 2
    copies[0].close()
    copies[0].close()
    assert len(host) == before + 1
    del copies
    gc.collect()
    assert len(host) == before
    env.close()


def test_a_copy_of_no_episode_can_be_reset(suite):
    env = suite.make_env()
    twin = env.copy()
    with pytest.raises(EnvError, match="step: no episode is running"):
        twin.step("look around")
    assert twin.reset(options={"task_id": TASKS[0]}) == env.reset(options={"task_id": TASKS[0]})
    twin.close()
    env.close()
    for closed in (env, twin):
        with pytest.raises(EnvError, match="copy: the environment is closed"):
            closed.copy()
        with pytest.raises(EnvError, match="reset: the environment is closed"):
            closed.reset(options={"task_id": TASKS[0]})


def test_the_tiny_recipe_can_be_audited(tmp_path):
    """An untrained policy: what is tested is that every continuation begins where its turn did."""
    tokenizer = build_tokenizer(["look around , open door to kitchen"])
    for part in (build_model(tokenizer, hidden_size=32, heads=2), tokenizer):
        part.save_pretrained(tmp_path / "run")
    options = (
        "--max_turns 3 --max_prompt_length 1200 --jvms 1 --max_completion_length 4 --audit_tasks 2 --audit_round 2 "
        "--audit_group 2 --audit_episodes 1 --audit_continuations 2 --audit_parallel 8"
    )
    assert main(["audit-credit", str(tmp_path / "run"), "--config", "scienceworld/tiny_cpu", *options.split()]) == 0
    found = json.loads((tmp_path / "run" / "credit_audit" / "round-000.json").read_text(encoding="utf-8"))
    assert len(found["turn"]) == 6 and {"grpo", "gigpo, state"} <= found["credits"].keys()
