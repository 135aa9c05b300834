"""A trained model as a folder that others load: safetensors, and what the model's own library writes beside
them.

    write_pretrained(model, peer.agreed_parameters(), Path("out"))
    AutoModelForCausalLM.from_pretrained("out")             # of a transformers model
    safetensors.torch.load_model(model, "out/model.safetensors")         # of any other

A model that can save itself (``save_pretrained``: transformers, PEFT) does so, with the given values. It
knows its file names, its tied weights and its config. Any other becomes ``model.safetensors`` under its own
names, and ``config.json`` if its ``config`` is a dict. No library but torch and safetensors is imported here.
"""

from __future__ import annotations

import inspect
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model, save_file
from torch import Tensor, nn

from p2p_co2.errors import ConfigError, EnvironmentFault
from p2p_co2.tensors.names import named_buffers, named_modules, named_parameters, shared_names, unwrapped

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
_CARD = "README.md"
_EXTRA = "_extra_state"
_MODEL = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


def write_pretrained(
    model: nn.Module, state: Mapping[str, Tensor], folder: Path, beside: Iterable[Path] = ()
) -> None:
    """Write ``model`` with the values of ``state`` into ``folder``, which is made if need be.

    ``state``: values by plain name, any float dtype and device, such as ``Peer.agreed_parameters()``; each is
    written in the dtype of the model's parameter. What it lacks (frozen parameters, buffers) is the model's
    own. ``beside``: files, and folders whose files, are copied there too, such as a tokenizer's. The model is
    as it was afterwards.

    Raises ``ConfigError`` if ``state`` has a name or shape that the model has not, or a file of ``beside`` is
    not there. Raises ``EnvironmentFault`` if the disk refuses. Price: one copy of the parameters that are no
    fp32.
    """
    inner = unwrapped(model)
    full = {name: one for name, one in full_state(inner, state).items() if not _is_extra(name)}
    copies = [file for path in beside for file in _files_of(path)]
    with written_whole(folder) as place:
        if not saves_itself(inner):
            _write_plain(inner, full, place)
        elif takes_state(inner) and not _computes_what_it_saves(inner):
            with undistributed(inner):
                _save_pretrained(inner)(place, state_dict=full)
        else:
            with _in_place(inner, full):
                _save_pretrained(inner)(place)
        for file in copies:
            shutil.copyfile(file, place / file.name)


def read_pretrained(model: Any, folder: Path) -> nn.Module:
    """``model`` with the values that ``write_pretrained`` wrote into ``folder``; of a library that loads by
    itself (``from_pretrained``) a new one. Raises ``ConfigError`` if they are of another model."""
    try:
        if hasattr(model, "peft_config"):
            model.load_adapter(folder, model.active_adapter)
        elif callable(getattr(model, "from_pretrained", None)):
            return type(model).from_pretrained(folder)  # type: ignore[no-any-return]
        else:
            load_model(model, folder / WEIGHTS)
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise ConfigError(str(folder), "", f"is of another model than the recipe makes: {error}") from None
    return model  # type: ignore[no-any-return]


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """While entered a place for files, which come into ``folder`` when all are written, and else not at all.
    Files of the same names, and the model of an earlier save, make room. Raises ``EnvironmentFault`` if the
    disk refuses; what was in ``folder`` is as it was then."""
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".writing-", dir=folder) as made:
            place = Path(made)
            if (folder / _CARD).is_file():  # which its library edits
                shutil.copyfile(folder / _CARD, place / _CARD)
            yield place
            names = {file.relative_to(place) for file in place.rglob("*") if file.is_file()}
            if any(_MODEL.fullmatch(str(name)) for name in names):
                for old in folder.iterdir():
                    if _MODEL.fullmatch(old.name) and Path(old.name) not in names:
                        old.unlink()  # shards of an earlier save: a reader would take them for ours
            for name in names:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (place / name).replace(folder / name)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise EnvironmentFault(f"cannot write {folder}: {why}") from error
    finally:
        if is_new:
            with suppress(OSError):  # it holds the model
                folder.rmdir()


def _is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == _EXTRA


def saves_itself(model: nn.Module) -> bool:
    """Whether it has the ``save_pretrained`` that transformers, PEFT and libraries like them give."""
    return callable(getattr(model, "save_pretrained", None))


def takes_state(model: nn.Module) -> bool:
    """Whether its ``save_pretrained`` writes the values that it is given. Others (diffusers) write their
    own."""
    is_peft = hasattr(model, "peft_config")
    return is_peft or "state_dict" in inspect.signature(_save_pretrained(model)).parameters


def _computes_what_it_saves(model: nn.Module) -> bool:
    """Whether PEFT computes what it writes from the model's own parameters, whatever state it is given: the
    prompts of prompt tuning, p-tuning and prefix tuning."""
    configs: Any = getattr(model, "peft_config", {})
    return any(getattr(one, "is_prompt_learning", False) for one in configs.values())


@contextmanager
def undistributed(model: nn.Module) -> Iterator[None]:
    """While entered transformers takes ``model`` for one of this process alone: it has all values, and must
    not ask the other processes for theirs."""
    config: Any = getattr(model, "config", None)
    distributed = getattr(config, "distributed_config", None)
    if distributed is not None:
        config.distributed_config = None
    try:
        yield
    finally:
        if distributed is not None:
            config.distributed_config = distributed


def config_text(model: nn.Module) -> str:
    """The ``config`` of a module that cannot save itself, as JSON; "" if it is no dict, or none that JSON can
    hold."""
    config = getattr(model, "config", None)
    if not isinstance(config, Mapping):
        return ""
    try:
        return json.dumps(dict(config), indent=2) + "\n"
    except (TypeError, ValueError):
        return ""


def _save_pretrained(model: nn.Module) -> Callable[..., object]:
    save: Callable[..., object] = model.save_pretrained  # type: ignore[assignment]  # a module gives any name
    return save


def full_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors of ``model`` by plain name, tied ones under each of theirs: one tensor for all. With what
    modules keep beside their tensors (``get_extra_state``), which is this machine's own."""
    own = {**named_parameters(model), **named_buffers(model, persistent=True)}
    shared = shared_names(model)
    if strangers := [name for name in state if name not in {*own, *shared} and not _is_extra(name)]:
        raise ConfigError("model", strangers[0], "is in the trained state, but not in this model")
    full = dict[str, Tensor]()
    for name, tensor in own.items():
        given = state.get(name)
        if given is not None and given.shape != tensor.shape:
            problem = f"is {tuple(given.shape)} in the trained state and {tuple(tensor.shape)} in this model"
            raise ConfigError("model", name, problem)
        full[name] = tensor.detach() if given is None else given.detach().to(tensor.dtype)
    for path, module in named_modules(model):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            full[f"{path}.{_EXTRA}" if path else _EXTRA] = module.get_extra_state()
    return full | {name: full[first] for name, first in shared.items()}


def _write_plain(model: nn.Module, full: Mapping[str, Tensor], folder: Path) -> None:
    shared = shared_names(model)
    write_tensors(folder / WEIGHTS, {name: one for name, one in full.items() if name not in shared}, shared)
    if text := config_text(model):
        (folder / CONFIG).write_text(text, encoding="utf-8")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], shared: Mapping[str, str]) -> None:
    """One safetensors file, as ``safetensors.torch.save_model`` writes it: a tied tensor once, its further
    names (``shared``: to the first) in the metadata."""
    dense = {name: one.contiguous().cpu() for name, one in tensors.items()}
    path.touch()
    mode = path.stat().st_mode
    save_file(dense, path, {"format": "pt", **shared})
    path.chmod(mode)  # save_file lets nobody else read it


def _files_of(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.is_file())
    if not path.is_file():
        raise ConfigError("recipe", "tokenizer", f"{path} is no file and no folder; correct the path")
    return [path]


@contextmanager
@torch.no_grad()
def _in_place(model: nn.Module, full: Mapping[str, Tensor]) -> Iterator[None]:
    """While entered the parameters of ``model`` hold the values of ``full``."""
    live = {name: one.detach().clone() for name, one in named_parameters(model).items()}
    try:
        _fill_(model, full)
        yield
    finally:
        _fill_(model, live)


@torch.no_grad()
def _fill_(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    for name, parameter in named_parameters(model).items():
        parameter.copy_(values[name])
