"""``python -m bootstrap seed RUN.toml``: the console script by another name; nothing imports it."""

import sys

from p2p_co2.cli.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], program="python -m bootstrap"))
