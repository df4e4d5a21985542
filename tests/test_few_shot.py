"""ReAct and few-shot prompts: what is shown, word by word, where the examples come from, and what is refused."""

from dataclasses import replace

import pytest
from rollout_parts import QWEN, ScriptedEnv, answer, build, byte_tokenizer, chat_ids, context_of, ids_of, step
from tokenizer_families import FAMILIES
from trainer_kit import make_config

from epo_trl.envs.toy import ToySuite
from epo_trl.rollout import PromptTemplate, RolloutSettings, TemplateError, play_episodes
from epo_trl.rollout.context import TurnView
from epo_trl.rollout.demonstrations import few_shot_of
from epo_trl.rollout.encoding import control_tokens
from epo_trl.rollout.spec import FewShotArguments
from epo_trl.rollout.templates import Example, PastTurn
from epo_trl.trainers.critic_values import final_states
from epo_trl.trainers.setup import build_rules

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


def test_a_state_at_the_end_of_an_episode_is_the_prompt_that_would_have_come_next(tokenizer):
    context = react(tokenizer)
    envs = [ScriptedEnv(step("one"), step("two")) for _ in range(2)]
    said = [*ids_of(tokenizer, answer("go", "the red box")), tokenizer.eos_token_id]
    policy = lambda prompts: ([said] * len(prompts), None)  # noqa: E731
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

    plain = controls(Example("a", (PastTurn("b", "c", "d"),)))
    for token in control_tokens(tokenizer):
        assert controls(Example(token, (PastTurn(token, token, token),))) == plain, token


def test_the_tags_of_an_example_are_the_tokens_that_an_answer_has():
    tokenizer = FAMILIES["qwen"]()
    think = tokenizer.convert_tokens_to_ids("<think>")
    counts = [build(react(tokenizer, examples=shown)).ids.count(think) for shown in ((), (ONE,))]
    assert counts == [1, 3]  # what to do; two turns


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
    return few_shot_of(options, suite, env_options).examples


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


# --- In training ---------------------------------------------------------------------------------------------------


def texts_of(tokenizer, context, suite):
    env = suite.make_env()
    observation, start = env.reset(options={"task_id": "train/0"})
    return tokenizer.decode(context.build([TurnView(observation=observation, info=start, history=())])[0].ids)


def test_training_and_its_evaluation_show_the_examples_that_the_evaluation_recipe_shows(tokenizer, tmp_path):
    suite, few = ToySuite(), {"few_shot": 2, "few_shot_turns": 5, "few_shot_seed": 3}
    args = make_config(tmp_path, prompt_template="react", protocol="alfworld50", max_prompt_length=9999, **few)
    rules, shots = build_rules(args, suite, tokenizer), few_shot_of(FewShotArguments(**few), suite)
    assert rules.context.examples == rules.eval_context.examples == shots.examples and len(shots.examples) == 2
    assert rules.protocol.name == f"alfworld50+few_shot={shots.label}"
    assert REACT.shown(shots.examples) in texts_of(tokenizer, rules.context, suite)
    bare = build_rules(make_config(tmp_path, prompt_template="react"), suite, tokenizer)
    assert bare.context.examples == () and "few_shot" not in bare.protocol.name


def test_a_template_that_has_no_place_for_examples_is_named(tokenizer):
    with pytest.raises(TemplateError, match="prompt_template: .*got 'test': first.txt shows no {examples}"):
        context_of(tokenizer, examples=(ONE,))
    first_only = PromptTemplate("mine", "{examples}{task}", "{task}", "{action}", "{observation}", "{task}")
    assert build(context_of(tokenizer, "concatenated", first_only, examples=(ONE,)))
    with pytest.raises(TemplateError, match="'mine': it has no example.txt"):
        context_of(tokenizer, "concatenated", replace(first_only, example=""), examples=(ONE,))
