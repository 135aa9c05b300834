"""``python -m peers TICKET ...`` is ``p2p-co2 join TICKET ...``; nothing imports it."""

import sys

from p2p_co2.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["join", *sys.argv[1:]], program="python -m peers"))
