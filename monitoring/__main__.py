"""The board as the program that ``socket_activation`` starts:
``python -m monitoring SOURCE ... LISTENER_FD RELAY_FD``.

Started at the first connection, gone after ``IDLE_S`` without one. ``SOURCE`` is "peer" (ask the process at
the other end of the pair) or a folder with journals.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from pathlib import Path

from monitoring.board.server import run_activated
from monitoring.feeds import JournalFeed, RelayedFeed
from p2p_co2.system.process import end_with_parent
from p2p_co2.system.socket_activation import take_over


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m monitoring")
    parser.add_argument("source", help="'peer', or a run's folder")
    parser.add_argument("--history", type=Path, default=None)
    parser.add_argument(
        "--journal", type=Path, default=None, help="what the peer wrote before anybody looked"
    )
    parser.add_argument("listener_fd", type=int)
    parser.add_argument("relay_fd", type=int)
    given = parser.parse_args()
    end_with_parent(os.getppid())
    listener, relay = take_over(given.listener_fd, given.relay_fd)
    give_way = threading.Timer(30.0, os.setpriority, (os.PRIO_PROCESS, os.getpid(), 10))
    give_way.daemon = True  # to the training beside it, but for the first page
    give_way.start()
    if given.source == "peer":
        feed = RelayedFeed(relay, given.journal.parent if given.journal is not None else None)
        return run_activated(feed, listener, given.history, feed.gone, given.journal)
    return run_activated(JournalFeed(Path(given.source)), listener, given.history)


if __name__ == "__main__":
    sys.exit(main())
