"""A peer's checkpoints: what is in one, and a folder that keeps the newest two.

What is agreed, the own optimizer and the buffers. No live parameters, since a resumed peer goes on from the
agreed ones, and no frozen ones.

Laws: a checkpoint is whole or it is not there, and the previous one stays while it is written. A damaged
newest one falls back to the previous, with the reason kept. Where a peer went back or began anew, the newest
of the abandoned future is set aside under another name. It goes when the peer has come as far again.

Price: two checkpoints on disk, a third while one is written, perhaps one that is set aside. Each holds the
fp32 parameters twice (agreed, outer momentum) and the inner optimizer. A resumed peer has lost what it
learned since its last offers, less than a round's work.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from p2p_co2.config import RunConfig
from p2p_co2.errors import ConfigError, EnvironmentFault, RemoteProtocolError
from p2p_co2.tensors.checkpoint import parts, tree
from p2p_co2.tensors.checkpoint.agreed import header_bytes, state_from_header
from p2p_co2.tensors.outer import AgreedState

_FORMAT = "p2p-co2 checkpoint 3"
_KEPT = 2
_SET_ASIDE = ".set-aside"
_NAME = re.compile(r"state-(\d{12})(?:-(\d{3,18})|\.safetensors)")
"""What we write, and earlier versions wrote. Other names are the user's own: neither read nor removed."""
_OTHER_VERSION = "not a checkpoint of this version; p2p-co2 of its time goes on from it"


class Owned(NamedTuple):
    """A parameter of an inner optimizer's. ``name``: "" if it is none of the model's."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class InnerOptimizer:
    """What an inner optimizer's state belongs to. ``kind``: its class; ``groups``: the parameters of each."""

    kind: str
    groups: tuple[tuple[Owned, ...], ...]


@dataclass(frozen=True)
class Checkpoint:
    """Everything that a peer needs to go on.

    ``run_config_json``: ``RunConfig.canonical_bytes`` as text. ``plan_digest``: of the ``FragmentPlan``, 32
    bytes. ``states``: the agreed state per fragment. ``buffers``: the module's, by name. ``optimizer``: the
    inner optimizer's ``state_dict()``, ``inner`` what it belongs to. ``parameters``: names and shapes of
    those that are trained, in order. ``position`` in rounds. ``residuals``: error feedback per fragment.
    ``past``: digests of the agreed state's earlier versions, per fragment. ``stage``: the one whose model
    this is, in a run with stages; None for the whole model. ``data``: where the peer is in its data, as the
    program says it. Names are plain: without wrappers' prefixes.

    Set by ``load``: ``path``, its folder, and ``passed_over``, newer ones that were damaged, and how.

    To sample or evaluate: rebuild the module with the recipe of ``run``, plan its fragments, compare
    ``plan_digest``, and load ``states[i].params`` as fragment i. Tensors are held, not copied.
    """

    run_config_json: str
    plan_digest: bytes
    states: Sequence[AgreedState]
    buffers: Mapping[str, Tensor]
    optimizer: Mapping[str, Any]
    position: float
    inner_steps: int
    tokens: int
    inner: InnerOptimizer = InnerOptimizer("", ())
    parameters: tuple[tuple[str, tuple[int, ...]], ...] = ()
    residuals: Mapping[int, parts.Values] = field(default_factory=dict)
    past: Sequence[Mapping[int, bytes]] = ()
    stage: int | None = None
    data: str = ""
    path: Path = Path()
    passed_over: tuple[str, ...] = ()

    @property
    def run(self) -> RunConfig:
        """Raises ``ConfigError`` if the run's settings are of another version."""
        return RunConfig.from_canonical_bytes(self.run_config_json.encode())

    @property
    def holds(self) -> str:
        """How much of the model is in it, in words."""
        return "the whole model" if self.stage is None else f"stage {self.stage}"


class Saving:
    """A checkpoint on its way into ``folder``: its ``changing_parts`` come by ``put``, the agreed states by
    ``put_agreed``, then ``finish`` makes it whole; ``give_up`` otherwise. One thread at a time. ``said``: of
    ``checkpoint.optimizer``.

    Raises ``EnvironmentFault`` if the disk is full or the folder not writable (the earlier checkpoints
    stay), ``ConfigError`` for a buffer that cannot be saved.
    """

    def __init__(self, folder: Path, checkpoint: Checkpoint, said: tree.SavedTree) -> None:
        self._folder = folder
        self._path = _new_path(folder, checkpoint.inner_steps)
        self._states = dict(enumerate(checkpoint.states))
        self._residuals = dict(checkpoint.residuals)
        metadata = {
            "format": _FORMAT,
            "run": checkpoint.run_config_json,
            "plan": checkpoint.plan_digest.hex(),
            "states": json.dumps([header_bytes(state).hex() for state in checkpoint.states]),
            "parameters": json.dumps(checkpoint.parameters),
            "optimizer": json.dumps(said.tree),
            "inner": json.dumps([checkpoint.inner.kind, checkpoint.inner.groups]),
            "position": checkpoint.position.hex(),
            "inner_steps": str(checkpoint.inner_steps),
            "tokens": str(checkpoint.tokens),
            "data": checkpoint.data,
            "past": json.dumps([{at: one.hex() for at, one in past.items()} for past in checkpoint.past]),
        }
        if checkpoint.stage is not None:
            metadata["stage"] = str(checkpoint.stage)
        self._writing = parts.Writing(self._path, metadata)
        self.put = self._writing.put
        """Write the values of some of the ``changing_parts``, as they are now."""

    def put_agreed(self, is_read: Callable[[int, int], None] = lambda fragment, version: None) -> None:
        """Write the agreed states and the residuals, and let them go; ``is_read`` hears which was written."""
        for index in list(self._states):
            state = self._states.pop(index)
            self.put({f"agreed.{index}.params": state.params, f"agreed.{index}.momentum": state.momentum})
            is_read(index, state.version)
        for index in list(self._residuals):
            self._writing.put_values(f"residual.{index}", self._residuals.pop(index))

    def finish(self) -> Path:
        """Write the rest; returns its folder. Then the newest two are kept."""
        self.put_agreed()
        self._writing.finish()
        _prune(self._folder, self._path)
        return self._path

    def give_up(self) -> None:
        """Leave nothing of it behind."""
        self._states.clear()
        self._residuals.clear()
        self._writing.give_up()


def changing_parts(checkpoint: Checkpoint, said: tree.SavedTree) -> list[Mapping[str, Tensor]]:
    """What changes with training, by its name there: what stands in one part belongs together."""
    buffers = [{f"buffer.{name}": values} for name, values in checkpoint.buffers.items()]
    return [*buffers, *said.tensors]


def save(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write ``checkpoint`` into ``folder`` and keep the newest two; returns where. Raises as ``Saving``,
    in one go."""
    said = tree.say(checkpoint.optimizer)
    saving = Saving(folder, checkpoint, said)
    saving.put({name: values for part in changing_parts(checkpoint, said) for name, values in part.items()})
    return saving.finish()


def has_checkpoint(folder: Path) -> bool:
    """Whether there is one, whole or not. Raises ``EnvironmentFault``."""
    return any(True for _ in _candidates(folder))


def set_aside(folder: Path) -> None:
    """A peer begins anew: no checkpoint in ``folder`` is its own any more. Raises ``EnvironmentFault``."""
    for path in list(_candidates(folder)):
        try:
            path.replace(path.with_suffix(_SET_ASIDE))
        except OSError as error:
            problem = f"cannot rename {path}: {error.strerror}; check its permissions"
            raise EnvironmentFault(problem) from error


def load(folder: Path) -> Checkpoint:
    """The newest whole checkpoint in ``folder``.

    Raises ``ConfigError`` if there is none, ``EnvironmentFault`` if there is none that this machine would
    read.
    """
    return _newest(folder, lambda name: True, ", or begin anew (--start-over, start_over=True)")


def load_agreed(folder: Path) -> Checkpoint:
    """As ``load``, the agreed state and the buffers alone. ``folder`` may be one checkpoint itself."""
    return _newest(folder, lambda name: name.startswith(("agreed.", "buffer.")))


def _read(path: Path, wanted: Callable[[str], bool], passed_over: tuple[str, ...]) -> Checkpoint:
    if path.is_file():
        raise parts.Damaged(_OTHER_VERSION)
    tensors, metadata = parts.read(path, wanted)
    if metadata.get("format") != _FORMAT:
        raise parts.Damaged(_OTHER_VERSION)
    headers = [bytes.fromhex(header) for header in json.loads(metadata["states"])]
    optimizer = _of(tensors, "optimizer.")
    return Checkpoint(
        run_config_json=metadata["run"],
        plan_digest=bytes.fromhex(metadata["plan"]),
        states=tuple(
            state_from_header(header, tensors[f"agreed.{index}.params"], tensors[f"agreed.{index}.momentum"])
            for index, header in enumerate(headers)
        ),
        buffers=_of(tensors, "buffer."),
        optimizer=_optimizer(metadata, [optimizer[str(index)] for index in range(len(optimizer))])
        if wanted("optimizer.")
        else {},
        position=float.fromhex(metadata["position"]),
        inner_steps=int(metadata["inner_steps"]),
        tokens=int(metadata["tokens"]),
        inner=_inner(metadata),
        parameters=tuple((name, tuple(shape)) for name, shape in json.loads(metadata["parameters"])),
        residuals={int(index): value for index, value in _of(tensors, "residual.").items()},
        past=[
            {int(version): bytes.fromhex(digest) for version, digest in past.items()}
            for past in json.loads(metadata.get("past", "[]"))
        ],
        stage=int(metadata["stage"]) if "stage" in metadata else None,
        data=metadata.get("data", ""),
        path=path,
        passed_over=passed_over,
    )


def _optimizer(metadata: Mapping[str, str], tensors: Sequence[Tensor]) -> Mapping[str, Any]:
    """Empty if it holds what only another version can say: the agreed state is worth more."""
    try:
        state_dict: Mapping[str, Any] = tree.unsay(json.loads(metadata["optimizer"]), tensors)
    except ValueError:
        return {}
    return state_dict


def _inner(metadata: Mapping[str, str]) -> InnerOptimizer:
    kind, groups = json.loads(metadata["inner"])
    owned = (tuple(Owned(name, dtype, tuple(shape)) for name, dtype, shape in group) for group in groups)
    return InnerOptimizer(kind, tuple(owned))


def _of(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)}


def _newest(folder: Path, wanted: Callable[[str], bool], otherwise: str = "") -> Checkpoint:
    """The newest whole checkpoint; ``otherwise``: what else there is to do, in the words of the error."""
    passed_over: list[str] = []
    refused: EnvironmentFault | None = None
    for path in _candidates(folder):
        try:
            return _read(path, wanted, tuple(passed_over))
        except EnvironmentFault as error:  # a bad sector need not have hit the one before it, too
            refused = refused or error
            passed_over.append(f"{path.name}: {error}")
        except parts.Damaged as error:
            passed_over.append(f"{path.name}: {error}")
        except (RemoteProtocolError, *parts.NOT_OURS) as error:
            # The digest was right, so somebody wrote this; it is not ours to read all the same.
            passed_over.append(f"{path.name}: its content is not a checkpoint ({error})")
    if refused is not None:
        raise refused
    problem = "no checkpoint there"
    if passed_over:
        problem = "no whole checkpoint there: " + "; ".join(passed_over)
    fix = f"give a peer's checkpoint folder{otherwise}"
    raise ConfigError(str(folder), "", f"{problem}; {fix}")


def _candidates(folder: Path) -> Iterator[Path]:
    """Newest first. A file is what an earlier version wrote."""
    try:
        is_one = folder.is_file() or (folder / parts.MANIFEST).exists()
        found = [path for path in folder.glob("state-*") if _NAME.fullmatch(path.name)]
    except OSError as error:
        raise EnvironmentFault(f"cannot read {folder}: {error.strerror}; check its permissions") from error
    yield from [folder] if is_one else sorted(found, key=_place, reverse=True)


def _place(path: Path) -> tuple[int, int]:
    """(inner steps, number) of a checkpoint of ours, by its name."""
    name = _NAME.match(path.name)
    assert name is not None
    return int(name[1]), int(name[2] or 0)


def _new_path(folder: Path, inner_steps: int) -> Path:
    """Where nothing was written yet: two of one step are told apart by a further number."""
    name = f"state-{inner_steps:012d}-"
    taken = [_place(path)[1] for path in folder.glob(f"{name}*") if _NAME.match(path.name)]
    return folder / f"{name}{max(taken, default=0) + 1:03d}"


def _prune(folder: Path, written: Path) -> None:
    """Keep ``written`` and the newest before it, and set aside what claims to be newer. Of that keep the
    newest while it is further on than ``written``.

    What cannot be removed is left: it costs space, not correctness.
    """
    older = []
    for path in _candidates(folder):
        if _place(path) > _place(written):
            with contextlib.suppress(OSError):
                path.replace(path.with_suffix(_SET_ASIDE))
        elif path != written:
            older.append(path)
    named = [path for path in folder.glob(f"state-*{_SET_ASIDE}") if _NAME.fullmatch(path.stem)]
    aside = sorted(named, key=_place, reverse=True)
    passed = [path for path in aside if _place(path) <= _place(written)]
    for path in {*older[_KEPT - 1 :], *aside[1:], *passed}:
        if path.is_file():
            with contextlib.suppress(OSError):
                path.unlink()
        shutil.rmtree(path, ignore_errors=True)
