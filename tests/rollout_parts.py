"""Helpers of the rollout tests: a byte-level tokenizer, chat templates like those of real models, scripted parties."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from epo_trl.envs.base import TextEnv
from epo_trl.rollout import ContextBuilder, PromptTemplate
from epo_trl.rollout.context import TurnView

TEXTS = ["<think> I see a drawer 3 . </think> <action> go to drawer 3 </action>", "You are in a room . task : put"] * 3

QWEN = (
    "<|im_start|>system\nYou are helpful.<|im_end|>\n"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '[' + m['role'] + ']\n\n' + m['content'] | trim + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<|im_start|>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' + m['content'] | trim }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}"
)
# No mark of its own before an answer, and nothing but the end-of-turn token after it.
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
)
# Past reasoning is cut out of the history, and every answer is opened with <think>.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'].split('</think>')[-1] }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
STYLES = {"qwen": QWEN, "llama": LLAMA, "gemma": GEMMA, "mistral": MISTRAL}

WORDS = PromptTemplate(
    "test",
    first="task: {task}. see: {observation} can: {admissible_actions}",
    next="task: {task}. {turns_taken} turns, last {history_length}: {history}. Turn {turn} see: {observation}",
    history="({turn} saw {observation} did {action})",
    followup="see: {observation} can: {admissible_actions}",
)


def byte_tokenizer(chat_template=QWEN, *, adds_bos=False, special=()) -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE with a few merges: every text comes back exactly, some in more than one way."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    names = ["<s>", "<pad>", "<|im_start|>", "<|im_end|>", *special]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[AddedToken(name, special=True) for name in names],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", pad_token="<pad>", eos_token="<|im_end|>", padding_side="left"
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def chat_ids(tokenizer, *texts, **kwargs):
    """Returns what the chat template makes of user, assistant, user, ... and the start of the next answer."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **kwargs)


def context_of(tokenizer, mode="windowed", template=WORDS, **kwargs):
    return ContextBuilder(tokenizer, template, mode=mode, **kwargs)


def view(history=(), observation="here", **kwargs):
    return TurnView(observation=observation, info=info(), history=history, **kwargs)


def build(context, *args, **kwargs):
    """Returns the prompt of `view(*args, **kwargs)`, `None` if it does not fit."""
    return context.build([view(*args, **kwargs)])[0]


def answer(action, thought="hm"):
    return f"<think> {thought} </think> <action> {action} </action>"


def info(*actions, won=False, task="find it", task_type="find"):
    return {"admissible_actions": actions or ("go", "look"), "won": won, "task": task, "task_type": task_type}


def step(observation="ok", *, reward=0.0, terminated=False, truncated=False, won=False):
    """Returns what `ScriptedEnv.step` answers."""
    return observation, reward, terminated, truncated, info(won=won)


WIN = step("done", reward=1.0, terminated=True, won=True)
LOSE = step("dead", terminated=True)


class ScriptedEnv(TextEnv):
    """Gives the answers of a list in turn, and raises the exceptions among them. `received` are the actions."""

    def __init__(self, *answers, start=None):
        self.answers = list(answers)
        self.start = start or ("start", info())
        self.received = []
        self.resets = []

    def reset(self, *, seed=None, options=None):
        self.resets.append((seed, options))
        if isinstance(self.start, Exception):
            raise self.start
        return self.start

    def step(self, action):
        self.received.append(action)
        given = self.answers.pop(0) if self.answers else step()
        if isinstance(given, Exception):
            raise given
        return given


@dataclass
class ScriptedPolicy:
    """Responds with the texts (or ids) of one round after the other, each ended by the end of turn; then with "go".

    `calls` are the prompts of each call.
    """

    tokenizer: PreTrainedTokenizerFast
    rounds: Sequence[Sequence[str | list[int]]] = ()
    logprobs: bool = False
    calls: list[list[list[int]]] = field(default_factory=list)

    def __call__(self, prompt_ids):
        given = self.rounds[len(self.calls)] if len(self.calls) < len(self.rounds) else []
        self.calls.append([list(ids) for ids in prompt_ids])
        texts = [*given, *[answer("go")] * (len(prompt_ids) - len(given))]
        ids = [t if isinstance(t, list) else [*ids_of(self.tokenizer, t), self.tokenizer.eos_token_id] for t in texts]
        return ids, [[-0.5 - i] * len(row) for i, row in enumerate(ids)] if self.logprobs else None
