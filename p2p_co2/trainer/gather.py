"""One whole checkpoint out of those of a model's stages, for ``sample`` and ``eval``.

    gather_folders([Path("runs/a/checkpoint"), Path("runs/b/checkpoint")], Path("whole"))
    gather_swarm(ticket, Path("whole"))                # from the peers themselves, while they train

Laws: every stage is in it exactly once, and all of one run. Of several checkpoints of a stage the one that is
furthest on is taken. Two that hold different states of one round are refused: one is of another history.
Stages are groups of their own, so they may have come to different rounds. A tied table is like a stage more:
it lies in the folder ``tied`` beside the checkpoints of the first stage and of the last.

Price: the whole model's parameters in memory, and one stage's agreed state. The files are read twice.
From a swarm a stage after the other is loaded, as a newcomer does, so the later ones are some rounds on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor, nn

from p2p_co2.config import PeerConfig, RunConfig
from p2p_co2.errors import ConfigError, RunOver, TransportError
from p2p_co2.recipes import Recipe, load_measuring_recipe
from p2p_co2.telemetry import events as ev
from p2p_co2.tensors.checkpoint.agreed import state_digest
from p2p_co2.tensors.checkpoint.folder import Checkpoint, has_checkpoint, load_agreed, save
from p2p_co2.tensors.fragments import plan_fragments
from p2p_co2.tensors.stages.whole import WholeModel, whole_names
from p2p_co2.ticket import Ticket
from p2p_co2.trainer.connection import TIED, connect
from p2p_co2.trainer.resuming import shapes_of

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class StageSource:
    """The newest whole checkpoint in ``folder``: ``file``. ``stage``: one past the last is the tied table.
    ``versions`` and ``digests``: of the agreed state, by fragment. ``damaged``: newer ones, and how."""

    run: RunConfig
    stage: int
    folder: Path
    file: Path
    position: float
    inner_steps: int
    tokens: int
    versions: tuple[int, ...]
    digests: tuple[bytes, ...]
    damaged: tuple[str, ...]

    @property
    def holds(self) -> str:
        return f"stage {self.stage}" if self.stage < self.run.pipeline.stages else "tied table"

    @property
    def came_to(self) -> str:
        """The rounds that its fragments have come to, in words."""
        first = min(self.versions)
        last = max(self.versions)
        return f"round {first}" if first == last else f"rounds {first} to {last}"


def sources_of(folders: Iterable[Path]) -> list[StageSource]:
    """The checkpoint to take of each stage, first to last.

    Raises ``ConfigError`` if a folder has no whole checkpoint, or one of no stage or of another run. Also if
    two contradict each other, or a stage is missing. ``EnvironmentFault`` if this machine refuses to read.
    """
    found = [_look(folder) for folder in folders]
    best = dict[int, StageSource]()
    if not found:
        raise ConfigError.of_option("FOLDER", "give a checkpoint folder of each stage")
    first = found[0]
    tables = [source.folder.parent / TIED / "checkpoint" for source in found]
    found += [_look(table) for table in tables if first.run.pipeline.is_tied and has_checkpoint(table)]
    for one in found:
        if one.run.digest() != first.run.digest():
            problem = f'is of another run ("{one.run.name}") than {first.folder} ("{first.run.name}")'
            raise ConfigError(str(one.folder), "", f"{problem}; give folders of one run")
        best[one.stage] = _further(best.get(one.stage, one), one)
    count = first.run.pipeline.stages
    if missing := [str(stage) for stage in range(count) if stage not in best]:
        what = f"stage {missing[0]} is" if len(missing) == 1 else f"stages {', '.join(missing)} are"
        problem = f"{what} missing, of {count}; add a checkpoint folder of a peer that holds it"
        raise ConfigError.of_option("FOLDER", problem)
    if first.run.pipeline.is_tied and count not in best:
        problem = f"the tied table is missing; it lies in {tables[0]}, or there beside another folder"
        raise ConfigError.of_option("FOLDER", problem)
    return [best[stage] for stage in sorted(best)]


def gather_folders(folders: Iterable[Path], out: Path, own_recipe: str = "") -> list[StageSource]:
    """Gather checkpoint folders, one or more of each stage, into ``out``; returns what was taken.
    ``own_recipe``: as of ``load_measuring_recipe``. Raises as that, ``sources_of`` and ``write_whole``."""
    _refuse_used(out)
    sources = sources_of(folders)
    run = sources[0].run
    write_whole(sources, out, *_models(load_measuring_recipe(run, own_recipe), run))
    return sources


def gather_swarm(ticket: str, out: Path, own_recipe: str = "") -> list[StageSource]:
    """As ``gather_folders``, from a swarm that trains. This process joins the peers of each stage as a
    newcomer, loads what they agree on, and leaves without having trained.

    Blocks, bounded. Raises ``TransportError`` if nobody gives a stage, and else as ``connect`` and ``start``.
    """
    Ticket.parse(ticket)
    _refuse_used(out)
    out.mkdir(parents=True, exist_ok=True)
    try:
        with TemporaryDirectory(prefix="stages-", dir=out) as place:
            visitor = PeerConfig(folder=Path(place) / "0", stage=0, board=False)
            run = fetch(ticket, visitor, own_recipe)
            for stage in range(1, run.pipeline.stages):
                there = {"folder": Path(place) / str(stage), "stage": stage}
                fetch(ticket, visitor.model_copy(update=there), own_recipe)
            folders = [Path(place) / str(stage) / "checkpoint" for stage in range(run.pipeline.stages)]
            return gather_folders(folders, out, own_recipe)
    finally:
        with suppress(OSError):  # the checkpoint is in it
            out.rmdir()


def write_whole(
    sources: Sequence[StageSource], out: Path, whole: nn.Module, stages: Sequence[nn.Module]
) -> Path:
    """Write the whole model of ``sources``, one for each stage, into the folder ``out``; returns the file.

    ``whole``: the model that the run's recipe makes of its ``stages``, whose tensors it shares. A tied table
    comes after the last of them. Only names and shapes are looked at, so all may be on
    the meta device. Raises ``ConfigError`` if a checkpoint is of another model, or ``out`` has a checkpoint;
    ``EnvironmentFault`` if the disk refuses.
    """
    _refuse_used(out)
    run = sources[0].run
    plan = plan_fragments(whole, run.fragments)
    names = whole_names(whole, stages)
    gathered = WholeModel(plan, names)
    buffers = dict[str, Tensor]()
    for source, module, there in zip(sources, stages, names, strict=True):
        found = _put(gathered, source, module)
        buffers |= {there[name]: values for name, values in found.items() if name in there}
    checkpoint = Checkpoint(
        run_config_json=run.canonical_bytes().decode(), plan_digest=plan.digest, states=gathered.states(),
        buffers=buffers, optimizer={}, position=min(one.position for one in sources),
        inner_steps=min(one.inner_steps for one in sources), tokens=min(one.tokens for one in sources),
        parameters=shapes_of(whole),
    )  # fmt: skip
    return save(out, checkpoint)


def _put(gathered: WholeModel, source: StageSource, module: nn.Module) -> Mapping[str, Tensor]:
    """Read one stage; returns its buffers."""
    saved = load_agreed(source.file)
    cut = plan_fragments(module, source.run.fragments)
    sizes = [state.params.numel() for state in saved.states]
    if saved.plan_digest != cut.digest or sizes != [one.numel for one in cut.fragments]:
        problem = f"is of another {source.holds} than the recipe makes here"
        raise ConfigError(str(source.folder), "", problem)
    gathered.put(source.stage, cut, saved.states)
    return saved.buffers


def _refuse_used(out: Path) -> None:
    if has_checkpoint(out):
        raise ConfigError.of_option("--out", f"{out} holds a checkpoint already; name another folder")


def _models(recipe: Recipe, run: RunConfig) -> tuple[nn.Module, Sequence[nn.Module]]:
    """The whole model, and its stages: names and shapes."""
    if run.pipeline.stages == 1:
        return recipe.model, [recipe.model]
    stages = recipe.in_stages(run.pipeline.stages)
    outlines = stages.outlines()
    groups = [stages.groups(stage, outline) for stage, outline in enumerate(outlines)]
    return stages.join(outlines), [own for own, *_ in groups] + groups[0][1:]


def fetch(ticket: str, config: PeerConfig, own_recipe: str = "") -> RunConfig:
    """Leave a checkpoint of ``config.stage`` in ``config.folder``, as the peers that hold it agree on it.
    Blocks and raises as ``gather_swarm``."""
    met = list[ev.PeerJoined]()
    whole = False

    def on_event(event: ev.Event) -> None:
        if isinstance(event, ev.PeerJoined):
            met.append(event)

    try:
        connection = connect(ticket, config, on_event)
        try:
            run = connection.run
            whole = run.pipeline.stages == 1
            for peer in reversed(connection.visit(load_measuring_recipe(run, own_recipe))):
                peer.stop()
                peer.leave("has what it came for")
        finally:
            connection.close()
        if not met:
            raise TransportError("none of its peers is there")
    except (RunOver, TransportError) as error:
        what = "the model" if whole else f"stage {config.stage}"
        problem = f"nobody gives {what} now: {error}"
        raise TransportError(f"{problem} (or take what lies in the folders of its peers)") from error
    return run


def _look(folder: Path) -> StageSource:
    saved = load_agreed(folder)
    count = saved.run.pipeline.stages
    stage = saved.stage
    if count == 1 and stage is None:
        stage = 0
    if stage is None:
        problem = "holds the whole model already: sample and eval read it; give folders of its stages"
        raise ConfigError(str(folder), "", problem)
    if not 0 <= stage < count + saved.run.pipeline.is_tied:
        problem = f"holds stage {stage} of a run that has {count} (from 0 on): nobody's checkpoint"
        raise ConfigError(str(folder), "", f"{problem}; give another folder")
    versions = tuple(state.version for state in saved.states)
    digests = tuple(state_digest(state, _CHUNK_BYTES) for state in saved.states)
    counts = saved.position, saved.inner_steps, saved.tokens
    return StageSource(saved.run, stage, folder, saved.path, *counts, versions, digests, saved.passed_over)


def _further(one: StageSource, other: StageSource) -> StageSource:
    """The one that has come further. Raises ``ConfigError`` if they hold two states of one round."""
    ours, theirs = (zip(which.versions, which.digests, strict=True) for which in (one, other))
    for (version, digest), (their_version, their_digest) in zip(ours, theirs, strict=False):
        if version == their_version and digest != their_digest:
            problem = f"holds another state of {one.holds} at round {version} than {one.folder}"
            cure = "one of them is of another history; leave it out"
            raise ConfigError(str(other.folder), "", f"{problem}: {cure}")
    return max(one, other, key=lambda which: (sum(which.versions), which.position))
