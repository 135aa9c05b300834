"""Requests to the libp2p daemon: reach a peer, open a stream to it, hang up on it, tell our addresses.

hivemind's client has them, but leaves its socket open when the daemon says no, and reads streams in pieces of
64 KiB. Here each socket is closed on every path, a failure is a ``TransportError`` in words, and a stream
reads a whole message at once. The protocol is go-libp2p-daemon's: length-prefixed protobuf.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from google.protobuf.message import DecodeError

from p2p_co2.errors import TransportError
from p2p_co2.net.transport.libp2p.hivemind import (
    P2P,
    Multiaddr,
    MultiaddrError,
    P2PDaemonError,
    PeerID,
    p2pd_pb2,
    read_pbmsg_safe,
    write_pbmsg,
)
from p2p_co2.system.clock import within
from p2p_co2.wire.identity import PeerId
from p2p_co2.wire.limits import MAX_ADDRESSES, MAX_MESSAGE_BYTES, MAX_STRING

DAEMON_GONE = "the libp2p daemon of this process is gone"
_P2P_CODE = b"\xa5\x03"
"""421 as a varint (multiaddr's table of protocols)."""
_CIRCUIT_CODE = b"\xa2\x02"
"""290."""


class Stream(NamedTuple):
    """``way``: the multiaddr that it goes to, empty if it is of a kind that hivemind does not know."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    way: str = ""


async def reach(p2p: P2P, peer: PeerId, maddrs: Sequence[str], timeout_s: float) -> None:
    """Make the daemon hold a connection to ``peer``; with no usable ``maddrs`` it asks its routing table.
    Raises ``TransportError``. Safe to cancel."""
    addresses = [raw for raw in (_address_bytes(maddr) for maddr in maddrs[:MAX_ADDRESSES]) if raw]
    connect = p2pd_pb2.ConnectRequest(peer=PeerID.from_base58(peer).to_bytes(), addrs=addresses)
    await _tell(p2p, p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=connect), timeout_s)


async def hang_up_on(p2p: P2P, peer: PeerId, timeout_s: float) -> None:
    """Make the daemon close its connections with ``peer``, and all streams with them. Raises
    ``TransportError``."""
    disconnect = p2pd_pb2.DisconnectRequest(peer=PeerID.from_base58(peer).to_bytes())
    request = p2pd_pb2.Request(type=p2pd_pb2.Request.DISCONNECT, disconnect=disconnect)
    await _tell(p2p, request, timeout_s)


async def ways_to_peers(p2p: P2P, timeout_s: float) -> dict[str, list[str]]:
    """Multiaddrs of the daemon's connections, by peer. Raises ``TransportError``."""
    async with daemon_call(timeout_s):
        peers = await p2p.list_peers()
    ways: dict[str, list[str]] = {}
    for info in peers:
        ways.setdefault(info.peer_id.to_base58(), []).extend(str(address) for address in info.addrs)
    return ways


async def own_maddrs(p2p: P2P, timeout_s: float) -> list[str]:
    """Where the daemon has learned by now that we can be reached; may be empty. Raises ``TransportError``."""
    async with daemon_call(timeout_s):
        with contextlib.suppress(ValueError):  # hivemind's word for "none yet"
            return [str(address) for address in await p2p.get_visible_maddrs(latest=True)]
    return []


@contextlib.asynccontextmanager
async def daemon_call(
    timeout_s: float, trouble: str = "the libp2p daemon did not answer"
) -> AsyncIterator[None]:
    """Bound what our daemon is asked, and give what hivemind raises when it fails as ``TransportError``;
    ``trouble`` says what took too long."""
    try:
        async with within(timeout_s):
            yield
    except TimeoutError:  # an OSError too, so it comes first
        raise TransportError(f"{trouble} within {timeout_s:.0f} s") from None
    except (OSError, asyncio.IncompleteReadError, P2PDaemonError, DecodeError):
        raise TransportError(DAEMON_GONE) from None


async def open_stream(p2p: P2P, peer: PeerId, protocol: str, timeout_s: float) -> Stream:
    """A raw stream to the handler of ``protocol`` at ``peer``; end it with ``hang_up``. Raises
    ``TransportError``."""
    wanted = p2pd_pb2.StreamOpenRequest(peer=PeerID.from_base58(peer).to_bytes(), proto=[protocol])
    request = p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=wanted)
    return await _ask(p2p, request, timeout_s)


async def hang_up(writer: asyncio.StreamWriter) -> None:
    """Close a stream at once, also when its other end is gone or does not read."""
    writer.transport.abort()
    with contextlib.suppress(OSError):  # the socket broke before we closed it: closed either way
        await writer.wait_closed()


async def _tell(p2p: P2P, request: p2pd_pb2.Request, timeout_s: float) -> None:
    await hang_up((await _ask(p2p, request, timeout_s)).writer)


async def _ask(p2p: P2P, request: p2pd_pb2.Request, timeout_s: float) -> Stream:
    """Our connection to the daemon once it has said yes. Errors are the cause alone: whoever shows them has
    named the peer already."""
    writer: asyncio.StreamWriter | None = None
    response = p2pd_pb2.Response()
    try:
        async with daemon_call(timeout_s, "it did not answer"):
            path = p2p.daemon_listen_maddr["unix"]
            reader, writer = await asyncio.open_unix_connection(path, limit=MAX_MESSAGE_BYTES)
            await write_pbmsg(writer, request)
            await read_pbmsg_safe(reader, response)
        if response.type == p2pd_pb2.Response.ERROR:
            raise TransportError(_cause(response.error.msg))
        answered = writer
        writer = None
    finally:
        if writer is not None:
            await hang_up(writer)
    way = ""
    with contextlib.suppress(MultiaddrError, ValueError):
        way = str(Multiaddr(response.streamInfo.addr)) if response.streamInfo.addr else ""
    return Stream(reader, answered, way)


def _address_bytes(maddr: str) -> bytes | None:
    """A peer's own idea of its address, or None if libp2p could not read it. hivemind writes a relay's id in
    a form that the daemon does not read, so that part is written here."""
    transport, _, relay = maddr.rpartition("/p2p/")[0].partition("/p2p/")
    if len(maddr) > MAX_STRING:
        return None
    try:
        raw = bytes(Multiaddr(transport or maddr).to_bytes())
        if not relay:
            return raw
        relay_id = PeerID.from_base58(relay.removesuffix("/p2p-circuit")).to_bytes()
    except (MultiaddrError, ValueError):
        return None
    by_relay = raw + _P2P_CODE + bytes((len(relay_id) & 0x7F,)) + relay_id + _CIRCUIT_CODE
    return by_relay if len(relay_id) < 128 else None


def _cause(message: str) -> str:
    """The daemon's many lines about one failure as one short one."""
    causes = re.findall(r"\* \[[^\]]*\] (.*)", message)
    text = "; ".join(dict.fromkeys(causes)) if causes else " ".join(message.split())
    return text[:300]
