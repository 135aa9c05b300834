"""The page of the run: what all peers agreed on, where it is, and how to invite somebody."""

from __future__ import annotations

import re
from collections.abc import Iterator
from operator import itemgetter

from nicegui import ui
from pydantic import BaseModel

from monitoring.board.cards import RunCard
from monitoring.board.shell import BoardTable, Frame, Page, Told, block, card, text
from monitoring.columns import TEXT, Column
from monitoring.facts import SILENT_AFTER_S, SwarmFacts
from monitoring.seeds import SeedFacts, ask_seeds
from monitoring.words import UNKNOWN, clock, figure, plain
from p2p_co2.config import OWN_LOOP, RunConfig
from p2p_co2.errors import TicketError
from p2p_co2.ticket import Ticket, line_to_join
from p2p_co2.wire.names import words_of

_NO_TICKET = "No invitation lies here. The seed prints one, and each peer keeps one in its folder (ticket)."
_LOCAL = "All its addresses are of this machine, so only peers on this machine can come."
_COPY = """() => {{
  const words = document.querySelector('[data-testid="{0}"]');
  const told = document.querySelector('[data-testid="copied"]');
  const select = () => getSelection().selectAllChildren(words);
  (navigator.clipboard ? navigator.clipboard.writeText(words.innerText) : Promise.reject())
    .then(() => told.innerText = 'Copied.')
    .catch(() => {{ select(); told.innerText = 'Selected: copy it with Ctrl-C.'; }});
}}"""
"""Without TLS a browser gives its clipboard to pages of this machine only."""


class RunPage(Page):
    """Settings, digests, seeds, checkpoints and the invitation."""

    def __init__(self, frame: Frame) -> None:
        self._run_card = RunCard(frame.model.facts())
        super().__init__(frame, self._run_told)
        self._ticket = ""
        with card("Invitation", "for a volunteer, to copy as a whole"):
            with block("b-copy"):
                self._command = text("b-code", test_id="invitation", tag="code")
                button = text("b-button", "Copy", "copy", tag="button").props("type=button")
                button.on("click", js_handler=_COPY.format("invitation"))
            text("b-hint", test_id="copied").props("role=status")
            self._about = text("b-hint b-words", test_id="invitation-about")
        with card("Seeds", "whom the invitation names, and whether this machine can dial them"):
            self._seeds = BoardTable("seeds", (
                Column("Seed or peer", TEXT, self._name_of), Column("Answers", TEXT, _answers),
                Column("Address", TEXT, lambda seed: plain(seed.place, 80)),
            ), rows_a_page=0)  # fmt: skip
        with card("Settings", "all peers agree on them; first what is not the default"):
            names = ("Setting", "Value", "Default", "What it is")
            columns = [Column(name, TEXT, itemgetter(place)) for place, name in enumerate(names)]
            self._settings = BoardTable(
                "settings", columns, rows_a_page=0, on_phone=names[:2], explain=itemgetter(3)
            )
        ui.timer(SILENT_AFTER_S, self._ask)

    def refresh(self, facts: SwarmFacts) -> None:
        super().refresh(facts)
        self._run_card.set(facts)

    def redraw(self, facts: SwarmFacts) -> None:
        self._settings.set(setting_rows(self.frame.model.known.run))
        if not self._ticket:
            self._ticket = self.frame.model.feed.invitation()
            self._command.text, self._about.text = invitation(self._ticket, self.frame.model.known.run)

    async def _ask(self) -> None:
        try:
            ticket = Ticket.parse(self._ticket or self.frame.model.feed.invitation())
        except TicketError:
            return  # none lies here
        self._seeds.set(await ask_seeds(ticket, SILENT_AFTER_S / 2))

    def _name_of(self, seed: SeedFacts) -> str:
        label = self.frame.model.known.labels.get(seed.peer)
        return f"peer {plain(label, 32)}" if label else f"seed {words_of(seed.peer)}"

    def _run_told(self, facts: SwarmFacts) -> Told:
        run = self.frame.model.known.run
        saved = self.frame.history.happenings(1, kinds=("checkpoint_saved",))
        last = ("-", "", "none was told of here")
        if saved:
            ago = clock(max(0.0, facts.at - saved[0].at))
            last = (ago, "ago", plain(saved[0].words, 90))
        digest = run.recipe_digest[:12] if run is not None else ""
        stages = f" in each of {len(facts.stages)} stages" if facts.stages else ""
        cut = f"{facts.fragments} fragments{stages}"
        return {
            "recipe": ("Recipe digest", digest or "-", "", plain(run.recipe, 60) if run is not None else ""),
            "run-digest": ("Run digest", facts.run_digest[:12] or "-", "", "sha256 of all settings below"),
            "checkpoint": ("Last checkpoint", *last),
            "model": (
                "Parameters",
                figure(facts.parameters or None),
                "",
                cut,
            ),
        }


def _answers(seed: SeedFacts) -> str:
    if seed.answers is None:
        return "not tried (no TCP)"
    return "yes" if seed.answers else "no"


def invitation(ticket: str, run: RunConfig | None) -> tuple[str, str]:
    """The command that a volunteer runs, and what to know of it."""
    if not ticket:
        return "p2p-co2 join TICKET", _NO_TICKET
    about = []
    if run is not None and run.is_own_recipe:
        about.append("This run has its own recipe: send its file along.")
    if run is not None and run.recipe == OWN_LOOP:
        about.append("This run is trained by a program of its own: send that along.")
    if run is not None and run.members:
        about.append("It takes members alone: the organiser invites with p2p-co2 invite NAME.")
    if Ticket.parse(ticket).is_local:
        about.append(_LOCAL)
    return line_to_join(ticket, run or RunConfig()), " ".join(
        about
    ) or "It is no secret: who has it can join, and look."


def setting_rows(run: RunConfig | None) -> list[tuple[str, str, str, str]]:
    """(name, value, the default if it is another, what it is) of every agreed setting, as in the run file;
    first those that are not the default."""
    if run is None:
        return []
    usual = {name: value for name, value, _ in _flat("", RunConfig())}
    rows = [
        (name, value, "" if usual.get(name) == value else usual.get(name, UNKNOWN), words)
        for name, value, words in _flat("", run)
        if run.pipeline.stages > 1 or not name.startswith("pipeline.")
    ]
    return sorted(rows, key=lambda row: not row[2])


def _flat(prefix: str, settings: BaseModel) -> Iterator[tuple[str, str, str]]:
    for name, value in settings:
        words = what_it_is(type(settings), name)
        if isinstance(value, BaseModel):
            yield from _flat(f"{prefix}{name}.", value)
            continue
        for key, one in (value if isinstance(value, dict) else {"": value}).items():
            shown = str(one).lower() if isinstance(one, bool) else str(one)
            yield plain(f"{prefix}{name}.{key}".rstrip("."), 80), plain(shown, 200) or UNKNOWN, words


def what_it_is(kind: type[BaseModel], field: str) -> str:
    """The sentence of the docstring of ``kind`` that first names ``field``; "" if none does."""
    sentences = re.split(r'(?<=[.;])\s+(?=[A-Z`"])', " ".join((kind.__doc__ or "").split()))
    found = next((one for one in sentences if f"``{field}``" in one), "")
    told = re.sub(rf"^``{field}``(:| is) ", "", found)
    return plain(told.replace("``", "").rstrip(";"), 240)
