"""A step that fails in its middle, at one operation of torch after the other, for every rule; then what is
saved and given away. ``test_faults`` has a real peer whose memory ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from p2p_co2.config import OuterConfig
from p2p_co2.digest import digest
from p2p_co2.errors import EnvironmentFault, LocalProtocolError
from p2p_co2.node.ledger import AgreedMean, PartWeights
from p2p_co2.protocol.catchup.goals import LEAST_CHUNK_BYTES
from p2p_co2.tensors import checkpoint, outer
from p2p_co2.tensors.aggregation import mean_of_parts
from p2p_co2.tensors.checkpoint import state_digest
from p2p_co2.tensors.outer import stepping, stepping_in_place
from p2p_co2.trainer import pieces
from p2p_co2.trainer.fragment_ledger import FragmentLedger
from p2p_co2.trainer.wholeness import Wholeness
from tests.test_trainer_ledger import BLOCK, Simulated, run_config
from tests.test_trainer_saver import Saving

SIZE = 6 * BLOCK
EVERY = 3
"""Of the operations of a change, how many are tried: one in so many, and the last."""
RULES = ["keep", "blend", "co2", "eager"]
CODECS = [("int4", False), ("int4", True), ("fp32", False)]


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


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three pieces to a fragment of six blocks."""
    monkeypatch.setattr(pieces, "CHUNK_BLOCKS", 2)
    monkeypatch.setattr(stepping_in_place, "_WIDTH", 2 * BLOCK)


@dataclass(frozen=True)
class Amid:
    """A peer's ledger after a round, its offer for the next in flight, and what that round came to."""

    ledger: FragmentLedger
    mean: bytes
    decoded: Tensor

    def commit(self) -> None:
        parts = [PartWeights(0, 3, {"a": 1.0}), PartWeights(3, 6, {"b": 1.0})]  # missed in a half of it
        self.ledger.commit(2, 1, self.decoded.clone, parts, self.mean)

    def adopt(self) -> None:
        theirs = outer.init(torch.ones(SIZE))._replace(version=7)
        self.ledger.adopt(theirs, [PartWeights(0, 6, {"a": 1.0})])

    def offer(self) -> None:
        self.ledger.abort(2, 1.0)
        self.ledger.offer(self.decoded.clone(), 1.0)

    def give_up(self) -> None:
        self.ledger.abort(2, 1.0)


def amid_its_run(rule: str, codec: str = "int4", feedback: bool = False) -> Amid:
    config = OuterConfig(rule=rule, lr=0.7, momentum=0.5)  # type: ignore[arg-type]
    torch.manual_seed(3)
    peer = Simulated("a", run_config(config, codec, feedback), torch.randn(SIZE))
    peer.live = peer.live + 0.1 * torch.randn(SIZE)
    peer.commit(mean_of_parts(peer.codec, [("a", 1.0, peer.offer())]), [PartWeights(0, 6, {"a": 1.0})])
    peer.live = peer.live + 0.1 * torch.randn(SIZE)
    mean = bytes(mean_of_parts(peer.codec, [("a", 1.0, peer.offer())]))
    return Amid(peer.ledger, mean, peer.codec.decode(torch.frombuffer(bytearray(mean), dtype=torch.uint8)))


def failed_everywhere(made: Amid, change: Callable[[Amid], None]) -> list[Amid]:
    """Copies of it, each failed at another operation of the change: those that are torn. The others are as
    before."""
    copy = deepcopy(made)
    with Failing(1_000_000) as whole:
        change(copy)
    assert whole.seen > 10
    before, torn = kept_by(made.ledger), []
    for operations in range(whole.seen - 1, -1, -EVERY):
        copy = deepcopy(made)
        with pytest.raises((MemoryError, EnvironmentFault)) as failed, Failing(operations):
            change(copy)
        if failed.type is EnvironmentFault:
            torn.append(copy)
        else:
            assert kept_by(copy.ledger) == before, operations
    return torn


def kept_by(ledger: FragmentLedger) -> list[object]:
    """What a checkpoint would hold of it, and what the next offer is made of."""
    residual = None if ledger.residual is None else ledger.residual[:].tolist()
    gained = ledger._rebase_on(ledger.state).addend(slice(0, SIZE)).tolist()
    return [state_digest(ledger.state, LEAST_CHUNK_BYTES), ledger.has_offered, residual, gained]


@pytest.mark.parametrize(("codec", "feedback"), CODECS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("change", [Amid.commit, Amid.adopt])
def test_wherever_a_change_fails_the_fragment_is_as_it_was_or_torn(
    rule: str, change: Callable[[Amid], None], codec: str, feedback: bool
) -> None:
    torn = failed_everywhere(amid_its_run(rule, codec, feedback), change)
    assert len(torn) > 3
    for ask in asked_of(torn[0].ledger):
        with pytest.raises(EnvironmentFault, match=r"no memory is left.*join again with --resume"):
            ask()


def asked_of(ledger: FragmentLedger) -> list[Callable[[], object]]:
    """All by which somebody gets at a state, or moves it."""
    return [
        ledger.lend,
        ledger.reset,
        lambda: ledger.offer(torch.zeros(SIZE), 1.0),
        lambda: ledger.commit(2, 1, lambda: torch.zeros(SIZE), [], b""),
        lambda: ledger.adopt(outer.init(torch.ones(SIZE))._replace(version=9)),
    ]


@pytest.mark.parametrize("rule", ["co2", "eager"])
def test_an_offer_that_fails_while_the_live_parameters_set_out_anew_leaves_the_fragment_torn(
    rule: str,
) -> None:
    """Saved beside them, its work would be taken out twice, or never."""
    made = amid_its_run(rule)
    made.ledger.abort(2, 1.0)
    assert failed_everywhere(made, Amid.offer)


@pytest.mark.parametrize("rule", ["co2", "eager"])
def test_a_round_given_up_that_fails_to_put_the_work_back_still_has_it(rule: str) -> None:
    assert failed_everywhere(amid_its_run(rule), Amid.give_up) == []


def test_memory_that_ended_is_this_machine_s_and_all_else_a_bug() -> None:
    of_torch = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.")
    for error, kind in [
        (MemoryError(), EnvironmentFault),
        (of_torch, EnvironmentFault),
        (IndexError("of a bug"), LocalProtocolError),
    ]:
        wholeness = Wholeness()
        with pytest.raises(kind) as told, wholeness.changing("the outer step of round 3"):
            raise error
        assert told.value.__cause__ is error
        with pytest.raises(kind, match=f"the outer step of round 3 failed .*{type(error).__name__}"):
            wholeness.check()


# ---- what is saved, and given away


def commit_round(made: Saving) -> None:
    """The first one of fragment 0, without this peer."""
    blocks = -(-made.plan.fragments.fragments[0].numel // BLOCK)
    mean = torch.ones(blocks * BLOCK).numpy().tobytes()
    start, parts = made.bench.ledger.agreed()[0].digest, (PartWeights(0, blocks, {"other": 1.0}),)
    agreed = AgreedMean(0, 1, 0, start, mean, parts)
    asyncio.run(made.bench.ledger.commit(agreed))


def tear(made: Saving, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round of fragment 0 commits in part."""

    def fail(*_: object) -> None:
        raise MemoryError("no memory is left")

    with monkeypatch.context() as patch:
        for module in (stepping, stepping_in_place):
            patch.setattr(module, "take_piece_", fail)
        with pytest.raises(EnvironmentFault, match=r"the outer step of round 1 failed .*no memory is left"):
            commit_round(made)


@pytest.mark.parametrize("rule", RULES)
def test_the_checkpoint_of_a_torn_peer_is_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    made = Saving(tmp_path, rule)
    made.bench.step(3)
    made.saver.save()
    (path,) = made.folder.iterdir()
    content = path.read_bytes()
    made.bench.step()
    tear(made, monkeypatch)
    made.ask()  # another is due
    for ask in (
        made.saver.save,
        made.bench.step,
        made.bench.ledger.agreed,
        lambda: asyncio.run(made.bench.ledger.export(0)),
        lambda: commit_round(made),
    ):
        with pytest.raises(EnvironmentFault, match="the last checkpoint is as it was"):
            ask()
    made.close()
    (saved,) = made.folder.glob("state-*")
    assert (saved, saved.read_bytes()) == (path, content)
    assert [state.version for state in checkpoint.load(made.folder).states] == [0, 0]


def test_a_checkpoint_on_its_way_and_a_donor_s_copy_are_of_before_the_tear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both hold the state that the round would have stepped in."""
    made = Saving(tmp_path, "co2")
    agreed, exported = asyncio.run(made.bench.ledger.export(1))
    with made.slow_disk():
        tear(made, monkeypatch)
    made.finish()
    made.saver.close()
    saved = checkpoint.load(made.folder).states
    names = [state_digest(state, LEAST_CHUNK_BYTES) for state in saved]
    assert names[0] == state_digest(outer.init(saved[0].params), LEAST_CHUNK_BYTES)  # as it was at version 0
    assert names[1] == agreed.digest == digest(digest(exported[:]))
    made.bench.ledger.close()
