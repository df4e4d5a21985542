"""What the policy is shown at each turn, as token ids.

Windowed context (the paper's): every turn is a fresh prompt built from the last `history_length` turns.
Concatenated context: the episode is one growing sequence; a turn appends the closing of the previous response and
the new observation. Either way the sampled ids are kept as they are: nothing is decoded and tokenised again. Only the
chat template and the prompt template write control tokens, see `epo_trl.rollout.encoding`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from itertools import takewhile
from typing import Any

from epo_trl.envs.base import Info
from epo_trl.rollout.chat_frame import ChatFrame, ChatTemplateError
from epo_trl.rollout.encoding import control_tokens, prompt_encoder
from epo_trl.rollout.examples import Example
from epo_trl.rollout.parsing import ActionFormat, ParsedResponse, Response, TaggedActions
from epo_trl.rollout.templates import PromptTemplate, render, rewrite

CONTEXTS = ("windowed", "concatenated")


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
        actions: Parser that finds the action in a response.
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
    actions: ActionFormat = field(default_factory=TaggedActions)

    def __post_init__(self) -> None:
        if self.mode not in CONTEXTS:
            raise ValueError(f"context: expected one of {CONTEXTS}, got {self.mode!r}")
        if self.history_length < 0:
            raise ValueError(f"history_length: expected an integer >= 0, got {self.history_length}")
        kwargs = {**self.chat_template_kwargs, **self.actions.chat_template_kwargs}
        self.frame = ChatFrame.of(self.tokenizer, "user" if self.is_windowed else self.actions.reply_role, **kwargs)
        self._encoder = prompt_encoder(self.tokenizer)
        write = self._encoder.write
        self._frame = ChatFrame(*map(write, astuple(self.frame)))
        self.template.check_examples(self.examples, ("first", "next") if self.is_windowed else ("first",))
        self._words = self.template.written(write)
        self._examples = self._words.shown(self.examples)
        self._check_encoder()
        self.end_ids = self.end_ids or [self.tokenizer.eos_token_id]
        self._closing_marks = self._marks(self._encode([self._frame.between])[0])
        tags = self.actions.tags
        shown = self.tokenizer.decode(self.encode(" ".join(tags), [{}])[0], skip_special_tokens=True).lower()
        lost = [tag for tag in tags if tag not in shown]
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
            prompt: Prompt of this turn.
            response_ids: Response token ids of this turn.
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

    def read(
        self, ids: Sequence[int], text: str, admissible: Sequence[str] | None, *, require_think: bool
    ) -> ParsedResponse:
        """Returns the action of a response.

        Args:
            ids: As they were sampled.
            text: The same, decoded.
            admissible: The actions that the environment accepts now; `None` if it does not list them.
            require_think: Whether a response without reasoning is invalid.
        """
        response = Response(ids, self.answer_start + text, self.frame.closing)
        return self.actions.read(response, admissible, require_think=require_think)

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
        frame = self._frame
        if not taken:
            return _framed(frame.opening, self._words.first, fields, frame.closing)
        if not self.is_windowed:
            return _framed(frame.between, self._words.followup, fields, frame.reply_closing)
        past = self._words.past(view.history[taken - kept :], first=taken - kept + 1)
        fields |= {"history": past, "history_length": kept}
        return _framed(frame.opening, self._words.next, fields, frame.closing)

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns ids of texts in which `_frame` and `_words` have the secret names of control tokens.

        Half of a surrogate pair, of which no tokenizer makes tokens, becomes a question mark.
        """
        return self._encoder.encode([text.encode(errors="replace").decode() for text in texts])

    def _check_encoder(self) -> None:
        """Raises `ChatTemplateError` if the templates' own text does not come out as from the tokenizer itself."""
        frame = self.frame
        plain = [frame.opening + self.template.first + frame.closing, frame.between, frame.reply_closing]
        written = self._encode([self._encoder.write(text) for text in plain])
        if written != self.tokenizer(plain, add_special_tokens=False)["input_ids"]:
            raise ChatTemplateError(
                f"processing_class: {type(self.tokenizer).__name__} gives other ids when its control tokens have other "
                "names, so what an environment says cannot be kept apart from them; take another tokenizer"
            )


def _framed(before: str, message: str, fields: Mapping[str, Any], after: str) -> str:
    # Many chat templates trim their messages, so white space around one would make the prompt another text.
    return before + render(message, fields).strip() + after
