"""Gymnasium's environments of text keep our contract, and train."""

import pytest

pytest.importorskip("gymnasium")

from tool_worlds import check_training
from typed import parse_recipe

from epo_trl.envs import EnvError
from epo_trl.envs.gymnasium import GymnasiumArguments
from epo_trl.envs.testing import EnvContract
from epo_trl.errors import EpoTrlError
from epo_trl.trainers import EPOConfig

KEYS = "gym_games:Keys-v0"


def try_a_key(info, rng):
    return f"try {rng.choice(['red', 'green', 'blue'])} key"


class TestKeys(EnvContract):
    expert_turns = None

    def make_suite(self):
        return GymnasiumArguments(env_id=KEYS, train_tasks=20, test_tasks=5).make_suite()


class TestKeysThatAreNotListed(EnvContract):
    expert_turns = None
    player = try_a_key

    def make_suite(self):
        return GymnasiumArguments(env_id=KEYS, env_kwargs='{"listing": false, "judging": true}').make_suite()


def test_a_task_is_a_seed_and_test_seeds_are_others():
    env = GymnasiumArguments(env_id=KEYS, train_tasks=50).make_suite().make_env()
    rights = []
    for number in range(20):
        env.reset(seed=number, options={"task_id": f"train/{number}"})
        rights.append(env._game.unwrapped.right)
        env.reset(seed=99, options={"task_id": f"train/{number}"})
        assert env._game.unwrapped.right == rights[-1]
    assert set(rights) == {"red", "green", "blue"}
    import gymnasium

    other = gymnasium.make(KEYS)
    for number in (0, 3):
        env.reset(options={"task_id": f"iid/{number}"})
        other.reset(seed=1_000_000 + number)
        assert env._game.unwrapped.right == other.unwrapped.right


def test_rewards_end_and_time_limit_are_gymnasium_s():
    env = GymnasiumArguments(env_id=KEYS, task_text="open the door").make_suite().make_env()
    _, info = env.reset(options={"task_id": "train/0"})
    assert (info["task"], info["task_type"]) == ("open the door", "gymnasium-gym-games-Keys-v0")
    right = env._game.unwrapped.right
    wrong = [colour for colour in ("red", "green", "blue") if colour != right]
    assert env.step(f"try {wrong[0]} key")[:4] == ("It does not fit.", 0.0, False, False)
    observation, reward, terminated, truncated, info = env.step(f"try {right} key")
    assert (observation, reward, terminated, truncated) == ("It opens.", 1.0, True, False)
    assert (info["won"], info["score"]) == (True, 1.0)
    with pytest.raises(EnvError, match="no episode is running"):
        env.step("try red key")
    env.reset(options={"task_id": "train/0"})
    assert [env.step(f"try {wrong[0]} key")[3] for _ in range(3)] == [False, False, True]


def test_actions_with_numbers_have_names_and_success_is_what_the_environment_says():
    env = GymnasiumArguments(env_id="gym_games:Doors-v0", action_names=["left", "right"]).make_suite().make_env()
    for action, won in (("left", False), ("right", True)):
        _, info = env.reset(options={"task_id": "train/0", "level": 2})
        assert info["admissible_actions"] == ("left", "right")
        assert env._game.unwrapped.options == {"level": 2}
        observation, reward, terminated, _, info = env.step(action)
        assert (observation, reward, terminated, info["won"]) == ("(nothing)", 3.0, True, won)


@pytest.mark.parametrize(
    ("reward", "said", "won"),
    [
        (0.0, {"is_success": True}, True),
        (1.0, {"is_success": False}, False),
        (1.0, {}, True),
        (0.5, {}, False),
    ],
)
def test_a_task_that_is_solved_at_the_time_limit_is_won(reward, said, won, monkeypatch):
    """As in an environment with a fixed horizon, which always truncates."""
    env = GymnasiumArguments(env_id=KEYS).make_suite().make_env()
    env.reset(options={"task_id": "train/0"})
    monkeypatch.setattr(env._game, "step", lambda _: ("", reward, False, True, said))
    _, _, terminated, truncated, info = env.step("try red key")
    assert (terminated, truncated, info["won"]) == (won, not won, won)
    with pytest.raises(EnvError, match="no episode is running"):
        env.step("try red key")


@pytest.mark.parametrize(("won_score", "won"), [(1.0, True), (1.01, False)])
def test_a_sum_of_rewards_wins_up_to_rounding(won_score, won):
    """0.1 ten times is 0.9999999999999999."""
    env = GymnasiumArguments(env_id="gym_games:Tenths-v0", won_score=won_score).make_suite().make_env()
    _, info = env.reset(seed=0, options={"task_id": "train/0"})
    assert info["admissible_actions"] == ("on", "off")  # of an array
    for _ in range(10):
        *_, terminated, _, info = env.step("on")
        assert info["admissible_actions"] == ("on",)
    assert terminated and info["score"] < 1 and info["won"] is won


def test_a_text_outside_the_action_space_does_not_reach_the_environment_and_any_other_does_whole():
    suite = GymnasiumArguments(env_id=KEYS, env_kwargs={"listing": False}).make_suite()
    assert suite.verbatim
    env = suite.make_env()
    env.reset(options={"task_id": "train/0"})
    for _ in range(5):  # more than the time limit
        observation, _, _, truncated, info = env.step("Try the RED key!")
        assert (observation, truncated, info["accepted"]) == ("This is not an action here.", False, False)
        assert info["refusal"].startswith("not in the action space: Text(1, 40")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"env_id": "NoSuchGame-v0"}, "env_id: got 'NoSuchGame-v0'"),
        ({"env_id": "gym_games:Grid-v0"}, "env_id: .*Text space .*, got 'gym_games:Grid-v0' with Discrete"),
        ({"env_id": "gym_games:Doors-v0"}, "action_names: expected 2 different names .*got"),
        ({"env_id": KEYS, "action_names": ["a"]}, "expected no names"),
        ({"env_id": KEYS, "env_kwargs": "[1]"}, r"^env_kwargs: expected .*got '\[1\]'"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, says):
    with pytest.raises(EpoTrlError, match=says):
        GymnasiumArguments(**settings).make_suite()


def test_a_config_names_it_and_gives_its_keywords(tmp_path):
    (tmp_path / "config.yaml").write_text(
        f"environment: gymnasium\nenv_id: {KEYS}\nenv_kwargs: {{listing: false, judging: true}}\nuse_cpu: true\n"
    )
    suite, _ = parse_recipe(EPOConfig, argv=["--config", str(tmp_path / "config.yaml")])
    assert (suite.name, suite.splits) == ("gymnasium-gym-games-Keys-v0", ("train", "iid"))
    assert suite.make_env().reset(options={"task_id": "iid/0"})[1]["admissible_actions"] is None


@pytest.mark.slow
def test_it_trains_for_two_steps(tmp_path):
    suite = GymnasiumArguments(env_id=KEYS, task_text="open the door").make_suite()
    actions = [f"try {colour} key" for colour in ("red", "green", "blue")]
    check_training(tmp_path, suite, actions, context="windowed", prompt_template="general")
