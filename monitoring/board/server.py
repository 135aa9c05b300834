"""The board as a process: binds, guards, ticks, serves pages, ``/metrics`` and ``/api/swarm``. NiceGUI keeps
one application per process.

Security: bound to loopback unless told otherwise, and then nothing is answered without the token (a cookie
after the first visit). On loopback the Host header must name this machine, so that a web site cannot reach
the board through a name of its own; a WebSocket must come from a page of the board's. Nothing here takes
input that could reach a peer.

Law: one tick a second folds what is new whoever looks; history is written in a thread, so a slow disk delays
no page.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import re
import secrets
import socket
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any
from urllib.parse import parse_qs

import uvicorn
from fastapi import FastAPI, Response
from fastapi import Path as PathParameter
from nicegui import ui

from monitoring.board.pages import (
    BandwidthPage,
    EventsPage,
    PeerPage,
    PeersPage,
    RoundPage,
    StalenessPage,
    SwarmPage,
)
from monitoring.board.shell import Frame, Page
from monitoring.facts import SwarmFacts
from monitoring.history import History
from monitoring.metrics import CONTENT_TYPE, FactsCollector, exposition
from monitoring.model import Model, Recorder
from p2p_co2.errors import ConfigError, EnvironmentFault

TICK_S = 1.0
COOKIE = "p2p_co2_board"
_TOKEN = re.compile(r"[A-Za-z0-9._~-]+")
_RoundNumber = Annotated[int, PathParameter(ge=0, le=2**53)]
"""Larger ones are no round's, and more than the history can look for."""
_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[Any]]
_Send = Callable[[Any], Awaitable[None]]
_App = Callable[[_Scope, _Receive, _Send], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a board listens. ``token``: asked of everybody; "" asks nobody, allowed on loopback only."""

    host: str = "127.0.0.1"
    port: int = 0
    token: str = ""


def place_for(host: str, port: int, token: str = "") -> Place:
    """The place with a token where it needs one. Raises ``EnvironmentFault`` for a host that is no address,
    ``ConfigError`` for a port or a token that cannot be."""
    if not 0 <= port < 1 << 16:
        raise ConfigError("command line", "--port", f"from 0 to 65535 (got {port})")
    if token and not _TOKEN.fullmatch(token):
        raise ConfigError(
            "command line", "--token", "letters, digits and -._~ only, for it stands in an address"
        )
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        raise EnvironmentFault(
            f"{host!r} is no IP address to listen on; 0.0.0.0 means all of this machine"
        ) from None
    return Place(host=host, port=port, token=token or ("" if loopback else secrets.token_urlsafe(18)))


def listening_socket(place: Place) -> socket.socket:
    """Bind it. Raises ``EnvironmentFault`` if the port is taken."""
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((place.host, place.port))
        bound.listen(64)
    except OSError as error:
        bound.close()
        raise EnvironmentFault(
            f"cannot serve the board on {place.host}:{place.port}: {error.strerror}; choose another --port"
        ) from None
    return bound


def address(place: Place, bound: socket.socket) -> str:
    """What to open in a browser."""
    host, port = bound.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/" + (f"?token={place.token}" if place.token else "")


class Activity:
    """When somebody last asked for something, and how many pages are open."""

    def __init__(self) -> None:
        self._asked_at = time.monotonic()
        self._open = 0

    @contextlib.contextmanager
    def during(self, *, is_page: bool) -> Iterator[None]:
        """Around a request, or a page that is open."""
        self._asked_at = time.monotonic()
        self._open += is_page
        try:
            yield
        finally:
            self._asked_at = time.monotonic()
            self._open -= is_page

    def idle_s(self) -> float:
        """Seconds without a request or an open page."""
        return 0.0 if self._open else time.monotonic() - self._asked_at


class Guard:
    """ASGI middleware: the token, or on loopback the Host and Origin headers; and who is here."""

    def __init__(self, app: _App, token: str, activity: Activity) -> None:
        self._activity, self._token = activity, token
        self.app = app  # NiceGUI looks for its own application behind `app`

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] not in {"http", "websocket"}:
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        refusal = self._refusal(scope, headers)
        if refusal:
            await _refuse(scope, receive, send, refusal)
            return
        if self._token and _token_in(scope):
            send = _with_cookie(send, self._token)
        with self._activity.during(is_page=scope["type"] == "websocket"):
            await self.app(scope, receive, send)

    def _refusal(self, scope: _Scope, headers: dict[str, str]) -> str:
        host = headers.get("host", "")
        origin = headers.get("origin", "")
        if scope["type"] == "websocket" and origin and origin.split("//", 1)[-1] != host:
            return "this page belongs to another site"
        if not self._token:
            name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
            return "" if _is_this_machine(name) else "this board is for this machine only"
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        offered = (_token_in(scope), _cookie(headers.get("cookie", "")), bearer)
        if any(hmac.compare_digest(word.encode(), self._token.encode()) for word in offered):
            return ""
        return "the token is missing or wrong; open the address that the board printed"


def _token_in(scope: _Scope) -> str:
    """The token in the address; "" if it is not there."""
    return str(parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])[0])


def _is_this_machine(name: str) -> bool:
    """Whether the name in a Host header is this machine's own: an address cannot be rebound to another."""
    try:
        return name.lower() == "localhost" or ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def _cookie(header: str) -> str:
    """Our cookie; "" if it is not there. Cookies of other programs on this host come along, in any shape."""
    pairs = (pair.strip().partition("=") for pair in header.split(";"))
    return next((value for name, _, value in pairs if name == COOKIE), "")


async def _refuse(scope: _Scope, receive: _Receive, send: _Send, words: str) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 4403})
        return
    text = words.encode()
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(text)).encode())]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": text})


def _with_cookie(send: _Send, token: str) -> _Send:
    cookie = f"{COOKIE}={token}; Path=/; HttpOnly; SameSite=Strict".encode()

    async def sending(message: Any) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", []), (b"set-cookie", cookie)]
        await send(message)

    return sending


def make_app(model: Model, recorder: Recorder, broken: Callable[[BaseException], None]) -> FastAPI:
    """The board's application; ``broken`` hears of an error that ended its ticking."""

    def ticked(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            broken(error)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        ticking = asyncio.create_task(_keep_ticking(model, recorder), name="tick")
        ticking.add_done_callback(ticked)
        yield
        ticking.cancel()
        await asyncio.gather(ticking, return_exceptions=True)

    app = FastAPI(title="p2p-co2", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    collector = FactsCollector(model.facts, lambda: model.feed.me)

    @app.get("/api/swarm")
    async def swarm() -> Response:
        return Response(model.facts().model_dump_json(), media_type="application/json")

    @app.get("/api/swarm/schema")
    async def schema() -> Response:
        return Response(json.dumps(swarm_schema()), media_type="application/schema+json")

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(exposition(collector), media_type=CONTENT_TYPE)

    _add_pages(model, recorder)
    # At its start NiceGUI asks every object of the process what it is, and torch's old names answer that they
    # are old: nothing that a user of the board could act on.
    warnings.filterwarnings("ignore", category=FutureWarning, module="nicegui")
    ui.run_with(
        app, title="p2p-co2", favicon="◐", dark=None, tailwind=False, show_welcome_message=False,
        binding_refresh_interval=None, reconnect_timeout=10.0,
    )  # fmt: skip
    return app


def _add_pages(model: Model, recorder: Recorder) -> None:
    pages: dict[str, Callable[[Frame], Page]] = {
        "/": SwarmPage, "/staleness": StalenessPage, "/bandwidth": BandwidthPage, "/peers": PeersPage,
        "/events": EventsPage,
    }  # fmt: skip
    for place, make in pages.items():
        ui.page(place)(partial(Frame, model, recorder, place, make))

    @ui.page("/peer/{peer}")
    def peer_page(peer: str) -> None:
        Frame(model, recorder, "/peers", lambda frame: PeerPage(frame, peer))

    @ui.page("/round/{fragment}/{number}")
    def round_page(fragment: _RoundNumber, number: _RoundNumber) -> None:
        Frame(model, recorder, "/events", lambda frame: RoundPage(frame, fragment, number))


def swarm_schema() -> dict[str, Any]:
    """The JSON schema of ``GET /api/swarm``."""
    return SwarmFacts.model_json_schema()


async def _keep_ticking(model: Model, recorder: Recorder) -> None:
    """Fold what is new once a second, write history in a thread."""
    while True:
        started_at = time.monotonic()
        for events in model.moments(time.time()):
            recorder.see(events)
            if batch := recorder.batch():
                await asyncio.to_thread(recorder.write, batch)
        await asyncio.sleep(max(0.05, TICK_S - (time.monotonic() - started_at)))


class _Server(uvicorn.Server):
    """Leaves signals to the caller."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(
    model: Model,
    history: History,
    place: Place,
    bound: socket.socket,
    stop: asyncio.Event,
    is_over: Callable[[Activity], bool] = lambda activity: False,
) -> None:
    """Serve until ``stop`` is set or ``is_over`` says so. ``bound`` is closed at the end.

    An error of ours in the ticking ends the board and is raised: pages then say that they are disconnected,
    instead of showing for good what was true once.
    """
    activity, errors = Activity(), list[BaseException]()

    def broken(error: BaseException) -> None:
        errors.append(error)
        server.should_exit = True

    async def until_over() -> None:
        while not stop.is_set() and not is_over(activity):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await stop.wait()

    app = Guard(make_app(model, Recorder(model, history), broken), place.token, activity)
    config = uvicorn.Config(
        app, log_level="warning", lifespan="on", ws="websockets-sansio", timeout_graceful_shutdown=2,
        access_log=False,
    )  # fmt: skip
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[bound]), name="serve")
    stopping = asyncio.create_task(until_over(), name="stop")
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    await asyncio.wait({serving}, timeout=5.0)
    stopping.cancel()
    serving.cancel()
    ended = await asyncio.gather(serving, stopping, return_exceptions=True)
    errors += [error for error in ended if isinstance(error, Exception)]
    bound.close()
    if errors:
        raise errors[0]
