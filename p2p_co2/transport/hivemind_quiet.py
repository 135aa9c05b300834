"""The one place that imports hivemind, so that the import changes nothing else in the process.

hivemind 1.1.12 adds a coloured handler to its logger, renames the level WARNING, and warns about deprecations
of its own. It does not touch the event loop policy (only its ``DHT`` and averager processes, which we do not
use, install uvloop). After this import its records go where the application's go, from ERROR upwards, or from
``HIVEMIND_LOGLEVEL`` if that is set.

Price: hivemind's package imports torch, about 1.5 s; nothing here uses it. Its averager imports
``scipy.optimize`` as well, for one function: that waits until the function is called, which we never do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any


@contextlib.contextmanager
def _put_off(submodule: str) -> Iterator[None]:
    """Have ``import package.submodule`` load the package alone, which then loads the submodule when it is
    used, as scipy does. Nothing of it stays behind."""
    if submodule in sys.modules:
        yield
        return
    sys.modules[submodule] = ModuleType(submodule)
    try:
        yield
    finally:
        del sys.modules[submodule]


with warnings.catch_warnings(), _put_off("scipy.optimize"):
    warnings.simplefilter("ignore", DeprecationWarning)
    from hivemind.dht import DHTID, DHTNode
    from hivemind.dht.crypto import DHTRecord, RecordValidatorBase
    from hivemind.dht.storage import DictionaryDHTValue
    from hivemind.p2p import P2P, PeerID
    from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
    from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, read_pbmsg_safe, write_pbmsg
    from hivemind.proto import p2pd_pb2
    from hivemind.utils import MSGPackSerializer, get_dht_time
    from hivemind.utils.logging import use_hivemind_log_handler
    from hivemind.utils.multiaddr import Multiaddr
    from hivemind.utils.multiaddr.exceptions import Error as MultiaddrError
    from hivemind.utils.timed_storage import ValueWithExpiration

use_hivemind_log_handler("nowhere")
logging.addLevelName(logging.WARNING, "WARNING")
logging.getLogger("hivemind").setLevel(os.environ.get("HIVEMIND_LOGLEVEL", "ERROR").upper())


def quiet_stream_ends(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A loop's exception handler: a daemon's stream that ends before its header is no news.

    hivemind's own handler lets that ``IncompleteReadError`` out, and asyncio would print a traceback.
    """
    error = context.get("exception")
    if isinstance(error, asyncio.IncompleteReadError | ConnectionError):
        logging.getLogger(__name__).debug("a stream of the daemon ended early: %r", error)
        return
    loop.default_exception_handler(context)


__all__ = [
    "DHTID",
    "P2P",
    "DHTNode",
    "DHTRecord",
    "DictionaryDHTValue",
    "MSGPackSerializer",
    "Multiaddr",
    "MultiaddrError",
    "P2PDaemonError",
    "PeerID",
    "RecordValidatorBase",
    "StreamInfo",
    "ValueWithExpiration",
    "get_dht_time",
    "p2pd_pb2",
    "quiet_stream_ends",
    "read_pbmsg_safe",
    "write_pbmsg",
]
