"""What a run trains: model, data, loss and inner optimizer, by a name that every peer can look up.

"byte-gpt" is built in; ``path/to/file.py:function`` is the user's own, called with the recipe options as
keyword arguments. The same name, options and seed give every peer the same bits of the model, and leave
torch's random state as it was. The digest covers what must agree (code and shape) and not a peer's own data,
so volunteers may train on different texts. Options come from an organiser, so none of them names a file: data
is named by each peer itself. A user's recipe is code that runs with the user's rights. It is read from the
peer's own disk only, once its digest is found to be the run's. The digest covers that file and the modules of
its own folder that it imports (``helpers``), not packages that are installed."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from p2p_co2.config import OWN_LOOP, ClockConfig, RunConfig
from p2p_co2.errors import ConfigError
from p2p_co2.recipes.byte_gpt import ByteGPT, Shape, byte_gpt_stages, next_token_loss, numel_of, sample_text
from p2p_co2.recipes.corpus import Corpus, embedded_corpus, option_error, text_corpus, token_corpus
from p2p_co2.recipes.drawing import drawn_from
from p2p_co2.recipes.helpers import Helper, helpers_of, serve
from p2p_co2.recipes.optimizers import Optimizers, as_one
from p2p_co2.recipes.stages import Stages
from p2p_co2.system.machine import available_memory_bytes

BYTE_GPT = "byte-gpt"
DATA = "data"
"""The parameter of a recipe's function that takes a peer's own data path."""
BYTE_GPT_VERSION = 1
"""Raised when a change makes the built-in model differ for the same options."""
WARMUP_ROUNDS = 0.5
_RUN = "the run"
_STAGES = "pipeline.stages"
_TIED = "pipeline.tied"
_HELD_OUT, _GLANCE = (4, 32), (1, 8)
"""Batches, and windows in each."""
_SHAPE_OPTIONS: dict[str, int] = Shape()._asdict()
Options = Mapping[str, str | int | float | bool]
ADAMW = "adamw"
MUON = "muon"
AUTO = "auto"
"""Muon on an accelerator, AdamW on a CPU, where a step of Muon's takes 1.45 times as long."""
_OPTIMIZERS = {ADAMW: 2e-3, MUON: 4e-3}
"""byte-gpt's inner optimizers, with the learning rate of each."""
_OTHER_OPTIONS = {
    "batch": 8,
    "optimizer": AUTO,
    "learning_rate": 0.0,  # the optimizer's
    "warmup_rounds": 0.0,  # as ``warm_up_and_decay`` has it
}
_LARGEST = 65536
"""Of a whole number among them: token ids are uint16."""
TEXT = "text"
TOKENS = "tokens"
_OWN_AFFAIR = {TEXT: "--text", TOKENS: "--tokens", DATA: "--data"}
"""What a peer names itself, with its option of ``join``: never an option in a run file."""


def first_tensor_numel(batch: Any) -> int:
    """Elements of the first tensor in ``batch`` (a tensor, or nested lists, tuples and mappings); 1 if there
    is none."""
    found = next(tensors_in(batch), None)
    return 1 if found is None else found.numel()


def default_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """AdamW with PyTorch's settings."""
    return AdamW(parameters)


def _made_one(make: Callable[[Iterable[nn.Parameter]], Any], parameters: Iterable[nn.Parameter]) -> Optimizer:
    """What ``make`` makes; a list of optimizers as one."""
    made: Optimizer = as_one(make(parameters))
    return made


def warm_up(position: float, rounds: float = WARMUP_ROUNDS) -> float:
    """Factor of the learning rate at ``position`` (rounds since the run began): 0.1, rising to 1 after
    ``rounds``."""
    return 1.0 if position >= rounds or rounds <= 0 else 0.1 + 0.9 * max(0.0, position) / rounds


def warm_up_and_decay(position: float, warmup: float, clock: ClockConfig) -> float:
    """Factor of the learning rate: ``warm_up`` for so many rounds, then half a cosine down to a tenth by the
    run's last one; a run without an end keeps its rate. ``warmup`` 0: 300 inner steps, or 300 s where the
    clock counts time. Never more than a third of the run."""
    if not warmup:
        warmup = 300.0 / (clock.round_s if clock.mode == "time" else clock.inner_steps_per_round)
    if not clock.rounds:
        return warm_up(position, warmup)
    warmup = min(warmup, clock.rounds / 3)
    if position < warmup:
        return warm_up(position, warmup)
    done = min(1.0, (position - warmup) / (clock.rounds - warmup))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True)
class Recipe:
    """Everything a trainer needs to do inner steps.

    ``batches(seed, batch)``: an endless iterator of batches of ``batch`` sequences; peers pass different
    seeds. ``loss(model, batch)``: a scalar to go backward from. ``tokens(batch)``: what the batch weighs in
    the mean. ``learning_rate(position)``: factor on the optimizer's own rates at this many rounds since the
    run began, the same for a newcomer. ``fits_swarm``: the rates are then multiplied by the root of the
    number of peers in the last means. ``held_out(model)``: loss on data that nobody trains on,
    or a mapping of figures, one of them "loss" (``recipes.measured``).
    ``glance(model)``: the same on a small slice, always the same one, for a look while training goes on
    (None: ``held_out``). ``optimizer(parameters)``: the inner optimizer, or a list of several (Muon for
    matrices, AdamW for the rest). ``generate(model, prompt, length, seed)``: text. ``default_batch``:
    sequences per inner step where a peer sets none. ``loader``: the list or
    loader that ``batches`` goes round, if it does. Each peer then goes through it in its own order, and where
    it was when it comes back.

    ``stages``: the model cut into stages, or a function of their number; None cannot be cut. In a run with
    stages ``model`` is an outline on torch's meta device, since a peer builds only its own stage.

    ``max_grad_norm``: gradients are clipped to this norm; None leaves them. In a run of S stages each peer
    clips its own stage's. For a bound on the whole model's norm give that over the root of S. ``accumulate``:
    batches of one inner step, each with a backward pass of its own; its tokens are the sum. ``autocast``:
    "bf16", or "fp16" with a gradient scaler; None computes in the parameters' own dtype. Both not in a run
    with stages.

    ``tokenizer``: files, or folders of files, that go out with the model (``p2p-co2 model``), such as those
    of a tokenizer beside the recipe: ``Path(__file__).parent / "tokenizer"``.
    """

    model: nn.Module
    batches: Callable[[int, int], Iterator[Any]]
    loss: Callable[[nn.Module, Any], Tensor]
    tokens: Callable[[Any], int] = first_tensor_numel
    optimizer: Callable[[Iterable[nn.Parameter]], Any] = default_optimizer
    learning_rate: Callable[[float], float] = warm_up
    fits_swarm: bool = False
    held_out: Callable[[nn.Module], Any] | None = None
    glance: Callable[[nn.Module], Any] | None = None
    generate: Callable[[nn.Module, str, int, int], str] | None = None
    default_batch: int = 8
    loader: Iterable[Any] | None = None
    stages: Stages | Callable[[int], Stages] | None = None
    tokenizer: str | Path | Sequence[str | Path] = ()
    accumulate: int = 1
    max_grad_norm: float | None = None
    autocast: Literal["bf16", "fp16"] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "optimizer", partial(_made_one, self.optimizer))

    @property
    def tokenizer_paths(self) -> list[Path]:
        """What ``tokenizer`` names, as a list."""
        named = [self.tokenizer] if isinstance(self.tokenizer, str | Path) else self.tokenizer
        return [Path(path).expanduser() for path in named]

    def in_stages(self, count: int) -> Stages:
        """The recipe's stages for a run of ``count``. Raises ``ConfigError`` if it has none or another number
        of them, or one has nothing to train."""
        stages = self.stages if self.stages is None or isinstance(self.stages, Stages) else self.stages(count)
        if stages is None:
            cure = "set stages = 1, or give its Recipe stages (examples/staged_recipe.py)"
            raise ConfigError(_RUN, _STAGES, f"is {count}, but the recipe brings no stages; {cure}")
        if len(stages) != count:
            problem = f"is {count}, but the recipe has {len(stages)} stages; write stages = {len(stages)}"
            raise ConfigError(_RUN, _STAGES, problem)
        stages.outlines()
        return stages

    def whole_model(self, run: RunConfig) -> nn.Module:
        """The model that all peers of ``run`` train together, in one process, with the first parameters: for
        ``held_out`` and ``generate``. Its names are those of a whole checkpoint."""
        count = run.pipeline.stages
        return self.model if count == 1 else self.in_stages(count).whole(run.seed)


class Code(NamedTuple):
    """What an own recipe runs, read once: its file and its helpers."""

    source: bytes
    helpers: Mapping[str, Helper]

    @classmethod
    def of(cls, name: str) -> Code | None:
        """That of the recipe called ``name``; None for a built-in one. Raises ``ConfigError``."""
        if name in {BYTE_GPT, OWN_LOOP}:
            return None
        path = _split(name)[0]
        source = _source(path)
        return cls(source, helpers_of(path, source))


def load_recipe(
    name: str, options: Options, seed: int, stages: int = 1, is_tied: bool = False, code: Code | None = None,
    data: Mapping[str, str] | None = None, clock: ClockConfig | None = None,
) -> Recipe:  # fmt: skip
    """Build the recipe called ``name`` ("byte-gpt", or ``path/to/file.py:function``) with its model drawn
    from ``seed``. ``stages``: of the run; above 1 the model is an outline, of the stages joined. ``is_tied``:
    whether the first of them and the last share a table. ``code``: runs in the place of what lies there now.
    ``data``: this peer's own paths: "text" or "tokens" of the built-in recipe, "data" of an own one.
    ``clock``: of the run, by which the built-in recipe's learning rate warms up and decays.

    Raises ``ConfigError`` for an unknown name, file, function or option, a text that cannot be used, and a
    function that returns no ``Recipe`` or ``(model, batches, loss)``. Other errors inside a user's own
    function pass through, so that its author sees where they come from."""
    if name == OWN_LOOP:
        problem = "this run is trained by a program of its own: run that program with the ticket instead"
        raise ConfigError(name, "", problem)
    with drawn_from(seed):
        made = (
            _byte_gpt(options, stages, is_tied, data or {}, clock or ClockConfig())
            if name == BYTE_GPT
            else _user_recipe(name, options, code or Code.of(name), data or {})
        )
    if stages > 1:
        cut = made.in_stages(stages)
        _check_tied(cut, is_tied)
        _check_without_stages(name, made)
        return replace(made, model=cut.join(cut.outlines()))
    if any(parameter.is_meta for parameter in made.model.parameters()):
        count = str(len(made.stages)) if isinstance(made.stages, Stages) else "2 or more"
        problem = f"is 1, but this recipe's model is only there in stages; write stages = {count}"
        raise ConfigError(_RUN, _STAGES, problem)
    return made


def _check_tied(stages: Stages, is_tied: bool) -> None:
    if is_tied and stages.tied is None:
        problem = 'is "fused", but the recipe\'s first and last stage share no table'
        raise ConfigError(_RUN, _TIED, f'{problem}; write tied = "no", or give its Stages a TiedTable')
    if stages.tied is not None and not is_tied:
        problem = 'is "no", but the recipe\'s first and last stage share a table'
        raise ConfigError(_RUN, _TIED, f'{problem}; write tied = "fused"')


def _check_without_stages(name: str, made: Recipe) -> None:
    """Raises ``ConfigError`` for a setting that has no meaning where peers hold one stage each."""
    cures = {
        "accumulate": (made.accumulate != 1, "set pipeline.microbatches in the run file instead"),
        "autocast": (made.autocast is not None, "use torch.autocast inside the stages' forward instead"),
    }
    for setting, (is_set, cure) in cures.items():
        if is_set:
            raise ConfigError(name, setting, f"does not apply in a run with stages; {cure}")


def recipe_digest(name: str, options: Options, code: Code | None = None) -> str:
    """sha256, hex, of what all peers must share. Built in: name, version and the model's shape, defaults
    written out. The user's own: the bytes of the file and of its helpers, the function's name and all
    options, but not where the file lies. ``code``: of it, if it has been read.

    Raises ``ConfigError`` as ``load_recipe`` does; runs no user code.
    """
    if name == OWN_LOOP:
        return hashlib.sha256(b"own loop").hexdigest()
    if name == BYTE_GPT:
        shape = check_options(options)[0]
        parts = [b"built-in", name.encode(), str(BYTE_GPT_VERSION).encode(), _canonical(shape._asdict())]
    else:
        _refuse_own_affair(name, options)
        code = code or Code.of(name)
        function = _split(name)[1]
        assert code is not None
        parts = [b"file", hashlib.sha256(code.source).digest(), function.encode(), _canonical(options)]
        for helper in code.helpers.values():
            parts += [helper.place.encode(), hashlib.sha256(helper.source).digest()]
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).hexdigest()


def check_stages(run: RunConfig) -> None:
    """Raises ``ConfigError`` if the run's number of stages cannot be, as far as is known without running a
    user's file."""
    count = run.pipeline.stages
    if run.recipe == BYTE_GPT and count > 1:
        byte_gpt_stages(check_options(run.recipe_options)[0], count)
    if run.recipe == OWN_LOOP and count > 1:
        problem = (
            f"is {count}, but a program of one's own has a whole model; set stages = 1, or give a recipe"
        )
        raise ConfigError(_RUN, _STAGES, problem)


def load_run_recipe(
    run: RunConfig, own: str = "", data: Mapping[str, str] | None = None, is_trained: bool = True
) -> Recipe:
    """The run's recipe as it is on this machine: the same as the organiser's, or refused.

    ``own``: where an own recipe lies here ("file.py:function"), "" for a built-in one. ``data``: as of
    ``load_recipe``. ``is_trained``: whether there must be data to train on. Raises ``ConfigError``
    before anything of the recipe is run; a file that only a stranger's run names is never read."""
    if run.is_own_recipe != bool(own):
        how = "its own" if run.is_own_recipe else "the built-in"
        cure = "get that file from the organiser, read it, and name it with --recipe FILE.py:function"
        problem = f"this run trains {how} recipe {run.recipe!r}; {'leave it out' if own else cure}"
        raise ConfigError.of_option("--recipe", problem)
    name = own or run.recipe
    code = Code.of(name)  # once: what is compared is what runs
    digest = recipe_digest(name, run.recipe_options, code)
    if digest != run.recipe_digest:
        both = f"digest {digest[:12]} here, {run.recipe_digest[:12] or 'none'} there"
        cure = "take the organiser's file, what it imports from beside it, and their version of p2p-co2"
        raise ConfigError("recipe", name, f"is another than the run's ({both}); {cure}")
    data = data or {}
    if own and (others := sorted(set(data) - {DATA})):
        problem = "only built-in recipes let a peer choose its own text or tokens; an own one takes --data"
        raise ConfigError.of_option(f"--{others[0]}", problem)
    if not own and DATA in data:
        problem = f"is for a run with its own recipe, and this one trains {run.recipe}"
        raise ConfigError.of_option("--data", f"{problem}; use --text or --tokens")
    made = load_recipe(
        name, run.recipe_options, run.seed, run.pipeline.stages, run.pipeline.is_tied, code, data,
        run.clock,
    )  # fmt: skip
    if is_trained and made.held_out is None and not own:
        problem = "this run trains on token ids, and Python's own text has none; name your file of them"
        raise ConfigError.of_option("--tokens", problem)
    return made


def load_measuring_recipe(run: RunConfig, own: str = "", data: Mapping[str, str] | None = None) -> Recipe:
    """What builds, measures and samples a trained model of ``run``: as ``load_run_recipe``, and of a run that
    programs of one's own train, the file that ``own`` names. Such a run has no digest of it: its model must
    have the names and shapes of what was trained, which the caller compares."""
    if run.recipe != OWN_LOOP:
        return load_run_recipe(run, own, data, is_trained=False)
    if not own:
        problem = "this run is trained by programs of their own; name a recipe file that makes their model"
        cure = "a peer's checkpoint folder goes out without one (p2p-co2 model)"
        raise ConfigError.of_option("--recipe", f"{problem}, --recipe FILE.py:function; {cure}")
    return load_recipe(own, run.recipe_options, run.seed, data=data)


# The built-in recipe


def _byte_gpt(
    options: Options, stages: int, is_tied: bool, data: Mapping[str, str], clock: ClockConfig
) -> Recipe:
    shape, settings = check_options(options)
    needs = 4 * (numel_of(shape) // stages + shape.context * shape.width)
    free = available_memory_bytes()
    if needs > free:
        problem = f"the model alone needs {needs / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free here"
        raise option_error("layers", problem)
    text = data.get(TEXT, "")
    tokens = data.get(TOKENS, "")
    if text and tokens:
        raise ConfigError.of_option("--tokens", "give either text or tokens, not both")
    if text and shape.vocab_size != 256:
        problem = f"is bytes, whose vocabulary is 256, and this run's is {shape.vocab_size}; give --tokens"
        raise ConfigError.of_option("--text", problem)
    with torch.device(
        "cpu" if stages == 1 else "meta"
    ):  # else another default device would draw another start
        model = ByteGPT(shape)  # first, so that no other draw comes before it
    if tokens:
        corpus = token_corpus(Path(tokens).expanduser(), shape.vocab_size)
    else:
        corpus = text_corpus(Path(text).expanduser()) if text else embedded_corpus()
    if len(corpus.train) < shape.context + 1:
        needed = f"context {shape.context} needs {shape.context + 1}"
        problem = f"only {len(corpus.train)} tokens to train on; {needed}"
        raise ConfigError.of_option("--tokens" if tokens else "--text", problem)
    is_measured = bool(tokens) or shape.vocab_size == 256
    return Recipe(
        model=model,
        batches=partial(_windows, corpus.train, shape.context),
        loss=next_token_loss,
        optimizer=_inner_optimizer(shape, settings),
        learning_rate=partial(warm_up_and_decay, warmup=float(settings["warmup_rounds"]), clock=clock),
        fits_swarm=True,
        held_out=partial(_held_out_loss, corpus, shape.context, _HELD_OUT) if is_measured else None,
        glance=partial(_held_out_loss, corpus, shape.context, _GLANCE) if is_measured else None,
        generate=None if tokens or not is_measured else sample_text,
        default_batch=int(settings["batch"]),
        stages=partial(byte_gpt_stages, shape, tied=is_tied),
    )


def _windows(tokens: Tensor, context: int, seed: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random windows for ever: inputs and targets, int64 [batch, context]."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    span = torch.arange(context + 1, dtype=torch.int64, device="cpu")
    while True:
        starts = torch.randint(
            len(tokens) - context, (batch, 1), generator=generator, dtype=torch.int64, device="cpu"
        )
        windows = tokens[starts + span].long()
        yield windows[:, :-1], windows[:, 1:]


def _held_out_loss(corpus: Corpus, context: int, size: tuple[int, int], model: nn.Module) -> float:
    """Mean loss over a fixed draw of held-out windows, the same on every peer with the same text; ``size``:
    batches, and windows in each."""
    context = min(context, len(corpus.held_out) - 1)
    batches = _windows(corpus.held_out, context, 0, size[1])
    was_training = model.training
    model.eval()
    with torch.no_grad():
        losses = [float(next_token_loss(model, next(batches))) for _ in range(size[0])]
    model.train(was_training)
    return sum(losses) / len(losses)


def _inner_optimizer(
    shape: Shape, settings: Mapping[str, Any]
) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    named = str(settings["optimizer"])
    has_muon = hasattr(torch.optim, "Muon")
    if named == MUON and not has_muon:
        raise option_error("optimizer", f"muon needs torch 2.9 or newer, and here is {torch.__version__}")

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        every = list(parameters)
        is_fast = has_muon and any(one.device.type not in {"cpu", "meta"} for one in every)
        kind = (MUON if is_fast else ADAMW) if named == AUTO else named
        rate = float(settings["learning_rate"]) or _OPTIMIZERS[kind]
        return _muon(rate, (shape.vocab_size, shape.width), every) if kind == MUON else _adamw(rate, every)

    return make


def _muon(learning_rate: float, table: tuple[int, int], parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Muon for the matrices of the blocks, AdamW for tables and vectors. A table has the shape ``table`` and
    is the first matrix or the last, since those of a block may have its shape, too. Muon's steps are as large
    as AdamW's, so both have one learning rate."""
    every = list(parameters)
    matrices = [one for one in every if one.ndim == 2]
    tables = {id(one) for one in (*matrices[:1], *matrices[-1:]) if tuple(one.shape) == table}
    matrices = [one for one in matrices if id(one) not in tables]
    rest = [one for one in every if one.ndim != 2 or id(one) in tables]
    parts: list[Optimizer] = []
    if matrices:
        parts.append(
            torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
        )
    return Optimizers([*parts, _adamw(learning_rate, rest)] if rest else parts)


def _adamw(learning_rate: float, parameters: Iterable[nn.Parameter]) -> Optimizer:
    # Fused: one pass over the parameters, about a sixth of the time on a CPU.
    return AdamW(parameters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True)


def _refuse_own_affair(name: str, options: Options) -> None:
    """Raises ``ConfigError`` for options of a run file that a peer alone may give."""
    for key, option in _OWN_AFFAIR.items():
        if key in options and (name == BYTE_GPT or key == DATA or isinstance(options[key], str)):
            problem = "a run file names no file of a volunteer; leave it out, and each peer joins with"
            raise ConfigError(f"recipe {name}", f"recipe_options.{key}", f"{problem} {option} PATH")


def check_options(options: Options) -> tuple[Shape, dict[str, Any]]:
    """Of the built-in recipe: what decides its parameters, and the rest. Raises ``ConfigError``."""
    _refuse_own_affair(BYTE_GPT, options)
    for key, value in options.items():
        if key not in _SHAPE_OPTIONS and key not in _OTHER_OPTIONS:
            known = ", ".join(sorted([*_SHAPE_OPTIONS, *_OTHER_OPTIONS]))
            raise option_error(key, f"unknown option; {BYTE_GPT} knows {known}")
        if key == "optimizer":
            if value not in (AUTO, *_OPTIMIZERS):
                raise option_error(key, f"must be auto, adamw or muon, got {value!r}")
        elif key in {"learning_rate", "warmup_rounds"}:
            is_number = not isinstance(value, bool | str) and 0 <= value < float("inf")
            if not is_number or (value == 0 and key == "learning_rate"):
                raise option_error(key, f"must be a positive number, got {value!r}")
        elif isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST:
            raise option_error(key, f"must be a whole number from 1 to {_LARGEST}, got {value!r}")
    shape = Shape(**{key: int(options.get(key, default)) for key, default in _SHAPE_OPTIONS.items()})
    settings = {key: options.get(key, default) for key, default in _OTHER_OPTIONS.items()}
    if shape.width % (2 * shape.heads):
        problem = f"width {shape.width} must be a multiple of 2 * heads ({2 * shape.heads})"
        raise option_error("heads", problem)
    return shape, settings


# The user's own recipe


def _user_recipe(name: str, options: Options, code: Code | None, data: Mapping[str, str]) -> Recipe:
    _refuse_own_affair(name, options)
    path, function_name = _split(name)
    assert code is not None
    options = {**options, **data}
    function = getattr(_load_module(path, code), function_name, None)
    if not callable(function):
        problem = f"{path} has no function {function_name!r}; define it, or name another after the colon"
        raise ConfigError(name, "", problem)
    taken = inspect.signature(function).parameters
    if DATA in options and DATA not in taken:
        problem = f"{function_name}() of {path} takes no data; leave it out, or its author adds a parameter"
        raise ConfigError.of_option("--data", f'{problem}: def {function_name}(..., data="")')
    if DATA in taken and DATA not in options and taken[DATA].default is inspect.Parameter.empty:
        problem = f"{function_name}() of {path} needs a data path: join with --data PATH"
        raise ConfigError.of_option("--data", f"{problem}; or its author gives that parameter a default")
    try:
        inspect.signature(function).bind(**options)
    except TypeError as error:
        raise ConfigError(name, "recipe_options", f"do not fit {function_name}(): {error}") from None
    return _as_recipe(name, function(**options))


def _split(name: str) -> tuple[Path, str]:
    file, colon, function = name.rpartition(":")
    if not colon or not file.endswith(".py") or not function.isidentifier():
        raise ConfigError(name, "", f'no such recipe; write "{BYTE_GPT}" or "path/to/file.py:function"')
    return Path(file).expanduser(), function


def _source(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(str(path), "", f"no such file; paths are relative to {Path.cwd()}") from None
    except OSError as error:
        raise ConfigError(str(path), "", f"cannot be read: {error.strerror}") from None


def _load_module(path: Path, code: Code) -> ModuleType:
    """Run the file as a module of its own name space, which imports its helpers by their names. What runs are
    the very bytes that the digest covers: no cached .pyc is read or written."""
    serve(code.helpers, str(path))
    module = ModuleType(f"p2p_co2_recipe_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    try:
        exec(compile(code.source, str(path), "exec"), module.__dict__)
    except SyntaxError as error:
        raise ConfigError(str(path), "", f"is not valid Python: {error}") from None
    except ImportError as error:
        cure = "install it, or put it beside the recipe, a package with its __init__.py"
        raise ConfigError(str(path), "", f"cannot import what it needs: {error}; {cure}") from None
    return module


def _as_recipe(name: str, made: object) -> Recipe:
    if isinstance(made, tuple) and len(made) == 3:
        model, batches, loss = made
        loader = None
        if isinstance(batches, Iterable) and not callable(batches):
            loader = None if hasattr(batches, "__next__") else batches
            batches = partial(_over_and_over, name, batches)
        if callable(batches) and callable(loss):
            made = Recipe(model=model, batches=batches, loss=loss, loader=loader)
    if not isinstance(made, Recipe) or not isinstance(made.model, nn.Module):
        wanted = "must return a Recipe, or (model, batches, loss): an nn.Module, data, a function"
        raise ConfigError(name, "", f"{wanted}; got {type(made).__name__}")
    if not (made.stages is None or isinstance(made.stages, Stages) or callable(made.stages)):
        wanted = "stages must be a Stages, or a function of their number"
        raise ConfigError(name, "stages", f"{wanted}; got {type(made.stages).__name__}")
    _check_step(name, made)
    if not any(parameter.requires_grad for parameter in made.model.parameters()):
        problem = "its model has no parameter that requires a gradient, so there is nothing to train"
        raise ConfigError(name, "", problem)
    return made


def _check_step(name: str, made: Recipe) -> None:
    """Raises ``ConfigError`` for settings of the inner step that mean nothing."""
    norm = made.max_grad_norm
    if isinstance(made.accumulate, bool) or not isinstance(made.accumulate, int) or made.accumulate < 1:
        problem = f"must be a whole number of batches of at least 1, got {made.accumulate!r}"
        raise ConfigError(name, "accumulate", problem)
    if norm is not None and (isinstance(norm, bool | str) or not 0 < norm < float("inf")):
        raise ConfigError(name, "max_grad_norm", f"must be a number above 0, or None; got {norm!r}")
    if made.autocast not in (None, "bf16", "fp16"):
        raise ConfigError(name, "autocast", f'must be "bf16", "fp16" or None; got {made.autocast!r}')


def _over_and_over(name: str, batches: Iterable[Any], seed: int, batch: int) -> Iterator[Any]:
    """A list or loader of batches, for ever; it knows no seed and no batch size, so those are its author's
    affair."""
    while True:
        empty = True
        for item in batches:
            empty = False
            yield item
        if empty:
            problem = "its batches have run out; return a list, a DataLoader, or a function of (seed, batch)"
            raise ConfigError(name, "", problem)


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """The tensors of a tensor, or of nested lists, tuples and mappings, in their order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_in(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from tensors_in(value)


def _canonical(options: Mapping[str, Any]) -> bytes:
    return json.dumps(dict(options), sort_keys=True, separators=(",", ":")).encode()
