"""A peer's checkpoints: what is in one, and a folder that keeps the newest two.

Laws: a checkpoint is whole or it is not there; while a new one is being written the previous one stays; a
damaged newest one falls back to the previous, with the reason kept. A file of an abandoned future (the peer
went back to an earlier checkpoint, or began anew in the same folder) is set aside under another name and
never deleted.

Price: two checkpoints on disk (a third while one is written, and between two that are written beside
training), each about the fp32 parameters three times (live, agreed, outer momentum) and the inner optimizer.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from p2p_co2.checkpoint import tensorfile, tree
from p2p_co2.checkpoint.agreed import header_bytes, state_from_header
from p2p_co2.config import RunConfig
from p2p_co2.errors import ConfigError, EnvironmentFault, RemoteProtocolError
from p2p_co2.outer import OuterState

_FORMAT = "p2p-co2 checkpoint 1"
_KEPT = 2
_PIECE = 1 << 18
"""Values that are read at once of what is not a tensor."""
_Loaded = TypeVar("_Loaded")


class Values(Protocol):
    """fp32 [n], read by slices: a tensor, or what makes one piece after the other."""

    def __len__(self) -> int: ...
    def __getitem__(self, at: slice, /) -> Tensor: ...


@dataclass(frozen=True)
class Checkpoint:
    """Everything that a peer needs to go on as if it had never stopped.

    ``run_config_json``: ``RunConfig.canonical_bytes`` as text. ``plan_digest``: of the ``FragmentPlan``, 32
    bytes. ``states``: the agreed state per fragment. ``params``, ``buffers``: the live module's, by name.
    ``optimizer``: the inner optimizer's ``state_dict()``. ``position`` in rounds. ``residuals``: error
    feedback per fragment. ``passed_over``, set by ``load``: newer files that were damaged, and how.

    Tensors are held, not copied. A list of ``states`` is emptied by ``Saving``, which lets each one go when
    it is written: the swarm may replace them meanwhile.
    """

    run_config_json: str
    plan_digest: bytes
    states: Sequence[OuterState]
    params: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    optimizer: Mapping[str, Any]
    position: float
    inner_steps: int
    tokens: int
    residuals: Mapping[int, Values] = field(default_factory=dict)
    passed_over: tuple[str, ...] = ()


@dataclass(frozen=True)
class Agreed:
    """What the swarm agreed on, enough to sample or evaluate: no live parameters, no optimizer.

    Rebuild the module with the recipe, plan its fragments, compare ``plan_digest``, and load
    ``states[i].params`` as fragment i.
    """

    run: RunConfig
    plan_digest: bytes
    states: tuple[OuterState, ...]
    buffers: Mapping[str, Tensor]
    position: float
    inner_steps: int
    tokens: int
    path: Path
    passed_over: tuple[str, ...] = ()


class Saving:
    """A checkpoint on its way into ``folder``. When this returns, what training changes (``params``,
    ``buffers``, ``optimizer``) is in the file's pages; ``finish`` adds the rest and makes it whole, on any
    thread. ``give_up`` otherwise.

    Raises ``EnvironmentFault`` if the disk is full or the folder not writable (the earlier checkpoints
    stay), ``ConfigError`` if the optimizer's state cannot be saved without pickle.
    """

    def __init__(self, folder: Path, checkpoint: Checkpoint) -> None:
        self._folder = folder
        self._path = folder / f"state-{checkpoint.inner_steps:012d}.safetensors"
        self._agreed = {
            f"agreed.{index}.{what}": values
            for index, state in enumerate(checkpoint.states)
            for what, values in (("params", state.params), ("momentum", state.momentum))
        }
        self._fragments = len(checkpoint.states)
        self._residuals = {f"residual.{index}": values for index, values in checkpoint.residuals.items()}
        optimizer_tensors: list[Tensor] = []
        optimizer = tree.flatten(checkpoint.optimizer, optimizer_tensors)
        changing = {f"live.{name}": value for name, value in checkpoint.params.items()}
        changing |= {f"buffer.{name}": value for name, value in checkpoint.buffers.items()}
        changing |= {f"optimizer.{index}": value for index, value in enumerate(optimizer_tensors)}
        metadata = {
            "format": _FORMAT,
            "run": checkpoint.run_config_json,
            "plan": checkpoint.plan_digest.hex(),
            "states": json.dumps([header_bytes(state).hex() for state in checkpoint.states]),
            "optimizer": json.dumps(optimizer),
            "position": checkpoint.position.hex(),
            "inner_steps": str(checkpoint.inner_steps),
            "tokens": str(checkpoint.tokens),
        }
        if isinstance(checkpoint.states, list):
            checkpoint.states.clear()
        shapes = {
            name: torch.empty(len(values), dtype=torch.float32, device="meta")
            for name, values in self._residuals.items()
        }
        self._writing = tensorfile.Writing(self._path, self._agreed | shapes | changing, metadata)
        self._writing.put(changing)

    def add(self, name: str, start: int, values: Tensor) -> None:
        """Add ``values`` (fp32 [n]) to the live parameter ``name``, from its element ``start`` on, as it is
        saved; rounded once to its dtype."""
        self._writing.change(f"live.{name}", start, start + values.numel(), lambda saved: saved.add_(values))

    def put_agreed(self, fragment: int) -> None:
        """Write the agreed state and the residual of a fragment, and let them go: nobody's memory is needed
        after it. One thread at a time."""
        for name in (f"agreed.{fragment}.params", f"agreed.{fragment}.momentum"):
            if name in self._agreed:
                self._writing.put({name: self._agreed.pop(name)})
        name = f"residual.{fragment}"
        values = self._residuals.pop(name, None)
        for start in range(0, len(values) if values is not None else 0, _PIECE):
            assert values is not None
            self._writing.put_piece(name, start, values[start : start + _PIECE])

    def finish(self, keep_spare: bool = False) -> Path:
        """Write the rest; returns the file. Then the newest two are kept, and with ``keep_spare`` the one
        before them (or as many zeros) for the next checkpoint to be written over, under its temporary
        name: its pages are in memory."""
        for fragment in range(self._fragments):
            self.put_agreed(fragment)
        self._writing.finish()
        _prune(self._folder, self._path, keep_spare)
        if keep_spare:
            tensorfile.reserve(self._folder, self._writing.size_bytes)
        return self._path

    def give_up(self) -> None:
        """Leave nothing of it behind."""
        self._agreed.clear()
        self._residuals.clear()
        self._writing.give_up()


def save(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write ``checkpoint`` into ``folder`` and keep the newest two; returns the file. Raises as ``Saving``,
    in one go."""
    return Saving(folder, checkpoint).finish()


def load(folder: Path) -> Checkpoint:
    """The newest whole checkpoint in ``folder``.

    Raises ``ConfigError`` if there is none, ``EnvironmentFault`` if there is none that this machine would
    read.
    """

    def build(path: Path, passed_over: tuple[str, ...]) -> Checkpoint:
        tensors, metadata = tensorfile.read(path, lambda name: True)
        parts = _parts(tensors, metadata)
        optimizer_tensors = [
            tensors[f"optimizer.{index}"] for index in range(len(_of(tensors, "optimizer.")))
        ]
        return Checkpoint(
            run_config_json=metadata["run"],
            params=_of(tensors, "live."),
            optimizer=tree.unflatten(json.loads(metadata["optimizer"]), optimizer_tensors),
            residuals={int(index): value for index, value in _of(tensors, "residual.").items()},
            passed_over=passed_over,
            **parts,
        )

    return _newest(folder, build, ", or start without resuming")


def load_agreed(folder: Path) -> Agreed:
    """The agreed parameters of the newest whole checkpoint in ``folder``, or of the one file that
    ``folder`` names.

    Memory: the agreed state only. Raises as ``load``, and ``ConfigError`` if the run's settings are of
    another version.
    """

    def build(path: Path, passed_over: tuple[str, ...]) -> Agreed:
        tensors, metadata = tensorfile.read(path, lambda name: name.startswith(("agreed.", "buffer.")))
        parts = _parts(tensors, metadata)
        run = RunConfig.from_canonical_bytes(metadata["run"].encode())
        return Agreed(run=run, path=path, passed_over=passed_over, **parts)

    return _newest(folder, build)


def _parts(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, Any]:
    """The fields that ``Checkpoint`` and ``Agreed`` share."""
    if metadata.get("format") != _FORMAT:
        raise tensorfile.Damaged("not a checkpoint of this version")
    headers = [bytes.fromhex(header) for header in json.loads(metadata["states"])]
    return {
        "states": tuple(
            state_from_header(header, tensors[f"agreed.{index}.params"], tensors[f"agreed.{index}.momentum"])
            for index, header in enumerate(headers)
        ),
        "plan_digest": bytes.fromhex(metadata["plan"]),
        "buffers": _of(tensors, "buffer."),
        "position": float.fromhex(metadata["position"]),
        "inner_steps": int(metadata["inner_steps"]),
        "tokens": int(metadata["tokens"]),
    }


def _of(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)}


def _newest(folder: Path, build: Callable[[Path, tuple[str, ...]], _Loaded], otherwise: str = "") -> _Loaded:
    """The newest whole checkpoint; ``otherwise``: what else there is to do, in the words of the error."""
    passed_over: list[str] = []
    refused: EnvironmentFault | None = None
    for path in _candidates(folder):
        try:
            return build(path, tuple(passed_over))
        except EnvironmentFault as error:  # a bad sector need not have hit the one before it, too
            refused = refused or error
            passed_over.append(f"{path.name}: {error}")
        except tensorfile.Damaged as error:
            passed_over.append(f"{path.name}: {error}")
        except (RemoteProtocolError, ValueError, KeyError, IndexError, TypeError) as error:
            # The digest was right, so somebody wrote this; it is not ours to read all the same.
            passed_over.append(f"{path.name}: its content is not a checkpoint ({error})")
    if refused is not None:
        raise refused
    problem = "no checkpoint there"
    if passed_over:
        problem = "no whole checkpoint there: " + "; ".join(passed_over)
    fix = f"give a peer's checkpoint folder, such as runs/peer/checkpoint{otherwise}"
    raise ConfigError(str(folder), "", f"{problem}; {fix}")


def _candidates(folder: Path) -> Iterator[Path]:
    """Newest first."""
    if folder.is_file():
        yield folder
        return
    try:
        yield from sorted(folder.glob("state-*.safetensors"), reverse=True)
    except OSError as error:
        raise EnvironmentFault(f"cannot read {folder}: {error.strerror}; check its permissions") from error


def _prune(folder: Path, written: Path, keep_spare: bool) -> None:
    """Keep ``written`` and the newest before it; set aside what claims to be newer.

    A file that cannot be removed is left: it costs space, not correctness. One that somebody still reads, or
    whose content a copy shares (a hard link), is not written over.
    """
    older = []
    for path in _candidates(folder):
        if path > written:
            with contextlib.suppress(OSError):
                path.replace(path.with_suffix(".set-aside"))
        elif path < written:
            older.append(path)
    for path in older[_KEPT - 1 :]:
        with contextlib.suppress(OSError):
            if keep_spare:
                tensorfile.reuse(path)
            else:
                path.unlink()
