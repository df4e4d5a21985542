"""The text that a chat template puts around messages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import TemplateError as JinjaError

from epo_trl.errors import InputError

_PROBE = ("userstart", "answerhere", "usernext", "answernext", "userlast")  # messages that reveal the frame
# What `strftime_now` of a chat template returns, so that prompts are the same every day: the default date of Llama 3.
_DATE = datetime(2024, 7, 26)
_DIRECTIVES = ("%-d", "%-m", *(f"%{letter}" for letter in "aAbBdeFHIjmMpSTyY"))


class ChatTemplateError(InputError):
    """The tokenizer's chat template cannot carry a multi-turn episode."""


@dataclass(frozen=True, slots=True)
class ChatFrame:
    """The text that a chat template puts around messages."""

    opening: str  # before the first user message
    closing: str  # after the first user message, up to the start of the assistant's answer
    between: str  # after an answer, up to the start of the next message; begins with the end-of-turn token
    reply_closing: str  # same as `closing`, for every later message
    # After the last answer of a conversation; empty if only the header of the next message, with which `between`
    # begins, ends an answer (GLM-4).
    ending: str

    @classmethod
    def of(cls, tokenizer: Any, reply_role: str = "user", **chat_template_kwargs: Any) -> ChatFrame:
        """Extracts the frame from the tokenizer's chat template; `reply_role` is `"user"` or `"tool"`.

        Raises:
            ChatTemplateError: If there is no template, or it does not show each message exactly once and verbatim.
        """
        chat_template_kwargs = _with_fixed_date(tokenizer, chat_template_kwargs)
        advice = "; use context: windowed or action_format: tags" if reply_role == "tool" else ""

        def apply(texts: Sequence[str], asks: bool = True, **reply: str) -> str:
            messages: list[dict[str, str]] = [
                {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)
            ]
            for message in messages[2::2]:
                message |= {"role": reply_role, **reply}
            try:
                return tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=asks, **chat_template_kwargs
                )
            except (JinjaError, TypeError, ValueError) as error:  # the last without a chat template
                roles = ", ".join(message["role"] for message in messages)
                raise ChatTemplateError(
                    f"processing_class: the chat template cannot render the messages {roles}: {error}{advice}"
                ) from error

        single, whole = _around(apply(_PROBE[:1]), _PROBE[:1]), _around(apply(_PROBE), _PROBE, advice)
        opening, closing = single
        reply_closing = whole[5] if reply_role == "tool" else closing
        # opening, user, (start of an answer), answer, between, user, ..., answer, between, user, closing
        for got, expected in ((whole[0], opening), (whole[4], whole[2]), (whole[5], reply_closing)):
            if got != expected:
                raise ChatTemplateError(
                    "processing_class: the chat template must put the same text around a message in every place of a "
                    f"conversation, got {got!r} and {expected!r}"
                )
        if reply_role == "tool" and apply(_PROBE, name="toolone") != apply(_PROBE, name="tooltwo"):
            raise ChatTemplateError(f"processing_class: the chat template names the tool beside its result{advice}")
        ending = apply(_PROBE[:2], asks=False).rpartition(_PROBE[1])[2]
        if opening.rstrip().endswith(ending.strip()):  # the header of a user's message
            ending = ""
        return cls(opening, closing, whole[2], reply_closing, ending)


def _with_fixed_date(tokenizer: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `apply_chat_template` with a template in which `strftime_now` returns a fixed date."""
    if "strftime_now" not in str(kwargs.get("chat_template") or tokenizer.chat_template):
        return kwargs
    template = tokenizer.get_chat_template(kwargs.get("chat_template"), kwargs.get("tools"))
    date = "".join(f" | replace('{each}', '{_DATE.strftime(each)}')" for each in _DIRECTIVES)
    # A macro shadows transformers' function, which no argument can replace. The template follows on a line of its own.
    macro = f"{{% macro strftime_now(format) %}}{{{{ format{date} }}}}{{% endmacro %}}\n"
    return {**kwargs, "chat_template": macro + template}


def _around(text: str, marks: Sequence[str], advice: str = "") -> list[str]:
    """Splits the text at the marks and returns the pieces before, between and after them."""
    counts = {mark: text.count(mark) for mark in marks}
    if set(counts.values()) != {1} or sorted(marks, key=text.index) != list(marks):
        raise ChatTemplateError(
            "processing_class: the chat template must show every message exactly once, verbatim and in order, got "
            f"{counts}{advice}"
        )
    return re.split("|".join(marks), text)
