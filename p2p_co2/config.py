"""What all peers of a run must agree on (``RunConfig``), and what is one peer's own (``PeerConfig``).

Both are frozen and validated where they are read; an unknown key is an error. The ``digest`` of a
``RunConfig`` covers every field: two peers that differ in an agreed setting refuse each other before anything
is downloaded."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from p2p_co2.codec_specs import SPECS, codec_names
from p2p_co2.errors import ConfigError, in_our_words
from p2p_co2.rule_specs import AGGREGATION_RULES, OUTER_RULES, implied_rule
from p2p_co2.system.governor import read_hours
from p2p_co2.system.owner import SENSES, read_words
from p2p_co2.wire.limits import MAX_STAGES, MAX_VERSION
from p2p_co2.wire.names import is_name

ApplyRule = Literal["keep", "co2", "blend", "eager"]
CarrierName = Literal["auto", "grpc", "libp2p"]
OWN_LOOP = "own-loop"
"""The recipe's name in runs whose peers run a program of their own around ``p2p_co2.join``."""
SLOWEST_CAP_BYTES_PER_S = 10_000
CHECKPOINT_BYTES_PER_DAY = 100e9
"""What checkpoints may write in a day, of itself; a consumer's SSD is made for several times that."""
CHECKPOINT_LEAST_S = 60.0
"""Between two checkpoints, however small they are."""
UPNP = "Ask the router to let others in (UPnP, NAT-PMP)."
RELAY = "Pass on traffic between peers that cannot reach each other directly."


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ClockConfig(_Frozen):
    """When fragments are sent.

    ``mode`` is "time", or "steps" (laboratory, the papers' tables). ``round_s``: by time, position = (swarm
    time - start) / ``round_s``, seconds; fast and slow peers send together and are weighted by tokens.
    ``inner_steps_per_round``: by steps, position = inner steps / ``inner_steps_per_round``. ``rounds``: the
    run ends at this position, and for all once most are there; 0 never."""

    mode: Literal["steps", "time"] = "time"
    inner_steps_per_round: int = Field(default=30, ge=1)
    round_s: float = Field(default=30.0, gt=0)
    rounds: int = Field(default=0, ge=0, le=MAX_VERSION)


class CodecConfig(_Frozen):
    """``name``: how outer gradients are encoded. ``error_feedback``: carry what the codec lost into the next
    exchange, times ``error_feedback_decay`` (SparseLoCo, arXiv 2508.15706). Left out or empty it is on with
    codecs that lose much, ``sign`` and ``q2``."""

    name: str = "q2"
    error_feedback: bool = True
    error_feedback_decay: float = Field(default=0.95, ge=0, le=1)

    @model_validator(mode="before")
    @classmethod
    def _filled_in(cls, settings: object) -> object:
        """What a run file leaves out, or leaves empty."""
        if not isinstance(settings, dict) or settings.get("error_feedback", "") != "":
            return settings
        spec = SPECS.get(str(settings.get("name", cls.model_fields["name"].default)))
        return settings | {"error_feedback": spec is not None and spec.needs_feedback}

    @field_validator("name")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if name not in SPECS:
            raise ValueError(f"no codec is called that; use {codec_names()}")
        return name


class OuterConfig(_Frozen):
    """The outer optimizer (CO2 arXiv 2401.16265, Streaming DiLoCo 2501.18512).

    ``rule``: how live parameters meet new outer parameters. ``lr``, ``momentum``, ``nesterov``: SGD on the
    mean outer gradient. ``gap_penalty``: CO2's staleness gap penalty. ``clip``: outer momentum clipping,
    elementwise at ``clip_phi`` or at ``clip_phi`` times the running RMS of the applied gradient.
    ``sync_delay_steps``: apply no sooner than this many inner steps after the send; 0 applies as soon as the
    exchange has committed. ``blend_alpha``: share of the live parameters that rule "blend" keeps.
    ``blocking_rounds``: training stands still (bounded) for so many first exchanges of each fragment. Their
    answers are not stale then; with 0 they travel beside training as all others do.
    """

    rule: ApplyRule = "keep"
    lr: float = Field(default=0.7, gt=0, le=10)
    momentum: float = Field(default=0.5, ge=0, lt=1)
    nesterov: bool = True
    gap_penalty: bool = True
    clip: Literal["none", "elementwise", "rms"] = "rms"
    clip_phi: float = Field(default=10.0, gt=0)
    sync_delay_steps: int = Field(default=0, ge=0)
    blend_alpha: float = Field(default=0.5, ge=0, le=1)
    blocking_rounds: int = Field(default=0, ge=0)

    @property
    def is_delayed(self) -> bool:
        """Whether live parameters meet a round's mean at the fragment's next schedule point."""
        return OUTER_RULES[self.rule].returns_work


class AggregationConfig(_Frozen):
    """``rule``: how the slices that the peers sent for a part become one mean. "scored" leaves out whose work
    goes against that of the peer that averages. The others it treats as "centred" does, which lets no slice
    pull harder, nor lie further from the others, than most do (centred clipping, Karimireddy, He and Jaggi
    2021). "clipped" looks at lengths alone. "median" takes the median of each value, whatever the weights.
    "mean" is the weighted mean, without defence. Left out or empty it is "scored", in a run with ``members``
    "centred", and "mean" where ``weight_cap`` is 0.

    "scored" is for strangers. It counts too little of what fast peers learned where most are ten times
    slower: that costs 2 to 12 % of the loss. Choose "centred" among friends."""

    rule: str = "scored"

    @field_validator("rule")
    @classmethod
    def _is_known(cls, rule: str) -> str:
        if rule not in AGGREGATION_RULES:
            raise ValueError(f"no rule is called that; use {' or '.join(AGGREGATION_RULES)}")
        return rule


BoundaryCodec = Literal["fp32", "bf16", "int8"]
RANK = "rank"
"""Begins the name of a low-rank codec: "rank16"."""


class PipelineConfig(_Frozen):
    """A model that is cut into ``stages``, of which a peer holds one (Optimus-CC, arXiv 2301.09830). 1: every
    peer holds the whole model.

    ``microbatches``: of an inner step of each replica of a stage; ``sequences``: in each. ``forward``,
    ``backward``: how activations and their gradients cross to the next stage and back. What is lost forward
    is lost for the loss itself, so never 4 bits. ``backward_critical``: of gradients that others wait for, on
    a line that carries less than is computed and at the end of an inner step. It is "int4", or "rank16" for
    low rank, or "" for none of its own. ``min_replicas``: a stage with fewer gets newcomers first, and nobody
    moves away from one with no more. ``tied`` "fused": the first stage and the last hold one table. Their
    peers agree on it in a group of its own (Optimus-CC's fused embedding synchronisation).
    """

    stages: int = Field(default=1, ge=1, le=MAX_STAGES)
    microbatches: int = Field(default=64, ge=1, le=4096)
    sequences: int = Field(default=1, ge=1, le=4096)
    forward: BoundaryCodec = "int8"
    backward: Literal["fp32", "bf16", "int8", "int4"] = "int8"
    backward_critical: str = ""
    min_replicas: int = Field(default=2, ge=1, le=64)
    tied: Literal["no", "fused"] = "no"

    @property
    def is_tied(self) -> bool:
        return self.stages > 1 and self.tied == "fused"

    @field_validator("backward_critical")
    @classmethod
    def _is_a_gradient_codec(cls, name: str) -> str:
        if name in {"", "int4"} or re.fullmatch(RANK + "[1-9][0-9]{0,3}", name):
            return name
        raise ValueError('use "int4", low rank as "rank16", or "" for the same as backward')

    @model_validator(mode="after")
    def _critical_is_smaller(self) -> PipelineConfig:
        if self.backward_critical == self.backward:
            problem = f"backward_critical is {self.backward}, as backward is"
            raise ValueError(f'{problem}; leave it out, or use low rank, as "rank16"')
        return self

    @model_validator(mode="after")
    def _fills_all_stages(self) -> PipelineConfig:
        if self.microbatches < self.stages:
            raise ValueError(
                f"microbatches is {self.microbatches}, below stages = {self.stages}: most stages would stand "
                f"idle; use 8 to 16 for each stage, at least {self.stages}"
            )
        return self


class RunConfig(_Frozen):
    """Everything the peers of one run agree on.

    ``name`` is what people call the run. ``recipe`` is a built-in name ("byte-gpt") or
    ``path/to/file.py:function``; ``recipe_options`` go to it as keyword arguments. ``recipe_digest`` (sha256,
    hex) is filled in when the run is published, and checked by every peer. ``fragments`` is the number of
    pieces the model is synchronised in. ``group_size`` is how many peers the run has at most. ``seed`` makes
    every peer start from the same parameters. ``salt`` keeps others from guessing the digest, and a ticket
    with it; where it is empty the first seed makes one. ``members``: only those take part whom the organiser
    has invited by name (``p2p-co2 invite``).

    ``weight_cap`` is the defence against a peer that lies about its work. Tokens count at most as so many
    times the median member's; among four or more, for a third of all at most. What is far larger than the
    others' for its work, or far from them, counts for less (``aggregation``). 0 is no defence."""

    name: str = Field(default="run", min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$")
    recipe: str = Field(default="byte-gpt", min_length=1, max_length=512)
    recipe_options: dict[str, str | int | float | bool] = Field(default_factory=dict)
    recipe_digest: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")
    seed: int = Field(default=0, ge=0, lt=2**31)
    salt: str = Field(default="", max_length=64, pattern=r"^[A-Za-z0-9_-]*$")
    members: bool = False
    fragments: int = Field(default=4, ge=1, le=256)
    group_size: int = Field(default=64, ge=1, le=64)
    weight_cap: float = Field(default=2.0, ge=0)
    clock: ClockConfig = ClockConfig()
    codec: CodecConfig = CodecConfig()
    outer: OuterConfig = OuterConfig()
    aggregation: AggregationConfig = AggregationConfig()
    pipeline: PipelineConfig = PipelineConfig()

    @model_validator(mode="before")
    @classmethod
    def _filled_in(cls, settings: object) -> object:
        """What a run file leaves out, or leaves empty."""
        table = settings.get("aggregation", {}) if isinstance(settings, dict) else None
        if isinstance(settings, dict) and isinstance(table, dict) and not table.get("rule"):
            rule = implied_rule(settings.get("weight_cap", 1), members=settings.get("members") is True)
            return settings | {"aggregation": table | {"rule": rule}}
        return settings

    @field_validator("weight_cap")
    @classmethod
    def _leaves_the_median(cls, cap: float) -> float:
        if 0 < cap < 1:
            raise ValueError("below 1 the median peer would be capped; use 1 or more, or 0 for no defence")
        return cap

    @model_validator(mode="after")
    def _possible(self) -> RunConfig:
        steps = self.clock.inner_steps_per_round
        delay = self.outer.sync_delay_steps
        if self.clock.mode == "steps" and steps < self.fragments:
            raise ValueError(
                f"clock.inner_steps_per_round is {steps}, below fragments = {self.fragments}: each fragment "
                f"needs an inner step of its own; use at least {self.fragments} steps"
            )
        if self.clock.mode == "steps" and delay > steps:
            raise ValueError(f"outer.sync_delay_steps is {delay}, more than a round of {steps} steps")
        if AGGREGATION_RULES[self.aggregation.rule].cuts and not self.weight_cap:
            raise ValueError(
                f"aggregation.rule {self.aggregation.rule!r} is a defence and weight_cap = 0 is none; use a "
                'weight_cap of 1 or more, or aggregation.rule = "mean"'
            )
        loses_much = SPECS[self.codec.name].needs_feedback and not self.codec.error_feedback
        if self.outer.is_delayed and loses_much:
            raise ValueError(
                f"codec.error_feedback is false with codec {self.codec.name!r}, and rule {self.outer.rule!r} "
                "takes out of the live parameters all that is offered: what the codec loses would be gone; "
                "leave error_feedback out, or use keep or blend"
            )
        if self.outer.is_delayed and delay:
            raise ValueError(
                f"outer.sync_delay_steps is {delay}, but rule {self.outer.rule!r} applies at the fragment's "
                "next schedule point, one round late; leave it at 0, or use keep or blend"
            )
        return self

    @property
    def is_own_recipe(self) -> bool:
        """Whether the recipe is a user's "file.py:function" rather than a built-in name."""
        return ":" in self.recipe

    def canonical_bytes(self) -> bytes:
        """The agreed settings as bytes: JSON with sorted keys, every default written out but for sections
        that later versions added."""
        settings = self.model_dump(mode="json")
        if self.pipeline.stages == 1:
            del settings["pipeline"]
        if not self.salt:
            del settings["salt"]
        if not self.members:
            del settings["members"]
        if self.aggregation.rule == implied_rule(self.weight_cap, members=self.members):
            del settings["aggregation"]
        return json.dumps(settings, sort_keys=True, separators=(",", ":")).encode()

    def digest(self) -> bytes:
        """sha256 of ``canonical_bytes``, 32 bytes: the run's identity on the wire."""
        return run_digest(self.canonical_bytes())

    def stage_digest(self, stage: int) -> bytes:
        """Names the group of the peers that hold ``stage``: an ordinary swarm under this digest. The run's
        own digest where there is one stage. One past the last stage is the group of the tied table."""
        return stage_digest(self.digest(), stage, self.pipeline.stages)

    @classmethod
    def from_canonical_bytes(cls, data: bytes) -> RunConfig:
        """Read a published config; raises ``ConfigError`` if it is not one that this version understands."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            wrong = _config_errors("the published run manifest", cls, error)[0]
            problem = wrong.problem.partition(";")[0]  # whose cure is for who writes a run file
            cure = "the run is of another version of p2p-co2, install the organiser's"
            raise ConfigError(wrong.where, wrong.key, f"{problem}; {cure}") from None


def read_rate(given: object) -> object:
    """Bytes per second of "2500000", "500k", "2.5M" or "20Mbit"; what is no text stays as it is."""
    if not isinstance(given, str):
        return given
    found = re.fullmatch(r"(-?[0-9.]+) ?([kMG]?)(bit)?", given)
    try:
        value = float(found[1]) if found else None
    except ValueError:
        value = None
    if found is None or value is None:
        raise ValueError("is no rate; write bytes per second (500k, 2M) or bits (20Mbit)")
    return value * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}[found[2]] / (8 if found[3] else 1)


Rate = Annotated[float, BeforeValidator(read_rate)]


def read_duration(given: object) -> object:
    """Seconds of "90", "90s", "5m" or "1h"; what is no text stays as it is."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smh]?)", given) if isinstance(given, str) else None
    if found is None and isinstance(given, str):
        raise ValueError("is no duration; write seconds, or 90s, 5m, 1h")
    return float(found[1]) * {"m": 60, "h": 3600}.get(found[2], 1) if found else given


@dataclass(frozen=True, kw_only=True)
class Option:
    """How a setting of a peer is given outside a peer file: ``--name`` of ``p2p-co2 join`` and ``doctor``,
    the variable ``P2P_CO2_NAME``, ``name=...`` of ``co2.join``.

    ``help``: what it is, for all of these and the reference. ``name``: if not that of its field. ``unit``:
    what help shows in place of a value. ``panel``: its heading in help. ``on_command_line`` and
    ``in_program``: whether it is an option of the commands, and of ``co2.join``. ``hidden``: left out of
    help."""

    help: str
    name: str = ""
    unit: str = ""
    panel: str = ""
    on_command_line: bool = True
    in_program: bool = True
    hidden: bool = False


GUEST = "A guest on your machine"
NETWORK = "Network"
BOARD = "Board"
STAGES = "Runs with stages"


class LimitsConfig(_Frozen):
    """Caps on what this peer gives. A program may give a rate as text, too: "20Mbit"."""

    upload_bytes_per_s: Annotated[
        Rate,
        Option(
            name="upload", unit="RATE", panel=GUEST,
            help="Send at most this: bytes per second, or 500k, 2M, 20Mbit; 0 for no cap.",
        ),
    ] = Field(default=0.0, ge=0)  # fmt: skip
    download_bytes_per_s: Annotated[
        Rate, Option(name="download", unit="RATE", panel=GUEST, help="Receive at most this, likewise.")
    ] = Field(default=0.0, ge=0)
    threads: Annotated[
        int, Option(panel=GUEST, help="Train with so many CPU threads; 0 for the number of cores.")
    ] = Field(default=0, ge=0, le=1024)
    hours: Annotated[
        str, Option(panel=GUEST, help="Train only then, local time: 22:00-07:00, or several with commas.")
    ] = Field(default="", max_length=256)
    rest_while: Annotated[
        str, Option(panel=GUEST, help="Rest while you use gpu, input, load; or while on battery, or in heat.")
    ] = Field(default="", max_length=256)
    rest_for: Annotated[
        str, Option(panel=GUEST, help="Rest while programs of these names run: blender,steam.")
    ] = Field(default="", max_length=1024)
    idle_for_s: Annotated[
        float,
        BeforeValidator(read_duration),
        Option(
            name="idle_for", unit="TIME", panel=GUEST,
            help="Go on when none of that was in use for so long: 90s, 5m, 1h.",
        ),
    ] = Field(default=300.0, ge=5, le=86400)  # fmt: skip

    @field_validator("upload_bytes_per_s", "download_bytes_per_s")
    @classmethod
    def _usable(cls, rate: float) -> float:
        if 0 < rate < SLOWEST_CAP_BYTES_PER_S:
            raise ValueError(
                f"below {SLOWEST_CAP_BYTES_PER_S} bytes/s no round gets through; give more, or 0 for no cap"
            )
        return rate

    @field_validator("hours", "rest_while")
    @classmethod
    def _readable(cls, text: str, info: ValidationInfo) -> str:
        try:
            read_hours(text) if info.field_name == "hours" else read_words(text, SENSES)
        except ConfigError as error:
            raise ValueError(error.problem) from None
        return text


class PeerConfig(_Frozen):
    """One peer's own settings. Each field says what it is; those with an ``Option`` are options of
    ``p2p-co2 join`` and ``co2.join``, too."""

    folder: Annotated[
        Path,
        Option(help="Keep identity, checkpoints, events here; one for each run, if absent. ~ is your home."),
    ] = Path("runs/peer")
    name: Annotated[str, Option(help="Give this peer a name; two words of its key, if absent.")] = ""
    device: Annotated[
        str, Option(in_program=False, help="Train on auto (a GPU if torch can use one), cpu, cuda or cuda:1.")
    ] = "auto"
    batch: Annotated[
        int, Option(in_program=False, help="Take so many sequences a step; 0 for the recipe's.")
    ] = Field(default=0, ge=0)
    min_peers: Annotated[int, Option(help="Wait (bounded) for this many before training.")] = Field(
        default=1, ge=1
    )
    checkpoint_every_s: Annotated[
        float,
        Option(
            name="checkpoint_every", unit="SECONDS",
            help="Write a checkpoint so often; 0 for what 100 GB of writes a day allow.",
        ),
    ] = Field(default=0.0, ge=0)  # fmt: skip
    carrier: Annotated[CarrierName, Option(panel=NETWORK, help="Carry by auto, grpc or libp2p.")] = "auto"
    host: Annotated[
        str,
        Option(
            panel=NETWORK, help="Listen on this address; all of this machine's, if the seeds are elsewhere."
        ),
    ] = ""
    announce_host: Annotated[
        str, Option(panel=NETWORK, help="Have others dial this address, if it is not the host's.")
    ] = ""
    grpc_port: Annotated[int, Option(panel=NETWORK, help="Receive here what peers send; 0 for any.")] = Field(
        default=0, ge=0, le=65535
    )
    libp2p_port: Annotated[int, Option(panel=NETWORK, help="Find peers, and relay, here; 0 for any.")] = (
        Field(default=0, ge=0, le=65535)
    )
    upnp: Annotated[bool, Option(panel=NETWORK, help=UPNP)] = True
    relay: Annotated[bool, Option(panel=NETWORK, help=RELAY)] = True
    board: Annotated[bool, Option(panel=BOARD, help="Serve a page on loopback; idle until looked at.")] = True
    board_port: Annotated[int, Option(panel=BOARD, help="Serve that page there; 0 for any.")] = Field(
        default=0, ge=0, le=65535
    )
    stage: Annotated[
        int, Option(in_program=False, panel=STAGES, help="Hold this, from 0; -1 for the neediest.")
    ] = Field(default=-1, ge=-1, lt=MAX_STAGES)
    cache_bytes: Annotated[
        int,
        Option(
            on_command_line=False, in_program=False,
            help="Keep so much for microbatches within a stage: half for payloads, half for graphs. "
            "What does not fit is computed again for its backward.",
        ),
    ] = Field(default=1 << 30, ge=1 << 20)  # fmt: skip
    slow_line: Annotated[
        str,
        Option(
            hidden=True, in_program=False,
            help='Play this line in a rehearsal: "up,down,latency,jitter,loss" (bits/s, seconds, share).',
        ),
    ] = Field(default="", max_length=128)  # fmt: skip
    limits: LimitsConfig = LimitsConfig()

    @field_validator("name")
    @classmethod
    def _is_a_name(cls, name: str) -> str:
        if name and not is_name(name):
            raise ValueError("at most 32 printable characters, none of them ~, no space at the ends")
        return name

    @field_validator("folder")
    @classmethod
    def _at_home(cls, folder: Path) -> Path:
        try:
            return folder.expanduser()
        except RuntimeError as error:
            raise ValueError(f"{error}; write the folder out") from None


_Config = TypeVar("_Config", RunConfig, PeerConfig)


def run_digest(canonical: bytes) -> bytes:
    """As ``RunConfig.digest``, of the ``canonical_bytes``."""
    return hashlib.sha256(b"p2p-co2 run\0" + canonical).digest()


def stage_digest(run: bytes, stage: int, stages: int) -> bytes:
    """As ``RunConfig.stage_digest``, for who knows only the digest of the ``run``."""
    return (
        run if stages == 1 else hashlib.sha256(b"p2p-co2 stage\0" + run + stage.to_bytes(4, "big")).digest()
    )


def read_run_config(path: Path) -> RunConfig:
    """Read a run file (TOML). Raises ``ConfigError`` naming the file, the key and what would be right."""
    return _read(RunConfig, path)


def read_peer_config(path: Path) -> PeerConfig:
    """Read a peer file (TOML); errors as ``read_run_config``."""
    return _read(PeerConfig, path)


def saved_text(path: Path) -> str:
    """A text as editors save it: UTF-8, or UTF-16 that begins with a byte order mark; without the mark.
    Raises ``OSError`` and ``UnicodeDecodeError``."""
    content = path.read_bytes()
    return content.decode("utf-16" if content[:2] in {b"\xff\xfe", b"\xfe\xff"} else "utf-8-sig")


def write_toml(config: RunConfig | PeerConfig) -> str:
    """The config as TOML that the readers above take back unchanged."""
    lines: list[str] = []
    _write_table(lines, "", config.model_dump(mode="json"))
    return "\n".join(lines) + "\n"


def _write_table(lines: list[str], prefix: str, table: dict[str, Any]) -> None:
    for key, value in table.items():
        if not isinstance(value, dict):
            lines.append(f"{key} = {json.dumps(value, ensure_ascii=False)}")
    for key, value in table.items():
        if isinstance(value, dict):
            name = f"{prefix}{key}"
            lines.append(f"\n[{name}]")
            _write_table(lines, f"{name}.", value)


def _read(kind: type[_Config], path: Path) -> _Config:
    try:
        text = saved_text(path)
        table = tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError(str(path), "", "no such file") from None
    except UnicodeDecodeError:
        raise ConfigError(str(path), "", "not UTF-8 text: save it as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(path), "", f"not valid TOML: {error}") from None
    except OSError as error:
        raise ConfigError(str(path), "", f"cannot be read: {error.strerror}") from None
    try:
        return kind.model_validate(table)
    except ValidationError as error:
        raise ConfigError.of_all(_config_errors(str(path), kind, error, text)) from None


def _config_errors(
    where: str, kind: type[BaseModel], error: ValidationError, text: str = ""
) -> list[ConfigError]:
    return [
        ConfigError(where, ".".join(place), told, _line_of(text, place))
        for place, told in problems_of(kind, error).items()
    ]


def _line_of(text: str, place: Sequence[str]) -> int:
    """The line of a TOML file in which the key or table at ``place`` is; 0 if none is."""
    table: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[([^\[\]]+)\]", line):
            here = table = _parts(header[1])
            is_it = here == list(place)
        elif key := re.match(r"\s*([^=#]+?)\s*=", line):
            here = table + _parts(key[1])
            is_it = here == list(place[: len(here)])  # of an inline table that of its key
        else:
            continue
        if is_it:
            return number
    return 0


def _parts(dotted: str) -> list[str]:
    return [part.strip().strip("\"'") for part in dotted.split(".")]


def problems_of(kind: type[BaseModel], error: ValidationError) -> dict[tuple[str, ...], str]:
    """What is wrong by the place of the key in ``kind``; one problem for each place."""
    found: dict[tuple[str, ...], str] = {}
    for one in error.errors():
        *tables, last = [str(part) for part in one["loc"]] or [""]
        if tables[:1] == ["recipe_options"]:  # pydantic tells of each type that it might have been
            found[(*tables[:1], (*tables[1:], last)[0])] = "write text, a number, true or false"
            continue
        problem = in_our_words(one["msg"])
        if one["type"] == "extra_forbidden":
            near = get_close_matches(last, _keys(kind, tables), 1)
            homes = [name for name in kind.model_fields if last in _keys(kind, [name])]
            if near:
                problem = f"unknown key; did you mean {near[0]}?"
            elif homes and not tables:
                problem = f"unknown key here; it belongs below [{homes[0]}]"
        elif one["loc"] and not isinstance(one["input"], dict):
            problem += f" (got {one['input']!r})"
        found.setdefault((*tables, last) if last else (), problem)
    return found


def _keys(kind: type[BaseModel], tables: Sequence[str]) -> list[str]:
    """The keys of a table in ``kind``."""
    for name in tables:
        inner = kind.model_fields[name].annotation if name in kind.model_fields else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        kind = inner
    return list(kind.model_fields)
