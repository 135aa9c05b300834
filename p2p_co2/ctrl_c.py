"""A Ctrl-C while the program is still importing itself: no traceback.

The console script imports this before anything else; later commands say themselves what a Ctrl-C means to
them. The process ends by the signal all the same, which a shell shows as status 130. Price: the interpreter's
own start, some 30 ms before this, is not ours.
"""

from __future__ import annotations

import sys
from types import TracebackType


def _end_quietly(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("stopped", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


if sys.excepthook is sys.__excepthook__:  # else somebody else, a debugger say, wants to see what comes
    sys.excepthook = _end_quietly
