"""Each peer's own order of the data, so that volunteers with the same files train on different batches.

    loader = DataLoader(co2.shard(dataset, swarm), batch_size=8)     # or swarm.until_done(any_loader)

Ranks of a torchrun group go in orders of their own, too, but for samplers that deal the data out to them.

The order follows from the run's seed, the peer's id and the epoch. A peer that comes back goes on in it
where its checkpoint was (``Place``). Ranks, and a loop that sets epochs itself, begin one that they have not
had. Nothing is cut out of the data: peers come and go, and each may see all of it."""

from __future__ import annotations

import json
import queue
import random
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import partial
from itertools import islice
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from p2p_co2.errors import ConfigError
from p2p_co2.tensors.device import choose_accelerator, current_accelerator
from p2p_co2.trainer.synchroniser import REPORT_EVERY_S

_T = TypeVar("_T")
SeedOf = Callable[[int], int]
"""The seed of an epoch's order, for this peer."""
BUFFER = 1024
"""Examples of a stream that are shuffled among each other."""
STATE_BYTES = 1 << 16
"""Of a stream's own state, as text, at most."""
_IS_OWN = "_is_in_own_order"
"""Marks what ``shard`` has made of the streams of ``datasets``."""


class Seeded(Protocol):
    """What gives each epoch's seed: a ``Swarm``."""

    def data_seed(self, epoch: int) -> int: ...


class Joins(Protocol):
    """What has a swarm, or will have one: a ``co2.Optimizer``, a ``SwarmCallback``."""

    @property
    def swarm(self) -> Seeded | None: ...


def shard(dataset: Any, swarm: Seeded | Joins, buffer: int = BUFFER) -> Any:
    """``dataset`` in this peer's own order: for torch's datasets, map-style and iterable, and those of
    ``datasets``, streaming too, whose kind it keeps. ``until_done`` and ``set_epoch(n)`` begin another order;
    a map-style one of ``datasets`` has but one.

    A stream is shuffled within ``buffer`` examples; a ``datasets`` stream in several files also by file.
    ``swarm`` may be a ``co2.Optimizer``, too, or a ``SwarmCallback``: before that has joined, a dataset of
    ``datasets`` comes out as one of torch's. Raises ``ConfigError`` for what is no dataset."""

    def seed_of(epoch: int) -> int:
        joined: Any = getattr(swarm, "swarm", swarm)
        return 0 if joined is None else int(joined.data_seed(epoch))

    if _is_of_datasets(dataset) and getattr(swarm, "swarm", swarm) is not None:
        streams = hasattr(dataset, "_ex_iterable") or not hasattr(dataset, "__len__")
        more = {"buffer_size": buffer} if streams else {}
        own = dataset.shuffle(seed=(seed_of(0) + _rank()) % 2**32, **more)
        setattr(getattr(own, "_ex_iterable", own), _IS_OWN, True)
        return own
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return ShuffledDataset(dataset, seed_of)
    if hasattr(dataset, "__iter__") and iter(dataset) is not dataset:
        return ShuffledStream(dataset, seed_of, buffer)
    problem = f"is of type {type(dataset).__name__}; give a dataset with items, or one that can be gone round"
    raise ConfigError("shard", "dataset", problem)


class PeerOrder(Sampler[int]):
    """All of ``range(length)`` once in each epoch, in this peer's order of it. ``set_epoch`` before each."""

    def __init__(self, length: int, seed_of: SeedOf, rank: int = 0) -> None:
        self._length = length
        self._seed_of = seed_of
        self._epoch = 0
        self._rank = rank

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(_order(self._length, self._seed_of(self._epoch) + self._rank))

    def __len__(self) -> int:
        return self._length


class _Epochs:
    """The epoch that a dataset is in, which a DataLoader's workers see, and the seed of each. Seeds are asked
    for in the process that joined."""

    def __init__(self, seed_of: SeedOf) -> None:
        self._seed_of = seed_of
        self._seed = torch.tensor(seed_of(0) + _rank(), dtype=torch.int64, device="cpu").share_memory_()  # type: ignore[no-untyped-call]

    def set(self, epoch: int) -> None:
        self._seed.fill_(self._seed_of(epoch) + _rank())

    @property
    def seed(self) -> int:
        return int(self._seed)

    def __getstate__(self) -> dict[str, Any]:  # a worker that is not forked has no swarm
        return {"_seed": self._seed}


class ShuffledDataset(Dataset[Any]):
    """A map-style dataset in a peer's order: item i is the i-th of the epoch's order."""

    def __init__(self, dataset: Any, seed_of: SeedOf) -> None:
        self._dataset = dataset
        self._epochs = _Epochs(seed_of)
        self._order: list[int] = []
        self._order_seed = -1

    def set_epoch(self, epoch: int) -> None:
        self._epochs.set(epoch)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        if (seed := self._epochs.seed) != self._order_seed:
            self._order = _order(len(self._dataset), seed)
            self._order_seed = seed
        return self._dataset[self._order[index]]


class ShuffledStream(IterableDataset[Any]):
    """An iterable dataset, shuffled in a peer's order within ``buffer`` examples."""

    def __init__(self, dataset: Any, seed_of: SeedOf, buffer: int) -> None:
        self._dataset = dataset
        self._epochs = _Epochs(seed_of)
        self._buffer = buffer

    def set_epoch(self, epoch: int) -> None:
        self._epochs.set(epoch)
        _tell_epoch(self._dataset, epoch)

    def __iter__(self) -> Iterator[Any]:
        if _is_of_datasets(self._dataset):  # its workers take files each
            yield from self._dataset.shuffle(seed=self._epochs.seed % 2**32, buffer_size=self._buffer)
            return
        draw = random.Random(self._epochs.seed)
        held = list[Any]()
        for example in self._dataset:
            if len(held) < self._buffer:
                held.append(example)
                continue
            at = draw.randrange(len(held))
            yield held[at]
            held[at] = example
        draw.shuffle(held)
        yield from held


def reseed(loader: Any, epoch: int, seed_of: SeedOf) -> None:
    """Give the next pass of ``loader`` this peer's order of ``epoch``: a ``DataLoader``'s, shuffled or not,
    or whatever has ``set_epoch``. A sampler of the user's own keeps its order, with this peer's seed if it
    has a generator."""
    seed = seed_of(epoch)
    own = seed + _rank()
    dataset = getattr(loader, "dataset", None)
    for part in (loader, dataset):
        _tell_epoch(part, epoch)
    if hasattr(loader, "generator"):
        loader.generator = torch.Generator().manual_seed(own)
    holder, sampler = _sampled(loader)
    if isinstance(sampler, DistributedSampler):
        sampler.seed = seed % 2**31
    elif _is_plain(sampler) and type(holder) is BatchSampler and not isinstance(dataset, ShuffledDataset):
        assert isinstance(sampler, RandomSampler | SequentialSampler)
        is_dealt_out = holder is not loader.batch_sampler  # by a wrapper, from one order
        holder.sampler = sampler = PeerOrder(len(sampler), seed_of, 0 if is_dealt_out else _rank())
    elif hasattr(sampler, "initial_seed"):  # accelerate's
        sampler.initial_seed = seed
    elif hasattr(sampler, "generator"):
        sampler.generator = torch.Generator().manual_seed(own)
    _tell_epoch(sampler, epoch)


def _sampled(loader: Any) -> tuple[Any, Any]:
    """What holds the sampler of ``loader``, and that sampler, if there is one."""
    holder = loader
    inner = getattr(loader, "batch_sampler", None)
    while inner is not None:  # of wrappers' wrappers the innermost
        holder = inner
        inner = getattr(inner, "batch_sampler", None)
    return holder, getattr(holder, "sampler", None)


class Place:
    """Where a peer is in its data: the ``epoch``, and the ``batches`` of it that were taken. ``first``: what
    its seeds count from. ``str`` gives what a checkpoint keeps of it, ``said``; "" before the first batch.

    A loader goes on by the indices that its sampler gives, a stream of ``datasets`` in this process by its
    own state. That loses what was in its shuffle buffer. Anything else is read again up to there."""

    def __init__(self, seed_of: SeedOf, said: str = "", first: int = 0) -> None:
        self._seed_of = seed_of
        self.first, self.epoch, self.batches = first, 0, 0
        self._size = 0
        """Examples of a batch, as far as the loader says."""
        self._state: Any = None
        """Of the stream, when the peer left it."""
        self._stream: Any = None
        self._put_back: Callable[[], None] = lambda: None
        if said:
            self.first, self.epoch, self.batches, self._size, self._state = json.loads(said)

    def __str__(self) -> str:
        if not (self.epoch or self.batches):
            return ""
        where = [self.first, self.epoch, self.batches, self._size]
        try:
            said = json.dumps([*where, self._stream and self._stream.state_dict()])
        except (TypeError, ValueError):  # not of plain values
            said = ""
        return said if 0 < len(said) <= STATE_BYTES else json.dumps([*where, None])

    def begin(self, loader: Any) -> int:
        """Give ``loader`` the order of this epoch, from here on. Returns how many batches are yet to be
        passed over."""
        self._put_back()
        dataset = getattr(loader, "dataset", loader)
        holder, sampler = _sampled(loader)
        is_indexed = type(holder) is BatchSampler and not isinstance(dataset, IterableDataset)
        size = getattr(holder, "batch_size", None) or 1
        self.batches = self.batches * (self._size or size) // size
        self._size = size
        if is_indexed and isinstance(sampler, Sized) and 0 < len(holder) <= self.batches:
            self.end()  # it had all of them
        reseed(loader, self.epoch, self._seed_of)
        is_here = _is_of_datasets(dataset) and not getattr(loader, "num_workers", 0)
        self._stream = dataset if is_here and hasattr(dataset, "load_state_dict") else None
        state, self._state = self._state, None
        if self._stream is not None and state is not None:
            self._stream.load_state_dict(state)
            return 0
        if not is_indexed:
            return self.batches
        sampler = holder.sampler
        holder.sampler = _Rest(sampler, self.batches * size)
        self._put_back = partial(setattr, holder, "sampler", sampler)
        return 0

    def end(self) -> None:
        """The epoch is over."""
        self.epoch += 1
        self.batches = 0


class _Rest(Sampler[int]):
    """What ``sampler`` gives after the first ``skipped``."""

    def __init__(self, sampler: Any, skipped: int) -> None:
        self._sampler = sampler
        self._skipped = skipped

    def __iter__(self) -> Iterator[int]:
        return islice(self._sampler, self._skipped, None)

    def __len__(self) -> int:
        return len(self._sampler)


def warn_of_a_stream(loader: Any) -> None:
    """Warn if the order of ``loader`` is that of a stream, which ``reseed`` cannot change."""
    dataset = getattr(loader, "dataset", loader)
    part = dataset
    while part is not None and not hasattr(part, _IS_OWN):  # of what was mapped since, say, the innermost
        part = getattr(part, "_ex_iterable", None) or getattr(part, "ex_iterable", None)
    if isinstance(dataset, IterableDataset) and part is None and not isinstance(dataset, ShuffledStream):
        warnings.warn(
            "the training data is a stream, which keeps its own order: unless each peer shuffles it with a "
            "seed of its own, all train on the same batches (co2.shard(dataset, swarm) does, with a "
            "SwarmCallback in the place of the swarm, too)",
            stacklevel=3,
        )


def _is_of_datasets(dataset: Any) -> bool:
    return type(dataset).__module__.partition(".")[0] == "datasets"


def _is_plain(sampler: Any) -> bool:
    """Whether it is one of torch's that go through all of a dataset once."""
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    return type(sampler) is SequentialSampler


def _tell_epoch(part: Any, epoch: int) -> None:
    if callable(tell := getattr(part, "set_epoch", None)):
        tell(epoch)


def _rank() -> int:
    """This process's number in its torchrun group; 0 outside one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _order(length: int, seed: int) -> list[int]:
    order: list[int] = torch.randperm(
        length, generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.int64, device="cpu"
    ).tolist()
    return order


class Stopped(Exception):
    """Nobody waits for the data any more."""


_CURE = "a dataset that opens its files and connections at their first use, not before, works in any thread"


class Fetching:
    """A thread that fetches what is asked for, so that whoever asks can do something else while a stream
    stalls. It fetches one thing at a time and nothing ahead: random numbers are drawn as in a plain loop. A
    context manager.

    What only the caller's thread may use fails in that thread, by an error that names threads: sqlite3's
    connections, signal handlers, thread-locals. From then on all is fetched there, which is warned of."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._found: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._device = torch.get_default_device()  # torch keeps these by thread
        self._accelerator = current_accelerator()
        self._is_needed = True
        self._thread = threading.Thread(target=self._work, name="p2p-co2 data", daemon=True)
        self._thread.start()

    def __enter__(self) -> Fetching:
        return self

    def __exit__(self, *error: object) -> None:
        # A thread that torch works in when the interpreter ends would abort the process. A stalled one waits.
        self._asked.put(None)
        self._thread.join(REPORT_EVERY_S)

    def fetch(
        self, what: Callable[[], _T], goes_on: Callable[[float], bool], is_repeatable: bool = False
    ) -> _T:
        """What ``what`` returns or raises. While it takes long, ``goes_on`` is called with the seconds that
        passed since the last time; if it says no, ``Stopped`` is raised. ``is_repeatable``: if it fails it
        may be tried in the caller's thread."""
        if not self._is_needed:
            return what()
        self._asked.put(what)
        while True:
            try:
                found, error = self._found.get(timeout=REPORT_EVERY_S / 10)
            except queue.Empty:
                if not goes_on(REPORT_EVERY_S / 10):
                    raise Stopped from None
                continue
            if error is not None and is_repeatable:
                found = what()  # or it raises as in a plain loop
                if "thread" in str(error):  # else it was a passing fault of the source
                    self._is_needed = False
                    told = f"until_done reads the data in the loop's thread, in another it failed: {error!r}"
                    price = "while the data stalls, this peer stands still, and does not end with the run"
                    warnings.warn(f"{told}; {price}; {_CURE}", stacklevel=4)
            elif error is not None:
                if "thread" in str(error):
                    error.add_note("until_done fetches in a thread of its own; " + _CURE)
                raise error
            return found  # type: ignore[no-any-return]

    def _work(self) -> None:
        choose_accelerator(self._accelerator)
        if self._device.type != "cpu":
            torch.set_default_device(self._device)
        while (what := self._asked.get()) is not None:
            try:
                self._found.put((what(), None))
            except BaseException as error:  # it is raised where it was asked for
                self._found.put((None, error))


def passes(loader: Iterable[_T], place: Place, goes_on: Callable[[float], bool]) -> Iterator[_T]:
    """Batches of ``loader`` from ``place`` on, again and again, reseeded for each pass. Ends when
    ``goes_on``, asked while data takes long, says no. Raises ``ConfigError`` for a loader without a batch,
    and for one that cannot begin again."""
    if hasattr(loader, "__next__"):
        problem = "is an iterator, which can be gone through once; give the loader or dataset it was made of"
        raise ConfigError("until_done", "loader", problem)

    def begin() -> tuple[Iterator[_T], tuple[_T] | None]:
        batches = iter(loader)
        return batches, _next(batches)

    with Fetching() as fetching:
        while True:
            skipped = place.begin(loader)
            batches, found = fetching.fetch(begin, goes_on, is_repeatable=True)
            if found is None and not place.batches:
                problem = "has no batch: is the dataset empty, or smaller than a batch that is dropped?"
                raise ConfigError("until_done", "loader", problem)
            while found is not None:
                if skipped:
                    skipped -= 1
                else:
                    place.batches += 1
                    yield found[0]
                found = fetching.fetch(partial(_next, batches), goes_on)
            place.end()


def _next(batches: Iterator[_T]) -> tuple[_T] | None:
    for batch in batches:
        return (batch,)
    return None
