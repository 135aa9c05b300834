"""A ``torchrun`` group as one peer: what each of its ranks calls instead of ``connect`` and ``start``.

    group = form_group(model, optimizer)                     # None outside a group
    peer = as_one_peer(group, model, optimizer, lead, learning_rate)

On rank 0 ``lead()`` connects and starts, and the result is a ``LeadingPeer`` that commands the other ranks.
There the result is a ``FollowingPeer`` with the same methods. What rank 0 fails with while it joins, every
rank raises.

Laws: all ranks make the same calls in the same order, or each raises one ``ConfigError`` that names the two.
Tokens are summed and losses averaged over the ranks. A rank that ends, ends the peer on every other rank. A
rank that leaves while others step makes their ``step`` return False.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from p2p_co2.config import RunConfig
from p2p_co2.errors import ConfigError, LocalProtocolError
from p2p_co2.recipes.measured import Measured
from p2p_co2.tensors.names import unwrapped
from p2p_co2.tensors.pretrained import full_state
from p2p_co2.tensors.sharding import reshard
from p2p_co2.trainer.exchanged_model import TrainingSetup
from p2p_co2.trainer.figures import loss_of, mean_loss, tokens_of
from p2p_co2.trainer.ledger.worker import TensorWorker
from p2p_co2.trainer.peer import Asked, Peer, as_it_was
from p2p_co2.trainer.ranks.collectives import error_of, text_of
from p2p_co2.trainer.ranks.follower import Follower
from p2p_co2.trainer.ranks.group import compare_samples, has_frozen_shards, sample_digest, whole_frozen
from p2p_co2.trainer.ranks.parameters import Group
from p2p_co2.trainer.rates import Factor, LearningRates
from p2p_co2.trainer.session import Participation
from p2p_co2.trainer.synchroniser import Progressed

_Given = tuple[int | Tensor, float | Tensor]
"""Tokens and loss of a step."""
_Word = dict[str, Any]
"""What a rank says as it makes a call: its name ("call"), or the "problem" that it ends with."""


class LeadingPeer(Peer):
    """Rank 0's: the peer, as the swarm sees it. Every method that trains, saves, measures or leaves is called
    by all ranks at the same time; ``agreed_parameters`` by rank 0 alone, if it likes."""

    def __init__(
        self, part: Participation, ledger: TensorWorker, plan: TrainingSetup, rates: LearningRates,
        start: Progressed,
    ) -> None:  # fmt: skip
        assert plan.group is not None
        self._ranks = plan.group.ranks
        self._device = next(plan.model.parameters()).device
        self._has_stepped = False
        super().__init__(part, ledger, plan, rates, start)
        self._signals = Asked(self.stop, signal.SIGINT, signal.SIGTERM)

    def keep_place(self, place: Callable[[], str]) -> str:
        """Nothing is kept: other ranks would not know it."""
        return ""

    def step(self, tokens: int | Tensor, loss: float | Tensor) -> bool:
        """As ``Peer.step``, called on every rank: tokens are summed and losses averaged."""
        self._stepping.must_be_here()
        if self._left:
            return super().step(tokens, loss)  # which raises
        given, word = _given(self._plan.model, self._device, tokens, loss, is_first=not self._has_stepped)
        self._has_stepped = True
        with self._call("step", **word) as words:
            compare_samples(word["samples"] for word in words if "samples" in word)
            if any(word["call"] == "leave" for word in words):
                self.stop()
            else:
                for wish in (wish for word in words for wish in word.get("asked", ())):
                    getattr(self, wish)()
                given = self._sums(words, given)
            goes_on = super().step(*given)
            self._go(goes_on)
        return goes_on

    def _sums(self, words: list[_Word], given: _Given) -> _Given:
        """Of all ranks. What lies on an accelerator is added there, and nobody waits for it."""
        if self._device.type == "cpu":
            losses: list[float | Tensor] = [word["loss"] for word in words]
            return sum(word["tokens"] for word in words), mean_loss(losses)
        self._ranks.tell("figures")
        both = summed(*given, self._device)
        return both[0], both[1] / self._ranks.size

    def idle(self, waited_s: float, between_steps: bool) -> bool:
        """As ``Peer.idle``, of rank 0 alone: nothing is merged, the other ranks may be at work."""
        return super().idle(waited_s, between_steps=False)

    @contextmanager
    def agreed(self, back: bool = True) -> Iterator[nn.Module]:
        """As ``Peer.agreed``, called on every rank."""
        with ExitStack() as stack:
            with self._call("agreed"):
                model = stack.enter_context(super().agreed(back))
                self._go()
            with self._ranks.together():
                yield model
            with self._call("the end of agreed"):
                stack.close()
                self._go()

    def state_dict(self) -> dict[str, Tensor]:
        """As ``Peer.state_dict``; called on every rank if it has frozen parameters that are sharded."""
        reshard(self._plan.model)
        frozen = dict[str, Tensor]()
        if has_frozen_shards(self._plan.model):
            with self._call("state_dict"):
                self._go()
            with self._ranks.together():
                frozen = {name: one.cpu() for name, one in whole_frozen(self._plan.model)}
        return full_state(unwrapped(self._plan.model), self.agreed_parameters() | frozen)

    def has_turn(self, number: int, is_ready: bool = True) -> bool:
        """As ``Peer.has_turn``, called on every rank."""
        with self._call("has_turn"):
            turn = super().has_turn(number, is_ready)
            self._go(turn)
        return turn

    def save(self) -> None:
        """As ``Peer.save``, called on every rank."""
        with self._call("save"):
            super().save()
            self._go()

    def leave(self, reason: str = "") -> None:
        """As ``Peer.leave``, called on every rank; it waits for those that are at a step. After a rank has
        ended by an error nothing is finished or saved."""
        if self._left or self._stepping.is_forked:
            return
        with self._signals.at_the_end(), ExitStack() as ending:
            ending.callback(self._leave_alone, reason)
            while not (self._left or self._ranks.is_broken):
                with self._call("leave") as words:
                    if all(word["call"] == "leave" for word in words):
                        ending.pop_all()
                        super().leave(reason)
                    self._go(self._left)  # else those at a step end it, and come to leave, too

    def _leave_alone(self, reason: str) -> None:
        """The ranks are not together any more: what is left is to go."""
        self._model.is_changed = True
        super().leave(reason)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ranks.end_by(error)
        super().__exit__(kind, error, trace)

    # ---- the other ranks

    @contextmanager
    def _call(self, call: str, **more: object) -> Iterator[list[_Word]]:
        """What every rank says as it makes this ``call``; the others obey meanwhile. Raises the first problem
        that one has, and ``ConfigError`` for another call than a leave beside steps."""
        with self._ranks.together():
            words: list[_Word] = self._ranks.gather({"call": call, **more})
        with self._ranks.commanding():
            for rank, word in enumerate(words):
                if word.get("problem"):
                    raise error_of(word["problem"])
                if word["call"] != call and {word["call"], call} != {"step", "leave"}:
                    raise ConfigError(
                        "peer", call,
                        f"is called by rank 0 where rank {rank} calls {word['call']}; every rank makes the "
                        "same calls in the same order",
                    )  # fmt: skip
            reshard(self._plan.model)
            yield words

    def _go(self, result: bool = True) -> None:
        """The call is over."""
        self._ranks.tell("go", result, self.position, self.inner_steps, self.over, self.rates.peers)


class FollowingPeer:
    """On a rank other than 0: with the methods of ``Peer``, each called when rank 0 calls it. It has no
    folder, no board and no connection to other peers. ``peer_id`` and ``ticket`` are rank 0's."""

    board = ""

    def __init__(self, group: Group, follower: Follower, rates: LearningRates) -> None:
        self._ranks = group.ranks
        self._follower = follower
        self.rates = rates
        self._device = next(follower.model.parameters()).device
        self._asked = list[str]()
        """By a person, since the last step."""
        self._has_stepped = False
        self._left = False
        self._signals = Asked(self.stop, signal.SIGINT, signal.SIGTERM)
        self.position = 0.0
        self.inner_steps = 0
        self.over = False
        self._serve()
        self.peer_id, self.ticket = self._ranks.hear()
        if self.inner_steps:
            rates.resumed()
        rates.set(self.position, self.rates.peers)

    @property
    def run(self) -> RunConfig:
        assert self._follower.run is not None  # told before rank 0 has started
        return self._follower.run

    def step(self, tokens: int | Tensor, loss: float | Tensor) -> bool:
        """As ``Peer.step``."""
        if self._left:
            raise LocalProtocolError("step: this peer has left the swarm; join again to train on")
        model = self._follower.model
        given, word = _given(model, self._device, tokens, loss, is_first=not self._has_stepped)
        self._has_stepped = True
        try:
            self._follower.look(self.position)
        except ConfigError as error:
            word["problem"] = text_of(error)
        asked = self._asked
        self._asked = []
        goes_on = self._together("step", lambda: summed(*given, self._device), asked=asked, **word)
        self.rates.set(self.position, self.rates.peers)
        return goes_on

    def idle(self, waited_s: float, between_steps: bool) -> bool:
        """As ``Peer.idle``: rank 0 counts the time."""
        return not self.over

    def keep_place(self, place: Callable[[], str]) -> str:
        """As ``LeadingPeer.keep_place``."""
        return ""

    def stop(self) -> None:
        """As ``Peer.stop``, from the next step on, for all ranks."""
        self._asked.append("stop")

    def pause(self) -> None:
        """As ``Peer.pause``. Only rank 0's ``go_on`` ends it."""
        self._asked.append("pause")

    def go_on(self) -> None:
        """As ``Peer.go_on``, as far as this rank comes to a step."""
        self._asked.append("go_on")

    def agreed_parameters(self) -> dict[str, Tensor]:
        """Rank 0 has them; here they are empty."""
        return {}

    def state_dict(self) -> dict[str, Tensor]:
        """As ``agreed_parameters``, called on every rank if frozen parameters are sharded."""
        if has_frozen_shards(self._follower.model):
            self._together("state_dict")
            with self._ranks.together():
                for _ in whole_frozen(self._follower.model):
                    continue
        return {}

    @contextmanager
    def agreed(self, back: bool = True) -> Iterator[nn.Module]:
        """As ``Peer.agreed``."""
        self._together("agreed")
        with self._ranks.together(), as_it_was(self._follower.model):
            yield self._follower.model
        self._together("the end of agreed")

    def measure_agreed(self, held_out: Callable[[nn.Module], Measured]) -> float:
        """As ``Peer.measure_agreed``: rank 0's loss is reported, and the 0 seconds that this returns are
        nobody's."""
        with self.agreed() as model:
            held_out(model)
        return 0.0

    def has_turn(self, number: int, is_ready: bool = True) -> bool:
        """As ``Peer.has_turn``."""
        return self._together("has_turn")

    def save(self) -> None:
        """As ``Peer.save``: what lies here goes into rank 0's file."""
        self._together("save")

    def leave(self, reason: str = "") -> None:
        """As ``Peer.leave``: carries out what rank 0 needs for it."""
        with self._signals.at_the_end():
            while not (self._left or self._ranks.is_broken):
                self._left = self._together("leave")
            self._left = True

    def __enter__(self) -> FollowingPeer:
        self._signals.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ranks.end_by(error)
        self.leave()

    def _together(self, call: str, figures: Callable[[], object] = lambda: None, **more: object) -> bool:
        """Make a ``call`` that all ranks make; rank 0's result."""
        with self._ranks.together():
            self._ranks.gather({"call": call, **more})
            return self._serve(figures)

    def _serve(self, figures: Callable[[], object] = lambda: None) -> bool:
        told = self._follower.serve(figures)
        result, self.position, self.inner_steps, self.over, self.rates.peers = told
        return bool(result)


AnyPeer = Peer | FollowingPeer


def as_one_peer(
    group: Group | None, model: nn.Module, optimizer: Optimizer, lead: Callable[[], Peer],
    learning_rate: Factor | None = None, fits_swarm: bool = False,
) -> AnyPeer:  # fmt: skip
    """What ``lead`` joins, on every rank of ``group``. Called on all of them at the same time; raises what
    ``lead`` raises on rank 0."""
    if group is None:
        return lead()
    ranks = group.ranks
    if not ranks.leads:
        with ranks.together():
            follower = Follower(group, model, optimizer)
            return FollowingPeer(
                group, follower, LearningRates(optimizer, learning_rate, _nobody, fits_swarm)
            )
    with ranks.commanding():
        peer = lead()
        ranks.tell("go", True, peer.position, peer.inner_steps, peer.over, peer.rates.peers)
        ranks.tell(peer.peer_id, peer.ticket)
    return peer


def _nobody(text: str) -> None:
    """Rank 0 warns of the same."""


def summed(tokens: int | Tensor, loss: float | Tensor, device: torch.device) -> Tensor:
    """Both numbers, added over all ranks where they lie; nobody waits for it."""
    both = torch.stack(
        [torch.as_tensor(one, dtype=torch.float64, device=device).reshape(()) for one in (tokens, loss)]
    )
    dist.all_reduce(both)
    return both


def _given(
    model: nn.Module, device: torch.device, tokens: int | Tensor, loss: float | Tensor, is_first: bool
) -> tuple[_Given, _Word]:
    """The arguments of a step, and what this rank says of them. Where the model is in host memory they come
    there, too."""
    word: _Word = {"samples": sample_digest(model)} if is_first else {}
    is_here = device.type == "cpu"
    try:
        given = tokens_of(tokens.cpu() if isinstance(tokens, Tensor) and is_here else tokens), loss_of(loss)
    except ConfigError as error:  # the other ranks hear of it, too
        return (0, math.nan), word | {"problem": text_of(error)}
    return given, word | ({"tokens": int(given[0]), "loss": float(given[1])} if is_here else {})
