"""The one place that imports hivemind, so that the import changes nothing else in the process.

Its log records go where the application's go, from ERROR upwards, or from ``HIVEMIND_LOGLEVEL``. Its packages
would import torch and its averagers, though a seed or a board needs only the DHT and libp2p. So three of them
begin empty here, and run their own ``__init__`` when something is asked of them that is not in ``_LIGHT``:
whoever uses ``hivemind.Optimizer`` beside us gets it. Measured (1.1.12): 0.14 s of CPU for the import instead
of 1.4 s, and a seed of 57 MB instead of 262.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import sys
import warnings
from importlib.util import find_spec, module_from_spec
from random import SystemRandom
from types import ModuleType
from typing import Any

_LIGHT = {
    "hivemind": {},
    "hivemind.utils": {
        "MSGPackSerializer": "serializer",
        "SerializerBase": "serializer",
        "get_dht_time": "timed_storage",
        "get_logger": "logging",
    },
    "hivemind.dht": {},
}
"""Packages that begin empty -> what their own modules ask of them, and where it is made."""
_ASKED_BY_PEOPLE = frozenset({"__version__", "__all__"})
"""Of the names with underscores, which Python itself asks all modules for: these need the package."""


class _PutOff(ModuleType):
    """A package whose ``__init__`` has not run yet."""

    def __getattr__(self, name: str) -> Any:
        submodule = sys.modules.get(f"{self.__name__}.{name}")
        if submodule is not None:  # that is being imported at this moment
            return submodule
        home = _LIGHT[self.__name__].get(name)
        if home is not None:
            return getattr(importlib.import_module(f"{self.__name__}.{home}"), name)
        spec = self.__spec__
        machinery = name.startswith("__") and name not in _ASKED_BY_PEOPLE
        if machinery or spec is None or spec.loader is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.__class__ = ModuleType  # type: ignore[assignment]  # from now on like any other
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            spec.loader.exec_module(self)
        return getattr(self, name)


def _put_off(package: str) -> None:
    """Begin ``package`` empty, unless it was imported before."""
    if package in sys.modules:
        return
    spec = find_spec(package)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    module = module_from_spec(spec)
    module.__class__ = _PutOff
    sys.modules[package] = module
    parent, _, name = package.rpartition(".")
    if parent:
        setattr(sys.modules[parent], name, module)


for _package in _LIGHT:
    _put_off(_package)
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from hivemind.dht.crypto import DHTRecord, RecordValidatorBase
    from hivemind.dht.node import DHTNode
    from hivemind.dht.routing import DHTID
    from hivemind.dht.storage import DictionaryDHTValue
    from hivemind.p2p import P2P, PeerID
    from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
    from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, read_pbmsg_safe, write_pbmsg
    from hivemind.proto import p2pd_pb2
    from hivemind.utils.auth import AuthorizerBase
    from hivemind.utils.logging import use_hivemind_log_handler
    from hivemind.utils.multiaddr import Multiaddr
    from hivemind.utils.multiaddr.exceptions import Error as MultiaddrError
    from hivemind.utils.serializer import MSGPackSerializer
    from hivemind.utils.timed_storage import ValueWithExpiration, get_dht_time

for _module in ("hivemind.dht.routing", "hivemind.dht.node"):
    # They draw ids from the program's own generator, which it may have seeded: other draws for the program
    # then, and equal ids for peers that all seed alike. A generator of our own would be copied by a fork.
    vars(sys.modules[_module])["random"] = SystemRandom()
use_hivemind_log_handler("nowhere")
logging.addLevelName(logging.WARNING, "WARNING")
logging.getLogger("hivemind").setLevel(os.environ.get("HIVEMIND_LOGLEVEL", "ERROR").upper())


def quiet_stream_ends(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A loop's exception handler: a daemon's stream that ends before its header is no news, nor is a search
    of the DHT that was going on when the daemon ended. asyncio would print their tracebacks."""
    error = context.get("exception")
    task = context.get("future")
    name = getattr(task.get_coro(), "__name__", "") if isinstance(task, asyncio.Task) else ""
    is_search = isinstance(error, AssertionError) and name == "traverse_dht"
    if is_search or isinstance(error, asyncio.IncompleteReadError | ConnectionError):
        logging.getLogger(__name__).debug("broken off by the daemon's end: %r", error)
    else:
        loop.default_exception_handler(context)


__all__ = [
    "DHTID", "P2P", "AuthorizerBase", "DHTNode", "DHTRecord", "DictionaryDHTValue", "MSGPackSerializer",
    "Multiaddr", "MultiaddrError", "P2PDaemonError", "PeerID", "RecordValidatorBase", "StreamInfo",
    "ValueWithExpiration", "get_dht_time", "p2pd_pb2", "quiet_stream_ends", "read_pbmsg_safe", "write_pbmsg",
]  # fmt: skip
