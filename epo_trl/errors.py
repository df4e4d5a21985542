"""The root of this package's errors."""


class EpoTrlError(Exception):
    """An error whose message is for the user: programs print it as one line, without a traceback.

    Subclasses also derive from the built-in type that callers catch, such as `ValueError`.
    """


class InputError(EpoTrlError, ValueError):
    """A setting, a file or an argument is invalid. The message names it."""


class FileError(EpoTrlError, OSError):
    """A file or folder that a setting names cannot be read or written. The message names both."""
