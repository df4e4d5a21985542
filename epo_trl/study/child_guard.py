"""`python child_guard.py PROGRAM ...`: runs a program, and kills it when the process that started this one is gone.

Stdin is a pipe that only the starter holds, so it closes when the starter ends, also by kill -9. Guard and program
share a process group, which is then killed. SIGTERM and Ctrl-C are left to the program.
"""

import os
import signal
import subprocess
import sys
import threading


def _end_with_the_starter() -> None:
    while os.read(0, 4096):  # not sys.stdin: Python needs its lock at exit
        pass
    os.killpg(0, signal.SIGKILL)


def main() -> int:
    """Runs the program and returns its exit status, or 128 plus the number of the signal that ended it."""
    program = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    for name in (signal.SIGTERM, signal.SIGINT):  # after the start, or the program would inherit that they are ignored
        signal.signal(name, lambda *_: None)
    threading.Thread(target=_end_with_the_starter, daemon=True).start()
    status = program.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
