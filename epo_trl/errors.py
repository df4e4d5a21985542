"""The root of this package's errors, how programs print them (as one line that a terminal only displays), and how
messages list settings that differ."""

import re
from collections.abc import Mapping
from typing import Any

# Characters that a terminal interprets instead of displaying (control characters except tab and newline, marks that
# change the writing direction), and characters that cannot be encoded (halves of surrogate pairs).
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class EpoTrlError(Exception):
    """An error whose message is for the user: programs print it as one line, without a traceback.

    Subclasses also derive from the built-in type that callers catch, such as `ValueError`.
    """


class InputError(EpoTrlError, ValueError):
    """A setting, a file or an argument is invalid. The message names it."""


class FileError(EpoTrlError, OSError):
    """A file or folder that a setting names cannot be read or written. The message names both."""


def spelled(text: str) -> str:
    """Escapes the characters that a terminal would interpret, as in `\\x1b`."""
    return _OBEYED.sub(lambda found: ascii(found[0])[1:-1], text.replace("\r\n", "\n"))


def one_line(message: object) -> str:
    """Returns a message, which may quote an environment or a file, as one escaped line."""
    return spelled(" ".join(str(message).split()))


def changed_settings(then: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Describes each setting that differs, also inside mappings, as in `env.seed: 0 there, 1 now`."""
    lines = []
    for name in sorted({*then, *now}, key=str):
        old, new = then.get(name), now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            lines += changed_settings(old, new, f"{prefix}{name}.")
        elif old != new:
            lines.append(f"{prefix}{name}: {_shortened(old)} there, {_shortened(new)} now")
    return lines


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns one line per setting that differs, among those that both sides have."""
    both = saved.keys() & now.keys()
    return changed_settings({name: saved[name] for name in both}, {name: now[name] for name in both})


def _shortened(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
