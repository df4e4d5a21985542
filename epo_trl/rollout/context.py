"""Builds the prompt of each turn as token ids.

Windowed context (the paper's): every turn is a fresh prompt built from the last `history_length` turns.
Concatenated context: the episode is one growing sequence; a turn appends the closing of the previous response and
the new observation. Either way the sampled ids are kept unchanged: nothing is decoded and tokenised again. Only the
chat template and the prompt template can write control tokens, see `epo_trl.rollout.encoding`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from itertools import takewhile
from typing import Any

from epo_trl.envs.base import Info
from epo_trl.errors import InputError
from epo_trl.rollout.chat_frame import ChatFrame, ChatTemplateError
from epo_trl.rollout.encoding import FastEncoder, control_tokens
from epo_trl.rollout.parsing import ActionFormat, ParsedResponse, RawResponse, TaggedActions
from epo_trl.rollout.templates import Example, PromptTemplate, render, rewrite

CONTEXTS = ("windowed", "concatenated")


@dataclass(slots=True)
class TurnView:
    """Everything that a prompt is built from.

    Args:
        observation: The current observation.
        info: The environment's info.
        history: Past turns with the fields of `PastTurn`, oldest first; the thought may be omitted.
        last_response_ids: Token ids of the previous response, for the concatenated context.
        context_tokens: Length of the concatenated sequence so far.
    """

    observation: str
    info: Info
    history: Sequence[tuple[str, ...]]
    last_response_ids: Sequence[int] = ()
    context_tokens: int = 0


@dataclass(slots=True)
class Prompt:
    """Token ids to append before the response (`ids`), and the number of history turns that did not fit."""

    ids: list[int]
    dropped_turns: int = 0


@dataclass
class ContextBuilder:
    """Builds prompts for many episodes at once.

    Args:
        tokenizer: A Hugging Face tokenizer with a chat template.
        template: Prompt template.
        mode: `"windowed"` or `"concatenated"`.
        history_length: Past turns shown in a windowed prompt.
        max_prompt_tokens: Maximum length of one turn's prompt, including the chat template.
        max_context_tokens: Maximum length of a concatenated sequence, including responses; `None` for no limit.
        max_response_tokens: Number of tokens reserved for the next response in that sequence.
        chat_template_kwargs: Arguments passed to the chat template.
        end_ids: Ids of the tokens that end a response; by default the tokenizer's end-of-sequence token.
        examples: Example episodes shown in the first prompt, and in every windowed one.
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
    examples: Sequence[Example] = ()
    actions: ActionFormat = field(default_factory=TaggedActions)

    def __post_init__(self) -> None:
        if self.mode not in CONTEXTS:
            raise InputError(f"context: expected one of {CONTEXTS}, got {self.mode!r}")
        if self.history_length < 0:
            raise InputError(f"history_length: expected an integer >= 0, got {self.history_length}")
        kwargs = {**self.chat_template_kwargs, **self.actions.chat_template_kwargs}
        self.frame = ChatFrame.of(self.tokenizer, "user" if self.is_windowed else self.actions.reply_role, **kwargs)
        if not getattr(self.tokenizer, "is_fast", False):
            raise ChatTemplateError(f"processing_class: expected a fast tokenizer, got {type(self.tokenizer).__name__}")
        self._encoder = FastEncoder(self.tokenizer)
        write = self._encoder.write
        self._frame = ChatFrame(*map(write, astuple(self.frame)))
        self._words, self._examples = self.template.written(write), ""
        if self.examples:
            self.template.check_examples(("first", "next") if self.is_windowed else ("first",))
            self._examples = self._words.shown(self.examples)
        self._check_encoder()
        self.end_ids = self.end_ids or [self.tokenizer.eos_token_id]
        control, between = set(control_tokens(self.tokenizer).values()), self._encode([self._frame.between])[0]
        # The leading control tokens of the text after an answer, and white space between them.
        self._closing_marks = list(
            takewhile(lambda token: token in control or not self.tokenizer.decode([token]).strip(), between)
        )
        tags = self.actions.tags
        (ids,) = self._encode([write(" ".join(tags))])
        shown = self.tokenizer.decode(ids, skip_special_tokens=True).lower()
        lost = [tag for tag in tags if tag not in shown]
        if lost:
            raise ChatTemplateError(
                f"processing_class: decoding loses {', '.join(lost)}, so no action could be read from a response; "
                "make them ordinary tokens (special=False) of the tokenizer"
            )

    @property
    def is_windowed(self) -> bool:
        """Whether every turn is a fresh prompt; otherwise the episode is one growing sequence."""
        return self.mode == "windowed"

    def check_limit(self, name: str, limit: int, turns: int = 1) -> None:
        """Raises `InputError` if a prompt and responses of maximum length exceed a limit.

        Args:
            name: Name of the limit.
            limit: Maximum sequence length in tokens.
            turns: Number of responses in the sequence.
        """
        prompt, response = self.max_prompt_tokens, self.max_response_tokens
        if (needed := prompt + turns * response) <= limit:
            return
        per_turn, budget, advice = "", "", "Lower max_prompt_length or max_completion_length"
        if turns > 1:
            per_turn, budget = f"{turns} x ", "max_turns, "
            advice = "Lower max_prompt_length, max_completion_length or max_turns, or use context='windowed'"
        raise InputError(
            f"{budget}max_prompt_length, max_completion_length: expected at most {name} = {limit} tokens, got {prompt} "
            f"+ {per_turn}{response} = {needed} in {self.mode} context. {advice}."
        )

    def carried(self, before: Sequence[int], prompt: Prompt, response_ids: Sequence[int]) -> list[int]:
        """Returns the token ids that precede the next turn's prompt, given those `before` this turn's."""
        return [] if self.is_windowed else [*before, *prompt.ids, *response_ids]

    @property
    def answer_end(self) -> int:
        """Token that ends an answer: that of the chat template if it ends responses, else the end of sequence."""
        return next((token for token in self._closing_marks if token in self.end_ids), self.tokenizer.eos_token_id)

    @property
    def answer_start(self) -> str:
        """Start of every answer that the chat template writes itself: `"<think>"`, or `""` for most templates."""
        return "<think>" if self.frame.closing.rstrip().endswith("<think>") else ""

    def decode(self, responses: Sequence[Sequence[int]]) -> list[str]:
        """Decodes responses without control tokens; the white space is the sampled one."""
        return self.tokenizer.batch_decode(responses, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def read(
        self, ids: Sequence[int], text: str, admissible: Sequence[str] | None, *, require_think: bool
    ) -> ParsedResponse:
        """Parses the action of a response, sampled as `ids` and decoded to `text`; see `parse_response`."""
        response = RawResponse(ids, self.answer_start + text, self.frame.closing)
        return self.actions.read(response, admissible, require_think=require_think)

    def build(self, views: Sequence[TurnView]) -> list[Prompt | None]:
        """Builds one prompt per view, or `None` where the prompt does not fit even without history.

        A prompt that is too long drops its oldest history turns; the task, the observation and the actions are never
        shortened.
        """
        kept = [min(self.history_length, len(view.history)) for view in views]
        ids = self._encode([self._text(view, n) for view, n in zip(views, kept, strict=True)])
        return [self._fit(view, view_ids, n) for view, view_ids, n in zip(views, ids, kept, strict=True)]

    def encode(self, text: str, values: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        """Encodes a text with `{field}` placeholders once per set of values; values never become control tokens."""
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

    def _ended(self, response: Sequence[int]) -> int:
        """Returns the number of closing tokens that must not follow the response.

        One or more tokens close an answer. A response that was not truncated has sampled all of them, or another
        end token instead. Where the next message's header ends an answer, that header follows the other token.
        """
        ends = [i for i, token in enumerate(self._closing_marks) if token in self.end_ids]
        closing = self._closing_marks[: ends[-1] + 1 if ends else 1]
        for count in range(len(closing), 0, -1):
            if list(response[-count:]) == closing[:count]:
                return count
        is_closed = response and response[-1] in self.end_ids and self.frame.ending.strip()
        return len(closing) if is_closed else 0

    def _text(self, view: TurnView, kept: int) -> str:
        taken = len(view.history)
        fields = {**view.info, "observation": view.observation, "turn": taken + 1, "turns_taken": taken}
        fields["examples"] = self._examples
        frame, words = self._frame, self._words
        if not taken:
            before, message, after = frame.opening, words.first, frame.closing
        elif not self.is_windowed:
            before, message, after = frame.between, words.followup, frame.reply_closing
        else:
            before, message, after = frame.opening, words.next, frame.closing
            past = words.past(view.history[taken - kept :], first=taken - kept + 1)
            fields |= {"history": past, "history_length": kept}
        # Many chat templates strip their messages, so white space around one would change the prompt.
        return before + render(message, fields).strip() + after

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes texts in which `_frame` and `_words` refer to control tokens by their secret names.

        An unpaired surrogate, which no tokenizer can encode, becomes a question mark.
        """
        return self._encoder.encode([text.encode(errors="replace").decode() for text in texts])

    def _check_encoder(self) -> None:
        """Raises `ChatTemplateError` if the templates' own text is encoded differently than by the tokenizer itself."""
        frame = self.frame
        plain = [frame.opening + self.template.first + frame.closing, frame.between, frame.reply_closing]
        written = self._encode([self._encoder.write(text) for text in plain])
        if written != self.tokenizer(plain, add_special_tokens=False)["input_ids"]:
            raise ChatTemplateError(
                f"processing_class: {type(self.tokenizer).__name__} gives other ids when its control tokens have other "
                "names, so observations that spell a control token cannot be escaped; use another tokenizer"
            )
