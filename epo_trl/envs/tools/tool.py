"""A tool: a function that an agent calls by name, with arguments checked against its type hints."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from epo_trl.envs.base import EnvError

FORM = '{"name": ..., "arguments": {...}}'


class Refusal(ValueError):
    """A tool call that is not possible. The message tells the agent why."""


def tool_call(name: str, **arguments: Any) -> str:
    """Builds the action that calls a tool."""
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def read_call(action: str) -> tuple[str, dict[str, Any]]:
    """Parses the name and arguments of a call in JSON; white space around names is ignored."""
    try:
        call = json.loads(action)
    except (ValueError, RecursionError):
        raise Refusal(f"this is no tool call; write one as {FORM}") from None
    call = _named(call)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise Refusal(f"this names no tool; write a call as {FORM}")
    arguments = _named(call.get("arguments", {}))
    if not isinstance(arguments, dict):
        raise Refusal(f"the arguments of {_short(call['name'])} are no names and values; write a call as {FORM}")
    return call["name"].strip(), arguments


@dataclass(frozen=True)
class Tool:
    """A tool."""

    name: str
    text: str  # signature and docstring, for prompts
    parameters: Mapping[str, TypeAdapter[Any]]
    required: tuple[str, ...]  # arguments without a default

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Tool:
        """Builds the tool from a function or a bound method.

        Raises:
            EnvError: If it has no docstring, an argument has no type, or it accepts `*args` or `**kwargs`.
            NameError: If a type is not defined in its module.
        """
        name, doc = function.__name__, inspect.getdoc(function)
        if not doc:
            raise EnvError(f"the tool {name!r} has no docstring; write one that tells the agent what it does")
        signature = inspect.signature(function, eval_str=True)
        parameters: dict[str, TypeAdapter[Any]] = {}
        for parameter in signature.parameters.values():
            is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if not is_named or parameter.annotation is parameter.empty:
                raise EnvError(f"the tool {name!r}: expected named arguments with types, got {parameter}")
            parameters[parameter.name] = TypeAdapter(parameter.annotation)
        required = tuple(p.name for p in signature.parameters.values() if p.default is p.empty)
        return cls(name, f"{name}{signature}\n{doc}", parameters, required)

    def checked(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Validates the arguments and converts them to the tool's types; raises `Refusal`."""
        for name in self.required:
            if name not in arguments:
                raise Refusal(f"{self.name} lacks the argument {name!r}")
        values = {}
        for name, value in arguments.items():
            if name not in self.parameters:
                names = ", ".join(map(repr, self.parameters)) or "none"
                raise Refusal(f"{self.name} has no argument {_short(name)}; it takes {names}")
            try:
                values[name] = self.parameters[name].validate_json(json.dumps(value, allow_nan=False), strict=True)
            except ValueError as error:
                reason = error.errors(include_url=False)[0]["msg"] if isinstance(error, ValidationError) else error
                raise Refusal(f"{self.name}: the argument {name!r} got {_short(value)}: {reason}") from None
        return values


def _named(value: Any) -> Any:
    return {name.strip(): item for name, item in value.items()} if isinstance(value, dict) else value


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False).encode(errors="replace").decode()  # no lone surrogates
    return text if len(text) <= 100 else text[:97] + "..."
