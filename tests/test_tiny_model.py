"""The tiny model and its tokenizer: round trips by eye, save and load, one family like the other."""

import pytest
import torch
from demonstrated_suites import LineSuite
from rollout_parts import WIN, step
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import ModelConfig

from epo_trl.envs.toy import ToySuite
from epo_trl.models import build_model, build_tokenizer
from epo_trl.models.corpus import corpus
from epo_trl.models.load import load_policy, tiny_size
from epo_trl.rollout.templates import PromptTemplate, render

TEXTS = [
    "You are in the middle of a room. You see a drawer 4, a cabinet 2, and a mug 12.",
    "<think> I look for the mug 12. </think> <action> go to drawer 1 </action>",
    "put mug 1 in/on drawer 2\nmove mug 3 to cabinet 1",
]
CHAT = [
    {"role": "user", "content": "go to drawer 3"},
    {"role": "assistant", "content": "<think> mug 12 </think> <action> put mug 1 in/on drawer 2 </action>"},
    {"role": "user", "content": "You see a mug 3"},
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(TEXTS)


def tokens_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[str]:
    return tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])


def test_an_entity_is_one_token(tokenizer):
    assert tokens_of(tokenizer, "go to drawer 3, mug 12.") == ["go", "to", "drawer 3", ",", "mug 12", "."]


def test_vocabulary_is_closed_over_numbers_and_parts(tokenizer):
    vocabulary = tokenizer.get_vocab()
    assert {f"drawer {n}" for n in range(1, 5)} <= set(vocabulary)  # "drawer 3" is in no text
    assert {"drawer", "mug", "cabinet", *map(str, range(13))} <= set(vocabulary)
    assert "drawer 5" not in vocabulary and "mug 13" not in vocabulary
    assert "cabinet 0" not in vocabulary


def test_an_unseen_number_falls_apart_into_known_words(tokenizer):
    assert tokens_of(tokenizer, "drawer 5 drawer 12 drawer 44") == ["drawer", "5", "drawer", "12", "drawer", "<unk>"]


@pytest.mark.parametrize(
    "action",
    [
        "wait1", "wait", "0", "focus on unknown substance b", "pour cup 2 in self-watering pot 10", "open b2 door",
        "put soapbar 3 in/on sinkbasin 1", "don't wait1 x2y/z3",
    ],
)  # fmt: skip
def test_words_with_marks_and_digits_come_back_whole(action):
    tokenizer = build_tokenizer([action])
    assert tokenizer.decode(tokenizer(action)["input_ids"]) == action


def test_case_and_white_space_are_folded(tokenizer):
    ids = tokenizer(" Go  to\n\nDrawer 3\t<THINK>")["input_ids"]
    assert tokenizer.decode(ids) == "go to drawer 3 <think>"


def test_ids_do_not_depend_on_the_order_of_the_texts(tokenizer):
    assert build_tokenizer(reversed(TEXTS)).get_vocab() == tokenizer.get_vocab()


def test_chat_template_by_eye(tokenizer):
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>user go to drawer 3<|im_end|>"
        "<|im_start|>assistant <think> mug 12 </think> <action> put mug 1 in/on drawer 2 </action><|im_end|>"
        "<|im_start|>user You see a mug 3<|im_end|>"
        "<|im_start|>assistant "
    )
    ids = tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True, return_dict=False)
    assert tokenizer.convert_ids_to_tokens(ids) == [
        "<|im_start|>", "user", "go", "to", "drawer 3", "<|im_end|>", "<|im_start|>", "assistant",
    ]  # fmt: skip


def test_a_chat_grows_by_appending_tokens(tokenizer):
    """Prompt + sampled response ids must be what the next prompt begins with (TRL, concatenated context)."""
    prompt = tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True, return_dict=False)
    response = tokenizer(CHAT[1]["content"] + "<|im_end|>")["input_ids"]
    whole = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert whole[: len(prompt) + len(response)] == prompt + response


def test_entity_embeddings_are_composed_of_their_parts(tokenizer):
    weight = build_model(tokenizer).get_input_embeddings().weight
    drawer, three, both = (weight[i] for i in tokenizer.convert_tokens_to_ids(["drawer", "3", "drawer 3"]))
    torch.testing.assert_close(both, (drawer + three) / 2**0.5)
    assert 0.7 < both.norm() / weight[tokenizer.convert_tokens_to_ids("to")].norm() < 1.4


def test_seed_decides_the_weights_and_nothing_else(tokenizer):
    before = torch.get_rng_state()
    one, same, other = (build_model(tokenizer, seed=seed).lm_head.weight for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("family", ["seed_oss", "llama", "qwen3", "gemma", "gemma2"])
def test_save_and_load_with_plain_auto_classes(tokenizer, family, tmp_path):
    model = build_model(tokenizer, family=family, hidden_size=32, heads=2)
    # the initial logits are nearly flat; make differences visible
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = AutoTokenizer.from_pretrained(tmp_path)

    for said in (*TEXTS, tokenizer.apply_chat_template(CHAT, tokenize=False)):
        assert tokens(said)["input_ids"] == tokenizer(said)["input_ids"]
    assert tokens.get_vocab() == tokenizer.get_vocab()
    assert (tokens.pad_token, tokens.eos_token, tokens.padding_side) == ("<pad>", "<|im_end|>", "left")
    text = "<|im_start|> " + CHAT[1]["content"]
    assert tokens.decode(tokens(text)["input_ids"], skip_special_tokens=True) == CHAT[1]["content"]
    render = {"tokenize": False, "add_generation_prompt": True}
    assert tokens.apply_chat_template(CHAT, **render) == tokenizer.apply_chat_template(CHAT, **render)

    assert type(again) is type(model)
    ids = tokens.apply_chat_template(CHAT, return_tensors="pt", return_dict=False)
    with torch.no_grad():
        want, got = model(ids).logits, again(ids).logits
    assert want.std() > 0.05
    torch.testing.assert_close(got, want)
    assert again.generation_config.eos_token_id == tokenizer.eos_token_id


def test_the_default_model_is_a_qwen2_by_another_name(tokenizer):
    model = build_model(tokenizer, hidden_size=32)
    shared = {k: v for k, v in model.config.to_dict().items() if k not in ("model_type", "architectures", "head_dim")}
    qwen2 = Qwen2ForCausalLM(Qwen2Config(**shared))
    assert [p.shape for p in qwen2.parameters()] == [p.shape for p in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():  # biases too, so that each shows
            parameter.normal_()
    qwen2.load_state_dict(model.state_dict())
    ids = torch.randint(len(tokenizer), (2, 50))
    assert torch.equal(qwen2.train()(ids).logits, model.train()(ids).logits)


def test_the_vocabulary_has_every_word_that_a_prompt_of_the_suite_shows():
    suite, template = ToySuite(), PromptTemplate.load("compact")
    tokenizer = build_tokenizer(corpus(suite, "compact"))
    env = suite.make_env()
    for task_id in suite.task_ids("ood"):
        observation, info = env.reset(options={"task_id": task_id})
        prompt = render(template.first, {**info, "observation": observation, "turn": 1, "turns_taken": 0})
        assert tokenizer.unk_token_id not in tokenizer(prompt)["input_ids"], prompt


def test_a_name_says_the_size():
    assert tiny_size("tiny") == (128, 2) and tiny_size("tiny:192x3") == (192, 3)
    assert tiny_size("tiny:copy") == (128, 2) and tiny_size("tiny:32x1:copy") == (32, 1)
    assert [tiny_size(name) for name in ("tiny-stories", "./tiny", "", None, "other:copy")] == [None] * 5
    for name in ("tiny:192", "tiny:100x2", "tiny:192x0"):
        with pytest.raises(ValueError, match=f"model_name_or_path: got '{name}'; expected 'tiny', or a width"):
            tiny_size(name)
    model, _ = load_policy(ModelConfig("tiny:32x1"), ToySuite(), "general_compact")
    assert (model.config.hidden_size, model.config.num_hidden_layers) == (32, 1)


def test_a_model_that_starts_to_copy_expects_what_it_has_read():
    """Before any training the tokens of a prompt have higher logits than all others; without `copies` they do not."""
    tokenizer = build_tokenizer(f"word{letter}{number}" for letter in "abcdefgh" for number in range(20))
    words = torch.tensor([tokenizer.get_vocab()[f"word{letter}3"] for letter in "abcdefgh"])
    lead = {}
    for copies in (False, True):
        model = build_model(tokenizer, copies=copies)
        with torch.no_grad():
            logits = model(words[None]).logits[0, -1]
        others = torch.ones(len(tokenizer), dtype=torch.bool)
        others[words] = False
        lead[copies] = (logits[words[:-1]].mean() - logits[others].mean()) / logits[others].std()
    assert lead[True] > 1.5 and abs(lead[False]) < 1


def test_the_corpus_takes_a_game_that_any_answer_ends():
    """`?` is as good an answer as any. The expert plays from the start."""
    suite = LineSuite([step("wrong", terminated=True)], [step("so far so good"), WIN])
    assert {"wrong", "so far so good", "done"} <= set(corpus(suite, "general_compact")) and suite.closed == 1
