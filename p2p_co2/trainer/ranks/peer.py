"""A ``torchrun`` group as one peer: what each of its ranks calls instead of ``connect`` and ``start``.

    group = form_group(model, optimizer)                     # None outside a group
    peer = as_one_peer(group, model, optimizer, lead, learning_rate)

On rank 0 ``lead()`` connects and starts, and the result is a ``LeadingPeer`` that commands the other ranks;
on those ``lead`` is not called, and the result is a ``FollowingPeer`` with the same methods. What rank 0
fails with while it joins, every rank raises.

Laws: all ranks make the same calls in the same order, or each raises one ``ConfigError`` that names the two.
Tokens are summed and losses averaged over the ranks. A rank that ends, ends the peer on every other rank,
with one ``EnvironmentFault``. A rank that leaves while others step makes their ``step`` return False.
"""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from p2p_co2.config import RunConfig
from p2p_co2.errors import ConfigError, LocalProtocolError, P2PCo2Error
from p2p_co2.tensors.names import unwrapped
from p2p_co2.tensors.pretrained import full_state
from p2p_co2.tensors.sharding import reshard
from p2p_co2.trainer.exchanged_model import Plan
from p2p_co2.trainer.figures import loss_of, mean_loss, tokens_of
from p2p_co2.trainer.follower import Follower
from p2p_co2.trainer.group import compare_samples, has_frozen_shards, whole_frozen
from p2p_co2.trainer.ledger.worker import TensorWorker
from p2p_co2.trainer.peer import Asked, Peer, as_it_was
from p2p_co2.trainer.ranks.parameters import Group
from p2p_co2.trainer.ranks.words import CALLED, Call, Command, Ranks
from p2p_co2.trainer.rates import Factor, Rates
from p2p_co2.trainer.session import Participation
from p2p_co2.trainer.synchroniser import Progressed

STOP, PAUSE, GO_ON, TOGGLE = 1, 2, 4, 8
"""What a person asked of a rank that follows, told with its next step."""
_Given = tuple[int | Tensor, float | Tensor]


class LeadingPeer(Peer):
    """Rank 0's: the peer, as the swarm sees it. Every method that trains, saves, measures or leaves is called
    by all ranks at the same time; ``agreed_parameters`` by rank 0 alone, if it likes."""

    def __init__(
        self, part: Participation, ledger: TensorWorker, plan: Plan, rates: Rates, start: Progressed
    ) -> None:
        assert plan.group is not None
        self._ranks = plan.group.ranks
        self._device = next(plan.model.parameters()).device
        self._waiting = set[int]()
        """Ranks that wait in ``leave`` for the others."""
        self._is_compared = False
        super().__init__(part, ledger, plan, rates, start)
        self._signals = Asked(self.stop, signal.SIGINT, signal.SIGTERM)

    def step(self, tokens: int | Tensor, loss: float | Tensor) -> bool:
        """As ``Peer.step``, called on every rank: tokens are summed and losses averaged."""
        self._stepping.must_be_here()
        with self._ranks.together():
            given, problem = _given(tokens, loss, self._device)
            words = self._meet(Call.STEP, problem)
            reshard(self._plan.model)
            if self._waiting:
                self.stop()
            else:
                given = self._figures(words, *given)
            goes_on = super().step(*given)
            self._go(goes_on)
        return goes_on

    def _figures(
        self, words: Mapping[int, list[float]], tokens: int | Tensor, loss: float | Tensor
    ) -> _Given:
        """Of all ranks. What lies on an accelerator is added there, and nobody waits for it."""
        if not self._is_compared:
            compare_samples(self._ranks, self._plan.model)
            self._is_compared = True
        for word in words.values():
            _obey(self, int(word[2]))
        if self._device.type != "cpu":
            self._ranks.tell(Command.FIGURES)
            both = summed(tokens, loss, self._device)
            return both[0], both[1] / self._ranks.size
        losses: list[float | Tensor] = [loss, *(word[1] for word in words.values())]
        assert isinstance(tokens, int)
        return tokens + sum(int(word[0]) for word in words.values()), mean_loss(losses)

    def idle(self, waited_s: float, between_steps: bool) -> bool:
        """As ``Peer.idle``, of rank 0 alone: nothing is merged, the other ranks may be at work."""
        return super().idle(waited_s, between_steps=False)

    @contextmanager
    def agreed(self, back: bool = True) -> Iterator[nn.Module]:
        """As ``Peer.agreed``, called on every rank."""
        with ExitStack() as stack:
            with self._ranks.together():
                self._meet(Call.AGREED)
                reshard(self._plan.model)
                model = stack.enter_context(super().agreed(back))
                self._go()
            with self._ranks.together():
                yield model
                self._meet(Call.PUT_BACK)
                reshard(self._plan.model)
                stack.close()
                self._go()

    def state_dict(self) -> dict[str, Tensor]:
        """As ``Peer.state_dict``; called on every rank if it has frozen parameters that are sharded."""
        reshard(self._plan.model)
        frozen = dict[str, Tensor]()
        if has_frozen_shards(self._plan.model):
            with self._ranks.together():
                self._meet(Call.STATE)
                self._ranks.tell(Command.FROZEN)
                frozen = {name: one.cpu() for name, one in whole_frozen(self._plan.model)}
                self._go()
        return full_state(unwrapped(self._plan.model), self.agreed_parameters() | frozen)

    def has_turn(self, number: int, is_ready: bool = True) -> bool:
        """As ``Peer.has_turn``, called on every rank."""
        with self._ranks.together():
            self._meet(Call.TURN)
            turn = super().has_turn(number, is_ready)
            self._go(turn)
        return turn

    def save(self) -> None:
        """As ``Peer.save``, called on every rank."""
        with self._ranks.together():
            self._meet(Call.SAVE)
            super().save()
            self._go()

    def leave(self, reason: str = "") -> None:
        """As ``Peer.leave``, called on every rank; it waits for those that are at a step. After a rank has
        ended by an error nothing is finished or saved."""
        if self._left or self._stepping.is_forked:
            return
        with self._signals.at_the_end(), ExitStack() as ending:
            ending.callback(self._leave_alone, reason)
            if self._ranks.is_broken:
                return
            with self._ranks.together():
                self._meet(Call.LEAVE)
                ending.pop_all()
                super().leave(reason)
                self._go(False)
                self._waiting.clear()

    def _leave_alone(self, reason: str) -> None:
        """The ranks are not together any more: what is left is to go."""
        self._model.is_changed = True
        super().leave(reason)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        cause = end_by(self._ranks, error)
        super().__exit__(kind, error, trace)
        if cause is not None:
            raise cause from error

    # ---- the other ranks

    def _meet(self, call: Call, problem: P2PCo2Error | None = None) -> dict[int, list[float]]:
        """Wait until every rank makes the same call: what each says with it. One that leaves while others
        step is ``_waiting``. Raises ``problem``, then ``ConfigError`` for another call."""
        words = dict[int, list[float]]()
        for rank in self._ranks.others:
            while rank not in self._waiting:
                kind, *words[rank] = self._ranks.next_word(rank)
                theirs = Call(int(kind))
                if theirs is Call.LEAVE:
                    self._waiting.add(rank)
                if theirs is Call.STEP and call is Call.LEAVE:
                    self._ranks.word(rank, Command.GO, *self._where(False))
                    continue
                if theirs is not call and not (theirs is Call.LEAVE and call is Call.STEP):
                    raise ConfigError(
                        "peer", CALLED[call],
                        f"is called by rank 0 where rank {rank} calls {CALLED[theirs]}; every rank makes the "
                        "same calls in the same order",
                    )  # fmt: skip
                break
        if problem is not None:
            raise problem
        return words

    def _go(self, result: bool = True) -> None:
        """The call is over: let those go that wait for it."""
        for rank in self._ranks.others:
            if self._left or rank not in self._waiting:
                self._ranks.word(rank, Command.GO, *self._where(result))

    def _where(self, result: bool) -> tuple[float, ...]:
        return float(result), self.position, float(self.inner_steps), float(self.over)


class FollowingPeer:
    """On a rank other than 0: with the methods of ``Peer``, each called when rank 0 calls it. It has no
    folder, no board and no connection to other peers."""

    board = ""

    def __init__(self, group: Group, follower: Follower, rates: Rates) -> None:
        self._ranks = group.ranks
        self._follower = follower
        self._rates = rates
        self._device = follower.device
        self._asked = 0
        """By a person, since the last step."""
        self._left, self._signals = False, Asked(self.stop, signal.SIGINT, signal.SIGTERM)
        self.position = 0.0
        self.inner_steps = 0
        self.over = False
        self._go()
        told = json.loads(self._ranks.hear(0))
        self.peer_id, self.ticket = str(told["peer"]), str(told["ticket"])
        """Rank 0's."""
        if self.inner_steps:
            rates.resumed()
        rates.set(self.position)

    @property
    def run(self) -> RunConfig:
        assert self._follower.run is not None  # told before rank 0 has started
        return self._follower.run

    def step(self, tokens: int | Tensor, loss: float | Tensor) -> bool:
        """As ``Peer.step``."""
        with self._ranks.together():
            if self._left:
                raise LocalProtocolError("step: this peer has left the swarm; join again to train on")
            (count, value), problem = _given(tokens, loss, self._device)
            if problem is not None:
                raise problem
            self._follower.look(self.position)
            asked = self._asked
            self._asked = 0
            if self._device.type == "cpu":
                self._ranks.word(0, Call.STEP, float(count), float(value), asked)
            else:
                self._ranks.word(0, Call.STEP, 0.0, math.nan, asked)
            goes_on = self._go(lambda: summed(count, value, self._device))
            self._rates.set(self.position)
        return goes_on

    def idle(self, waited_s: float, between_steps: bool) -> bool:
        """As ``Peer.idle``: rank 0 counts the time."""
        return not self.over

    def stop(self) -> None:
        """As ``Peer.stop``, from the next step on, for all ranks."""
        self._asked |= STOP

    def pause(self) -> None:
        """As ``Peer.pause``. Only rank 0's ``go_on`` ends it."""
        self._asked |= PAUSE

    def go_on(self) -> None:
        """As ``Peer.go_on``, as far as this rank comes to a step."""
        self._asked |= GO_ON

    def toggle_pause(self) -> None:
        """As ``Peer.toggle_pause``."""
        self._asked ^= TOGGLE

    def agreed_parameters(self) -> dict[str, Tensor]:
        """Rank 0 has them; here they are empty."""
        return {}

    def state_dict(self) -> dict[str, Tensor]:
        """As ``agreed_parameters``, called on every rank if frozen parameters are sharded."""
        if has_frozen_shards(self._follower.model):
            self._together(Call.STATE)
        return {}

    @contextmanager
    def agreed(self, back: bool = True) -> Iterator[nn.Module]:
        """As ``Peer.agreed``."""
        self._together(Call.AGREED)
        with self._ranks.together():
            with as_it_was(self._follower.model):
                yield self._follower.model
            self._together(Call.PUT_BACK)

    def measure_agreed(self, held_out: Callable[[nn.Module], float]) -> float:
        """As ``Peer.measure_agreed``: rank 0's loss is reported, and the 0 seconds that this returns are
        nobody's."""
        with self.agreed() as model:
            held_out(model)
        return 0.0

    def has_turn(self, number: int, is_ready: bool = True) -> bool:
        """As ``Peer.has_turn``."""
        return self._together(Call.TURN)

    def save(self) -> None:
        """As ``Peer.save``: what lies here goes into rank 0's file."""
        self._together(Call.SAVE)

    def leave(self, reason: str = "") -> None:
        """As ``Peer.leave``: carries out what rank 0 needs for it."""
        with self._signals.at_the_end():
            if not (self._left or self._ranks.is_broken):
                self._together(Call.LEAVE)
            self._left = True

    def __enter__(self) -> FollowingPeer:
        self._signals.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        cause = end_by(self._ranks, error)
        self.leave()
        if cause is not None:
            raise cause from error

    def _together(self, call: Call) -> bool:
        with self._ranks.together():
            self._ranks.word(0, call)
            return self._go()

    def _go(self, figures: Callable[[], object] | None = None) -> bool:
        result, self.position, inner_steps, over, *_ = self._follower.serve(figures)
        self.inner_steps = int(inner_steps)
        self.over = bool(over)
        return bool(result)


AnyPeer = Peer | FollowingPeer


def as_one_peer(
    group: Group | None, model: nn.Module, optimizer: Optimizer, lead: Callable[[], Peer],
    learning_rate: Factor | None = None,
) -> AnyPeer:  # fmt: skip
    """What ``lead`` joins, on every rank of ``group``. Called on all of them at the same time; raises what
    ``lead`` raises on rank 0."""
    if group is None:
        return lead()
    ranks = group.ranks
    with ranks.together():
        if not ranks.leads:
            return FollowingPeer(
                group, Follower(group, model, optimizer), Rates(optimizer, learning_rate, _nobody)
            )
        peer = lead()
        ranks.tell(Command.GO, 1.0, peer.position, float(peer.inner_steps), float(peer.over))
        for rank in ranks.others:
            ranks.say(rank, json.dumps({"peer": peer.peer_id, "ticket": peer.ticket}))
    return peer


def _nobody(text: str) -> None:
    """Rank 0 warns of the same."""


def end_by(ranks: Ranks, error: BaseException | None) -> P2PCo2Error | None:
    """A rank's loop has ended, perhaps by an ``error``: the group ends with it. Returns what stands behind
    the error, if that is another rank's end."""
    if error is None or ranks.is_broken:
        return None
    cause = ranks.gone() if isinstance(error, RuntimeError) else None
    if not ranks.is_broken:
        ranks.fail(cause or error)
    return cause


def summed(tokens: int | Tensor, loss: float | Tensor, device: torch.device) -> Tensor:
    """Both numbers, added over all ranks where they lie; nobody waits for it."""
    both = torch.stack(
        [torch.as_tensor(one, dtype=torch.float64, device=device).reshape(()) for one in (tokens, loss)]
    )
    dist.all_reduce(both)
    return both


def _given(
    tokens: int | Tensor, loss: float | Tensor, device: torch.device
) -> tuple[_Given, ConfigError | None]:
    """The arguments of a step as they should be, or what is wrong with them. Where the model is in host
    memory (offloaded), they come there, too."""
    try:
        count = tokens_of(tokens.cpu() if isinstance(tokens, Tensor) and device.type == "cpu" else tokens)
        return (count, loss_of(loss)), None
    except ConfigError as error:  # the other ranks hear of it, too
        return (0, math.nan), error


def _obey(peer: Peer, asked: int) -> None:
    for flag, do in (
        (STOP, peer.stop),
        (PAUSE, peer.pause),
        (GO_ON, peer.go_on),
        (TOGGLE, peer.toggle_pause),
    ):
        if asked & flag:
            do()
