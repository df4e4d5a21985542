"""`python -m epo_trl.cli` is `epo-trl`, also under a launcher of several processes."""

import sys

from epo_trl.cli import main

if __name__ == "__main__":
    sys.exit(main())
