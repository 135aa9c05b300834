"""Tickets: what a person pastes arrives whole or is refused in one line."""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import replace

import base58
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_co2.errors import TicketError
from p2p_co2.ticket import MAX_TICKET_CHARACTERS, PREFIX, Ticket
from p2p_co2.wire.identity import Identity, peer_id_of
from p2p_co2.wire.members import Pass
from p2p_co2.wire.names import is_name

KEYS = st.binary(min_size=32, max_size=32)
ADDRESSES = st.one_of(
    st.builds("/ip4/{}/tcp/{}".format, st.ip_addresses(v=4), st.integers(1, 65535)),
    st.builds("/ip6/{}/tcp/{}".format, st.ip_addresses(v=6), st.integers(1, 65535)),
    st.builds(
        "/dns4/{}/tcp/{}".format, st.from_regex(r"[a-z0-9]{1,20}\.org", fullmatch=True), st.integers(1, 9)
    ),
)
SEEDS = st.builds("{}/p2p/{}".format, ADDRESSES, KEYS.map(peer_id_of))
TICKETS = st.builds(Ticket, KEYS, KEYS.map(peer_id_of), st.lists(SEEDS, min_size=1, max_size=16).map(tuple))
ONE = Ticket(
    bytes(range(32)), peer_id_of(bytes(32)), (f"/ip4/203.0.113.5/tcp/31000/p2p/{peer_id_of(bytes(32))}",)
)
ALPHABET = base58.BITCOIN_ALPHABET.decode() + "0OIl- /é\n"


def _forge(content: bytes) -> str:
    """A ticket of any content with the right checksum."""
    checksum = hashlib.sha256(PREFIX.encode() + content).digest()[:4]
    return PREFIX + base58.b58encode(content + checksum).decode()


def test_a_ticket_is_one_word_for_a_terminal() -> None:
    word = str(ONE)
    assert word.startswith("p2pco2-")
    assert word.removeprefix("p2pco2-").isalnum()
    assert len(word) < 190
    assert Ticket.parse(f"  {word}\n") == ONE


@given(TICKETS)
def test_round_trip(ticket: Ticket) -> None:
    assert Ticket.parse(str(ticket)) == ticket
    assert len(str(ticket)) <= MAX_TICKET_CHARACTERS


@given(TICKETS, st.data())
def test_any_changed_character_is_refused(ticket: Ticket, data: st.DataObject) -> None:
    word = str(ticket)
    place = data.draw(st.integers(0, len(word) - 1))
    other = data.draw(st.sampled_from([c for c in ALPHABET if c != word[place]]))
    changed = word[:place] + other + word[place + 1 :]
    if changed.strip() != changed:  # a space at an end does not change the word but shortens it
        changed = changed.strip()
    with pytest.raises(TicketError):
        Ticket.parse(changed)


@given(st.integers(1, 2), st.binary(max_size=400))
def test_any_content_with_a_right_checksum_is_read_or_refused(version: int, content: bytes) -> None:
    word = _forge(bytes((version,)) + content)
    with contextlib.suppress(TicketError):
        assert str(Ticket.parse(word)) == word


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "begins with"),
        ("hello", "begins with"),
        (str(ONE).upper(), "begins with"),
        (str(ONE) + str(ONE), "character"),
        (PREFIX + "1" * 5000, "at most"),
        (_forge(b"\x03" + bytes(64)), "version 3"),
        (_forge(b""), "version 0"),
        (_forge(b"\x01" + bytes(64) + b"\x00"), "seeds"),
        (_forge(b"\x01" + bytes(64) + b"\x01\x05/ip4"), "too early"),
        (_forge(b"\x01" + bytes(64) + b"\x01\x03a b" + bytes(32)), "no seed address"),
    ],
)
def test_what_is_wrong_is_said(text: str, says: str) -> None:
    with pytest.raises(TicketError, match=says):
        Ticket.parse(text)


@given(st.text("ab é", min_size=1, max_size=32).filter(is_name), st.booleans(), st.integers(0, 400))
def test_a_ticket_of_one_person_comes_back_whole_and_no_byte_of_it_can_be_another(
    name: str, watches: bool, place: int
) -> None:
    key = Identity.generate()
    open_part = Ticket(ONE.run, key.peer_id, ONE.seeds)
    ticket = replace(open_part, admits=Pass.issue(key, ONE.run, name, 2e9, watches))
    assert Ticket.parse(str(ticket)) == ticket
    assert str(ticket.open_part) == str(open_part)
    said = ticket.certificate()
    assert said is not None
    assert (said.name, said.expires_at, said.watches) == (name, 2_000_000_000, watches)
    content = bytearray(base58.b58decode(str(ticket).removeprefix(PREFIX))[:-4])
    content[place % (len(content) - 32)] ^= 1  # but for the private key, which no seal can be of
    with contextlib.suppress(TicketError):
        assert Ticket.parse(_forge(bytes(content))).seeds != ONE.seeds  # those are for anybody to name


def test_values_that_make_no_ticket() -> None:
    with pytest.raises(TicketError):
        Ticket(bytes(31), ONE.run_key, ONE.seeds)
    with pytest.raises(TicketError):
        Ticket(ONE.run, ONE.run_key, ())
    with pytest.raises(TicketError):
        Ticket(ONE.run, ONE.run_key, ("/ip4/203.0.113.5/tcp/31000",))
    with pytest.raises(TicketError):
        Ticket(ONE.run, ONE.run_key, ("/ip4/203.0.113.5/tcp/31000/p2p/QmNoEd25519",))
