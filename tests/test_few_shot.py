"""ReAct and few-shot prompts: what is shown, word by word, where the examples come from, and what is refused."""

import pytest
from rollout_parts import (
    QWEN,
    WIN,
    ScriptedEnv,
    ScriptedPolicy,
    answer,
    build,
    byte_tokenizer,
    chat_ids,
    context_of,
    ids_of,
    step,
)
from tokenizer_families import FAMILIES
from trainer_kit import make_config, make_trainer

from epo_trl.cli.imitation import DemonstrationArguments, demonstrations
from epo_trl.envs.toy import ToySuite
from epo_trl.rollout import PromptTemplate, RolloutSettings, TemplateError, play_episodes
from epo_trl.rollout.context import TurnView
from epo_trl.rollout.encoding import control_tokens
from epo_trl.rollout.few_shot import FewShotArguments, read_example
from epo_trl.rollout.templates import Example, PastTurn
from epo_trl.trainers.critic.final_states import final_states
from epo_trl.trainers.model_card import write_card
from epo_trl.trainers.setup import build_rules
from epo_trl.types import StopReason

REACT = PromptTemplate.load("react")
INTRODUCTION = REACT.first.partition("\n")[0]
ONE = Example("find {it}", (PastTurn("a {hall}", "go", "why not"), PastTurn("a wall", "look", "hm")))
SHOWN = (
    "Example 1, which was solved. The task: find {it}\n"
    "What you see: a {hall}\n"
    "<think> why not </think> <action> go </action>\n"
    "What you see: a wall\n"
    "<think> hm </think> <action> look </action>\n\n"
)


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer(QWEN)


def react(tokenizer, mode="windowed", examples=(ONE,), **kwargs):
    return context_of(tokenizer, mode, REACT, examples=examples, **kwargs)


# --- What is shown -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["windowed", "concatenated"])
@pytest.mark.parametrize(
    ("examples", "shown"),
    [
        ((), ""),
        ((ONE,), SHOWN),
        ((ONE, ONE), SHOWN + SHOWN.replace("Example 1", "Example 2")),
        (("Do as I {do}.",), "Do as I {do}.\n\n"),
    ],
)
def test_the_first_prompt_has_the_examples_between_what_to_do_and_the_task(tokenizer, mode, examples, shown):
    message = (
        f"{INTRODUCTION}\n\n{shown}This is your task: find it\nWhat you see: here\n"
        "The actions that you can take now are: [go, look].\nThink, then act."
    )
    assert build(react(tokenizer, mode, examples)).ids == chat_ids(tokenizer, message)


def test_a_later_windowed_prompt_has_the_examples_too_and_the_thoughts_of_the_window(tokenizer):
    past = [PastTurn("one", "go", "first"), PastTurn("two", "look", "second"), PastTurn("three", "go", "third")]
    message = (
        f"{INTRODUCTION}\n\n{SHOWN}This is your task: find it\n"
        "So far you have taken 3 action(s). The last 2, each with what you saw and thought before it:\n"
        "What you see: two\n<think> second </think> <action> look </action>\n"
        "What you see: three\n<think> third </think> <action> go </action>\n"
        "What you see now: here\nThe actions that you can take now are: [go, look].\nThink, then act."
    )
    assert build(react(tokenizer), past).ids == chat_ids(tokenizer, message)


def test_a_prompt_that_is_too_long_loses_its_past_and_keeps_the_examples(tokenizer):
    past = [PastTurn("one", "go", "first")]
    bare = build(react(tokenizer, history_length=0), past)
    cut = build(react(tokenizer, max_prompt_tokens=len(bare.ids)), past)
    assert (cut.ids, cut.dropped_turns) == (bare.ids, 1)
    assert "<think> why not </think>" in tokenizer.decode(cut.ids)
    assert build(react(tokenizer, max_prompt_tokens=len(bare.ids) - 1), past) is None


# --- Thoughts of earlier turns -------------------------------------------------------------------------------------

ROUNDS = [answer("go", "the red box"), "no tags at all", answer("look", "the blue box"), answer("go", "done")]


def play(tokenizer, context):
    """Returns the episode, and as text all that the policy read at each turn."""
    policy = ScriptedPolicy(tokenizer, [[text] for text in ROUNDS])
    env = ScriptedEnv(step("one"), step("two"), step("three"), WIN)
    [episode] = play_episodes([env], [("t", 0)], policy, context, RolloutSettings(max_turns=4))
    assert episode.stop is StopReason.WON
    return episode, [tokenizer.decode(call[0]) for call in policy.calls]


def test_windowed_context_shows_the_thoughts_of_the_window_if_the_template_asks_for_them(tokenizer):
    episode, read = play(tokenizer, react(tokenizer, history_length=2))
    assert [turn.thought for turn in episode.turns] == ["the red box", "", "the blue box", "done"]
    assert "<think> the red box </think> <action> go </action>" in read[1]
    assert "What you see: one\n<think>  </think> <action> no tags at all </action>" in read[2]
    assert ["the red box" in text for text in read] == [False, True, True, False]
    _, read = play(tokenizer, context_of(tokenizer))
    assert not any("the red box" in text for text in read), "the history of other templates is what was seen and done"


def test_a_state_at_the_end_of_an_episode_is_the_prompt_that_would_have_come_next(tokenizer):
    context = react(tokenizer)
    envs = [ScriptedEnv(step("one"), step("two")) for _ in range(2)]
    policy = lambda prompts: ([[*ids_of(tokenizer, ROUNDS[0]), tokenizer.eos_token_id]] * len(prompts), None)  # noqa: E731
    [short] = play_episodes(envs[:1], [("t", 0)], policy, context, RolloutSettings(max_turns=1))
    [longer] = play_episodes(envs[1:], [("t", 0)], policy, context, RolloutSettings(max_turns=2))
    assert final_states([short], context) == [list(longer.turns[1].prompt_ids)]
    assert "the red box" in tokenizer.decode(longer.turns[1].prompt_ids)


# --- What is shown is data -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["windowed", "concatenated"])
def test_examples_that_spell_control_tokens_add_none(family, mode):
    tokenizer = FAMILIES[family]()
    control = {index for token, index in control_tokens(tokenizer).items() if token != "<unk>"}

    def controls(*examples):
        return [index for index in build(react(tokenizer, mode, examples)).ids if index in control]

    plain = controls(Example("a", (PastTurn("b", "c", "d"),)), "e")
    for token in control_tokens(tokenizer):
        assert controls(Example(token, (PastTurn(token, token, token),)), token) == plain, token


def test_the_tags_of_an_example_are_the_tokens_that_an_answer_has():
    tokenizer = FAMILIES["qwen"]()
    think = tokenizer.convert_tokens_to_ids("<think>")
    counts = [build(react(tokenizer, examples=shown)).ids.count(think) for shown in ((), (ONE,), ("<think> hm",))]
    assert counts == [1, 3, 1]  # what to do; two turns; a file's own tags are letters


# --- Where examples come from --------------------------------------------------------------------------------------


class Watched(ToySuite):
    """Notes the resets of its environments."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.resets = []

    def make_env(self):
        env = super().make_env()
        reset = env.reset

        def noted(*, seed=None, options=None):
            self.resets.append(options)
            return reset(seed=seed, options=options)

        env.reset = noted
        return env


def expert_examples(suite, count, *, max_turns, seed=0, env_options=None):
    options = FewShotArguments(few_shot=count, few_shot_turns=max_turns, few_shot_seed=seed)
    return options.few_shot_of(suite, env_options).examples


def test_examples_are_won_by_the_expert_on_training_tasks_and_the_seed_chooses_them():
    suite = Watched()
    found = expert_examples(suite, 3, max_turns=7, env_options={"level": "easy"})
    assert len(found) == len(set(found)) == 3
    assert all(options["task_id"].startswith("train/") and options["level"] == "easy" for options in suite.resets)
    assert found == expert_examples(ToySuite(), 3, max_turns=7)
    assert found != expert_examples(ToySuite(), 3, max_turns=7, seed=1)
    env = ToySuite().make_env()
    observation, start = env.reset(options=suite.resets[0])
    expert = suite.make_expert()
    assert found[0].task == start["task"]
    for turn in found[0].turns:  # the game, played again
        assert turn.observation == observation
        assert (turn.thought, turn.action) == expert.act(observation, start)
        observation, _, is_over, _, start = env.step(turn.action)
    assert is_over and start["won"]


def test_tasks_that_take_too_long_are_passed_over():
    found = expert_examples(ToySuite(), 4, max_turns=3)
    assert {len(example.turns) for example in found} <= {2, 3}
    assert max(len(example.turns) for example in expert_examples(ToySuite(), 4, max_turns=7)) > 3
    with pytest.raises(ValueError, match="few_shot: got 2, but of 40 training tasks .* 0 within few_shot_turns=1; use"):
        expert_examples(ToySuite(), 2, max_turns=1)


def test_a_file_is_shown_as_it_is(tmp_path, tokenizer, monkeypatch):
    path = tmp_path / "mine.txt"
    path.write_text("\nSo {geht} es.\nUnd Schluß.\n\n", encoding="utf-8-sig")
    monkeypatch.setenv("HOME", str(tmp_path))
    shots = FewShotArguments(few_shot_file="~/mine.txt").few_shot_of(ToySuite(), {})
    assert shots.examples == ("So {geht} es.\nUnd Schluß.",) and shots.label.startswith("mine.txt-")
    assert "\n\nSo {geht} es.\nUnd Schluß.\n\nThis is" in tokenizer.decode(
        build(react(tokenizer, examples=shots.examples)).ids
    )


# --- In training ---------------------------------------------------------------------------------------------------


def texts_of(tokenizer, context, suite):
    env = suite.make_env()
    observation, start = env.reset(options={"task_id": "train/0"})
    return tokenizer.decode(context.build([TurnView(observation=observation, info=start, history=())])[0].ids)


def test_training_and_its_evaluation_show_the_examples_that_the_evaluation_recipe_shows(tokenizer, tmp_path):
    suite, few = ToySuite(), {"few_shot": 2, "few_shot_turns": 5, "few_shot_seed": 3}
    args = make_config(tmp_path, prompt_template="react", protocol="alfworld50", max_prompt_length=9999, **few)
    rules, shots = build_rules(args, suite, tokenizer), FewShotArguments(**few).few_shot_of(suite)
    assert rules.context.examples == rules.eval_context.examples == shots.examples and len(shots.examples) == 2
    assert rules.protocol.name == f"alfworld50+few_shot={shots.label}"
    assert REACT.shown(shots.examples) in texts_of(tokenizer, rules.context, suite)
    bare = build_rules(make_config(tmp_path, prompt_template="react"), suite, tokenizer)
    assert bare.context.examples == () and "few_shot" not in bare.protocol.name


def test_the_warm_start_has_the_prompts_of_rl(tokenizer, tmp_path):
    suite, few = ToySuite(), {"few_shot": 1, "prompt_template": "react"}
    rules = build_rules(make_config(tmp_path, max_prompt_length=9999, **few), suite, tokenizer)
    shown = DemonstrationArguments(episodes=1, max_prompt_length=9999, **few)
    ids = demonstrations(suite, tokenizer, shown, seed=0)[0]["input_ids"]
    (task,) = suite.demonstration_tasks("train", 50, 1)
    env = suite.make_env()
    observation, start = env.reset(seed=0, options={"task_id": task})
    prompt = rules.context.build([TurnView(observation=observation, info=start, history=())])[0].ids
    assert ids[: len(prompt)] == prompt and "Example 1" in tokenizer.decode(ids)


def test_an_rl_step_is_played_with_examples_and_its_card_says_which(tmp_path):
    trainer = make_trainer(
        tmp_path, prompt_template="react", few_shot=1, few_shot_turns=2, max_prompt_length=600, max_steps=1
    )
    trainer.train()
    episode = trainer.play([("train/0", 0)])[0]
    example = trainer.processing_class.convert_tokens_to_ids("<action>")
    assert [turn.prompt_ids.count(example) for turn in episode.turns][0] == 3  # what to do; two turns of the example
    write_card(trainer, tmp_path)
    assert "+few_shot=1-" in (tmp_path / "README.md").read_text()


# --- What is refused -----------------------------------------------------------------------------------------------


def test_a_number_of_examples_and_a_file_exclude_each_other():
    with pytest.raises(ValueError, match="few_shot_file: expected none with few_shot=2, got 'a.txt'"):
        FewShotArguments(few_shot=2, few_shot_file="a.txt")


def test_an_empty_file_is_named(tmp_path):
    (tmp_path / "mine.txt").write_text(" \n")
    with pytest.raises(ValueError, match="few_shot_file: expected a text, got the empty .*mine.txt"):
        read_example(str(tmp_path / "mine.txt"))


def test_a_template_that_has_no_place_for_examples_is_named(tokenizer):
    with pytest.raises(TemplateError, match="prompt_template: .*got 'test': first.txt shows no {examples}"):
        context_of(tokenizer, examples=("text",))
    first_only = PromptTemplate("mine", "{examples}{task}", "{task}", "{action}", "{observation}")
    with pytest.raises(TemplateError, match="'mine': next.txt shows no {examples}"):
        context_of(tokenizer, template=first_only, examples=("text",))
    assert build(context_of(tokenizer, "concatenated", first_only, examples=("text",)))
    with pytest.raises(TemplateError, match="'mine': it has no example.txt"):
        context_of(tokenizer, "concatenated", first_only, examples=(ONE,))
