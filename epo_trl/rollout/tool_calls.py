"""Actions as tool calls, in the chat format of the model's family.

The chat template shows the tools, and tells the model how to call one; the tokenizer's response template says how a
call is read. For the families that TRL knows (Qwen, Llama 3, Gemma 4, ...) TRL sets it where it is missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from epo_trl.envs.adapters import FINAL_ANSWER
from epo_trl.rollout.chat_frame import ChatTemplateError
from epo_trl.rollout.encoding import control_tokens
from epo_trl.rollout.parsing import MAX_PASSED_CHARS, ActionFormat, ParsedResponse, Response, TaggedActions

ACTION_FORMATS = ("tags", "tool_calls")
TOO_DEEP = "the tool call is nested too deeply"
_REASONING = ("reasoning_content", "thinking")  # what response templates call it


def action_format(
    name: str, tokenizer: Any, tools: Sequence[Callable[..., Any]], *, verbatim: bool = False
) -> ActionFormat:
    """Returns how a response names its action.

    Args:
        name: `"tags"`, between `<action>` and `</action>`; or `"tool_calls"`, in the model family's own format.
        tokenizer: Tokenizer of the policy. TRL may set its `response_template`.
        tools: Tools of the suite.
        verbatim: Of the suite; tool calls are.

    Raises:
        ValueError: If the name is unknown, or there are no tools to call.
        ChatTemplateError: If the chat template cannot show tools, or nobody knows how its calls are read.
    """
    if name not in ACTION_FORMATS:
        raise ValueError(f"action_format: expected one of {ACTION_FORMATS}, got {name!r}")
    if name == "tags":
        return TaggedActions(verbatim=verbatim or bool(tools))
    if not tools:
        raise ValueError(
            f"action_format: expected 'tags', got {name!r} with an environment that has no tools (docs/other_worlds.md)"
        )
    return ToolCalls(tokenizer, tools)


class ToolCalls:
    """One tool call is the action of a response; the environment gets it as JSON, `{"name": ..., "arguments": ...}`.

    Args:
        tokenizer: Its chat template shows tools.
        tools: Functions with types and docstrings, as transformers' chat templates take them.
    """

    reply_role: ClassVar[str] = "tool"
    tags: ClassVar[Sequence[str]] = ()  # ids are read, not the text

    def __init__(self, tokenizer: Any, tools: Sequence[Callable[..., Any]]) -> None:
        from transformers.utils import get_json_schema
        from trl import add_response_schema, supports_tool_calling

        if not supports_tool_calling(tokenizer):
            raise ChatTemplateError(
                "action_format: got 'tool_calls', but the chat template does not show tool calls and what they "
                "return; use 'tags', or another model"
            )
        if getattr(tokenizer, "response_template", None) is None:
            try:
                add_response_schema(tokenizer)
            except ValueError as error:
                raise ChatTemplateError(
                    "action_format: got 'tool_calls', but TRL does not know how this chat template's calls are read; "
                    "set `tokenizer.response_template`, or take 'tags'"
                ) from error
        self.tokenizer = tokenizer
        self.schemas = [get_json_schema(tool) for tool in tools]
        self._check_texts()
        self._can_answer = any(schema["function"]["name"] == FINAL_ANSWER for schema in self.schemas)

    @property
    def chat_template_kwargs(self) -> Mapping[str, Any]:
        """The tools, for the chat template to show."""
        return {"tools": self.schemas}

    def read(self, response: Response, admissible: Iterable[str] | None, *, require_think: bool) -> ParsedResponse:
        """Returns the one tool call of a response; a response without any is the final answer, if there is that tool.

        Args:
            response: Its ids are read.
            admissible: Not used: whether a call is right is checked against the tool.
            require_think: Whether a call without reasoning in front of it is invalid.
        """
        from trl.chat_template_utils import parse_response

        try:
            message = parse_response(self.tokenizer, list(response.ids), prefix=response.start, tools=self.schemas)
        except RecursionError:
            return ParsedResponse(response.text[-MAX_PASSED_CHARS:], error=TOO_DEEP)
        calls, content = message.get("tool_calls") or [], str(message.get("content") or "").strip()
        thought = next((str(message[name]).strip() for name in _REASONING if message.get(name)), "")
        if not calls and content and self._can_answer:
            calls = [{"name": FINAL_ANSWER, "arguments": {"answer": content}}]
        if len(calls) != 1:
            error = f"{len(calls)} tool calls, takes one" if calls else "no tool call"
            return ParsedResponse(content[-MAX_PASSED_CHARS:], thought, error)
        call = calls[0].get("function", calls[0])
        try:
            action = json.dumps({"name": call["name"], "arguments": call["arguments"]}, ensure_ascii=False)
        except RecursionError:
            return ParsedResponse(content[-MAX_PASSED_CHARS:], thought, TOO_DEEP)
        return ParsedResponse(
            action, thought, "no reasoning before the tool call" if require_think and not thought else ""
        )

    def _check_texts(self) -> None:
        """Raises `ChatTemplateError` if a tool spells a control token: the chat template would write it as one."""
        for schema in self.schemas:
            text = json.dumps(schema, ensure_ascii=False)
            spelled = [token for token in control_tokens(self.tokenizer) if token in text]
            if spelled:
                raise ChatTemplateError(
                    f"action_format: the description of the tool {schema['function']['name']!r} spells "
                    f"{spelled[0]!r}, a control token of the model; word it otherwise, or take 'tags'"
                )
