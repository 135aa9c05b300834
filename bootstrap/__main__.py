"""``python -m bootstrap seed RUN.toml`` and ``python -m bootstrap demo``: the console script's programs by
another name.

An entry point stands above every floor, so it may call the command line; nothing imports it.
"""

import sys

from p2p_co2.cli.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], program="python -m bootstrap"))
