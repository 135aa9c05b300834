"""Tensors as a folder of small safetensors files, and a manifest that names them with their digests.

    writing = Writing(folder / "state-1", {"key": "word"})
    writing.put({"weight": weight})                # any number of times
    writing.finish()                               # or give_up
    tensors, metadata = read(folder / "state-1", lambda name: True)

Each tensor lies flat, cut into pieces ``START:NAME`` of at most ``PART_BYTES``. ``manifest.json`` has dtypes,
shapes, metadata, and the sha256 of each part. Any safetensors reader opens the parts.

Laws: a folder appears under its name whole or not at all. One whose bytes changed in any place is refused.
Reading never runs code, and allocates no more than lies on the disk. Price: a part of ``PART_BYTES`` three
times in memory.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import Parameter

from p2p_co2.errors import ConfigError, EnvironmentFault
from p2p_co2.tensors.sharding import is_sharded

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
        torch.int8, torch.uint8, torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn,
        torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.complex64,
    )
}  # fmt: skip
"""By name: what can be saved."""
_AS_BYTES = ("uint16", "uint32", "uint64", "float8", "complex")
"""How dtypes begin that not every version of the library knows."""
MANIFEST = "manifest.json"
TEMPORARY = "state.part"
PART_BYTES = 16 << 20
"""Of a part's values."""
_MOST_PIECES = 4096
"""Of a part: their names are its header."""
_MOST_PART_BYTES = 2 * PART_BYTES
"""Of a part's file, with its header."""
_MOST_MANIFEST_BYTES = 16 << 20
"""For some 100,000 tensors: reading takes up to 17 times as much memory."""
_MOST_DIMENSIONS = 64
_MOST_NUMEL = 1 << 48
"""With each extent of 0 taken as 1: beside one the sizes of files do not bound the others."""
NOT_OURS = (
    ValueError, LookupError, TypeError, AttributeError, RecursionError, ArithmeticError, MemoryError,
)  # fmt: skip
"""What reading words of others raises where they say what we never write."""


class Values(Protocol):
    """fp32 [n], read by slices: a tensor, or what makes one piece after the other."""

    def __len__(self) -> int: ...
    def __getitem__(self, at: slice, /) -> Tensor: ...


class Damaged(Exception):
    """It is not what was written: torn, changed, or not ours. The text says how we know."""


def trouble_with(tensor: Tensor) -> str:
    """Why ``tensor`` cannot be saved; "" if it can."""
    if type(tensor) not in {Tensor, Parameter} and not is_sharded(tensor):
        return f"a {type(tensor).__name__}"
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        return f"a tensor of layout {str(tensor.layout).removeprefix('torch.')}"
    if tensor.dtype not in DTYPES.values():
        return f"a tensor of {str(tensor.dtype).removeprefix('torch.')}"
    return "a tensor without values" if tensor.is_meta else ""


class Writing:
    """On its way to the folder ``path``, which is not there yet. One thread at a time. What an earlier one
    has left under the temporary name goes.

    Raises ``ConfigError`` for a tensor that cannot be saved, ``EnvironmentFault``, as every method, if this
    machine refuses; nothing is left then.
    """

    def __init__(self, path: Path, metadata: Mapping[str, str]) -> None:
        self._path = path
        self._place = path.parent / TEMPORARY
        self._manifest: dict[str, Any] = {"metadata": dict(metadata), "tensors": {}, "parts": []}
        with self._faults():
            if self._place.is_dir():
                shutil.rmtree(self._place)
            self._place.unlink(missing_ok=True)
            self._place.mkdir(parents=True)

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Write their values as they are now."""
        part: dict[str, Tensor] = {}
        size = 0
        for name, tensor in tensors.items():
            if trouble := trouble_with(tensor):
                raise ConfigError("checkpoint", name, f"{trouble} cannot be saved")
            dtype = str(tensor.dtype).removeprefix("torch.")
            self._manifest["tensors"][name] = [dtype, list(tensor.shape)]
            flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
            for start, piece in _pieces(flat, tensor.element_size()):
                if part and (size + piece.nbytes > PART_BYTES or len(part) == _MOST_PIECES):
                    self._write(part)
                    part = {}
                    size = 0
                part[f"{start}:{name}"] = piece.view(torch.uint8) if dtype.startswith(_AS_BYTES) else piece
                size += piece.nbytes
        if part:
            self._write(part)

    def put_values(self, name: str, values: Values) -> None:
        """As ``put``, of what makes one piece after the other."""
        self._manifest["tensors"][name] = ["float32", [len(values)]]
        for start, piece in _pieces(values, torch.float32.itemsize):
            self._write({f"{start}:{name}": piece})

    def _write(self, part: Mapping[str, Tensor]) -> None:
        if len(part) > 1:  # the library refuses tensors that share memory, as tied ones do
            part = {name: piece.clone() for name, piece in part.items()}
        parts = self._manifest["parts"]
        file = self._place / _part_name(len(parts))
        with self._faults():
            try:
                safetensors.torch.save_file(dict(part), file)  # without a copy in memory
            except SafetensorError as error:  # its words alone say what the system said
                number = re.search(r"os error (\d+)", str(error))
                raise OSError(int(number[1]) if number else errno.EIO, str(error)) from error
            with file.open("rb") as written:
                parts.append([file.stat().st_size, hashlib.file_digest(written, "sha256").hexdigest()])

    def finish(self) -> None:
        """Let what was ``put`` appear under its name."""
        text = json.dumps(_sealed(self._manifest)).encode()
        if len(text) > _MOST_MANIFEST_BYTES:
            count = len(self._manifest["tensors"])
            raise ConfigError("checkpoint", "", f"{count} tensors are too many for one checkpoint; use fewer")
        with self._faults():
            (self._place / MANIFEST).write_bytes(text)
            for name in (*map(_part_name, range(len(self._manifest["parts"]))), MANIFEST, "."):
                _sync(self._place / name)  # late: what is to be written is held until it is
            self._place.rename(self._path)
            _sync(self._path.parent)

    def give_up(self) -> None:
        """Leave nothing behind. May be called twice, and after ``finish``."""
        shutil.rmtree(self._place, ignore_errors=True)

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.give_up()
            raise _write_fault(self._path, self._place, error) from error


def read(path: Path, wanted: Callable[[str], bool]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors whose name is ``wanted`` (host memory), and the metadata. Every part is checked.

    Raises ``Damaged`` if it is not what was written, ``EnvironmentFault`` if this machine refuses to read it.
    """
    try:
        return _read(path, wanted)
    except OSError as error:
        raise EnvironmentFault(f"cannot read {path}: {error.strerror}; check its permissions") from error


def _pieces(flat: Values, itemsize: int) -> Iterator[tuple[int, Tensor]]:
    most = PART_BYTES // itemsize
    for start in range(0, len(flat), most):
        yield start, flat[start : start + most]


def _part_name(number: int) -> str:
    return f"part-{number:05d}.safetensors"


def _sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """With a digest over the rest of it."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return rest | {"sha256": hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()}


def _sync(path: Path) -> None:
    """Make it survive a power cut: a file's values, a folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_fault(path: Path, place: Path, error: OSError) -> EnvironmentFault:
    left = f"; {place} could not be removed" if place.exists() else ""
    if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
        problem = "the disk is full; free some space or give another folder"
    elif error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        problem = "no permission to write there; change the folder's owner or mode, or give another folder"
    else:
        problem = f"{error.strerror or error}; check the folder or give another one"
    return EnvironmentFault(
        f"cannot write the checkpoint {path}: {problem} (earlier checkpoints are whole){left}"
    )


def _read(path: Path, wanted: Callable[[str], bool]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """It may be anybody's, so nothing in it is believed before it is checked."""
    metadata, rows, parts = _parse(_content(path / MANIFEST, _MOST_MANIFEST_BYTES))
    for number, (size, _) in enumerate(parts):
        if not _file(path / _part_name(number)).stat().st_size == size <= _MOST_PART_BYTES:
            raise Damaged(f"{_part_name(number)} is not what was written: another size")
    room = sum(size for size, _ in parts)
    kept = {name: row for name, row in rows.items() if wanted(name)}
    if sum(math.prod(shape) * dtype.itemsize for dtype, shape in kept.values()) > room:
        raise Damaged("its tensors are larger than its parts")
    try:
        tensors = {name: torch.empty(row[1], dtype=row[0], device="cpu") for name, row in kept.items()}
    except RuntimeError:
        problem = f"no memory for the {room >> 20} MiB of {path}; free some, or use a larger machine"
        raise EnvironmentFault(problem) from None
    filled = dict.fromkeys(tensors, 0)
    for number, (size, digest) in enumerate(parts):
        data = _content(path / _part_name(number), _MOST_PART_BYTES)
        if len(data) != size or hashlib.sha256(data).hexdigest() != digest:
            raise Damaged(f"{_part_name(number)} is not what was written: another sha256")
        for name, start, piece in _pieces_of(data):
            if (out := tensors.get(name)) is not None:
                flat = out.view(-1).view(torch.uint8)
                at = filled[name]
                if start * out.itemsize != at or at + len(piece) > len(flat):
                    raise Damaged(f"a piece of {name} is not where it should be")
                flat[at : at + len(piece)] = piece
                filled[name] += len(piece)
    if torn := [name for name, tensor in tensors.items() if filled[name] != tensor.nbytes]:
        raise Damaged(f"a piece of {torn[0]} is missing")
    return tensors, metadata


def _file(path: Path) -> Path:
    if not path.is_file():
        raise Damaged(f"it has no file {path.name}")
    return path


def _content(path: Path, most_bytes: int) -> bytes:
    with _file(path).open("rb") as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise Damaged(f"{path.name} is larger than one can be")
    return data


def _pieces_of(data: bytes) -> Iterator[tuple[str, int, Tensor]]:
    """Name, first element and bytes of each piece of a part."""
    try:
        for name, piece in sorted(safetensors.torch.load(data).items(), key=lambda one: _start(one[0])):
            yield name.partition(":")[2], _start(name), piece.reshape(-1).view(torch.uint8)
    except (SafetensorError, ValueError, KeyError) as error:
        raise Damaged(f"a part is not readable ({error})") from error


def _start(name: str) -> int:
    return int(name.partition(":")[0])


def _parse(
    text: bytes,
) -> tuple[dict[str, str], dict[str, tuple[torch.dtype, tuple[int, ...]]], list[tuple[int, str]]]:
    """Metadata; dtype and shape of each tensor; size and digest of each part."""
    try:
        manifest = json.loads(text)
        if manifest != _sealed(manifest):
            raise Damaged("its manifest is not what was written")
        metadata = manifest["metadata"]
        if not all(isinstance(value, str) for value in metadata.values()):
            raise Damaged("its metadata is not ours")
        rows = {}
        for name, (dtype, shape) in manifest["tensors"].items():
            is_whole = all(type(extent) is int and extent >= 0 for extent in shape)
            if (
                len(shape) > _MOST_DIMENSIONS
                or not is_whole
                or math.prod(n or 1 for n in shape) > _MOST_NUMEL
            ):
                raise Damaged(f"{name} has an impossible shape")
            rows[name] = DTYPES[dtype], tuple(shape)
        return metadata, rows, [(int(size), str(digest)) for size, digest in manifest["parts"]]
    except NOT_OURS as error:
        raise Damaged(f"its manifest is not readable ({type(error).__name__})") from error
