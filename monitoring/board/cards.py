"""The cards that the first page begins and ends with: the reader's own peer, the run, and this machine.

A board that belongs to no peer (an observer's, one of journals) has neither the first nor the last.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import replace

from nicegui import ui

from monitoring.board.shell import Frame, Tiles, Told, block, card, text
from monitoring.facts import RECENT_S, SILENT_AFTER_S, PeerFacts, RunState, SwarmFacts
from monitoring.machine import GpuFacts, MachineFacts, ask_nvidia, read_machine
from monitoring.words import clock, end_told, figure, of_fragment, percent, plain, size, to_owner
from p2p_co2.telemetry.feed import Feed
from p2p_co2.wire.names import words_of

_NOT_HEARD = "it is still joining, and has said nothing of itself yet"
_TONES = {RunState.HEALTHY: "good", RunState.ALONE: "odd", RunState.DEGRADED: "odd", RunState.LOST: "bad",
          RunState.OVER: "over"}  # fmt: skip
"""Of the run's state; the word itself says it too."""


_WISH = """(click) => fetch(
  `/wish?wish=${encodeURIComponent(click.target.textContent.toLowerCase())}`,
  {method: "POST", headers: {"X-Token": "TOKEN"}}
).then(async answer => answer.ok || alert(await answer.text()))"""
"""The button's word is the wish."""


class OwnCard:
    """What the reader's own peer does and has given. ``wish_token``: of a page that may pause it."""

    def __init__(self, facts: SwarmFacts, feed: Feed, wish_token: str = "") -> None:
        self._feed = feed
        with block("b-card", "section").props("data-testid=you"):
            with block("b-head"):
                self._title = text("b-title", tag="h2")
                block("b-grow")
                self._wish = text("b-button", test_id="wish", tag="button")
                self._wish.on("click", js_handler=_WISH.replace("TOKEN", wish_token))
                self._wish.visible = bool(wish_token)
            self._tiles = Tiles(own_told(facts))
        self.set(facts)

    def set(self, facts: SwarmFacts) -> None:
        peer = facts.own
        name = plain(peer.label, 40) if peer is not None else words_of(facts.me)
        self._title.text = f"You: {name}"
        self._wish.text = "Go on" if peer is not None and peer.state == "paused" else "Pause"
        self._tiles.set(own_told(facts, self._feed.tokens_in_model()))


def own_told(facts: SwarmFacts, in_model: float | None = None) -> Told:
    """``in_model``: tokens that commits counted, since the peer first trained; None if it is not known."""
    peer = facts.own
    last = facts.my_exchange
    if peer is None:
        nothing = ("-", "", "")
        told = [("-", "", _NOT_HEARD), nothing, nothing, nothing, nothing]
    else:
        held = "" if peer.stage is None else f"stage {peer.stage} of {len(facts.stages)}"
        of = f"of {figure(facts.tokens_counted)} tokens that the group counted"
        rate = f"{figure(peer.tokens_per_s)} per second"
        if in_model is not None:
            known = min(in_model, float(peer.tokens))  # what it says it trained may be a second older
            rate = f"{figure(known)} are in the model so far; {rate}"
        round_ = ("-", "", "none yet")
        if last is not None:
            what = of_fragment(last.fragment, last.stage if facts.stages else None)
            who = "alone" if last.outcome == "alone" else f"{last.contributors} in the mean"
            ago = clock(max(0.0, facts.at - last.at))
            round_ = (figure(last.round), "", f"{what}, {ago} ago, {who}")
        why = plain(to_owner(peer.reason), 90) or held or f"on {plain(peer.device, 16)}"
        told = [
            (plain(peer.state, 16).capitalize(), "", why),
            (percent(peer.share_counted), "", of),
            (figure(peer.tokens), "", rate),
            (size(peer.up_bytes), "", f"{size(peer.down_bytes)} received"),
            round_,
        ]  # fmt: skip
    captions = {
        "you-state": "State", "you-share": "Share of the counted work", "you-tokens": "Tokens trained",
        "you-sent": "Sent", "you-round": "Last round",
    }  # fmt: skip
    return {key: (caption, *line) for (key, caption), line in zip(captions.items(), told, strict=True)}


class RunCard:
    """How the run is, in a word and why, and how far; what it came to, once it is over."""

    def __init__(self, facts: SwarmFacts) -> None:
        self._tone = ""
        with block("b-card b-runs", "section"):
            with block("b-head"):
                self._title = text("b-title", tag="h2")
                self._word = text("b-chip", test_id="run-state", tag="span")
                self._why = text("b-hint b-words", test_id="run-why")
            with block("b-bar-of") as self._bar:
                self._done = block("b-bar-done")
            self._bar.props('role=progressbar aria-label="rounds made" aria-valuemin=0 aria-valuemax=100')
            self._far = text("b-hint", test_id="run-progress")
            with block("").style("margin-top:12px") as self._end:
                self._came_to = Tiles(end_told(facts))
        self.set(facts)

    def set(self, facts: SwarmFacts) -> None:
        self._title.text = f"Run: {plain(facts.run, 64)}" if facts.run else "Run"
        self._word.text = facts.state or "Not known yet"
        self._why.text = plain(facts.state_words, 300)
        tone = _TONES.get(RunState(facts.state), "") if facts.state else ""
        if tone != self._tone:
            self._word.classes(remove=self._tone, add=tone)
            self._tone = tone
        self._bar.set_visibility(facts.progress is not None)
        if facts.progress is not None:
            made = f"{100 * facts.progress:.1f}"
            if self._bar.props.get("aria-valuenow") != made:
                self._bar.props["aria-valuenow"] = made
                self._done.style(f"width:{made}%")
        self._far.text = progress_words(facts)
        self._end.set_visibility(facts.state == RunState.OVER)
        if facts.state == RunState.OVER:
            self._came_to.set(end_told(facts))


def progress_words(facts: SwarmFacts) -> str:
    """How far the run is, and how long it still takes."""
    if facts.progress is None:
        return f"Round {figure(facts.position, 1)}; the run has no last round."
    left = f"; {clock(facts.time_left_s)} left" if facts.time_left_s is not None else ""
    made = f"{percent(facts.progress)}: round {figure(facts.position, 1)} of {figure(facts.rounds_total)}"
    return f"{made}{left}."


class MachineCard:
    """The machine of the reader's own peer. Looked at while the page is open, and not by the event loop."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._nvidia = tuple[GpuFacts, ...]()
        self._worked: tuple[float, float | None] = 0.0, None
        """When it was looked last, monotonic, and the processor seconds of the peer by then."""
        with card("This machine", "yours; read only while this page is open").props("data-testid=machine"):
            self._tiles = Tiles(self._told(MachineFacts()))
        ui.timer(SILENT_AFTER_S / 2, self._look)

    async def _look(self) -> None:
        peer = self._frame.model.view.peers.get(self._frame.model.feed.me)
        found = await asyncio.to_thread(read_machine, peer.start.pid if peer is not None else 0)
        found = self._with_share(found)
        self._show(found)  # a driver may not answer for long
        self._nvidia = await asyncio.to_thread(ask_nvidia)
        self._show(found)

    def _with_share(self, found: MachineFacts) -> MachineFacts:
        """With the processor time since the last look; of the first look it is not known."""
        at, worked_s = self._worked
        self._worked = time.monotonic(), found.peer_cpu_s
        if worked_s is None or found.peer_cpu_s is None:
            return found
        share = (found.peer_cpu_s - worked_s) / max(self._worked[0] - at, 1e-3) / (os.cpu_count() or 1)
        return replace(found, peer_cpu_share=max(0.0, share))

    def _show(self, found: MachineFacts) -> None:
        self._tiles.set(self._told(replace(found, gpus=(*self._nvidia, *found.gpus))))

    def _told(self, found: MachineFacts) -> Told:
        now = time.localtime()
        today_s = 3600 * now.tm_hour + 60 * now.tm_min + now.tm_sec
        me = self._frame.model.feed.me
        began_at = time.time() - today_s
        moved = self._frame.history.moved(me, began_at)
        peer = self._frame.model.facts().own
        cap = None if peer is None else peer.upload_cap_bytes_per_s
        joined_at = peer.joined_at if peer is not None and peer.joined_at is not None else began_at
        since = max(began_at, min(joined_at, self._frame.history.span()[0] or joined_at))
        told = at_least_told(moved, peer, began_at)
        return machine_told(found, told, today_s, cap, time.time() - since)


def at_least_told(moved: tuple[float, float], peer: PeerFacts | None, since: float) -> tuple[float, float]:
    """``moved``, bytes sent and received as a history has them, or what the peer says of itself where it is
    more. No board may have been there; a peer that came after ``since`` moved all of it since then."""
    if peer is None or peer.joined_at is None or peer.joined_at < since:
        return moved
    return max(moved[0], peer.up_bytes), max(moved[1], peer.down_bytes)


def machine_told(
    found: MachineFacts,
    moved: tuple[float, float],
    today_s: float,
    cap: float | None,
    moved_in_s: float = 0.0,
) -> Told:
    """``moved``: bytes sent and received today, which began ``today_s`` ago, and in ``moved_in_s`` of it;
    ``cap``: of sending, bytes/s."""
    memory = percent(found.used_bytes / found.total_bytes) if found.used_bytes and found.total_bytes else "-"
    own = f"this peer {size(found.peer_bytes)}; " if found.peer_bytes is not None else ""
    ram = f"{own}{size(found.used_bytes)} of {size(found.total_bytes)} in use"
    gpu = ("no\u00a0GPU", "", "none that this machine tells of")
    known = [one for one in found.gpus if one.used_bytes is not None and one.total_bytes]
    if found.gpus:
        gpu = ("-", "", plain(found.gpus[0].name, 40))
    if known:
        used, total = (sum(getattr(one, name) for one in known) for name in ("used_bytes", "total_bytes"))
        gpu = (percent(used / total), "", f"{size(used)} of {size(total)}, {plain(known[0].name, 40)}")
    warm = [one.celsius for one in found.gpus if one.celsius is not None]
    gpus = f"GPU {figure(max(warm))} °C; " if warm else ""
    limit = f"no cap; {size(moved[1])} received"
    if cap:
        limit = f"{percent(moved[0] / (cap * max(today_s, 1.0)))} of what {size(cap)}/s lets through"
    if moved_in_s >= 5 * RECENT_S:  # less says nothing of a month
        limit += f"; at this rate {size(sum(moved) / moved_in_s * 30 * 86400)} a month both ways"
    celsius = figure(found.celsius)
    sensors = f"{gpus}the warmest sensor" if found.celsius is not None else f"{gpus}no sensor to read"
    return {
        "machine-ram": ("Memory", memory, "", ram),
        "machine-cpu": (
            "Processor",
            percent(found.peer_cpu_share),
            "",
            f"this peer, of {os.cpu_count()} cores",
        ),
        "machine-gpu": ("GPU memory", *gpu),
        "machine-heat": ("Temperature", celsius, "°C", sensors),
        "machine-traffic": ("Sent today", size(moved[0]), "", limit),
    }
