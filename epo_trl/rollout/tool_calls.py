"""Actions as tool calls, in the chat format of the model's family.

The chat template shows the tools and tells the model how to call one; the tokenizer's response template defines how a
call is parsed. TRL sets a missing one for the families that it supports (Qwen, Llama 3, Gemma 4, ...).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from epo_trl.envs.border import FINAL_ANSWER
from epo_trl.rollout.chat_frame import ChatTemplateError
from epo_trl.rollout.encoding import control_tokens
from epo_trl.rollout.parsing import MAX_PASSED_CHARS, ParsedResponse, RawResponse

_NAME = "toolname"  # stands for a tool's name in a call that the chat template writes
_REASONING = ("reasoning_content", "thinking")  # names of the reasoning in response templates


class ToolCalls:
    """One tool call is the action of a response; the environment gets it as JSON, `{"name": ..., "arguments": ...}`.

    Tools are functions with type hints and docstrings, the format of transformers' chat templates.
    """

    reply_role: ClassVar[str] = "tool"
    tags: ClassVar[Sequence[str]] = ()  # the ids are parsed, not the text

    def __init__(self, tokenizer: Any, tools: Sequence[Callable[..., Any]]) -> None:
        from transformers.utils import get_json_schema
        from trl import add_response_schema, supports_tool_calling

        if not supports_tool_calling(tokenizer):
            raise ChatTemplateError("action_format: expected 'tags': the chat template shows no tool calls and results")
        if getattr(tokenizer, "response_template", None) is None:
            add_response_schema(tokenizer)
        self.tokenizer = tokenizer
        self.schemas = [get_json_schema(tool) for tool in tools]
        self._can_answer = any(schema["function"]["name"] == FINAL_ANSWER for schema in self.schemas)
        self._opener = self._find_opener() if self._can_answer else ""

    @property
    def chat_template_kwargs(self) -> Mapping[str, Any]:
        """The schemas of the tools, for the chat template."""
        return {"tools": self.schemas}

    def read(self, response: RawResponse, admissible: Iterable[str] | None, *, require_think: bool) -> ParsedResponse:
        """Parses the one tool call of a response.

        Without a call, the response is the final answer if that tool exists; a malformed or truncated call is not.
        A call is checked against its tool, so `admissible` is not used.
        """
        from trl.chat_template_utils import parse_response

        message = parse_response(self.tokenizer, list(response.ids), prefix=response.start, tools=self.schemas)
        calls, content = message.get("tool_calls") or [], str(message.get("content") or "").strip()
        thought = next((str(message[name]).strip() for name in _REASONING if message.get(name)), "")
        if not calls and content and self._can_answer and not self._begins_call(response.ids, thought):
            calls = [{"name": FINAL_ANSWER, "arguments": {"answer": content}}]
        if len(calls) != 1:
            error = f"{len(calls)} tool calls, expected one" if calls else "no tool call"
            return ParsedResponse(content[-MAX_PASSED_CHARS:], thought, error)
        call = calls[0].get("function", calls[0])
        action = json.dumps({"name": call["name"], "arguments": call["arguments"]}, ensure_ascii=False)
        error = "no reasoning before the tool call" if require_think and not thought else ""
        return ParsedResponse(action, thought, error)

    def _find_opener(self) -> str:
        """Returns the token or word with which the chat template starts every call, such as `<tool_call>`."""

        def apply(**message: Any) -> str:
            messages = [{"role": "user", "content": "play"}, {"role": "assistant", **message}]
            return self.tokenizer.apply_chat_template(messages, tools=self.schemas, tokenize=False)

        def call(arguments: Any) -> str:
            function = {"name": _NAME, "arguments": arguments}
            return apply(content="", tool_calls=[{"type": "function", "function": function}])

        try:
            shown = call({})
        except TypeError:  # the template joins texts, such as DeepSeek-V3's
            shown = call("{}")
        before, name, _ = shown.partition(_NAME)
        if not name:
            return ""
        common = os.path.commonprefix([before, apply(content="answerhere")])
        word = next(iter(before.removeprefix(common).split()), "")
        return next(filter(word.startswith, control_tokens(self.tokenizer)), word)

    def _begins_call(self, ids: Sequence[int], thought: str) -> bool:
        """Returns whether a response contains, after its reasoning, the start of a call, or ends within it."""
        text = self.tokenizer.decode(ids)
        said = text.split(thought, 1)[-1] if thought else text
        last_word = tuple(said.split()[-1:])
        return bool(self._opener) and (self._opener in said or self._opener.startswith(last_word))
