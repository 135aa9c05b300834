"""A swarm in cells: the cuts as laws, whole rounds by hand, and under lost messages and deaths."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from google.protobuf.message import DecodeError, Message

from p2p_co2.errors import RemoteProtocolError
from p2p_co2.node.lanes import Bulk, piece_of
from p2p_co2.protocol.rounds import Aborted, Committed, FellBehind, PayloadShape, Stale, open_decision
from p2p_co2.protocol.rounds.cells import (
    assign_roots,
    check_cell_ready,
    check_council,
    council_order,
    read_who,
    slot_ranges,
    sub_slots,
    write_who,
)
from p2p_co2.protocol.rounds.parts import BlockRange, covers
from p2p_co2.protocol.rounds.swarm import coordination_order
from p2p_co2.protocol.wire import messages_pb2 as wire
from p2p_co2.protocol.wire.envelope import kind_of
from p2p_co2.protocol.wire.identity import PeerId, _cell_of, cell_of
from p2p_co2.tensors.aggregation import mean_of_parts
from p2p_co2.tensors.codec import get_codec
from tests.fuzz.mutate import Mutator, Tape
from tests.round_network import RUN, Faults, Network, make_identity

SHAPE = PayloadShape(8, (24,), 8)
CELLS = 3


def network(peers: int = 15, seed: int = 0, faults: Faults | None = None) -> Network:
    return Network(peers, seed, faults, shape=SHAPE, cells=CELLS)


def members(net: Network, cell: int) -> list[PeerId]:
    return [name for name in net.names if cell_of(name, CELLS) == cell]


def coordinator_of(net: Network, cell: int, round_: int = 1) -> PeerId:
    return coordination_order(members(net, cell), 0, round_)[0]


def check_means(net: Network, round_: int = 1) -> None:
    """All who committed hold the sum of what the rosters of their cells name, and nobody else's."""
    committed = net.committed(round_)
    assert len({bytes(event.mean) for event in committed.values()}) <= 1
    if not committed:
        return
    event = next(iter(committed.values()))
    for number, (start, stop) in enumerate(slot_ranges(24)):
        counted: dict[PeerId, float] = {}
        for one in committed.values():
            counted |= dict(one.parts[number].contributors)
        total = [0] * (8 * (stop - start))
        for name, weight in counted.items():
            assert weight == net.weight(name)
            piece = net.payload(name, 0, round_)[8 * start : 8 * stop]
            total = [(a + int(weight) * b) % 256 for a, b in zip(total, piece, strict=True)]
        whole_cells = {cell_of(name, CELLS) for name in committed}
        if whole_cells == set(range(CELLS)):
            assert bytes(event.mean[8 * start : 8 * stop]) == bytes(total)


# ---- cuts


@pytest.mark.parametrize("blocks", [1, 7, 63, 64, 65, 1000])
def test_slots_and_sub_slots_are_the_whole(blocks: int) -> None:
    slots = slot_ranges(blocks)
    assert covers(slots, blocks)
    assert len(slots) == min(blocks, 64)
    for slot in slots:
        for roots in range(1, slot.stop - slot.start + 1):
            parts = sub_slots(slot, roots)
            assert len(parts) == roots
            assert covers(
                [BlockRange(a - slot.start, b - slot.start) for a, b in parts], slot.stop - slot.start
            )


def test_peers_spread_over_cells_and_cells_take_turns() -> None:
    counts = Counter(cell_of(f"peer {number}", 20) for number in range(1024))
    assert set(counts) == set(range(20))
    assert max(counts.values()) < 2 * 1024 / 20
    firsts = Counter(council_order(range(20), 0, round_)[0] for round_ in range(1000))
    assert max(firsts.values()) < 100


def test_roots_are_owners_and_more_cells_have_more_of_them() -> None:
    shape = PayloadShape(68, (64_000,), 512)
    owners = {cell: [PeerId(f"{cell}/{slot}") for slot in range(64)] for cell in range(20)}
    roots = assign_roots(owners, (0, 1), shape)
    assert [len(slot.peers) for slot in roots] == [3] * 64
    assert all(peer.endswith(f"/{slot}") for slot, peers in enumerate(roots) for peer in peers.peers)
    per_cell = Counter(peer.partition("/")[0] for slot in roots for peer in slot.peers)
    assert max(per_cell.values()) < 3 * 64 * 3 / 20
    assert [len(slot.peers) for slot in assign_roots(owners, (0, 1), PayloadShape(68, (64,), 512))] == [
        1
    ] * 64


def test_who_is_in_a_mean_fits_into_bits() -> None:
    peers = [PeerId(name) for name in "abcdefghij"]
    assert read_who(write_who({"a", "c", "j"}, peers), peers) == ("a", "c", "j")
    assert read_who(write_who(set(), peers), peers) == ()
    for bits in (b"", b"\0", b"\0\x04", b"\0\0\0"):
        with pytest.raises(RemoteProtocolError):
            read_who(bits, peers)


# ---- the mean of means


@pytest.mark.parametrize("name", ["fp32", "int4", "int8"])
def test_a_mean_over_cells_is_the_mean_of_all(name: str) -> None:
    codec, sums = get_codec(name), get_codec("fp32")  # type: ignore[arg-type]
    noise = torch.Generator().manual_seed(1)
    given = [
        (f"{n:02}", float(n + 1), bytes(codec.encode(torch.randn(1024, generator=noise)).numpy()))
        for n in range(9)
    ]
    cells = [given[:4], given[4:5], given[5:]]
    parts = [
        (f"cell {n}", sum(weight for _, weight, _ in cell), mean_of_parts(codec, cell, sums))
        for n, cell in enumerate(cells)
    ]
    exact = sum(
        weight * codec.decode(torch.frombuffer(bytearray(data), dtype=torch.uint8)).double()
        for _, weight, data in given
    ) / sum(weight for _, weight, _ in given)
    joined = mean_of_parts(sums, parts, sums)
    decoded = sums.decode(torch.frombuffer(joined, dtype=torch.uint8))
    torch.testing.assert_close(decoded.double(), exact, rtol=1e-6, atol=1e-6)
    assert mean_of_parts(sums, parts, codec) == codec.encode(decoded).numpy().tobytes()


# ---- rounds


def test_three_cells_agree_on_the_sum_of_everybody() -> None:
    net = network()
    assert all(members(net, cell) for cell in range(CELLS))
    for round_ in (1, 2):
        net.sent.clear()
        net.offer_all(round_=round_)
        net.run_until_settled()
        net.run(1.0)
        assert len(net.committed(round_)) == 15
        check_means(net, round_)
        kinds = Counter(message.__class__.__name__ for _, _, message in net.sent)
        assert (kinds["CellReady"], kinds["CellBegin"], kinds["CellResult"], kinds["CellDecision"]) == (
            2,
        ) * 4
    assert not net.refused
    assert len({peer.states[0] for peer in net.peers.values()}) == 1


def test_all_that_was_sent_for_a_round_that_is_over_is_told_to_be_of_no_use() -> None:
    """Sums and means between cells travel in the council's attempt, slices and means in the cell's."""
    net = network()
    for round_ in (1, 2):
        net.offer_all(round_=round_)
        net.run_until_settled()
        net.run(1.0)
    told = {(name, event.attempt, event.means) for name, event in net.events if isinstance(event, Stale)}
    bulk = [one for one in net.sent if kind_of(one[2]).is_bulk]
    assert {kind_of(message).name for _, _, message in bulk} == {"part", "mean", "cell_part", "cell_mean"}
    for source, _, message in bulk:
        piece = piece_of(message, kind_of(message))
        assert piece is not None
        of_round_1 = message.key.round == 1  # type: ignore[attr-defined]
        stale = [Bulk(b"", piece).is_stale(*one) for name, *one in told if name == source]
        assert any(stale) == (of_round_1 or not piece.is_mean)  # means of the last may complete a slower one


def test_a_decision_names_the_cell_and_binds_the_others() -> None:
    net = network()
    net.offer_all()
    net.run_until_settled()
    for name, event in net.committed().items():
        decision = wire.Decision.FromString(event.decision)
        outcome = open_decision(decision, RUN, SHAPE)
        assert [member.peer for member in outcome.members] == members(net, cell_of(name, CELLS))
        assert [share.cell for share in outcome.cells] == [0, 1, 2]
        assert outcome.base_version == 0
        assert outcome.decided_by == coordinator_of(net, cell_of(name, CELLS))
        decision.roster_signature = bytes(64)
        with pytest.raises(RemoteProtocolError):
            open_decision(decision, RUN, SHAPE)


@pytest.mark.parametrize("seed", range(12))
def test_lost_and_doubled_messages_never_make_two_means(seed: int) -> None:
    net = network(12, seed, Faults(loss=0.03, duplication=0.05))
    net.offer_all()
    net.run_until_settled()
    assert not net.undecided()
    check_means(net)


@pytest.mark.parametrize("seed", range(8))
def test_deaths_cost_a_round_and_never_agreement(seed: int) -> None:
    """A coordinator of a cell, the council's, an owner or a root dies at the n-th message of its kind."""
    net = network(15, seed)
    kinds: list[type[Message]] = [
        wire.CellReady, wire.CellBegin, wire.CellPart, wire.CellMean, wire.CellResult, wire.CellDecision,
        wire.Begin, wire.Mean,
    ]  # fmt: skip
    kind, left = kinds[seed % len(kinds)], [1 + seed // len(kinds)]

    def die(source: PeerId, to: PeerId, message: Message) -> bool:
        if isinstance(message, kind) and left[0] > 0:
            left[0] -= 1
            if not left[0]:
                net.crash(source)
                return False
        return True

    net.on_send = die
    net.offer_all()
    net.run_until_settled()
    assert not net.undecided()
    check_means(net)
    left[0] = 0
    for _ in range(2):  # the survivors go on, all together
        at = {net.peers[name].version for name in net.names if net.peers[name].alive}
        net.events.clear()
        net.offered.clear()
        net.planned.clear()
        for name in net.names:
            if net.peers[name].alive:
                net.offer(name, net.peers[name].version + 1)
        net.run_until_settled()
        net.run(5.0)
    alive = [peer for peer in net.peers.values() if peer.alive]
    assert min(peer.version for peer in alive) > min(at) - 1
    assert max(peer.version for peer in alive) >= 2
    assert len({peer.states[0] for peer in alive if peer.version == max(p.version for p in alive)}) == 1


def test_a_cell_that_does_not_come_is_left_out_and_catches_up() -> None:
    net = network()
    first = council_order(range(CELLS), 0, 1)[0]
    away = next(cell for cell in range(CELLS) if cell != first)
    for name in net.names:
        if cell_of(name, CELLS) != away:
            net.offer(name)
    net.run(100.0)
    others = [name for name in net.names if cell_of(name, CELLS) != away]
    assert set(net.committed()) == set(others)
    for name in members(net, away):
        net.offer(name)
    net.run(100.0)
    behind = [event for name, event in net.events if isinstance(event, FellBehind) and name not in others]
    assert {event.version for event in behind} == {1}
    assert len({peer.states[0] for peer in net.peers.values()}) == 1


def test_a_begin_of_the_council_that_is_lost_is_asked_for_again() -> None:
    net = network()
    lost: list[PeerId] = []

    def lose(source: PeerId, to: PeerId, message: Message) -> bool:
        if isinstance(message, wire.CellBegin) and not lost:
            lost.append(to)
            return False
        return True

    net.on_send = lose
    net.offer_all()
    net.run_until_settled()
    assert lost
    assert len(net.committed()) == 15
    check_means(net)


def test_who_goes_while_the_council_gathers_is_not_in_the_round_and_who_comes_is() -> None:
    net = network()
    first = council_order(range(CELLS), 0, 1)[0]
    early = next(cell for cell in range(CELLS) if cell != first)
    goes, comes = [name for name in members(net, early) if name != coordinator_of(net, early)][:2]
    for name in members(net, early):
        if name != comes:
            net.offer(name)
    net.run(12.0)
    assert [message.members for _, _, message in net.sent if isinstance(message, wire.CellReady)][-1] == len(
        members(net, early)
    ) - 1
    net.crash(goes)
    net.run(5.0)
    net.offer(comes)
    net.run(5.0)
    for name in net.names:
        if cell_of(name, CELLS) != early:
            net.offer(name)
    net.run_until_settled()
    assert set(net.committed()) == set(net.names) - {goes}
    check_means(net)


def test_a_round_whose_sums_are_lost_is_given_up_at_once() -> None:
    """A root dies with what all cells need: they hear of it from its cell, and not by a deadline."""
    net = network()

    def die(source: PeerId, to: PeerId, message: Message) -> bool:
        whole = all(peer.alive for peer in net.peers.values())
        if isinstance(message, wire.CellPart) and whole and to != coordinator_of(net, cell_of(to, CELLS)):
            net.crash(to)
        return True

    net.on_send = die
    net.offer_all()
    net.run_until_settled()
    reasons = {event.reason for _, event in net.events if isinstance(event, Aborted)}
    assert any("who sums for all cells" in reason for reason in reasons)
    assert net.now < 1000.0 + 10.0


def test_the_next_round_has_more_time_after_one_that_was_too_slow() -> None:
    net = network()
    net.on_send = lambda source, to, message: not isinstance(message, wire.CellMean)
    net.offer_all()
    net.run_until_settled()
    first = [message.parts_within_s for _, _, message in net.sent if isinstance(message, wire.CellReady)]
    assert not net.committed()
    net.on_send = lambda source, to, message: True
    for record in (net.sent, net.events, net.offered, net.planned):
        record.clear()
    net.offer_all()
    net.run_until_settled()
    second = [message.parts_within_s for _, _, message in net.sent if isinstance(message, wire.CellReady)]
    assert min(second) > 2 * max(first)
    assert len(net.committed()) == 15
    check_means(net)


def test_half_of_the_cells_begin_only_with_the_lowest() -> None:
    net = Network(16, shape=SHAPE, cells=2)
    for name in net.names:
        if cell_of(name, 2) == 1:
            net.offer(name)
    net.run(200.0)
    endings = [event for _, event in net.events if isinstance(event, Aborted | Committed)]
    assert endings
    assert all(isinstance(event, Aborted) for event in endings)


# ---- forged


KINDS = (wire.CellReady, wire.CellWaiting, wire.CellBegin, wire.CellPart, wire.CellMean, wire.CellResult,
         wire.CellDecision)  # fmt: skip


def envelope(message: Message) -> bytes:
    kind = message.__class__
    name = next(f.name for f in wire.Envelope.DESCRIPTOR.fields if f.message_type is kind.DESCRIPTOR)
    body = {name: kind.FromString(message.SerializeToString())}  # its data may lie beside it
    return wire.Envelope(version=1, **body).SerializeToString()  # type: ignore[arg-type]


@pytest.mark.parametrize("insider", [False, True])
def test_wrong_messages_between_cells_are_refused_and_raise_nothing_else(insider: bool) -> None:
    """Every message between cells is followed by wrong ones like it, of a stranger or of its sender."""
    net, chance = network(9, 5), random.Random(7)
    mutator, stranger = Mutator(Tape(b"")), make_identity(1000)
    tried: Counter[str] = Counter()

    def lie(source: PeerId, to: PeerId, message: Message) -> bool:
        kind = message.__class__.__name__
        if isinstance(message, KINDS) and tried[kind] < 40 and chance.random() < 0.3:
            liar = net.peers[source].identity if insider else stranger
            mutator.saw(envelope(message))
            for _ in range(4):
                mutator.tape = Tape(chance.randbytes(48))
                wrong = wire.Envelope()
                try:
                    wrong.ParseFromString(mutator.mutate(envelope(message), liar))
                except DecodeError:
                    continue
                body = getattr(wrong, wrong.WhichOneof("body") or "cell_part")
                if isinstance(body, KINDS):
                    tried[kind] += 1
                    net.at(net.now, lambda body=body: net.deliver(liar.peer_id, to, body))  # type: ignore[misc]
        return True

    net.on_send = lie
    for _ in range(8):
        net.offered.clear()
        net.events.clear()
        for name in net.names:
            net.offer(name, net.peers[name].version + 1)
        net.run_until_settled()
        net.run(5.0)
    assert set(tried) == {kind.__name__ for kind in KINDS}
    assert net.refused
    assert max(peer.version for peer in net.peers.values()) >= 2
    if not insider:
        refused = {sender for _, sender, _ in net.refused}
        assert refused == {stranger.peer_id}
    for peer in net.peers.values():
        assert all(held <= bound for held, bound in peer.machine.held().values())


# ---- what costs too much


def test_a_council_names_few_roots_and_only_ids() -> None:
    shape, cells = PayloadShape(8, (6400,), 8), 16
    slots = len(slot_ranges(6400))
    peers = [make_identity(i).peer_id for i in range(3)]
    council = wire.Council(coordinator=peers[0], cells=range(cells), sums_within_s=1.0)
    council.roots.extend(wire.SlotRoots(peers=peers[:2]) for _ in range(slots))
    check_council(council, cells, shape)
    council.roots[5].peers.append(peers[2])  # 100 blocks in a slot: a root for each was let in
    with pytest.raises(RemoteProtocolError, match="3 roots"):
        check_council(council, cells, shape)
    del council.roots[5].peers[1:]
    council.roots[5].peers[0] += "x" * 1000
    with pytest.raises(RemoteProtocolError, match="wrong cell"):
        check_council(council, cells, shape)


def test_what_is_no_id_names_no_owner_and_stays_nowhere() -> None:
    sender = make_identity(1).peer_id
    cell = cell_of(sender, CELLS)
    long = next(name for i in range(99) if cell_of(name := f"{i}" + "x" * 1000, CELLS) == cell)
    ready = wire.CellReady(
        key=wire.RoundKey(fragment=0, round=1), cell=cell, state_digest=bytes(32), members=3,
        parts_within_s=1.0, owners=24 * [sender],
    )  # fmt: skip
    check_cell_ready(ready, sender, CELLS, SHAPE)
    ready.owners[3] = long
    with pytest.raises(RemoteProtocolError, match="wrong owner"):
        check_cell_ready(ready, sender, CELLS, SHAPE)
    kept = _cell_of.cache_info().currsize
    cell_of(long + "y", CELLS)
    assert _cell_of.cache_info().currsize == kept
