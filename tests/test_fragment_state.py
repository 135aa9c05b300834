"""The tensor side of one fragment: by hand, then its laws over several peers and orders, then faults."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from p2p_co2.config import CodecConfig, OuterConfig, RunConfig
from p2p_co2.errors import EnvironmentFault
from p2p_co2.protocol.catchup.goals import LEAST_CHUNK_BYTES
from p2p_co2.protocol.ledger import PartWeights
from p2p_co2.tensors import outer
from p2p_co2.tensors.aggregation import get_rule, reduce_slices
from p2p_co2.tensors.checkpoint.agreed import state_bytes, state_digest
from p2p_co2.tensors.checkpoint.folder import Checkpoint, load, save
from p2p_co2.tensors.codec import get_codec
from p2p_co2.trainer.ledger import kept
from p2p_co2.trainer.ledger.fragment_state import FragmentOutcome, FragmentState
from p2p_co2.wire.schedule import OfferState

PLAIN = OuterConfig(rule="keep", lr=1.0, momentum=0.0, nesterov=False, gap_penalty=False, clip="none")
BLOCK, RULES = 128, ["keep", "blend", "co2", "eager"]


def run_config(outer_config: OuterConfig = PLAIN, codec: str = "fp32", feedback: bool = False) -> RunConfig:
    return RunConfig(
        outer=outer_config,
        codec=CodecConfig.model_validate({"name": codec, "error_feedback": feedback}),
    )


def plain(rule: str, codec: str = "fp32", feedback: bool = False) -> RunConfig:
    return run_config(PLAIN.model_copy(update={"rule": rule}), codec, feedback)


class Simulated:
    """A peer: its state and its live parameters, one fragment of ``n`` values."""

    def __init__(self, name: str, run: RunConfig, start: Tensor) -> None:
        self.name, self.codec = name, get_codec(run.codec.name)
        self.ledger = FragmentState(run, self.codec, name, outer.init(start))
        self.live = start.clone()
        self.offers = 0

    def take(self, outcome: FragmentOutcome | None) -> None:
        if outcome is not None and outcome.merge is not None:
            self.live = self.live * outcome.merge.keep + outcome.merge.addend

    def offer(self) -> bytes:
        self.offers += 1
        offer = self.ledger.offer(self.live.clone(), OfferState(self.offer_id))
        if offer.merge is not None:
            self.live = self.live * offer.merge.keep + offer.merge.addend
        return bytes(offer.payload)

    @property
    def offer_id(self) -> bytes:
        """Of the last one."""
        return bytes([self.offers])

    def give_up(self) -> None:
        """The last offer came to nothing."""
        self.take(self.ledger.abort(self.offer_id))

    def commit(
        self, mean: bytes, parts: Sequence[PartWeights], base_version: int | None = None
    ) -> FragmentOutcome:
        round_ = self.ledger.state.version + 1
        base = round_ - 1 if base_version is None else base_version
        outcome = self.ledger.commit(round_, base, mean, parts)
        self.take(outcome)
        return outcome

    def decoded(self, payload: bytes) -> Tensor:
        return self.codec.decode(torch.frombuffer(bytearray(payload), dtype=torch.uint8))


FIRST = bytes([1])
"""The id of a peer's first offer."""


def part(start: int, stop: int, *inside: Simulated | str) -> PartWeights:
    """Who is in a part: peers with their last offers, and others by name."""
    names = [one if isinstance(one, str) else one.name for one in inside]
    ids = {one.name: one.offer_id for one in inside if isinstance(one, Simulated)}
    return PartWeights(start, stop, dict.fromkeys(names, 1.0), ids)


def of_a(start: int, stop: int, offer_id: bytes = FIRST, weight: float = 1.0) -> PartWeights:
    return PartWeights(start, stop, {"a": weight}, {"a": offer_id})


def filled(value: float, blocks: int = 1, width: int = BLOCK) -> Tensor:
    return torch.full((blocks * width,), value, dtype=torch.float32)


# ---- by hand


def test_co2_is_one_step_stale_and_pays_the_gap_penalty() -> None:
    config = PLAIN.model_copy(update={"rule": "co2", "gap_penalty": True})
    peer = Simulated("a", run_config(config), filled(0.0))
    peer.live += 1.0
    mean = peer.offer()
    peer.live += 1.0  # trained while the first round travels
    peer.commit(mean, [part(0, 1, peer)])
    assert torch.equal(peer.ledger.state.params, filled(1.0))
    payload = peer.offer()  # the boundary: measured from version 0, met by version 1
    assert torch.equal(peer.live, filled(1.0))
    report = peer.commit(payload, [part(0, 1, peer)], base_version=0).report
    assert report is not None
    assert report.gap == pytest.approx(2.0)  # moved as far as the gradient is long


@pytest.mark.parametrize("bad", [filled(math.inf).numpy().tobytes(), b"", bytes(3)])
def test_a_mean_that_is_not_sound_is_skipped_by_everybody_alike(bad: bytes) -> None:
    states = []
    for name in "ab":
        peer = Simulated(name, run_config(), filled(0.0))
        peer.live += 1.0
        peer.offer()
        outcome = peer.commit(bad, [part(0, 1, peer)])
        assert (bool(outcome.trouble), outcome.share) == (True, 0.0)
        assert torch.equal(peer.live, filled(1.0))
        states.append(state_digest(peer.ledger.state, LEAST_CHUNK_BYTES))
    assert states[0] == states[1]


# ---- which offer a round is about


@pytest.mark.parametrize("rule", ["keep", "co2"])
def test_an_offer_is_known_by_its_id_and_the_end_of_one_ends_no_other(rule: str) -> None:
    """Given up, and counted after all, while the next one, which holds its work too, is in flight."""
    peer = Simulated("a", plain(rule), filled(0.0))
    peer.live += 1.0
    payload = peer.offer()
    peer.give_up()
    peer.live += 2.0
    peer.offer()
    assert peer.ledger.abort(FIRST) is None
    peer.commit(payload, [of_a(0, 1)])
    if rule == "co2":
        peer.offer()
        peer.give_up()
    assert torch.equal(peer.ledger.state.params, filled(1.0))
    assert torch.equal(peer.live, filled(3.0))


@pytest.mark.parametrize("rule", ["keep", "co2"])
def test_an_offer_from_before_a_restart_is_not_counted_twice(rule: str) -> None:
    """Also where it weighed as much as the one that is in flight now."""
    before, again = (Simulated("a", plain(rule), filled(0.0)) for _ in range(2))
    before.live += 1.0
    payload = before.offer()
    again.live += 1.0  # as a checkpoint had it, before the commit
    again.offer()
    again.commit(payload, [of_a(0, 1, b"before")])
    assert torch.equal(again.live, filled(1.0))
    again.offer()
    assert torch.equal(again.live, filled(1.0))


def test_a_slice_whose_effective_weight_is_nothing_is_offered_again() -> None:
    peer = Simulated("a", run_config(), filled(0.0))
    peer.live += 5.0
    peer.offer()
    zero = filled(0.0).numpy().tobytes()
    nothing = PartWeights(0, 1, {"a": 0.0, "b": 1.0}, {"a": FIRST})
    assert peer.commit(zero, [nothing]).share == 0.0
    assert torch.equal(peer.decoded(peer.offer()), filled(-5.0))


THERE = outer.init(filled(100.0, 2))._replace(version=7)
NOBODY, HALF = part(0, 2, "b"), (of_a(0, 1), part(1, 2, "b"))


@pytest.mark.parametrize("rule", ["keep", "co2"])
@pytest.mark.parametrize("given_up", [False, True])
@pytest.mark.parametrize(
    ("parts", "first", "second"),
    [
        ((NOBODY,), 106.0, 106.0),  # the outcome says that the offer came to nothing: all is kept
        ((of_a(0, 2),), 101.0, 101.0),  # counted: only what came after it is kept
        (HALF, 101.0, 106.0),
        (None, 101.0, 101.0),  # nobody knows: it must not count twice
        ((of_a(0, 2, b"other"),), 100.0, 100.0),  # one that we do not know was counted
        ((of_a(0, 2, FIRST, 0.2),), 101.0, 101.0),  # ours, for less than it asked
    ],
)
def test_adopting_a_newer_state_counts_the_last_offer_at_most_once(
    rule: str, given_up: bool, parts: tuple[PartWeights, ...] | None, first: float, second: float
) -> None:
    peer = Simulated("a", plain(rule), filled(0.0, 2))
    peer.live += 5.0
    peer.offer()
    if given_up:
        peer.give_up()
    peer.live += 1.0
    peer.take(peer.ledger.adopt(THERE, parts))
    assert torch.equal(peer.live, torch.cat([filled(first), filled(second)]))
    assert peer.ledger.state.version == 7
    peer.offer()  # nothing is in flight any more


@pytest.mark.parametrize("rule", ["keep", "co2"])
@pytest.mark.parametrize("version", [1, 7])
def test_a_state_in_which_a_rival_attempt_counted_our_offer_does_not_count_it_twice(
    rule: str, version: int
) -> None:
    """Ours was in one attempt at round 1, another one committed; then we go over to the first one's
    history."""
    peer = Simulated("a", plain(rule), filled(0.0, 2))
    peer.live += 5.0
    peer.offer()
    peer.give_up()
    peer.ledger.offers.in_doubt = True
    peer.commit(filled(-1.0, 2).numpy().tobytes(), [NOBODY])
    assert rule != "keep" or torch.equal(peer.live, filled(6.0, 2))  # not counted in this one
    theirs = outer.init(filled(5.0, 2))._replace(version=version)
    peer.take(peer.ledger.adopt(theirs, (NOBODY,)))
    assert torch.equal(peer.live, theirs.params)
    assert not peer.ledger.offers.in_doubt


@pytest.mark.parametrize("is_newest", [True, False])
@pytest.mark.parametrize("rule", ["keep", "co2"])
def test_a_doubt_ends_when_a_later_offer_is_counted_whole(rule: str, is_newest: bool) -> None:
    """Not where only an earlier one for that round is: the next held more, and may be counted elsewhere."""
    peer = Simulated("a", plain(rule), filled(0.0, 2))
    peer.live += 5.0
    peer.offer()
    if not is_newest:
        peer.give_up()
        peer.offer()
    peer.ledger.offers.in_doubt = True
    peer.commit(filled(-5.0, 2).numpy().tobytes(), [of_a(0, 2)])
    assert peer.ledger.offers.in_doubt is not is_newest


@pytest.mark.parametrize("rule", ["keep", "co2"])
def test_who_goes_to_another_history_keeps_its_uncounted_offer_once(rule: str) -> None:
    """A second time it may be counted where we were: then nothing is kept."""
    peer = Simulated("a", plain(rule), filled(0.0, 2))
    peer.live += 5.0
    peer.offer()
    peer.take(peer.ledger.adopt(THERE._replace(version=0)))
    assert torch.equal(peer.live, filled(105.0, 2))
    peer.take(peer.ledger.adopt(outer.init(filled(50.0, 2))))
    assert torch.equal(peer.live, filled(50.0, 2))


# ---- laws


@settings(max_examples=40, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize(
    ("rule", "codec"),
    [
        ("keep", "fp32"),
        ("keep", "fp16"),
        ("keep", "int4"),
        ("co2", "fp32"),
        ("co2", "int4"),
        ("eager", "fp32"),
        *((rule, codec) for rule in ("keep", "co2") for codec in ("sign", "q2")),
    ],
)
def test_every_committed_drift_counts_exactly_once(data: st.DataObject, rule: str, codec: str) -> None:
    """Conservation: in whatever order commits, aborts, misses in part and replays come, every drift is in the
    agreed parameters once, or still in its peer's live ones. A peer that missed a commit trains on."""
    has_feedback = codec in {"int4", "sign", "q2"}
    run, blocks, names = plain(rule, codec, feedback=has_feedback), 2, "abc"
    if has_feedback:
        kept_whole = run.codec.model_copy(update={"error_feedback_decay": 1.0})
        run = run.model_copy(update={"codec": kept_whole})
    width = get_codec(codec).block_values
    nothing = filled(0.0, blocks, width)
    peers = {name: Simulated(name, run, nothing) for name in names}
    drift, counted = ({name: nothing.clone() for name in names} for _ in range(2))
    moved = nothing.clone()
    made: list[tuple[bytes, list[PartWeights]]] = []

    def train(name: str) -> None:
        step = (torch.arange(width * blocks) % 7 - float(data.draw(st.integers(-4, 4)))).float()
        peers[name].live = peers[name].live + step
        drift[name] += step

    def catch_up(name: str) -> None:
        while (version := peers[name].ledger.state.version) < len(made):
            peers[name].commit(*made[version])

    for _ in range(data.draw(st.integers(1, 6))):
        offers: dict[str, bytes] = {}
        for name, peer in peers.items():
            train(name)
            if peer.ledger.state.version == len(made) and peer.ledger.offers.open is None:
                offers[name] = peer.offer()
            if data.draw(st.booleans()):
                train(name)
        if not offers or data.draw(st.integers(0, 3)) == 0:
            for name in offers:
                peers[name].give_up()
            continue
        code, pieces, parts = peers["a"].codec, [], []
        for block in range(blocks):
            inside = data.draw(st.lists(st.sampled_from(sorted(offers)), min_size=1, unique=True))
            where = slice(block * width, (block + 1) * width)
            cut = slice(block * code.block_bytes, (block + 1) * code.block_bytes)
            slices = [(name, 1.0, offers[name][cut]) for name in sorted(inside)]
            mean = bytes(reduce_slices(get_rule("mean"), code, slices).encoded)
            for name, _, piece in slices:
                counted[name][where] -= peers["a"].decoded(piece)
            moved[where] -= peers["a"].decoded(mean)
            pieces.append(mean)
            parts.append(part(block, block + 1, *(peers[name] for name in inside)))
        made.append((b"".join(pieces), parts))
        for name in names:
            if data.draw(st.booleans()):
                catch_up(name)
    for name, peer in peers.items():
        catch_up(name)
        torch.testing.assert_close(peer.ledger.state.params, moved, rtol=1e-5, atol=1e-3)
        assert torch.equal(peer.ledger.state.params, peers["a"].ledger.state.params)
        sent = peer.decoded(peer.offer())
        offer = peer.ledger.offers.open
        assert offer is not None
        left = 0.0 if offer.residual is None else offer.residual[:]
        # What is offered next is all that is not counted, what the codec lost of it included.
        near = 1e-3 if codec == "fp32" else 0.1 * float(drift[name].abs().max() + 1)
        torch.testing.assert_close(-(sent + left), drift[name] - counted[name], rtol=1e-5, atol=near)


@pytest.mark.parametrize("codec", ["int4", "int8", "fp16", "sign", "q2"])
def test_a_residual_is_what_the_codec_lost_where_the_offer_was_counted(
    codec: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Against error feedback (SparseLoCo), over rounds that some blocks miss; and through a checkpoint."""
    width = get_codec(codec).block_values
    small_pieces(monkeypatch, width)
    torch.manual_seed(4)
    run, size = run_config(codec=codec, feedback=True), width * 5
    peer, expected = Simulated("a", run, torch.zeros(size)), torch.zeros(size)
    for inside in ([True, False, True, True, False], [False, True, True, True, True], [True] * 5):
        peer.live = peer.live + torch.randn(size) * 0.01
        gradient = peer.ledger.state.params - peer.live
        wanted = gradient + expected * run.codec.error_feedback_decay
        payload = peer.codec.encode(wanted)
        lost = wanted - peer.codec.decode(payload)[:size]
        assert peer.offer() == payload.numpy().tobytes()
        parts = [part(i, i + 1, "b", *[peer] * has_us) for i, has_us in enumerate(inside)]
        peer.commit(payload.numpy().tobytes(), parts)
        whole = torch.where(torch.tensor(inside).repeat_interleave(width), lost, expected)
        assert peer.ledger.residual is not None
        residual = peer.ledger.residual[:]
        assert bool(((residual - whole).abs() <= whole.abs().max() * 2.0**-3).all())
        expected = residual
    checkpoint = Checkpoint(
        run_config_json="{}", plan_digest=bytes(32), states=[peer.ledger.state], buffers={},
        optimizer={}, position=1.0, inner_steps=1, tokens=1, residuals={0: peer.ledger.residual},
    )  # fmt: skip
    save(tmp_path, checkpoint)
    peer.ledger.set_residual(load(tmp_path).residuals[0])
    assert torch.equal(peer.ledger.residual[:], expected)


@pytest.mark.parametrize("rule", ["co2", "eager"])
def test_at_a_boundary_too_all_work_comes_back_and_the_residual_waits_for_a_commit(rule: str) -> None:
    torch.manual_seed(2)
    peer, worked = Simulated("a", plain(rule, "int4", feedback=True), filled(0.0, 2)), filled(0.0, 2)
    for _ in range(3):
        drift = torch.randn(BLOCK * 2)
        peer.live, worked = peer.live + drift, worked + drift
        payload = peer.offer()
        assert peer.ledger.residual is None
        peer.give_up()
    assert (worked - peer.live).norm() < 0.03 * worked.norm()  # int4 alone would have lost a tenth
    payload = peer.offer()
    peer.commit(payload, [part(0, 2, peer)])
    assert peer.ledger.residual is not None
    left = worked - peer.decoded(payload).neg() - peer.ledger.residual[:].neg()
    assert left.norm() < 0.03 * worked.norm()


@pytest.mark.parametrize("codec", ["fp32", "fp16", "int8", "int4"])
def test_eager_offers_nothing_of_its_correction_again(codec: str) -> None:
    """What was added to the live parameters is what is taken off again: a peer that learns nothing more
    offers nothing more."""
    torch.manual_seed(7)
    config = OuterConfig.model_validate({"rule": "eager", "gap_penalty": False})
    peer = Simulated("a", run_config(config, codec), filled(0.0, 5))
    for _ in range(3):
        peer.live = peer.live + torch.randn(5 * BLOCK)
        peer.commit(peer.offer(), [part(0, 5, peer, "b")])
    assert float((peer.live - peer.ledger.state.params).abs().max()) > 0.1  # a correction is in them
    torch.testing.assert_close(peer.decoded(peer.offer()), filled(0.0, 5), rtol=0, atol=1e-6)


@pytest.mark.parametrize("rule", ["co2", "eager"])
@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_work_is_measured_from_where_it_set_out_however_often_the_state_moved(rule: str, codec: str) -> None:
    """The others commit three rounds without this peer between two of its boundaries."""
    config = OuterConfig.model_validate({"rule": rule, "lr": 1.0, "momentum": 0.0, "gap_penalty": False})
    peer = Simulated("a", run_config(config, codec), filled(0.0))
    for theirs in (7.0, 14.0, -7.0):  # exact in int4, too
        mean = peer.codec.encode(filled(theirs)).numpy().tobytes()
        peer.commit(mean, [part(0, 1, "b")])
    assert float(peer.ledger.state.params.mean()) == -14.0
    assert len(peer.ledger.departure.offset) == 2, "what is held does not grow"
    peer.live = peer.live + 35.0
    torch.testing.assert_close(peer.decoded(peer.offer()), filled(-35.0), rtol=2**-10, atol=0.0)
    torch.testing.assert_close(peer.live, peer.ledger.state.params, rtol=2**-10, atol=0.0)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("codec", ["sign", "q2"])
def test_every_rule_learns_with_one_bit_and_two(rule: str, codec: str) -> None:
    """Noisy least squares, an exchange in five given up. What the codec loses comes back, and does not pile
    up, also where live parameters keep a share of their own."""
    outer_config = OuterConfig.model_validate({"rule": rule})
    run = RunConfig(outer=outer_config, codec=CodecConfig(name=codec))
    size, noise = 2048, torch.Generator().manual_seed(1)
    target = torch.randn(size, generator=noise)
    peers = [Simulated(name, run, torch.zeros(size)) for name in "abc"]
    for turn in range(40):
        for peer in peers:
            for _ in range(5):
                peer.live = peer.live - 0.1 * (peer.live - target + torch.randn(size, generator=noise))
        offers = [(peer.name, 1.0, peer.offer()) for peer in peers]
        if turn % 5 == 4:
            for peer in peers:
                peer.give_up()
            continue
        mean = bytes(reduce_slices(get_rule("centred"), peers[0].codec, offers).encoded)
        for peer in peers:
            peer.commit(mean, [part(0, size // 512, *peers)])
    for peer in peers:
        assert torch.equal(peer.ledger.state.params, peers[0].ledger.state.params)
        assert (peer.ledger.state.params - target).norm() < 0.27 * target.norm()  # of fp32 0.22
        assert peer.ledger.residual is not None
        assert peer.ledger.residual[:].norm() < 0.25 * target.norm()


# ---- whose memory


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("is_lent", [False, True])
def test_a_step_takes_the_old_memory_but_never_what_was_lent(rule: str, is_lent: bool) -> None:
    """The same bits either way."""
    torch.manual_seed(6)
    config, size = OuterConfig.model_validate({"rule": rule}), 5 * BLOCK
    peer, other = Simulated("a", run_config(config, "fp16"), torch.zeros(size)), outer.init(torch.zeros(size))
    for _ in range(3):
        peer.live = peer.live + torch.randn(size)
        payload = peer.offer()
        before = peer.ledger.lend() if is_lent else peer.ledger.state
        held = state_bytes(before)
        peer.commit(payload, [part(0, 5, peer, "b")])
        other, _ = outer.step(config, other, peer.decoded(payload), other.version)
        after = peer.ledger.state
        assert (after.momentum is before.momentum) is not is_lent
        assert (after.params is before.params) is (rule in {"co2", "eager"} and not is_lent)
        assert (state_bytes(before) == held) is is_lent or rule in {"keep", "blend"}
        assert state_bytes(after) == state_bytes(other)


# ---- a change that fails in its middle


class Failing(TorchDispatchMode):
    """Lets ``operations`` of torch pass, and then none: memory has ended."""

    def __init__(self, operations: int) -> None:
        super().__init__()
        self.left, self.seen = operations, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.left <= 0:
            raise MemoryError("no memory is left")
        self.left, self.seen = self.left - 1, self.seen + 1
        return func(*args, **(kwargs or {}))


def small_pieces(monkeypatch: pytest.MonkeyPatch, width: int = BLOCK) -> None:
    """Two blocks each."""
    for module in (kept, __import__("p2p_co2.tensors.codec.base", fromlist=["base"])):
        monkeypatch.setattr(module, "PIECE_VALUES", 2 * width)


SIZE, EVERY = 6 * BLOCK, 5
"""Of the operations of a change, one in so many is tried."""


def amid_its_run(rule: str, codec: str, feedback: bool) -> tuple[FragmentState, bytes]:
    """A fragment after a round, its offer for the next in flight, and what that round came to."""
    config = OuterConfig(rule=rule, lr=0.7, momentum=0.5)  # type: ignore[arg-type]
    torch.manual_seed(3)
    peer = Simulated("a", run_config(config, codec, feedback), torch.randn(SIZE))
    for _ in range(2):
        peer.live = peer.live + 0.1 * torch.randn(SIZE)
        mean = peer.offer()
        if peer.ledger.state.version == 0:
            peer.commit(mean, [part(0, 6, peer)])
    return peer.ledger, mean


def commits(state: FragmentState, mean: bytes) -> None:
    parts = [of_a(0, 3, bytes([2])), part(3, 6, "b")]  # missed in a half of it
    state.commit(2, 1, mean, parts)


def adopts(state: FragmentState, mean: bytes) -> None:
    state.adopt(outer.init(torch.ones(SIZE))._replace(version=7), [of_a(0, 6, bytes([2]))])


def offers(state: FragmentState, mean: bytes) -> None:
    state.abort(bytes([2]))
    state.offer(torch.ones(SIZE), OfferState(FIRST))


def gives_up(state: FragmentState, mean: bytes) -> None:
    state.abort(bytes([2]))


def failed_everywhere(
    make: Callable[[], tuple[FragmentState, bytes]], change: Callable[[FragmentState, bytes], None]
) -> list[FragmentState]:
    """Alike ones, each failed at another operation of the change: those that are poisoned. The others are as
    before."""
    (state, mean), poisoned = make(), list[FragmentState]()
    before = kept_by(state)
    with Failing(1_000_000) as whole:
        change(state, mean)
    for operations in range(whole.seen - 1, -1, -EVERY):
        state, mean = make()
        with pytest.raises((MemoryError, EnvironmentFault)) as failed, Failing(operations):
            change(state, mean)
        if failed.type is EnvironmentFault:
            poisoned.append(state)
        elif change is not offers:
            assert kept_by(state) == before, operations
    return poisoned


def kept_by(state: FragmentState) -> list[object]:
    """What a checkpoint would hold of it, and what the next offer is made of."""
    residual = None if state.residual is None else state.residual[:].tolist()
    offset = [one[:].tolist() for one in state.departure.offset]
    return [state_digest(state.state, LEAST_CHUNK_BYTES), state.offers.open is None, residual, offset]


@pytest.mark.parametrize(("codec", "feedback"), [("int4", True), ("fp32", False)])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("change", [commits, adopts])
def test_wherever_a_change_fails_the_fragment_is_as_it_was_or_poisoned(
    rule: str,
    change: Callable[[FragmentState, bytes], None],
    codec: str,
    feedback: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_pieces(monkeypatch)
    poisoned = failed_everywhere(lambda: amid_its_run(rule, codec, feedback), change)
    assert len(poisoned) > 1
    state = poisoned[0]
    asked: list[Callable[[], object]] = [
        state.lend,
        state.reset,
        lambda: state.offer(torch.zeros(SIZE), OfferState(FIRST)),
        lambda: state.commit(state.state.version + 1, 1, b"", []),
        lambda: state.adopt(outer.init(torch.ones(SIZE))._replace(version=9)),
    ]
    for ask in asked:
        with pytest.raises(EnvironmentFault, match=r"no memory is left.*join again with --resume"):
            ask()


@pytest.mark.parametrize("rule", ["co2", "eager"])
def test_live_parameters_that_were_to_set_out_anew_poison_and_work_put_back_does_not(rule: str) -> None:
    """Saved beside a boundary that failed, its work would be taken out twice, or never."""
    assert failed_everywhere(lambda: amid_its_run(rule, "int4", False), offers)
    assert failed_everywhere(lambda: amid_its_run(rule, "int4", False), gives_up) == []
