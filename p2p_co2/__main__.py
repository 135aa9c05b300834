"""``python -m p2p_co2`` is the console script."""

import sys

from p2p_co2.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
