"""The root of this package's errors, and how programs print them: as one line that a terminal only displays."""

import re

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
