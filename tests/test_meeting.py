"""What peers compare when they meet: models by their tables, clocks, addresses, and whom they knew."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import nn

from p2p_co2.config import PeerConfig, RunConfig
from p2p_co2.errors import ConfigError, EnvironmentFault, RemoteProtocolError, TransportError
from p2p_co2.net.transport.probe import ProbeServer
from p2p_co2.node.network import Network, leads_as_far, leads_elsewhere, require_others_can_dial
from p2p_co2.protocol import strangers as strangers_room
from p2p_co2.protocol.membership import (
    Left,
    Membership,
)
from p2p_co2.protocol.strangers import STRANGER_TOLD_S, OtherModel, Stranger
from p2p_co2.telemetry import events as ev
from p2p_co2.tensors.fragments import plan_fragments
from p2p_co2.ticket import Ticket
from p2p_co2.trainer.connection import connect
from p2p_co2.trainer.model_summary import summarise
from p2p_co2.wire.identity import Identity, PeerId
from p2p_co2.wire.messages_pb2 import (
    Leave,
    ModelRow,
    ModelTable,
    PeerRecord,
    Ping,
    Status,
)
from p2p_co2.wire.model_table import MAX_TABLE_BYTES, ModelSummary, Row, check_rows
from tests.test_discovery import CONFIG, DEAD, RECIPE, RUN, open_member
from tests.test_membership import deliver, drain

A, B, C, D = (Identity(Ed25519PrivateKey.from_private_bytes(bytes([n] * 32))).peer_id for n in range(4))


def outnumbered(machine: Membership) -> Stranger | None:
    return machine.strangers.outnumber([info.status for info in machine.live.values()])


def trunk(rows: int = 64, columns: int = 16) -> nn.Sequential:
    """A frozen base and a trained matrix."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(columns, rows, bias=False))
    model[0].requires_grad_(False)
    return model


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def summary(model: nn.Module) -> ModelSummary:
    return summarise(model, plan_fragments(model, 2))


# ---- models: by hand


def _frozen_value(model: nn.Sequential) -> None:
    with torch.no_grad():
        model[0].weight[3, 3] += 1e-3


DIFFERENCES: dict[str, tuple[Callable[[nn.Sequential], object], str, str]] = {
    "another base": (_frozen_value, "0.weight", "the frozen values differ"),
    "base in bfloat16": (lambda model: model[0].bfloat16(), "0.weight", "bfloat16 there; load the same base"),
    "unfrozen": (lambda model: model[0].weight.requires_grad_(), "0.weight", "frozen here and trained there"),
    "one more": (lambda model: model.append(nn.Linear(2, 2)), "2.weight", "none of this name here"),
    "renamed": (lambda model: model.append(model.pop(1)).insert(1, nn.Tanh()), "1.weight", "no"),
    "live dtype": (lambda model: model[1].half(), "1.weight", "float32 here and float16 there"),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_difference_is_named(name: str) -> None:
    change, parameter, words = DIFFERENCES[name]
    mine, other = trunk(), trunk()
    change(other)
    here, there = summary(mine), summary(other)
    assert here.digest != there.digest
    found = here.difference(there.message)
    assert found.name == parameter
    assert words in found.problem


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int8, torch.float8_e4m3fn])
def test_quantised_bases_in_buffers_are_compared_as_frozen_parameters_are(dtype: torch.dtype) -> None:
    def quantised(value: int) -> nn.Sequential:
        model = trunk()
        model[0].register_buffer("packed", torch.full((8, 4), value).to(dtype))
        return model

    here, there = summary(quantised(3)), summary(quantised(5))
    assert summary(quantised(3)).digest == here.digest != there.digest
    found = here.difference(there.message)
    assert found.name == "0.packed"
    assert "the frozen values differ from the others'; load the same base" in found.problem
    machines = meet(a=here, b=there)
    assert not machines[A].live


def test_what_a_peer_counts_and_measures_by_itself_makes_no_other_model() -> None:
    before, after = normalised(), normalised()
    for model, value in ((before, 0), (after, 1)):
        model.register_buffer("codes_seen", torch.full((9,), value, dtype=torch.int32))
        model.register_buffer("places", torch.full((3, 3), value))
        model.register_buffer("mask", torch.full((3, 3), bool(value)))
        model.register_buffer("own", torch.full((3, 3), value, dtype=torch.uint8), persistent=False)
    after(torch.randn(8, 4))
    assert summary(before).digest == summary(after).digest


def test_matrices_of_one_size_and_two_shapes_are_not_the_same_model() -> None:
    here, there = summary(trunk(64, 16)), summary(trunk(16, 64))
    found = here.difference(there.message)
    assert str(found).startswith(
        "1.weight: shape (64, 16) here and (16, 64) there; trained parameters: 1,024"
    )


def test_the_same_model_is_the_same_whatever_lies_round_it_and_however_it_lies_in_memory() -> None:
    plain, strided = trunk(), trunk()
    strided[0].weight.data = strided[0].weight.data.t().contiguous().t()
    with torch.no_grad():
        strided[1].weight.add_(1.0)  # what is trained is agreed on elsewhere
    assert not strided[0].weight.is_contiguous()
    assert summary(plain).digest == summary(strided).digest
    wrapped = torch.compile(trunk(), backend="eager")
    assert isinstance(wrapped, nn.Module)
    assert summary(wrapped).rows == summary(plain).rows


def test_a_long_table_is_cut_short_and_still_compared() -> None:
    rows = tuple(Row(f"layers.{number}.weight", (number,), "float32", True) for number in range(20_000))
    here = ModelSummary(rows, bytes(32), 1)
    there = ModelSummary((*rows[:-1], Row("last", (1,), "float32", True)), bytes(32), 1)
    assert there.message.ByteSize() <= MAX_TABLE_BYTES + 100
    assert here.difference(there.message).name == ""
    early = ModelSummary((Row("first", (1,), "float32", True), *rows[1:]), bytes(32), 1)
    assert here.difference(early.message).name == rows[0].name


@pytest.mark.parametrize(
    "row", [ModelRow(name="x" * 600), ModelRow(shape=[1] * 20), ModelRow(digest=b"x")], ids=str
)
def test_a_table_that_no_model_has_is_refused(row: ModelRow) -> None:
    with pytest.raises(RemoteProtocolError, match="bad model table"):
        check_rows(ModelTable(rows=[row]))


# ---- models: peers that meet


def meet(**models: ModelSummary | None) -> dict[PeerId, Membership]:
    """Peers a to d with these models, of which the first finds all others; each says what it trains."""
    names = dict(zip("abcd", (A, B, C, D), strict=True))
    machines = {names[name]: Membership(names[name], model=model) for name, model in models.items()}
    for peer, machine in machines.items():
        joins = Status.JOINING if peer == A else Status.TRAINING
        model = machine.strangers.model.digest if machine.strangers.model is not None else 0
        machine.status = Status(phase=joins, process=1, model=model)
    for machine in machines.values():
        machine.found(machines, 100.0)
    deliver(machines, 100.0)
    return machines


RIGHT, WRONG = summary(trunk(64, 16)), summary(trunk(16, 64))


def test_peers_with_two_models_are_strangers_and_each_is_told_once_by_what_they_differ() -> None:
    machines = meet(a=WRONG, b=RIGHT)
    for mine, other in ((A, B), (B, A)):
        machine = machines[mine]
        assert not machine.live
        (told,) = drain(machine)
        assert isinstance(told, OtherModel)
        assert told.peer == other
        assert told.difference is not None
        assert told.difference.name == "1.weight"
        machine.found(machines, 105.0)
        machine.handle_timer(106.0)
        assert machine.messages_to_send() == []
    assert outnumbered(machines[A]) is machines[A].strangers.known[B]


def test_who_does_not_name_its_model_is_taken() -> None:
    machines = meet(a=RIGHT, b=None)
    assert set(machines[A].live) == {B}
    assert set(machines[B].live) == {A}


def test_a_newcomer_goes_by_most_and_a_lone_liar_keeps_nobody_out() -> None:
    one_each = meet(a=RIGHT, b=RIGHT, c=WRONG)
    assert set(one_each[A].live) == {B}
    assert outnumbered(one_each[A]) is None
    many = meet(a=RIGHT, b=RIGHT, c=WRONG, d=WRONG)[A]
    assert outnumbered(many) is not None


def test_of_those_who_train_one_counts_more_than_any_that_join() -> None:
    machine = meet(a=RIGHT, b=RIGHT, c=WRONG, d=WRONG)[A]
    for stranger in machine.strangers.known.values():
        stranger.status = stranger.status._replace(phase=Status.JOINING)
    assert outnumbered(machine) is None


def test_a_peer_that_comes_back_with_another_model_is_no_member_and_with_the_right_one_is() -> None:
    machine = Membership(A, model=RIGHT)
    right, wrong = Status(model=RIGHT.digest, process=1), Status(model=WRONG.digest, process=2)
    machine.receive(Ping(status=right), B, 100.0)
    machine.receive(Ping(status=wrong), B, 101.0)
    assert not machine.live
    assert any(isinstance(event, Left) for event in drain(machine))
    machine.receive(Ping(status=Status(model=RIGHT.digest, process=3)), B, 102.0)
    assert set(machine.live) == {B}
    assert not machine.strangers.known


def test_a_stranger_that_says_another_thing_each_time_is_told_once_in_a_while() -> None:
    """A table is large and each warning is read, so neither goes by what a peer says of itself."""
    machine, tables, warnings = Membership(A, model=RIGHT), list[float](), 0
    for number in range(1, 130):
        now = 100.0 + number
        machine.receive(Ping(status=Status(model=number, process=number)), B, now)
        if number % 5 == 0:
            machine.receive(Leave(), B, now)
        if number % 7 == 0:
            machine.receive(Ping(status=Status(model=RIGHT.digest)), B, now)
        machine.handle_timer(now)
        tables += [now for _, message in machine.messages_to_send() if isinstance(message, ModelTable)]
        warnings += sum(isinstance(event, OtherModel) for event in drain(machine))
    assert len(tables) == 129 // STRANGER_TOLD_S + 1
    assert min(later - sooner for sooner, later in pairwise(tables)) >= STRANGER_TOLD_S
    assert warnings <= len(tables)


def test_no_more_strangers_are_told_in_a_minute_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers_room, "MAX_PEERS", 3)
    machine = Membership(A, model=RIGHT)
    for number in range(8):
        machine.receive(Ping(status=Status(model=7)), PeerId(f"stranger {number}"), 100.0)
        machine.receive(Leave(), PeerId(f"stranger {number}"), 100.0)
        assert all(count <= bound for count, bound in machine.held().values()), machine.held()
    assert sum(isinstance(message, ModelTable) for _, message in machine.messages_to_send()) == 3


def test_a_table_that_nobody_waits_for_is_counted() -> None:
    machine = Membership(A, model=RIGHT)
    with pytest.raises(RemoteProtocolError, match="unasked"):
        machine.receive(WRONG.message, B, 100.0)
    machine.receive(Ping(status=Status(model=7)), B, 100.0)
    machine.receive(WRONG.message, B, 100.0)
    with pytest.raises(RemoteProtocolError, match="unasked"):
        machine.receive(WRONG.message, B, 100.0)


# ---- clocks and addresses


@pytest.mark.parametrize("offset_s", [90.0, -3600.0])
async def test_who_joins_with_another_time_is_refused(tmp_path: Path, offset_s: float) -> None:
    async with open_member(tmp_path / "seed", []) as seed:
        await seed.discovery.publish_manifest(CONFIG.canonical_bytes(), RECIPE)
        probes = ProbeServer(seed.p2p, RUN, clock=lambda: time.time() + offset_s)
        await probes.start()
        ticket = Ticket(RUN, seed.identity.peer_id, (DEAD, *seed.maddrs))
        with pytest.raises(EnvironmentFault, match=r"clock: .* against 1 other; .* timedatectl"):
            await Network.open(ticket, PeerConfig(folder=tmp_path / "peer"), lambda *_: None)
        await probes.close()


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([[0.1]], ""),
        ([[], [0.1]], ""),  # who did not answer is asked once more
        ([[], []], "nobody answered what time it is; .* date -u"),
        ([[-20.0]], r"\+20.00 s against 1 other; from 45 s on .* timedatectl"),
        ([[0.0, 100.0]], "2 others differ by 100 s; .* date -u"),
    ],
    ids=["well", "late", "silent", "limited", "at odds"],
)
async def test_a_clock_that_is_in_doubt_is_told_and_lets_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: list[list[float]], words: str
) -> None:
    async def answered(*_: object) -> list[float]:
        return answers.pop(0)

    monkeypatch.setattr("p2p_co2.node.network.clock_offsets_s", answered)
    network = Network(Identity.load_or_create(tmp_path / "identity"), PeerConfig(), Ticket(RUN, A, (HERE,)))
    network.use(None, None)  # type: ignore[arg-type]
    await network._compare_clocks([HERE])
    assert re.match(f"clock: {words}" if words else "$", network.clock_doubt)
    assert not answers


@pytest.mark.parametrize("doubt", ["", "clock: +20.00 s against 1 other"])
def test_who_connects_with_a_clock_in_doubt_hears_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, doubt: str
) -> None:
    class Opened:
        """A session that is open at once."""

        def __init__(self, ticket: Ticket, config: PeerConfig, on_event: Callable[[ev.Event], None]) -> None:
            self.on_event = on_event
            identity = SimpleNamespace(peer_id=A)
            self.network = SimpleNamespace(clock_doubt=doubt, run=RunConfig(), identity=identity)

        def open(self) -> None:
            return

        def warn(self, text: str) -> None:
            self.on_event(ev.Warned(at=0.0, peer="me", text=text))

    monkeypatch.setattr("p2p_co2.trainer.connection.Session", Opened)
    told = list[ev.Event]()
    connect(str(Ticket(RUN, A, (HERE,))), PeerConfig(folder=tmp_path), told.append)
    assert [event.text for event in told if isinstance(event, ev.Warned)] == [doubt] * bool(doubt)


PUBLIC = f"/ip4/203.0.113.5/tcp/31000/p2p/{A}"
NEAR = f"/ip4/10.99.99.99/tcp/31000/p2p/{A}"
HERE = f"/ip4/127.0.0.1/tcp/31000/p2p/{A}"


@pytest.mark.parametrize("seed", [PUBLIC, NEAR, f"/dns4/seed.example.org/tcp/31000/p2p/{A}"])
@pytest.mark.parametrize("key", ["host", "announce_host"])
@pytest.mark.parametrize("place", ["127.0.0.1", "localhost", "::1"])
def test_loopback_is_refused_where_the_seeds_are_elsewhere(seed: str, key: str, place: str) -> None:
    config = PeerConfig().model_copy(update={"host": "0.0.0.0", key: place})
    with pytest.raises(ConfigError, match=f"settings: {key}: {place} leads nowhere"):
        require_others_can_dial(config, Ticket(RUN, A, (seed,)))
    require_others_can_dial(config, Ticket(RUN, A, (HERE,)))
    good = config.model_copy(update={"host": "0.0.0.0", "announce_host": ""})
    require_others_can_dial(good, Ticket(RUN, A, (seed,)))


@pytest.mark.parametrize(
    ("maddr", "seeds", "is_useful"),
    [
        (HERE, (HERE,), True), (NEAR, (HERE,), False), (NEAR, (NEAR,), True), (HERE, (NEAR,), False),
        (PUBLIC, (PUBLIC, NEAR), True), (NEAR, (PUBLIC,), False), (HERE, (PUBLIC,), False),
        (NEAR, (PUBLIC, NEAR), True), ("10.99.99.98:4000", (PUBLIC,), False),
        ("[fd00::1]:4000", (NEAR,), True),
        ("localhost:4000", (NEAR,), False), ("nonsense", (PUBLIC,), True),
    ],
)  # fmt: skip
def test_a_later_ticket_names_whom_newcomers_can_dial(
    maddr: str, seeds: tuple[str, ...], is_useful: bool
) -> None:
    assert leads_as_far(maddr, seeds) is is_useful


@pytest.mark.parametrize(
    ("maddrs", "grpc", "leads"),
    [
        ([HERE], [], False), ([HERE], ["127.0.0.1:4000", "[::1]:4000"], False), ([HERE, NEAR], [], True),
        ([HERE], ["10.99.99.99:4000"], True), ([], [], True), (["nonsense"], [], True),
        ([f"/ip4/127.0.0.1/tcp/1/p2p/{B}/p2p-circuit/p2p/{A}"], [], True),
    ],
)  # fmt: skip
def test_a_record_that_leads_only_to_whoever_dials_it_is_of_no_use(
    maddrs: list[str], grpc: list[str], leads: bool
) -> None:
    assert leads_elsewhere(PeerRecord(peer=A, maddrs=maddrs, grpc_addresses=grpc)) is leads


async def test_peers_keep_the_runs_settings_for_newcomers_when_the_seed_is_gone(tmp_path: Path) -> None:
    networks: list[Network] = []

    async def join(name: str, ticket: Ticket) -> Network:
        network = await Network.open(ticket, PeerConfig(folder=tmp_path / name), lambda *_: None)
        networks.append(network)
        await network.publish_self()
        return network

    try:
        async with open_member(tmp_path / "seed", []) as seed:
            await seed.discovery.publish_manifest(CONFIG.canonical_bytes(), RECIPE)
            ticket = Ticket(RUN, seed.identity.peer_id, tuple(seed.maddrs))
            one, two = await join("one", ticket), await join("two", ticket)
            assert [record.peer for record in await one.find_peers()] == [two.identity.peer_id]
        later = Ticket.parse((tmp_path / "one" / "ticket").read_text())
        assert {seed.rpartition("/")[2] for seed in later.seeds} == {
            seed.identity.peer_id, one.identity.peer_id, two.identity.peer_id,
        }  # fmt: skip
        with pytest.raises(TransportError, match="no seed can be reached"):
            await one.rebootstrap()
        await one.close()  # and goes on with the ticket that it had, from its own folder
        one = await join("one", ticket)
        assert one.run == CONFIG
        assert [record.peer for record in await one.find_peers()] == [two.identity.peer_id]
        newcomer = await join("newcomer", later)
        assert newcomer.run == CONFIG
        known = {one.identity.peer_id, two.identity.peer_id}
        assert {record.peer for record in await newcomer.find_peers()} == known
    finally:
        for network in networks:
            await network.close()


async def test_a_copied_identity_is_refused_while_the_other_lives_and_a_restart_is_not(
    tmp_path: Path,
) -> None:
    async def open_(name: str) -> Network:
        return await Network.open(ticket, PeerConfig(folder=tmp_path / name), lambda *_: None)

    async def no_message(*_: object) -> None: ...

    async def work(network: Network) -> None:
        await network.start_carriers(no_message, lambda *_: None)
        await network.publish_self()

    async with open_member(tmp_path / "seed", []) as seed:
        await seed.discovery.publish_manifest(CONFIG.canonical_bytes(), RECIPE)
        ticket = Ticket(RUN, seed.identity.peer_id, tuple(seed.maddrs))
        first = await open_("first")
        await work(first)
        shutil.copytree(tmp_path / "first", tmp_path / "copy")
        with pytest.raises(ConfigError, match="at work elsewhere, too"):
            await open_("copy")
        await first.find_peers()
        assert await first.publish_self() == ""
        await first.close()
        first = await open_("first")  # its last record is listed still
        copy = await open_("copy")  # at the same moment
        try:
            await work(first)
            await work(copy)
            await first.find_peers()
            assert "another --folder" in await first.publish_self()
        finally:
            await first.close()
            await copy.close()
