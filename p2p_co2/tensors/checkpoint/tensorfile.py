"""One safetensors file, with a sha256 over all of it inside.

Laws: a file appears under its name whole or not at all (temporary name, fsync, rename, fsync of the
folder); a file whose bytes changed in any place is refused; reading never runs code. Any safetensors reader
opens these files: 8 bytes of header length, a JSON header (dtype, shape and offsets per tensor, strings
under ``__metadata__``), then the values.

Why our own writer and reader of a public format: the library's writer gives neither the digest of what it
writes nor an fsync before the rename, and in older versions holds a second copy of everything in memory;
its reader would be a second pass after the digest, over bytes that may have changed since. Here one tensor
at a time is in flight, once.

A file is written in any order (``Writing``), tensor after tensor as they can be had; the digest, which reads
them again, and the disk come at the end.

The digest stands in the header, so it covers the header with 64 zeros in its own place. Price: sha256 of
everything on both ways, about 0.5 to 2 GB/s.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from p2p_co2.errors import ConfigError, EnvironmentFault
from p2p_co2.tensors.sharding import is_sharded

_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
}
NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_DIGEST_KEY = "sha256"
_NO_DIGEST = "0" * 64
_MAX_HEADER_BYTES = 16 << 20
"""Of some 100,000 tensors. Less than the format allows, since reading takes up to 17 times as much memory."""
_MAX_DIMENSIONS = 64
_MAX_NUMEL = 1 << 48
"""With each extent of 0 taken as 1: beside one the file's size does not bound the others."""
_SCRATCH_BYTES = 1 << 20
TEMPORARY = "state.part"


class Damaged(Exception):
    """The file is not what was written: torn, changed, or not ours. The text says how we know."""


class _Entry(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    numel: int


def trouble_with(tensor: Tensor) -> str:
    """Why the format cannot hold ``tensor``; "" if it can."""
    if type(tensor) not in {Tensor, Parameter} and not is_sharded(tensor):
        return f"a {type(tensor).__name__}"
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        return f"a tensor of layout {str(tensor.layout).removeprefix('torch.')}"
    if tensor.dtype not in NAMES:
        return f"a tensor of {str(tensor.dtype).removeprefix('torch.')}"
    return "a tensor without values" if tensor.is_meta else ""


class Writing:
    """A file on its way to ``path``: every tensor once by ``put`` or ``put_piece``, then ``finish``; or
    ``give_up``. One thread at a time.

    ``tensors`` (any device, layout) gives dtypes and shapes; it is not kept. What is left under the temporary
    name is written over.

    Raises ``ConfigError`` for a tensor that the format cannot hold, ``EnvironmentFault``, as every method, if
    this machine refuses; the temporary file is gone then, and what was there before is untouched.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        # Widest dtypes first, as the format asks, so that every tensor lies aligned.
        order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
        self._header = _header(order, tensors, metadata)
        self._path = path
        self._temporary = path.parent / TEMPORARY
        self._begins: dict[str, int] = {}
        """Where each tensor's values begin in the file."""
        at = len(self._header)
        for name in order:
            self._begins[name] = at
            at += tensors[name].numel() * tensors[name].element_size()
        self.size_bytes = at
        with self._faults():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        with self._faults():
            os.ftruncate(self._file, self.size_bytes)
            _write_at(self._file, memoryview(self._header), 0)

    def put(self, name: str, values: Tensor) -> None:
        """A tensor's values, as they are now."""
        self.put_piece(name, 0, values.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1))

    def put_piece(self, name: str, start: int, values: Tensor) -> None:
        """Some values of a tensor ([n], host memory, of its dtype), from its element ``start`` on."""
        with self._faults():
            _write_at(self._file, _view(values), self._begins[name] + start * values.element_size())

    def finish(self) -> None:
        """Seal what was ``put``, and let it appear under its name."""
        with self._faults():
            digest = hashlib.sha256(self._header)
            scratch = memoryview(bytearray(_SCRATCH_BYTES))
            for at in range(len(self._header), self.size_bytes, _SCRATCH_BYTES):
                piece = scratch[: min(_SCRATCH_BYTES, self.size_bytes - at)]
                _read_at(self._file, piece, at)
                digest.update(piece)
            sealed = memoryview(digest.hexdigest().encode())
            _write_at(self._file, sealed, self._header.index(_NO_DIGEST.encode()))
            os.fsync(self._file)
            self._temporary.replace(self._path)
            _sync_folder(self._path.parent)
            self._close()

    def give_up(self) -> None:
        """Leave nothing behind. May be called twice, and after ``finish``."""
        if self._file >= 0:
            self._close()
            with contextlib.suppress(OSError):
                self._temporary.unlink(missing_ok=True)

    def _close(self) -> None:
        file = self._file
        self._file = -1
        os.close(file)

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if getattr(self, "_file", -1) >= 0:
                self._close()
            raise _write_fault(self._path, self._temporary, error) from error


def read(path: Path, wanted: Callable[[str], bool]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors whose name is ``wanted`` (host memory), and the metadata. The whole file is checked in
    any case.

    Raises ``Damaged`` if the file is not what was written, ``EnvironmentFault`` if this machine refuses to
    read it.
    """
    try:
        with path.open("rb") as file:
            return _read(file, os.fstat(file.fileno()).st_size, wanted)
    except OSError as error:
        raise EnvironmentFault(f"cannot read {path}: {error.strerror}; check its permissions") from error


def _header(order: list[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    # The digest goes first, so that its place is the first run of zeros whatever the rest says.
    table: dict[str, Any] = {"__metadata__": {_DIGEST_KEY: _NO_DIGEST, **metadata}}
    at = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in NAMES or tensor.layout != torch.strided:
            raise ConfigError("checkpoint", name, f"{trouble_with(tensor)} cannot be saved")
        stop = at + tensor.numel() * tensor.element_size()
        table[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER_BYTES:
        raise ConfigError("checkpoint", "", f"{len(order)} tensors are too many for one file; use fewer")
    return len(text).to_bytes(8, "little") + text


def _view(flat: Tensor) -> memoryview:
    if not flat.numel():
        return memoryview(b"")
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy().data  # one value may have any stride


def _write_at(file: int, piece: memoryview, at: int) -> None:
    """All of ``piece``; a call may take less than it was given."""
    while piece:
        taken = os.pwrite(file, piece, at)
        piece = piece[taken:]
        at = at + taken


def _read_at(file: int, into: memoryview, at: int) -> None:
    while into:
        taken = os.preadv(file, [into], at)
        if not taken:
            raise OSError(errno.EIO, "the file was cut while it was written")
        into = into[taken:]
        at = at + taken


def _sync_folder(folder: Path) -> None:
    """Make the rename itself survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_fault(path: Path, temporary: Path, error: OSError) -> EnvironmentFault:
    try:
        temporary.unlink(missing_ok=True)
    except OSError:
        left = f"; {temporary} could not be removed"
    else:
        left = ""
    if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
        problem = "the disk is full; free some space or give another folder"
    elif error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        problem = "no permission to write there; change the folder's owner or mode, or give another folder"
    else:
        problem = f"{error.strerror or error}; check the folder or give another one"
    return EnvironmentFault(
        f"cannot write the checkpoint {path}: {problem} (earlier checkpoints are whole){left}"
    )


def _read(
    file: BufferedReader, size: int, wanted: Callable[[str], bool]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    length_bytes = file.read(8)
    length = int.from_bytes(length_bytes, "little")
    if len(length_bytes) < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
        raise Damaged("shorter than its header, or its header is too large")
    text = file.read(length)
    entries, metadata = _parse(text)
    promised = 8 + length + sum(entry.numel * entry.dtype.itemsize for entry in entries)
    if size != promised:
        raise Damaged(f"{size} bytes, not {promised}")
    expected = metadata.pop(_DIGEST_KEY)
    digest = hashlib.sha256(length_bytes + text.replace(expected.encode(), _NO_DIGEST.encode(), 1))
    tensors: dict[str, Tensor] = {}
    scratch = torch.empty(_SCRATCH_BYTES, dtype=torch.uint8, device="cpu")
    for entry in entries:
        if wanted(entry.name):
            tensors[entry.name] = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
            pieces: Iterator[Tensor] = iter((tensors[entry.name].reshape(-1).view(torch.uint8),))
        else:
            pieces = _scratches(scratch, entry.numel * entry.dtype.itemsize)
        for piece in pieces:
            view = piece.numpy().data
            if piece.numel() and file.readinto(view) != len(view):
                raise Damaged("shorter than its header says")
            digest.update(view if piece.numel() else b"")
    if digest.hexdigest() != expected:
        raise Damaged("its sha256 is not the one written in it")
    return tensors, metadata


def _scratches(scratch: Tensor, count: int) -> Iterator[Tensor]:
    for start in range(0, count, _SCRATCH_BYTES):
        yield scratch[: min(_SCRATCH_BYTES, count - start)]


def _parse(text: bytes) -> tuple[list[_Entry], dict[str, str]]:
    """The header's entries in file order. It may be anybody's file, so nothing in it is believed before it
    is checked."""
    try:
        table = json.loads(text)
        metadata = table.pop("__metadata__")
        if not all(isinstance(value, str) for value in metadata.values()) or len(metadata[_DIGEST_KEY]) != 64:
            raise Damaged("its metadata is not ours")
        entries = []
        at = 0
        for name, row in table.items():
            dtype = _DTYPES[row["dtype"]]
            shape = tuple(row["shape"])
            is_whole = all(type(extent) is int and extent >= 0 for extent in shape)
            if len(shape) > _MAX_DIMENSIONS or not is_whole or math.prod(n or 1 for n in shape) > _MAX_NUMEL:
                raise Damaged(f"{name} has an impossible shape")
            numel = math.prod(shape)
            if row["data_offsets"] != [at, at + numel * dtype.itemsize]:
                raise Damaged(f"{name} does not follow the tensor before it")
            at += numel * dtype.itemsize
            entries.append(_Entry(name, dtype, shape, numel))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"its header is not readable ({type(error).__name__})") from error
    return entries, metadata
