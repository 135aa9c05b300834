"""How a run of several processes ends its own: with the reasons why it was no success, or because somebody
stopped it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType


def exit_status_of(run: Callable[[], list[str]], stopped: str) -> int:
    """Call ``run``, which gives the reasons why it was no success, and tell them: 0 without any, else 1.
    While it lasts SIGTERM counts as Ctrl-C; after either ``stopped`` is said, and the status is 130."""
    before = signal.signal(signal.SIGTERM, _interrupted)
    try:
        reasons = run()
    except KeyboardInterrupt:
        print(stopped, file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, before)
    for reason in reasons:
        print(f"error: {reason}", file=sys.stderr)
    return 1 if reasons else 0


def _interrupted(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
