"""What the policy is shown at each turn, as token ids.

Windowed context (the paper's): every turn is a fresh prompt built from the last `history_length` turns.
Concatenated context: the episode is one growing sequence; a turn appends the closing of the previous response and
the new observation. Either way the sampled ids are kept as they are: nothing is decoded and tokenised again. Only the
chat template and the prompt template write control tokens, see `epo_trl.rollout.encoding`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from jinja2 import TemplateError as JinjaError

from epo_trl.envs.base import Info
from epo_trl.rollout.encoding import control_tokens, prompt_encoder
from epo_trl.rollout.examples import Example
from epo_trl.rollout.templates import PromptTemplate, render, rewrite

CONTEXTS = ("windowed", "concatenated")
TAGS = ("<think>", "</think>", "<action>", "</action>")
_PROBE = ("userstart", "answerhere", "usernext", "answernext", "userlast")  # the messages that show the frame


class ChatTemplateError(ValueError):
    """The tokenizer's chat template cannot carry a multi-turn episode."""


@dataclass(frozen=True, slots=True)
class ChatFrame:
    """The text that a chat template puts around messages.

    Args:
        opening: Before the first user message.
        closing: After a user message, up to where the assistant's answer begins.
        between: After an answer, up to where the next user message begins. It starts with the end-of-turn token.
    """

    opening: str
    closing: str
    between: str

    @classmethod
    def of(cls, tokenizer: Any, **chat_template_kwargs: Any) -> ChatFrame:
        """Returns the frame of the tokenizer's chat template.

        Raises:
            ChatTemplateError: If there is no template, or it does not show each message exactly once and verbatim.
        """
        if getattr(tokenizer, "chat_template", None) is None:
            raise ChatTemplateError(
                "processing_class: the tokenizer has no chat template; load an instruct model's tokenizer or set "
                "`tokenizer.chat_template`"
            )

        def apply(texts: Sequence[str]) -> str:
            messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
            try:
                return tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True, **chat_template_kwargs
                )
            except (JinjaError, TypeError) as error:
                roles = ", ".join(message["role"] for message in messages)
                raise ChatTemplateError(
                    f"processing_class: the chat template cannot render the messages {roles}: {error}"
                ) from error

        single, whole = _around(apply(_PROBE[:1]), _PROBE[:1]), _around(apply(_PROBE), _PROBE)
        opening, closing = single
        # opening, user, (start of an answer), answer, between, user, ..., answer, between, user, closing
        for got, expected in ((whole[0], opening), (whole[4], whole[2]), (whole[5], closing)):
            if got != expected:
                raise ChatTemplateError(
                    "processing_class: the chat template must put the same text around a message wherever it stands "
                    f"in the conversation; got {got!r} in one place, {expected!r} in another"
                )
        return cls(opening, closing, whole[2])


def _around(text: str, marks: Sequence[str]) -> list[str]:
    """Returns the pieces of the text before, between and after the marks."""
    counts = {mark: text.count(mark) for mark in marks}
    if set(counts.values()) != {1} or sorted(marks, key=text.index) != list(marks):
        raise ChatTemplateError(
            "processing_class: the chat template must show every message exactly once, verbatim and in order, for "
            f"user and assistant in turn; of {len(marks)} messages it showed {counts} times"
        )
    pieces = []
    for mark in marks:
        piece, _, text = text.partition(mark)
        pieces.append(piece)
    return [*pieces, text]


@dataclass(slots=True)
class TurnView:
    """What is known when a prompt is to be built.

    Args:
        observation: The current observation.
        info: The environment's info.
        history: The past turns as `PastTurn` has them, oldest first; the thought may be left out.
        last_response_ids: The previous response, for the concatenated context.
        context_tokens: Length of the concatenated sequence so far.
    """

    observation: str
    info: Info
    history: Sequence[tuple[str, ...]]
    last_response_ids: Sequence[int] = ()
    context_tokens: int = 0


@dataclass(slots=True)
class Prompt:
    """Token ids to append before the response (`ids`), and how many history turns did not fit."""

    ids: list[int]
    dropped_turns: int = 0


@dataclass
class ContextBuilder:
    """Builds prompts for many episodes at once.

    Args:
        tokenizer: A Hugging Face tokenizer with a chat template.
        template: The wording.
        mode: `"windowed"` or `"concatenated"`.
        history_length: Past turns shown in a windowed prompt.
        max_prompt_tokens: Longest prompt of one turn, chat template included.
        max_context_tokens: Concatenated: longest sequence, responses included. `None` for no limit.
        max_response_tokens: Room kept for the next response in that sequence.
        chat_template_kwargs: Passed to the chat template.
        end_ids: Tokens that end a response; by default the tokenizer's end of sequence.
        examples: Episodes in front of the first prompt, and so of every windowed one. A text is shown as it is.
    """

    tokenizer: Any
    template: PromptTemplate
    mode: str = "windowed"
    history_length: int = 2
    max_prompt_tokens: int = 2048
    max_context_tokens: int | None = None
    max_response_tokens: int = 0
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    end_ids: Sequence[int] = ()
    examples: Sequence[Example | str] = ()

    def __post_init__(self) -> None:
        if self.mode not in CONTEXTS:
            raise ValueError(f"context: got {self.mode!r}, takes one of {CONTEXTS}")
        if self.history_length < 0:
            raise ValueError(f"history_length: got {self.history_length}, takes an integer >= 0")
        self.frame = ChatFrame.of(self.tokenizer, **self.chat_template_kwargs)
        self._encoder = prompt_encoder(self.tokenizer)
        write = self._encoder.write
        self._frame = ChatFrame(write(self.frame.opening), write(self.frame.closing), write(self.frame.between))
        self.template.check_examples(self.examples, ("first", "next") if self.is_windowed else ("first",))
        self._words = self.template.written(write)
        self._examples = self._words.shown(self.examples)
        self._check_encoder()
        self.end_ids = self.end_ids or [self.tokenizer.eos_token_id]
        self._closing_marks = self._marks(self._encode([self._frame.between])[0])
        shown = self.tokenizer.decode(self.encode(" ".join(TAGS), [{}])[0], skip_special_tokens=True).lower()
        lost = [tag for tag in TAGS if tag not in shown]
        if lost:
            raise ChatTemplateError(
                f"processing_class: decoding loses {', '.join(lost)}, so no action could be read from a response; "
                "make them ordinary tokens (special=False) of the tokenizer"
            )

    @property
    def is_windowed(self) -> bool:
        """Whether a prompt is all that the policy reads before a turn; else the episode is one growing sequence."""
        return self.mode == "windowed"

    def carried(self, before: Sequence[int], prompt: Prompt, response_ids: Sequence[int]) -> list[int]:
        """Returns the token ids that stand before the next turn's prompt.

        Args:
            before: Those that stood before this turn's.
            prompt: Of this turn.
            response_ids: Of this turn.
        """
        return [] if self.is_windowed else [*before, *prompt.ids, *response_ids]

    @property
    def answer_start(self) -> str:
        """What the chat template has already written of every answer: `"<think>"`, or `""` for most templates."""
        return "<think>" if self.frame.closing.rstrip().endswith("<think>") else ""

    @property
    def has_empty_thought(self) -> bool:
        """Whether the chat template has already written a `<think>` block of every answer, and closed it."""
        return self.frame.closing.rstrip().endswith("</think>")

    def build(self, views: Sequence[TurnView]) -> list[Prompt | None]:
        """Returns one prompt per view, or `None` where it does not fit even without history.

        A prompt that is too long loses its oldest history turns first; the task, the observation and the actions are
        never shortened.
        """
        kept = [min(self.history_length, len(view.history)) for view in views]
        ids = self._encode([self._text(view, n) for view, n in zip(views, kept, strict=True)])
        return [self._fit(view, view_ids, n) for view, view_ids, n in zip(views, ids, kept, strict=True)]

    def encode(self, text: str, values: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        """Returns the ids of a text with `{field}` placeholders, once for each set of values, which are data."""
        written = rewrite(text, self._encoder.write)
        return self._encode([render(written, fields) for fields in values])

    def _fit(self, view: TurnView, ids: list[int], kept: int) -> Prompt | None:
        if not self.is_windowed:
            if view.history:
                ids = ids[self._ended(view.last_response_ids) :]
            total = view.context_tokens + len(ids) + self.max_response_tokens
            fits = self.max_context_tokens is None or total <= self.max_context_tokens
            return Prompt(ids) if fits and len(ids) <= self.max_prompt_tokens else None
        wanted = kept
        while len(ids) > self.max_prompt_tokens:
            if kept == 0:
                return None
            kept -= 1
            ids = self._encode([self._text(view, kept)])[0]
        return Prompt(ids, dropped_turns=wanted - kept)

    def _marks(self, between: Sequence[int]) -> list[int]:
        """Returns the control tokens, and white space among them, that come first after an answer."""
        control = set(control_tokens(self.tokenizer).values())
        return list(takewhile(lambda i: i in control or not self.tokenizer.decode([i]).strip(), between))

    def _ended(self, response: Sequence[int]) -> int:
        """Returns how many tokens of what closes an answer need not be appended to this response.

        The closing of an answer is one token or several, of which a response that was not cut has sampled all, or
        another one that ends it as well.
        """
        ends = [i for i, token in enumerate(self._closing_marks) if token in self.end_ids]
        closing = self._closing_marks[: ends[-1] + 1 if ends else 1]
        for count in range(len(closing), 0, -1):
            if list(response[-count:]) == closing[:count]:
                return count
        return len(closing) if response and response[-1] in self.end_ids else 0

    def _text(self, view: TurnView, kept: int) -> str:
        taken = len(view.history)
        fields = {**view.info, "observation": view.observation, "turn": taken + 1, "turns_taken": taken}
        fields["examples"] = self._examples
        if not taken:
            return self._framed(self._frame.opening, self._words.first, fields)
        if not self.is_windowed:
            return self._framed(self._frame.between, self._words.followup, fields)
        past = self._words.past(view.history[taken - kept :], first=taken - kept + 1)
        fields |= {"history": past, "history_length": kept}
        return self._framed(self._frame.opening, self._words.next, fields)

    def _framed(self, before: str, message: str, fields: Mapping[str, Any]) -> str:
        # Many chat templates trim their messages, so white space around one would make the prompt another text.
        return before + render(message, fields).strip() + self._frame.closing

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns ids of texts in which `_frame` and `_words` have the secret names of control tokens."""
        return self._encoder.encode(texts)

    def _check_encoder(self) -> None:
        """Raises `ChatTemplateError` if the templates' own text does not come out as from the tokenizer itself."""
        plain = [self.frame.opening + self.template.first + self.frame.closing, self.frame.between]
        written = self._encode([self._encoder.write(text) for text in plain])
        if written != self.tokenizer(plain, add_special_tokens=False)["input_ids"]:
            raise ChatTemplateError(
                f"processing_class: {type(self.tokenizer).__name__} gives other ids when its control tokens have other "
                "names, so what an environment says cannot be kept apart from them; take another tokenizer"
            )
