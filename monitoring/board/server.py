"""The board as a process: binds, guards, ticks, serves pages, ``/metrics`` and ``/api/swarm``. NiceGUI keeps
one application per process.

Security: bound to loopback unless told otherwise, and then nothing is answered without the token. On loopback
the Host header must name this machine, so that a web site cannot reach the board through a name of its own.
No request may come from another site's page, beside a link to a page, and no page may be shown in a frame.
The only input that reaches a peer is a wish, pause or go on, from the page that it serves itself: a POST with
the token that stands in that page. Law: one tick a second folds what is new whoever looks.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import os
import re
import secrets
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, Header, Request, Response
from fastapi import Path as PathParameter
from fastapi.exceptions import RequestValidationError
from nicegui import Client, ui
from nicegui import app as nicegui_app
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from monitoring.board import pages
from monitoring.board.run_page import RunPage
from monitoring.board.shell import PAGES, TICK_S, Frame, Page
from monitoring.facts import SwarmFacts
from monitoring.feeds import PastFeed
from monitoring.history import TIERS, BoardHistory
from monitoring.metrics import CONTENT_TYPE, FactsCollector, exposition
from monitoring.model import Model, Recorder
from p2p_co2.config import RunConfig
from p2p_co2.errors import ConfigError, EnvironmentFault
from p2p_co2.system.governor import Wish, wish_in
from p2p_co2.system.process import StopSignals
from p2p_co2.telemetry.events import Event
from p2p_co2.telemetry.feed import Feed
from p2p_co2.telemetry.journal import read_events

IDLE_S = 90.0
"""A board that a connection started ends after this long without a request or an open page."""
MAX_PAST_BYTES = 4 << 20
"""Of a peer's journal, some three hours."""
PAST_ROUNDS_KEPT = 192
"""At a time: each step of the past looks at all of them."""
COOKIE = "p2p_co2_board"
_NO_FRAME = [(b"content-security-policy", b"frame-ancestors 'none'"), (b"x-frame-options", b"DENY")]
_TOKEN = re.compile(r"[A-Za-z0-9._~-]+")
_PAGES: dict[str, Callable[[Frame], Page]] = {
    "/": pages.SwarmPage, "/run": RunPage, "/staleness": pages.StalenessPage,
    "/bandwidth": pages.BandwidthPage, "/peers": pages.PeersPage, "/events": pages.EventsPage,
}  # fmt: skip
_RoundNumber = Annotated[int, PathParameter(ge=0, le=2**53)]
"""Larger ones are no round's, and more than the history can look for."""


@dataclass(frozen=True, kw_only=True)
class BoardPlace:
    """Where a board listens. ``token``: asked of everybody; "" asks nobody, allowed on loopback only."""

    host: str = "127.0.0.1"
    port: int = 0
    token: str = ""


def place_for(host: str, port: int, token: str = "") -> BoardPlace:
    """The place with a token where it needs one. Raises ``ConfigError`` for a host that is no address, or a
    port or a token that cannot be."""
    if not 0 <= port < 1 << 16:
        raise ConfigError("command line", "--port", f"from 0 to 65535 (got {port})")
    if token and not _TOKEN.fullmatch(token):
        words = "letters, digits and -._~ only, for it stands in an address"
        raise ConfigError("command line", "--token", words)
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        words = f"{host!r} is no IP address to listen on; 0.0.0.0 means all of this machine"
        raise ConfigError.of_option("--host", words) from None
    return BoardPlace(host=host, port=port, token=token or ("" if loopback else secrets.token_urlsafe(18)))


def listening_socket(place: BoardPlace) -> socket.socket:
    """Bind it. Raises ``EnvironmentFault`` if the port is taken."""
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((place.host, place.port))
        bound.listen(64)
    except OSError as error:
        bound.close()
        where = f"{place.host}:{place.port}: {error.strerror}"
        raise EnvironmentFault(f"cannot serve the board on {where}; choose another --port") from None
    return bound


def address(place: BoardPlace, bound: socket.socket) -> str:
    """What to open in a browser."""
    host, port = bound.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/" + (f"?token={place.token}" if place.token else "")


class Guard:
    """ASGI middleware: the token, or on loopback the Host and Origin headers; and whether anybody is here."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._token = token
        self._asked_at = time.monotonic()
        self._open = 0
        self.app = app  # NiceGUI looks for its own application behind `app`

    def idle_s(self) -> float:
        """Seconds without a request or an open page."""
        return 0.0 if self._open else time.monotonic() - self._asked_at

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in {"http", "websocket"}:
            await self.app(scope, receive, send)
            return
        asked = HTTPConnection(scope)
        is_page = scope["type"] == "websocket"
        send = _with_headers(send, _NO_FRAME)
        if refusal := self._refusal(asked):
            answer = WebSocketClose(4403) if is_page else PlainTextResponse(refusal, 403)
            await answer(scope, receive, send)
            return
        if self._token and "token" in asked.query_params:
            cookie = f"{COOKIE}={self._token}; Path=/; HttpOnly; SameSite=Strict".encode()
            send = _with_headers(send, [(b"set-cookie", cookie)])
        self._asked_at = time.monotonic()
        self._open += is_page
        try:
            await self.app(scope, receive, send)
        finally:
            self._asked_at = time.monotonic()
            self._open -= is_page

    def _refusal(self, asked: HTTPConnection) -> str:
        host = asked.headers.get("host", "")
        origin = asked.headers.get("origin", "")
        from_site = asked.headers.get("sec-fetch-site", "")
        mode = asked.headers.get("sec-fetch-mode", "")
        # A browser sends the Origin, or with a page's plain GET only what kind of site it is.
        is_foreign = from_site in {"cross-site", "same-site"} and mode != "navigate"
        if origin.split("//", 1)[-1] != host if origin else is_foreign:
            return "this request comes from another site's page"
        if not self._token:
            name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
            return "" if _is_this_machine(name) else "this board is for this machine only"
        bearer = asked.headers.get("authorization", "").removeprefix("Bearer ")
        offered = (asked.query_params.get("token", ""), asked.cookies.get(COOKIE, ""), bearer)
        if any(hmac.compare_digest(word.encode(), self._token.encode()) for word in offered):
            return ""
        return "the token is missing or wrong; open the address that the board printed"


def _is_this_machine(name: str) -> bool:
    """Whether the name in a Host header is this machine's own: an address cannot be rebound to another."""
    try:
        return name.lower() == "localhost" or ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def _with_headers(send: Send, headers: list[tuple[bytes, bytes]]) -> Send:
    async def sending(message: Any) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", []), *headers]
        await send(message)

    return sending


def make_app(model: Model, recorder: Recorder) -> FastAPI:
    """The board's application."""
    app = FastAPI(title="p2p-co2", docs_url=None, redoc_url=None, openapi_url=None)
    collector = FactsCollector(model.facts, lambda: model.feed.me)

    @app.get("/api/swarm")
    async def swarm() -> Response:
        model.feed.watched(time.monotonic())  # a peer's own board asks the others only while somebody looks
        return Response(model.facts().model_dump_json(), media_type="application/json")

    @app.get("/api/swarm/schema")
    async def schema() -> Response:
        return Response(json.dumps(swarm_schema()), media_type="application/schema+json")

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(exposition(collector), media_type=CONTENT_TYPE)

    if (folder := model.feed.folder) is not None:

        @app.post("/wish")
        async def wish(wish: Wish, x_token: Annotated[str, Header()] = "") -> Response:
            if not hmac.compare_digest(x_token.encode(), model.wish_token.encode()):
                return PlainTextResponse("the page is an old one; load it again", 403)
            try:
                await asyncio.to_thread(wish_in, folder, wish)
            except EnvironmentFault as fault:
                return PlainTextResponse(str(fault), 500)
            return Response(status_code=204)

    for place, make in _PAGES.items():
        ui.page(place, title=f"{dict(PAGES)[place]} · p2p-co2")(partial(Frame, model, recorder, place, make))

    @ui.page("/peer/{peer}", title="Peer · p2p-co2")
    def peer_page(peer: str) -> None:
        Frame(model, recorder, "/peers", lambda frame: pages.PeerPage(frame, peer))

    @ui.page("/round/{fragment}/{number}", title="Fragment exchange · p2p-co2")
    def round_page(fragment: _RoundNumber, number: _RoundNumber) -> None:
        Frame(model, recorder, "/events", lambda frame: pages.RoundPage(frame, fragment, number))

    async def no_page(request: Request, _: Exception) -> Response:
        with Client(ui.page("", title="No such page · p2p-co2"), request=request) as client:
            Frame(model, recorder, "", Page)
        return client.build_response(request, 404)

    nicegui_app.add_exception_handler(404, no_page)
    nicegui_app.add_exception_handler(RequestValidationError, no_page)  # a number that is no round's
    # At its start NiceGUI asks every object of the process what it is, and torch's old names answer that they
    # are old: nothing that a user of the board could act on.
    warnings.filterwarnings("ignore", category=FutureWarning, module="nicegui")
    ui.run_with(
        app, title="p2p-co2", favicon="◐", dark=None, language="en-US", tailwind=False,
        show_welcome_message=False, binding_refresh_interval=None, reconnect_timeout=10.0,
    )  # fmt: skip
    return app


def swarm_schema() -> dict[str, Any]:
    """The JSON schema of ``GET /api/swarm``."""
    return SwarmFacts.model_json_schema()


class _Server(uvicorn.Server):
    """Leaves signals to the caller."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(
    model: Model, history: BoardHistory, bound: socket.socket, token: str = "",
    is_over: Callable[[float], bool] = lambda idle_s: False, recall: Callable[[], None] | None = None,
) -> None:  # fmt: skip
    """Serve until SIGINT, SIGTERM, or ``is_over`` says so; closes ``bound``, ``history`` and the feed.

    ``recall`` puts a past into the history, in a thread: the first page does not wait for it, and what is
    seen meanwhile is kept after it. An error of ours ends the board and is raised, so that no page shows for
    good what was true once."""
    recorder = Recorder(model, history)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    guard = Guard(make_app(model, recorder), token)
    config = uvicorn.Config(
        guard, log_level="warning", lifespan="on", ws="websockets-sansio", timeout_graceful_shutdown=2,
        access_log=False,
    )  # fmt: skip
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[bound]), name="serve")
    recalling = asyncio.create_task(asyncio.to_thread(recall or (lambda: None)), name="recall")
    unrecorded: list[Event] = []
    has_past = recall is None  # a feed that brings its past tells it moment by moment, at once
    with StopSignals(lambda: loop.call_soon_threadsafe(stop.set)):
        try:
            while not (stop.is_set() or serving.done() or is_over(guard.idle_s())):
                next_at = time.monotonic() + TICK_S
                for events in model.moments(time.time()):
                    unrecorded += events
                    if not has_past and not recalling.done():
                        continue
                    if not has_past:
                        has_past = True
                        recalling.result()
                        recorder.begin()
                    recorder.see(unrecorded)
                    unrecorded = []
                    if batch := recorder.batch():
                        await asyncio.to_thread(recorder.write, batch)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.05, next_at - time.monotonic())):
                        await stop.wait()
        finally:
            server.should_exit = True
            await asyncio.wait({serving}, timeout=5.0)
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            model.feed.close()  # what is recalled may wait for it
            await asyncio.gather(recalling, return_exceptions=True)
            bound.close()
            history.close()


def run_board(feed: Feed, place: BoardPlace, history: Path | None, say: Callable[[str], None] = print) -> int:
    """Serve ``feed`` at ``place`` until SIGINT or SIGTERM; returns the exit status. Closes the feed.

    ``history``: the SQLite file; None keeps it in memory, and so does a place that cannot be written, which
    is said. Raises ``EnvironmentFault`` if the port is taken.
    """
    with contextlib.closing(feed):
        bound = listening_socket(place)
        say(f"board: {address(place, bound)}")
        kept = BoardHistory.or_in_memory(history)
        if kept.trouble:
            say(f"warning: {kept.trouble}")
        asyncio.run(serve(Model(feed), kept, bound, place.token))
    return 0


def run_activated(
    feed: Feed, bound: socket.socket, history: Path | None, gone: threading.Event | None = None,
    journal: Path | None = None,
) -> int:  # fmt: skip
    """Serve on an inherited loopback socket until nobody looks, or ``gone`` is set. ``journal``: what the
    feed's own peer wrote before anybody looked."""
    kept = BoardHistory.or_in_memory(history)
    gone = gone or threading.Event()

    def recall() -> None:
        assert journal is not None
        os.nice(10)  # of this thread alone
        ends_at = time.monotonic() + IDLE_S
        while not feed.me and feed.state.phase == "connecting" and time.monotonic() < ends_at:
            time.sleep(0.02)  # a peer under load answers late
        recall_journal(journal, feed.me, feed.run, kept)

    def is_over(idle_s: float) -> bool:
        return idle_s > IDLE_S or gone.is_set()

    with contextlib.closing(feed):
        past = recall if journal is not None else None  # other feeds bring their own
        asyncio.run(serve(Model(feed), kept, bound, "", is_over, past))
    return 0


def recall_journal(journal: Path, me: str, run: RunConfig | None, history: BoardHistory) -> None:
    """Put what peer ``me`` wrote into ``journal`` since ``history`` ends into it, as if a board had been
    there. Price: two or three seconds of CPU for a full journal, and only the peer's own word."""
    now = time.time()
    since = max(history.span()[1], now - TIERS[-1][1])
    try:
        told = read_events(journal, MAX_PAST_BYTES)
    except EnvironmentFault:
        return  # it was written by an own loop, or not at all
    events = [event for event in told if event.peer == me and since < event.at <= now]
    if events:
        Recorder(Model(PastFeed(events, run, me), PAST_ROUNDS_KEPT), history).follow(now)
