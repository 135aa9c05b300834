"""A peer in the user's own loop: what ``join`` and ``step`` take and refuse, a model that changes later,
learning rates, and what it still tells after ``leave``.

The front door believes nothing: a model and an optimizer either train two peers to equal parameters, or are
refused with the parameter's name and the cure before the network is used."""

from __future__ import annotations

import copy
import errno
import math
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.lr_scheduler import LinearLR

from p2p_co2.config import PeerConfig, PipelineConfig, RunConfig, read_peer_config
from p2p_co2.errors import ConfigError, EnvironmentFault, LocalProtocolError, P2PCo2Error
from p2p_co2.node.environment import RunGroup
from p2p_co2.peer_options import listening, peer_config
from p2p_co2.planning.advice import swarm_factor
from p2p_co2.protocol.ledger import PartWeights, effective_peers
from p2p_co2.swarm import Swarm
from p2p_co2.telemetry import events as ev
from p2p_co2.tensors.checkpoint.folder import load
from p2p_co2.tensors.pretrained import write_pretrained
from p2p_co2.ticket import Ticket
from p2p_co2.trainer import Connection, connect, join
from p2p_co2.trainer.exchanged_model import check_model
from p2p_co2.trainer.figures import mean_loss, tokens_of
from p2p_co2.trainer.rates import TWO_SCHEDULES, LearningRates
from p2p_co2.trainer.session import Participation, Session
from p2p_co2.trainer.synchroniser import Progressed
from p2p_co2.wire.identity import Identity
from tests.paced_recipe import Descent
from tests.trainer_bench import NEW, STEPS, Lone, impatient, meet

__all__ = ["impatient"]
pytestmark = pytest.mark.usefixtures("impatient")
Made = tuple[Any, Any]
"""A model and its optimizer."""


def whole_of(run: RunConfig) -> Participation:
    """In the whole run, and nobody on the line."""
    network = SimpleNamespace(run=run)
    return cast(Participation, SimpleNamespace(warn=print, network=network, group=RunGroup.whole(run)))


UNUSED = cast(Participation, SimpleNamespace(warn=print))


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))


def sgd(model: nn.Module, lr: Any = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


@pytest.fixture
def lone(tmp_path: Path) -> Iterator[Lone]:
    model = plain()
    made = Lone(tmp_path, model, sgd(model))
    yield made
    made.peer.leave()


# ---- the numbers of a step

MASK = torch.ones(8, 8)
TOKENS = [
    64, 64.0, np.int32(64), np.uint8(64), np.float64(64), np.array(64), MASK.sum(), MASK.long().sum(),
    (MASK > 0).sum(), MASK.sum().to(torch.bfloat16), MASK.sum().reshape(1), Fraction(64),
]  # fmt: skip


@pytest.mark.parametrize("tokens", TOKENS, ids=repr)
def test_a_whole_number_of_tokens_is_taken_as_whatever_it_comes(lone: Lone, tokens: Any) -> None:
    assert lone.train(tokens)
    assert lone.train(0)
    assert (lone.sync.figures.tokens, type(lone.sync.figures.tokens)) == (64, int)
    lone.peer.save()
    assert load(lone.folder / "checkpoint").tokens == 64


NO_TOKENS = [
    -5, 64.5, math.nan, math.inf, True, None, "64", {"tokens": 64}, [64], torch.tensor([1, 2]), 2**70,
    torch.tensor(-1), torch.tensor(True), torch.tensor(1j), np.array([1, 2]), torch.ones((), device="meta"),
]  # fmt: skip
NO_LOSSES = [
    None, {"loss": 1.0}, 10**400, "1.5", True, 1j, (1.0, 2.0), torch.ones(3), torch.ones(0),
    torch.tensor(1j), torch.tensor(True), torch.ones((), device="meta"), np.ones(3),
]  # fmt: skip


def test_other_numbers_are_refused_at_the_call_which_changes_nothing(lone: Lone) -> None:
    for tokens in NO_TOKENS:
        with pytest.raises(ConfigError, match=r"step: tokens: is .*; give how many.*int\(mask.sum\(\)\)"):
            lone.train(tokens)
    for loss in NO_LOSSES:
        with pytest.raises(ConfigError, match=r"step: loss: is .*as one number: loss.mean\(\)"):
            lone.train(loss=loss)
    assert lone.peer.inner_steps == 0
    assert lone.train(64)


@pytest.mark.parametrize(
    "loss",
    [1, 1.5, np.float32(1.5), torch.tensor(1.5), torch.tensor([1.5]), torch.tensor(2)],
    ids=repr,
)
def test_one_number_is_a_loss(lone: Lone, loss: Any) -> None:
    given = loss * torch.ones((), requires_grad=True) if isinstance(loss, Tensor) else loss
    assert lone.train(loss=given)
    lone.sync.report()
    assert lone.wire.seen(ev.Progress)[-1]["loss"] == pytest.approx(float(loss))


def test_a_loss_that_is_not_finite_is_unknown_and_training_goes_on(lone: Lone) -> None:
    for loss in (math.nan, 2.0, torch.tensor(math.inf), 4.0):
        assert lone.train(loss=loss)
    lone.sync.report()
    assert lone.wire.seen(ev.Progress)[-1]["loss"] == 3.0
    lone.train(loss=torch.tensor(math.nan))
    lone.sync.report()
    assert math.isnan(lone.wire.seen(ev.Progress)[-1]["loss"])
    assert math.isnan(mean_loss([]))


def test_what_lies_on_an_accelerator_is_read_only_when_the_sum_is_asked_for(
    lone: Lone, monkeypatch: pytest.MonkeyPatch
) -> None:
    class There(Tensor):
        """A count that tells when it is read."""

        reads = 0

        @property
        def device(self) -> torch.device:  # type: ignore[override]
            return torch.device("cuda")

        def cpu(self) -> Tensor:  # type: ignore[override]
            There.reads += 1
            return torch.tensor(64)

    given = torch.tensor(64).as_subclass(There)
    monkeypatch.setattr(There, "detach", lambda self: self)
    assert tokens_of(given) is given
    lone.sync.after_step(tokens_of(given), 1.0)
    assert There.reads == 0
    assert (lone.sync.figures.tokens, There.reads) == (64, 1)
    assert (lone.sync.figures.tokens, There.reads) == (64, 1)


# ---- one thread, until it leaves


def test_two_threads_do_not_step_at_once(lone: Lone) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def held_out(model: nn.Module) -> float:
        inside.set()
        go_on.wait()
        return 1.0

    other = threading.Thread(target=lambda: lone.peer.measure_agreed(held_out))
    other.start()
    inside.wait()
    try:
        for call in (lone.train, lambda: lone.peer.measure_agreed(held_out)):
            with pytest.raises(LocalProtocolError, match="of this peer is under way"):
                call()
    finally:
        go_on.set()
        other.join()
    assert lone.train()


@pytest.mark.parametrize("how", ["leave", "an exception", "Ctrl-C"])
def test_after_leaving_a_peer_tells_what_it_did_and_does_no_more(tmp_path: Path, how: str) -> None:
    model = plain()
    lone = Lone(tmp_path, model, sgd(model))
    for _ in range(STEPS):
        lone.train()
        meet(lone)
    lone.train()
    try:
        with lone.peer as peer:
            if how != "leave":
                raise KeyboardInterrupt if how == "Ctrl-C" else RuntimeError
    except (KeyboardInterrupt, RuntimeError):
        pass
    agreed = peer.agreed_parameters()
    states = load(tmp_path / "checkpoint").states
    assert [state.version for state in states] == [1, 1]
    kept = torch.cat([state.params for state in states]).sort().values
    assert torch.equal(torch.cat([values.flatten() for values in agreed.values()]).sort().values, kept)
    assert (peer.inner_steps, peer.position, peer.over) == (STEPS + 1, (STEPS + 1) / STEPS, False)
    assert (peer.peer_id, peer.board, peer.run.fragments) == ("me", "", 2)
    peer.stop()
    peer.pause()
    peer.go_on()
    peer.leave()
    live = [parameter.detach().clone() for parameter in model.parameters()]

    def loss_of(measured: nn.Module) -> float:
        assert torch.equal(measured.state_dict()["2.weight"], agreed["2.weight"])
        return 0.5

    assert peer.measure_agreed(loss_of) >= 0.0
    assert all(torch.equal(now, was) for now, was in zip(model.parameters(), live, strict=True))
    with pytest.raises(LocalProtocolError, match="step: this peer has left the swarm; join again"):
        peer.step(64, 1.0)
    with pytest.raises(LocalProtocolError, match="save: this peer has left"):
        peer.save()


# ---- what is agreed, as tensors


class Odd(nn.Module):
    """Tied, transposed in memory, half of it in 16 bits, and frozen in part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight
        self.middle = nn.Linear(4, 6).to(torch.bfloat16)
        self.middle.weight.data = across(self.middle.weight.data)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)


def test_the_agreed_parameters_are_a_state_dict_in_fp32_on_the_host(tmp_path: Path) -> None:
    model = Odd()
    lone = Lone(tmp_path, model, sgd(model))
    torch.set_default_dtype(torch.float64)
    try:
        agreed = lone.peer.agreed_parameters()
    finally:
        torch.set_default_dtype(torch.float32)
    assert set(agreed) == {"embed.weight", "middle.weight", "middle.bias", "head.weight"}
    for name, values in agreed.items():
        assert (values.dtype, values.device.type, values.is_contiguous()) == (torch.float32, "cpu", True)
        assert torch.equal(values, model.state_dict()[name].float())
    assert agreed["head.weight"] is agreed["embed.weight"]
    other = Odd()
    found = other.load_state_dict(agreed, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["frozen.weight", "frozen.bias"], [])
    lone.peer.leave()


def test_a_measurement_sees_the_agreed_parameters_and_leaves_the_live_ones_as_they_were(
    tmp_path: Path,
) -> None:
    model = Odd().double()
    lone = Lone(tmp_path, model, sgd(model))
    agreed = lone.peer.agreed_parameters()
    lone.train()
    with torch.no_grad():
        model.embed.weight += 1e-12  # of a precision that no exchange has
    live = lone.live()

    def held_out(measured: nn.Module) -> Tensor:
        for name, values in agreed.items():
            assert torch.equal(measured.state_dict()[name], values.double())
        return torch.tensor(2.5)

    lone.peer.measure_agreed(held_out)  # a tensor does as well
    assert all(torch.equal(now, was) for now, was in zip(model.parameters(), live, strict=True))
    lone.peer.measure_agreed(lambda _: {"accuracy": torch.tensor(0.25), "loss": 2.0})
    told = [(fields["loss"], fields["figures"]) for fields in lone.wire.seen(ev.AgreedMeasured)]
    assert told == [(2.5, {}), (2.0, {"accuracy": 0.25})]

    def fails(measured: nn.Module) -> float:
        raise RuntimeError("no such data")

    with pytest.raises(RuntimeError, match="no such data"):
        lone.peer.measure_agreed(fails)
    assert all(torch.equal(now, was) for now, was in zip(model.parameters(), live, strict=True))
    lone.peer.leave()


@pytest.mark.parametrize("fails", [True, False])
def test_what_an_evaluation_changes_beside_the_model_is_put_back(lone: Lone, fails: bool) -> None:
    lone.model.train()
    lone.model[1].eval()
    draw = torch.get_rng_state()

    def held_out(model: nn.Module) -> float:
        model.eval()
        torch.set_grad_enabled(False)
        torch.manual_seed(5)
        return 1.0 / (not fails)

    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        lone.peer.measure_agreed(held_out)
    assert [module.training for module in lone.model.modules()] == [True, True, False, True]
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), draw)


def test_a_last_checkpoint_that_cannot_be_written_is_told_when_all_else_is_done(
    lone: Lone, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise EnvironmentFault("no space left on device")

    monkeypatch.setattr(lone.peer._saver, "save", full)
    lone.peer.leave()
    assert lone.wire.ended_with
    assert lone.peer.state_dict()
    kinds = [kind for kind, _ in lone.wire.events]
    assert kinds[-2:] == [ev.PeerFinished, ev.Warned]
    assert "no space left" in lone.wire.events[-1][1]["text"]


def test_sigterm_asks_a_loop_to_end_and_is_the_programs_again_afterwards(lone: Lone) -> None:
    """One that goes on all the same leaves, so that nothing is lost. A program's own handler stays."""
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with Swarm(lone.peer, lone.model, lone.optimizer) as swarm:
            assert swarm.exchange(8, 1.0)
            signal.raise_signal(signal.SIGTERM)
            assert not swarm.exchange(8, 1.0)
            assert not lone.wire.ended_with
            assert not swarm.exchange(8, 1.0)
            assert lone.wire.ended_with
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
            assert load(lone.folder / "checkpoint").inner_steps == 2
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with lone.peer:
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


class Counting(nn.Linear):
    def get_extra_state(self) -> Tensor:
        return torch.tensor(3)

    def set_extra_state(self, state: Tensor) -> None:
        assert state == 3


def test_what_modules_keep_beside_their_tensors_is_in_the_state(tmp_path: Path) -> None:
    model = nn.Sequential(Counting(4, 4))
    lone = Lone(tmp_path, model, sgd(model))
    model.load_state_dict(lone.peer.state_dict())
    lone.peer.leave()
    write_pretrained(model, lone.peer.state_dict(), tmp_path / "out")


# ---- a model that changes after join


def add_adapter(lone: Lone) -> None:
    lone.model[2].adapter = nn.Parameter(torch.zeros(2))
    lone.optimizer.add_param_group({"params": [lone.model[2].adapter]})


CHANGES: list[tuple[Callable[[Any], Any], str]] = [
    (lambda lone: lone.model[0].requires_grad_(True), "0.weight: is trained, and was not when this peer"),
    (add_adapter, "2.adapter: is trained, and was not when this peer joined"),
    (
        lambda lone: lone.model.__setitem__(2, nn.Linear(6, 5)),
        r"2.weight: was float32 \(4, 6\) in join and is",
    ),
    (lambda lone: setattr(lone.model[3], "weight", lone.model[2].weight), "3.weight: is gone since join"),
    (lambda lone: lone.model.half(), "2.weight: was float32 .* in join and is float16"),
    (
        lambda lone: lone.model.load_state_dict(copy.deepcopy(lone.model.state_dict()), assign=True),
        "weight: was replaced by another object after join",
    ),
    (
        lambda lone: lone.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(7))]}),
        r"trains a parameter of shape \(7,\) that is not the model's",
    ),
]


def frozen_at_first(folder: Path) -> Lone:
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4), nn.Linear(6, 4))
    model[0].requires_grad_(False)
    return Lone(folder, model, sgd(model))


@pytest.mark.parametrize("steps", [0, STEPS])
@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_a_change_of_what_is_trained_is_told_loudly(
    tmp_path: Path, change: Callable[[Lone], None], words: str, steps: int
) -> None:
    lone = frozen_at_first(tmp_path)

    def train() -> None:
        with lone.peer:
            for _ in range(steps):
                lone.train()
                meet(lone)
            lone.sync.figures.made_at -= 2.0  # a second and more passed since the last report
            change(lone)
            lone.tell()

    with pytest.raises(ConfigError, match=words):
        train()
    assert [words for fields in lone.wire.seen(ev.Warned) if fields["text"].startswith(("model", "join"))]
    assert lone.wire.ended_with == "ConfigError in the training loop"
    assert set(lone.peer.agreed_parameters()) == {"2.weight", "2.bias", "3.weight", "3.bias"}


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.to(memory_format=torch.contiguous_format),
        lambda model: model.eval(),
        lambda model: model.__setitem__(2, torch.compile(model[2], backend="eager")),
    ],
    ids=["to", "eval", "compiled in part"],
)
def test_changes_that_leave_the_parameters_what_they_are_pass(lone: Lone, change: Any) -> None:
    change(lone.model)
    for _ in range(STEPS + 1):
        lone.train()
        meet(lone)
    assert lone.sync.versions == [1, 1]
    assert not lone.wire.seen(ev.Warned)


# ---- learning rates


def rates(lone: Lone) -> list[float]:
    return [float(group["lr"]) for group in lone.optimizer.param_groups]


def test_a_warm_up_scheduler_that_was_made_before_gives_the_rate_it_starts_from(tmp_path: Path) -> None:
    model = plain()
    optimizer = sgd(model, 0.2)
    LinearLR(optimizer, start_factor=1e-9, total_iters=100)
    lone = Lone(tmp_path, model, optimizer, learning_rate=lambda position: 0.5)
    assert rates(lone) == [0.1]
    lone.peer.leave()


@pytest.mark.parametrize(("start", "most"), [(NEW, 1.0), (Progressed(2.0, 8, 512), 0.1)])
def test_only_a_resumed_peers_warm_up_is_held_at_its_rate(
    tmp_path: Path, start: Progressed, most: float
) -> None:
    model = plain()
    optimizer = sgd(model, 0.1)
    scheduler = LinearLR(optimizer, start_factor=0.1, total_iters=4)
    lone = Lone(tmp_path, model, optimizer, start=start)
    optimizer.param_groups[0]["lr"] = 0.1  # as it was saved
    for _ in range(6):
        lone.train()
        scheduler.step()
    lone.tell()
    assert rates(lone) == [pytest.approx(most)]
    assert len(list(lone.wire.seen(ev.Warned))) == (most == 0.1)
    lone.peer.leave()


def test_a_group_that_is_added_later_has_its_own_rate(tmp_path: Path) -> None:
    model = plain()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.2)
    lone = Lone(tmp_path, model, optimizer, learning_rate=lambda position: 0.5)
    lone.tell()
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.4})
    lone.tell()
    lone.tell()
    assert rates(lone) == [0.1, 0.2]
    lone.peer.leave()


def test_rates_that_fit_grow_with_the_root_of_those_in_the_last_means(tmp_path: Path) -> None:
    peers = []
    for name in "abcd":
        model = plain()
        made = Lone(tmp_path / name, model, sgd(model, 0.2), name, lambda _: 0.5, fits_swarm=name == "a")
        peers.append(made)
    a, b, *_ = peers
    assert (rates(a), b.peer.rates.suggested(0.3)) == ([0.1], 0.3)  # alone, as far as is known
    for _ in range(2 * STEPS):
        for peer in peers:
            peer.tell()
        meet(*peers)
    assert (rates(a), rates(b)) == ([pytest.approx(0.2)], [0.1])
    assert b.peer.rates.suggested(0.3) == pytest.approx(0.6)
    for peer in peers:
        peer.peer.leave()


def test_rates_that_do_not_fit_are_told_when_the_swarms_size_changes_what_would() -> None:
    told = list[str]()
    own = LearningRates(sgd(plain()), None, told.append)
    for peers, told_of in ((0, 0), (2, 0), (4, 0), (5, 1), (10, 1), (16, 2), (5, 2), (1, 2), (16, 2)):
        own.set(0.0, peers)
        assert len(told) == told_of, peers
    assert "about 5 equal peers" in told[0]
    assert "2.2 times that of one machine alone" in told[0]
    followed = LearningRates(sgd(plain()), None, told.append)
    assert followed.suggested(0.3) == 0.3
    followed.set(0.0, 1), followed.set(0.0, 16)  # the program fits them itself
    fits = sgd(plain(), 0.1)
    LearningRates(fits, None, told.append, fits=True).set(0.0, 16)
    assert fits.param_groups[0]["lr"] == pytest.approx(0.4)
    assert len(told) == 2


@pytest.mark.parametrize(("peers", "factor"), [(0.0, 1.0), (1, 1.0), (4, 2.0), (16, 4.0), (1e30, 4.0)])
def test_what_a_rate_is_multiplied_by_is_a_root_with_a_bound(peers: float, factor: float) -> None:
    """However many peers somebody invents."""
    assert swarm_factor(peers) == factor


def test_peers_count_by_their_weights() -> None:
    parts = [PartWeights(0, 1, {"a": 2.0, "b": 2.0}), PartWeights(1, 4, {"a": 3e-300, "b": 1e-300})]
    assert effective_peers(parts) == pytest.approx((2.0 + 3 * 1.6) / 4)


def test_a_second_schedule_is_told_once(tmp_path: Path) -> None:
    model = plain()
    optimizer = sgd(model)
    scheduler = LinearLR(optimizer, start_factor=0.1, total_iters=100)
    lone = Lone(tmp_path, model, optimizer, learning_rate=lambda position: 0.5)
    for _ in range(3):
        lone.train()
        scheduler.step()
    assert [fields["text"] for fields in lone.wire.seen(ev.Warned)] == [TWO_SCHEDULES]
    lone.peer.leave()


# ---- where a peer lives and listens


def test_the_home_folder_is_meant_by_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert PeerConfig(folder="~/run").folder == tmp_path / "run"  # type: ignore[arg-type]
    (tmp_path / "peer.toml").write_text('folder = "~/run"\n')
    assert read_peer_config(tmp_path / "peer.toml").folder == tmp_path / "run"
    assert peer_config(None, {"folder": Path("~/run")}).folder == tmp_path / "run"
    (tmp_path / "peer.toml").write_text('folder = "~nobody-has-this-name/run"\n')
    with pytest.raises(ConfigError, match="write the folder out"):
        read_peer_config(tmp_path / "peer.toml")


@pytest.mark.parametrize(
    ("seed", "host"), [("127.0.0.1", "127.0.0.1"), ("203.0.113.5", "0.0.0.0")], ids=["here", "elsewhere"]
)
def test_a_loop_of_ones_own_listens_where_the_command_line_does(tmp_path: Path, seed: str, host: str) -> None:
    me = Identity.load_or_create(tmp_path / "identity").peer_id
    ticket = Ticket(bytes(32), me, (f"/ip4/{seed}/tcp/31000/p2p/{me}",))
    assert listening(PeerConfig(), ticket).host == host
    assert peer_config(None, {}, str(ticket)).host == host
    assert listening(PeerConfig(host="192.0.2.7"), ticket).host == "192.0.2.7"
    assert peer_config(None, {"host": "192.0.2.7"}, str(ticket)).host == "192.0.2.7"
    assert peer_config(None, {}).host == "127.0.0.1"


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        *((OSError(number, "nobody reads it"), False) for number in (errno.EPIPE, errno.EIO, errno.ENOSPC)),
        (OSError(errno.EACCES, "it is somebody else's"), True),
        (ValueError("a bug of the caller's"), True),
    ],
)
def test_a_callback_that_fails_ends_the_training_unless_only_its_terminal_is_gone(
    tmp_path: Path, error: Exception, ends: bool
) -> None:
    def on_event(event: ev.Event) -> None:
        raise error

    me = Identity.load_or_create(tmp_path / "identity").peer_id
    ticket = Ticket(bytes(32), me, (f"/ip4/127.0.0.1/tcp/1/p2p/{me}",))
    session = Session(ticket, PeerConfig(folder=tmp_path), on_event)
    with pytest.raises(type(error)) if ends else nullcontext():
        session.on_event(ev.Warned(at=0.0, peer=me, text="something"))
    assert session.failure is (error if ends else None)
    session.close()


# ---- the front door takes: two peers that start alike and train apart end alike


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight


class Shared(nn.Module):
    """One module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict({"embed": nn.Embedding(9, 4), "out": nn.Linear(4, 4)})
        self.decoder = nn.ModuleDict({"embed": self.encoder["embed"], "out": nn.Linear(4, 4)})


class Scales(nn.Module):
    """A parameter without dimensions, one without elements, one without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.nothing = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.empty(0, 3))
        self.inner, self.module = nn.Linear(3, 3), nn.Linear(3, 3)
        self.frozen = nn.Parameter(torch.ones(5, dtype=torch.int8), requires_grad=False)
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))


def across(values: Tensor) -> Tensor:
    """The same values, column by column in memory."""
    return values.t().contiguous().t()


def altered(change: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    """The plain model after a change."""

    def made() -> nn.Module:
        model = plain()
        change(model)
        return model

    return made


def one_buffer() -> nn.Module:
    """All parameters as views of one tensor, as flattened recurrent layers have them."""
    model = plain()
    flat, at = torch.empty(sum(p.numel() for p in model.parameters())), 0
    for parameter in model.parameters():
        view = flat[at : at + parameter.numel()].view(parameter.shape)
        at += parameter.numel()
        parameter.data = view.copy_(parameter.data)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "tied": Tied,
    "a shared module": Shared,
    "odd sizes, and a layer called module": Scales,
    "bfloat16": lambda: plain().to(torch.bfloat16),
    "float16": lambda: plain().half(),
    "float64": lambda: plain().double(),
    "mixed dtypes": altered(lambda model: model[0].to(torch.bfloat16)),
    "partly frozen": altered(lambda model: model[0].requires_grad_(False)),
    "not contiguous": altered(lambda model: setattr(model[0].weight, "data", across(model[0].weight.data))),
    "views of one buffer": one_buffer,
    "channels last": lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
    "recurrent": lambda: nn.LSTM(3, 5, 2),
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
    "weight norm": altered(lambda model: nn.utils.parametrizations.weight_norm(model[0])),
    "compiled": lambda: cast(nn.Module, torch.compile(plain(), backend="eager")),
    "compiled and checkpointed in part": altered(
        lambda model: model.__setitem__(2, checkpoint_wrapper(torch.compile(model[2], backend="eager")))
    ),
    "DataParallel": lambda: nn.DataParallel(plain()),
    "TorchScript": lambda: torch.jit.script(plain()),
}


def by_groups(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [one], "lr": 0.01} for one in model.parameters()], lr=0.1)


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "SGD": sgd,
    "SGD with momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "AdamW by groups": by_groups,
    "a rate that is a tensor": lambda model: torch.optim.Adam(
        model.parameters(), lr=torch.tensor(0.01), capturable=False, foreach=False
    ),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.01),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
    "one of the user's own": lambda model: Descent(model.parameters()),
}
CASES = [(name, "SGD") for name in MODELS] + [("plain", name) for name in OPTIMIZERS if name != "SGD"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize(("model", "optimizer"), CASES)
def test_two_peers_with_it_train_to_equal_parameters(tmp_path: Path, model: str, optimizer: str) -> None:
    peers = []
    for name in ("a", "b"):
        torch.manual_seed(0)
        made = MODELS[model]()
        peers.append(Lone(tmp_path / name, made, OPTIMIZERS[optimizer](made), name))
    start = peers[0].live()
    for step in range(3 * STEPS + 1):
        for peer in peers:
            peer.train() if step < 2 * STEPS else peer.tell()
        meet(*peers)
    for peer in peers:
        peer.peer.leave()
    agreed = [peer.peer.agreed_parameters() for peer in peers]
    for name, values in agreed[0].items():
        assert torch.equal(values, agreed[1][name]), name
    for ours, theirs, begun, parameter in zip(
        peers[0].live(), peers[1].live(), start, peers[0].model.parameters(), strict=True
    ):
        assert torch.equal(ours.float(), theirs.float())
        if parameter.requires_grad and parameter.numel():
            assert not torch.equal(ours, begun)


# ---- the front door refuses


def meta() -> Made:
    with torch.device("meta"):
        model = plain()
    return model, sgd(model)


def meta_buffer() -> Made:
    model = plain()
    model[2].register_buffer("mask", torch.ones(2, device="meta"))
    return model, sgd(model)


def lazy() -> Made:
    return nn.Sequential(nn.LazyLinear(3)), sgd(plain())


def changed(change: Callable[[nn.Sequential], None]) -> Callable[[], Made]:
    """The plain model after a change, and its optimizer."""

    def made() -> Made:
        model = plain()
        change(model)
        return model, sgd(model)

    return made


def weight(make: Callable[[Tensor], Tensor]) -> Callable[[nn.Sequential], None]:
    """Another first weight, made of the one that is there."""

    def change(model: nn.Sequential) -> None:
        model[0].weight = nn.Parameter(make(model[0].weight.detach()))

    return change


def tie_by_data(model: nn.Sequential) -> None:
    model.append(nn.Linear(8, 6))
    model[3].weight.data = model[0].weight.data


def overlap(model: nn.Sequential) -> None:
    values = torch.zeros(100)
    model[0].weight, model[2].weight = (
        nn.Parameter(values[:48].view(6, 8)),
        nn.Parameter(values[40:64].view(4, 6)),
    )


def not_finite(model: nn.Sequential) -> None:
    model[2].weight.data[1, 2] = math.nan


def in_inference_mode() -> Made:
    with torch.inference_mode():
        model = plain()
    return model, sgd(model)


def half_trained(more: bool = False) -> Made:
    """By an optimizer of half of it; or of all and something ``more``."""
    model = plain()
    other = [*model.parameters(), nn.Parameter(torch.ones(3, 7))] if more else model[0].parameters()
    return model, torch.optim.SGD(other, lr=0.1)


class Scaled(torch.Tensor):
    """A tensor with a meaning of its own, as quantisers make."""


def rated(rate: Any) -> Callable[[], Made]:
    def made() -> Made:
        model = plain()
        optimizer = sgd(model)
        optimizer.param_groups[0]["lr"] = rate
        return model, optimizer

    return made


REFUSED: dict[str, tuple[Callable[[], Made], str]] = {
    "no model": (lambda: (None, sgd(plain())), r"join: model: is None; give the torch.nn.Module"),
    "no optimizer": (lambda: (plain(), None), r"join: optimizer: is None; give the model first"),
    "swapped": (lambda: (sgd(plain()), plain()), "join: model: is of type SGD"),
    "all frozen": (changed(lambda model: model.requires_grad_(False) and None), "no parameter to train"),
    "meta": (meta, r"0.weight: has no values yet .*to_empty"),
    "a meta buffer": (meta_buffer, r"2.mask: has no values yet"),
    "lazy": (lazy, r"0.weight: has no values yet .*make one forward pass"),
    "complex": (
        changed(weight(lambda one: one.to(torch.complex64))),
        r"0.weight: is a Tensor of complex64, strided; only plain",
    ),
    "float8": (
        changed(weight(lambda one: one.to(torch.float8_e4m3fn))),
        r"0.weight: is a Tensor of float8_e4m3fn",
    ),
    "sparse": (
        changed(weight(lambda one: one.to_sparse())),
        r"0.weight: is a Tensor of float32, sparse_coo; .*to_dense",
    ),
    "tied by data": (changed(tie_by_data), r"shares memory with (0|3).weight.*make them one parameter"),
    "overlapping": (changed(overlap), r"2.weight: shares memory with 0.weight"),
    "expanded": (changed(weight(lambda one: one[:1].expand(6, 8))), r"0.weight: .*memory of their own"),
    "a special tensor": (
        changed(weight(lambda one: one.as_subclass(Scaled))),
        r"0.weight: is a Scaled of float32",
    ),
    "made in inference mode": (in_inference_mode, r"0.weight: is a Tensor of float32, strided; .*leaves"),
    "NaN": (changed(not_finite), r"2.weight: has values that are not finite"),
    "an optimizer of another copy": (
        lambda: (copy.deepcopy(plain()), sgd(plain())),
        r"holds none of the model's parameters \(0.weight",
    ),
    "an optimizer of half": (
        half_trained,
        r"2.weight: is trained by no group of the optimizer.*requires_grad_",
    ),
    "an optimizer of more": (
        lambda: half_trained(more=True),
        r"trains a parameter of shape \(3, 7\) that is not the model's",
    ),
    "a rate of 0": (rated(0.0), r"optimizer: param_groups\[0\]: has the learning rate 0.0; give it the rate"),
    "a tensor rate of 0": (rated(torch.tensor(0.0)), r"param_groups\[0\]: has the learning rate"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_exchanged_is_refused_by_name_before_the_network_is_used(case: str) -> None:
    make, words = REFUSED[case]
    model, optimizer = make()
    with pytest.raises(ConfigError, match=words):
        join("no ticket, and so a TicketError if it were looked at", model, optimizer)
    unused = Connection(UNUSED, PeerConfig())
    with pytest.raises(ConfigError, match=words):
        unused.start(model, optimizer)


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch._C._clear_DTensor_sharding_propagator_cache()  # it holds the group, which no forked child can end


def sharded_after_the_optimizer() -> Made:
    from torch.distributed.fsdp import fully_shard

    model = plain()
    optimizer = sgd(model)
    fully_shard(model)
    return model, optimizer


def sharded_by_a_wrapper() -> Made:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = nn.Sequential(FullyShardedDataParallel(plain(), device_id=torch.device("cpu")))
    return model, sgd(model)


def parallel() -> Made:
    model = nn.Sequential(nn.parallel.DistributedDataParallel(plain()))
    return model, sgd(model)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (sharded_after_the_optimizer, "optimizer: holds none of the model's parameters"),
        (sharded_by_a_wrapper, "model: 0: is wrapped by .*; shard it with .*fully_shard"),
        (parallel, "ticket"),  # looked at next: the model is right, in a group of one, too
    ],
)
def test_a_group_of_one_shares_with_nobody(make: Callable[[], Made], words: str) -> None:
    model, optimizer = make()
    with pytest.raises(P2PCo2Error, match=words):
        join("no ticket", model, optimizer)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("make", [parallel, sharded_after_the_optimizer])
def test_what_processes_share_is_refused_outside_a_group(make: Callable[[], Made]) -> None:
    model, optimizer = make()
    with pytest.raises(
        ConfigError, match=r"model: 0.*: is shared between processes .*: start .* with torchrun"
    ):
        check_model(model, optimizer)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((None, PeerConfig(), print), "ticket: is of type NoneType; give the word"),
        ((Path("ticket"), PeerConfig(), print), "ticket: is of type PosixPath"),
        (("ticket", None, print), r"config: is of type NoneType; give PeerConfig\(folder"),
        (("ticket", "runs/me", print), "config: is of type str"),
        (("ticket", {"folder": "me"}, print), "config: is of type dict"),
        (("ticket", PeerConfig(), None), "on_event: is of type NoneType; give a function"),
    ],
)
def test_other_arguments_are_refused_by_name(arguments: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        connect(*arguments)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (0.5, r"learning_rate: is 0.5; give a function"),
        (lambda position: None, "gives None at position 0"),
        (lambda position: float("nan"), "gives nan at position 0"),
        (lambda position: -1.0, "gives -1.0 at position 0; it must give a factor of 0 or more"),
    ],
)
def test_a_schedule_is_tried_once_at_the_start(schedule: Any, words: str) -> None:
    model = plain()
    unused = Connection(UNUSED, PeerConfig())
    with pytest.raises(ConfigError, match=words):
        unused.start(model, sgd(model), schedule)


@pytest.mark.parametrize(
    ("stages", "stage", "words"),
    [
        (2, -1, r"start: pipeline.stages: is 2 .* use start_stage\(recipe\)"),
        (1, 1, "--stage: this run has no stages, .*got 1.*; leave it out"),
    ],
)
def test_a_whole_model_and_a_stage_are_not_taken_for_each_other(stages: int, stage: int, words: str) -> None:
    """It would train alone under the run's name, and be taken for a peer of the first stage."""
    part = whole_of(RunConfig(pipeline=PipelineConfig(stages=stages)))
    model = plain()
    with pytest.raises(ConfigError, match=words):
        Connection(part, PeerConfig(stage=stage)).start(model, sgd(model))


# ---- a stage that waits for others


def test_a_stage_that_waits_writes_checkpoints(tmp_path: Path) -> None:
    """A machine that is switched off meanwhile goes on with what its stage had agreed on last."""
    lone = Lone(
        tmp_path, model := plain(), sgd(model), start=Progressed(3.0, 12, 768), checkpoint_every_s=1e-9
    )
    for _ in range(100_000):
        assert lone.peer.idle(0.0, between_steps=False)
        if lone.wire.seen(ev.CheckpointSaved):
            break
    assert load(tmp_path / "checkpoint").position == 3.0
    lone.peer.leave()


@pytest.mark.parametrize("others", ["none", "a replica", "beside"])
def test_a_stage_that_comes_back_alone_begins_where_the_stages_beside_it_are(
    tmp_path: Path, others: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By inner steps too, which no clock carries on; a step later each stage counts its own."""
    lone = Lone(tmp_path, model := plain(), sgd(model), start=Progressed(3.0, 12, 768))
    if others != "none":
        monkeypatch.setattr(lone.wire, "swarm_position", lambda: (9.0, 0.0))
    if others == "a replica":
        monkeypatch.setattr(lone.wire, "live_trainers", lambda: ["other"])
    lone.peer.idle(0.0, between_steps=True)
    lone.tell()
    first = 9.0 if others == "beside" else 3.0
    assert lone.peer.position == first + 1 / STEPS
    monkeypatch.setattr(lone.wire, "swarm_position", lambda: (20.0, 0.0))
    lone.peer.idle(0.0, between_steps=True)
    lone.tell()
    assert lone.peer.position == first + 2 / STEPS
    lone.peer.leave()
