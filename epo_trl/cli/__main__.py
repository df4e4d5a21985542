"""`python -m epo_trl.cli` is the same as `epo-trl`; launchers of several processes use it."""

import sys

from epo_trl.cli import main

if __name__ == "__main__":
    sys.exit(main())
