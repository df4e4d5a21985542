"""`python keeper.py PROGRAM ...`: runs a program, and ends it when whoever started this is gone.

Stdin is a pipe that only the starter holds, so its end is the starter's, however that came (kill -9, too). Keeper and
program are one process group, of which nothing is left then. SIGTERM and Ctrl-C are for the program to answer.
"""

import os
import signal
import subprocess
import sys
import threading


def _end_with_the_starter() -> None:
    while os.read(0, 4096):  # not sys.stdin, whose lock Python wants at its end
        pass
    os.killpg(0, signal.SIGKILL)


def main() -> int:
    """Returns the program's exit status, in the way of a shell if a signal has ended it."""
    program = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    for name in (signal.SIGTERM, signal.SIGINT):  # after the start: a program would inherit that it ignores them
        signal.signal(name, lambda *_: None)
    threading.Thread(target=_end_with_the_starter, daemon=True).start()
    status = program.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
