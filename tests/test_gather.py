"""Gathering: stages' checkpoints become one whole model, value by value, and nothing that is not theirs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from p2p_co2.cli import main as cli
from p2p_co2.config import PeerConfig, PipelineConfig, RunConfig
from p2p_co2.errors import ConfigError, LocalProtocolError
from p2p_co2.recipes import load_run_recipe, recipe_digest
from p2p_co2.recipes.byte_gpt import ByteGPTStage, Shape, stage_edges
from p2p_co2.recipes.recipe import Options
from p2p_co2.tensors import outer
from p2p_co2.tensors.checkpoint import parts
from p2p_co2.tensors.checkpoint.agreed import header_bytes
from p2p_co2.tensors.checkpoint.folder import Checkpoint, load_agreed, save
from p2p_co2.tensors.codec import get_codec
from p2p_co2.tensors.fragments import LiveParameters, plan_fragments
from p2p_co2.tensors.names import named_buffers
from p2p_co2.tensors.stages import Chain
from p2p_co2.tensors.stages.whole import WholeModel, whole_names
from p2p_co2.trained import Trained
from p2p_co2.trainer.exchanged_model import ExchangedModel, TrainingSetup
from p2p_co2.trainer.gather import sources_of, write_whole
from p2p_co2.trainer.ledger.fragment_state import FragmentState
from p2p_co2.trainer.ledger.worker import TensorWorker
from p2p_co2.trainer.resuming import shapes_of
from p2p_co2.trainer.saver import Saver
from p2p_co2.trainer.synchroniser import Progressed, Synchroniser
from tests.trainer_bench import RecordingWire
from tools.house import ROOT

SHAPE = Shape(layers=3, width=16, heads=2, context=8)


def run_of(stages: int, name: str = "cut", fragments: int = 3) -> RunConfig:
    return RunConfig(name=name, fragments=fragments, pipeline=PipelineConfig(stages=stages))


class Normed(nn.Module):
    """A stage with buffers, and a parameter that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.inner.bias.requires_grad_(False)


def drawn(seed: int, make: type[nn.Module] | None = None, *arguments: object) -> nn.Module:
    torch.manual_seed(seed)
    return (make or Normed)(*arguments)


def write(
    folder: Path, run: RunConfig, stage: int | None, module: nn.Module, versions: Sequence[int] = (3, 4, 4),
    inner_steps: int = 40,
) -> Path:  # fmt: skip
    """As a stage's peer does, with the module's values as the agreed ones."""
    plan = plan_fragments(module, run.fragments)
    live = LiveParameters(module, plan)
    states = [outer.init(live.snapshot(part.index)) for part in plan.fragments]
    checkpoint = Checkpoint(
        run_config_json=run.canonical_bytes().decode(), plan_digest=plan.digest,
        states=[state._replace(version=version) for state, version in zip(states, versions, strict=True)],
        buffers=named_buffers(module, persistent=True), optimizer={}, position=float(max(versions)),
        inner_steps=inner_steps, tokens=10 * inner_steps, parameters=shapes_of(module), stage=stage,
    )  # fmt: skip
    save(folder, checkpoint)
    return folder


def write_all(folder: Path, run: RunConfig, modules: Sequence[nn.Module]) -> list[Path]:
    return [write(folder / f"of-{stage}", run, stage, module) for stage, module in enumerate(modules)]


def byte_stages(count: int) -> list[nn.Module]:
    edges = stage_edges(SHAPE.layers, count)
    return [drawn(stage, ByteGPTStage, SHAPE, *edge) for stage, edge in enumerate(edges)]


def loaded(folder: Path, whole: nn.Module) -> dict[str, torch.Tensor]:
    """The agreed parameters and the buffers in ``folder`` by name, of a model like ``whole``."""
    saved, plan = load_agreed(folder), plan_fragments(whole, load_agreed(folder).run.fragments)
    assert saved.plan_digest == plan.digest
    assert dict(saved.parameters) == dict(shapes_of(whole))
    values = {name: torch.empty(shape) for name, shape in saved.parameters}
    for part, state in zip(plan.fragments, saved.states, strict=True):
        at = 0
        for one in part.slices:
            size = one.stop - one.start
            values[one.name].view(-1)[one.start : one.stop] = state.params[at : at + size]
            at += size
    return values | dict(saved.buffers)


# ---- by hand


def test_two_stages_by_hand() -> None:
    stages = [nn.Linear(2, 1, bias=False), nn.Linear(1, 1, bias=False)]
    whole = Chain(stages)
    names = whole_names(whole, stages)
    plan = plan_fragments(whole, 1)
    first, second = (next(iter(there.values())) for there in names)
    assert [part.name for part in plan.fragments[0].slices] == [first, second]
    gathered = WholeModel(plan, names)
    gathered.put(1, plan_fragments(stages[1], 1), [outer.init(torch.tensor([7.0]))._replace(version=2)])
    with pytest.raises(LocalProtocolError, match="2 values"):
        gathered.states()
    gathered.put(0, plan_fragments(stages[0], 1), [outer.init(torch.tensor([5.0, 6.0]))._replace(version=3)])
    (state,) = gathered.states()
    assert state.params.tolist() == [5.0, 6.0, 7.0]
    assert (state.version, state.momentum.tolist(), state.moved_norms) == (2, [0.0, 0.0, 0.0], ())


# ---- laws


@pytest.mark.parametrize(("count", "fragments"), [(2, 1), (2, 5), (3, 3)])
def test_the_whole_holds_what_its_stages_hold(tmp_path: Path, count: int, fragments: int) -> None:
    run, modules = run_of(count, fragments=fragments), byte_stages(count)
    versions = [tuple(range(3 + stage, 3 + stage + fragments)) for stage in range(count)]
    folders = [
        write(tmp_path / str(stage), run, stage, module, versions[stage])
        for stage, module in enumerate(modules)
    ]
    whole = Chain(modules)
    sources = sources_of(reversed(folders))
    assert [source.stage for source in sources] == list(range(count))
    assert [source.versions for source in sources] == versions
    file = write_whole(sources, tmp_path / "whole", whole, modules)
    saved = load_agreed(tmp_path / "whole")
    assert (file, saved.stage, saved.run) == (saved.path, None, run)
    assert {state.version for state in saved.states} == {3}
    assert saved.position == min(float(max(some)) for some in versions)
    values = loaded(tmp_path / "whole", whole)
    assert values.keys() == dict(whole.named_parameters()).keys()
    assert all(torch.equal(values[name], parameter) for name, parameter in whole.named_parameters())


def test_buffers_come_along_and_frozen_parameters_stay_where_the_recipe_has_them(tmp_path: Path) -> None:
    run, modules = run_of(2), [drawn(0), drawn(1)]
    for stage, module in enumerate(modules):
        module.get_buffer("norm.running_mean").fill_(stage + 1.0)
    whole = Chain(modules)
    write_whole(sources_of(write_all(tmp_path, run, modules)), tmp_path / "whole", whole, modules)
    values = loaded(tmp_path / "whole", whole)
    assert values.keys() == {name for name in whole.state_dict() if not name.endswith("inner.bias")}
    assert all(torch.equal(values[name], whole.state_dict()[name]) for name in values)


def test_a_run_of_one_stage_is_gathered_too_and_the_newest_wins(tmp_path: Path) -> None:
    run, older, newer = run_of(1), drawn(0), drawn(1)
    folders = [write(tmp_path / "a", run, None, newer, (4, 5, 5)), write(tmp_path / "b", run, None, older)]
    for order, given in enumerate((folders, folders[::-1])):
        out = tmp_path / f"whole-{order}"
        write_whole(sources_of(given), out, newer, [newer])
        assert torch.equal(loaded(out, newer)["inner.weight"], newer.get_parameter("inner.weight"))


def test_several_replicas_of_a_stage_may_be_given(tmp_path: Path) -> None:
    run, modules = run_of(2), [drawn(0), drawn(1)]
    folders = [*write_all(tmp_path, run, modules), write(tmp_path / "twin", run, 1, modules[1])]
    assert [source.stage for source in sources_of(folders)] == [0, 1]
    folders.append(write(tmp_path / "late", run, 1, drawn(5), (5, 5, 5)))
    assert [source.folder.name for source in sources_of(folders)] == ["of-0", "late"]


# ---- with recipes


TINY: Options = {"layers": 3, "width": 32, "heads": 2, "context": 32}
SMALL: Options = {"width": 16, "blocks": 3}
EXAMPLE = f"{ROOT / 'examples' / 'staged_recipe.py'}:make"


def save_as_a_peer(folder: Path, run: RunConfig, stage: int, module: nn.Module) -> Path:
    """A peer's saver writes; ``module``'s values are what was agreed."""
    plan, codec = plan_fragments(module, run.fragments), get_codec(run.codec.name)
    optimizer = torch.optim.AdamW(module.parameters())
    setup = TrainingSetup(run, PeerConfig(folder=folder), plan, module, optimizer, stage)
    model = ExchangedModel(setup, print)
    states = [outer.init(model.live.snapshot(index)) for index in range(run.fragments)]
    ledger = TensorWorker(codec, [FragmentState(run, codec, "me", one, at) for at, one in enumerate(states)])
    wire = RecordingWire()
    saver = Saver(
        setup,
        ledger,
        Synchroniser(run, model, ledger, cast(Any, wire), Progressed()),
        model.live,
        wire.report,
    )
    saver.save()
    saver.close()
    ledger.close()
    return folder / "checkpoint"


@pytest.mark.parametrize(
    ("recipe", "options", "count"),
    [("byte-gpt", TINY, 3), (EXAMPLE, SMALL, 2)],
)
def test_what_is_gathered_is_measured_as_the_stages_in_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recipe: str, options: Options, count: int
) -> None:
    own = "" if recipe == "byte-gpt" else recipe
    run = RunConfig(
        recipe=recipe, recipe_options=dict(options), recipe_digest=recipe_digest(recipe, options),
        fragments=3, pipeline=PipelineConfig(stages=count),
    )  # fmt: skip
    made = load_run_recipe(run, own)
    stages = [made.in_stages(count).build(5, stage) for stage in range(count)]
    for number, parameter in enumerate(Chain(stages).parameters()):
        drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
        parameter.data.add_(0.02 * drawn)
    folders = [save_as_a_peer(tmp_path / str(at), run, at, stage) for at, stage in enumerate(stages)]
    options_given = ["--recipe", own] if own else []
    command = ["gather", *map(str, folders[::-1]), "--out", str(tmp_path / "whole"), *options_given]
    with pytest.raises(SystemExit) as end:
        cli.main(command)
    assert not end.value.code
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"stage 0: round 0, from {folders[0]}"
    assert lines[count:] == [f"written to {tmp_path / 'whole'}"]

    trained = Trained.load(tmp_path / "whole", own)
    assert made.held_out is not None
    loss = trained.held_out_loss()
    assert loss == pytest.approx(made.held_out(Chain(stages)), abs=1e-6)
    with pytest.raises(SystemExit):
        cli.main(["eval", str(tmp_path / "whole"), "--json", *options_given])
    told = json.loads(capsys.readouterr().out)
    assert told["loss"] == pytest.approx(loss, abs=1e-6)
    assert (told["round"], Path(told["checkpoint"]).parent) == (0.0, tmp_path / "whole")
    if trained.recipe.generate is not None:
        with pytest.raises(SystemExit):
            cli.main(["sample", str(tmp_path / "whole"), "--length", "9", *options_given])
        assert capsys.readouterr().out == trained.sample("def ", 9, 0) + "\n"

    assert cli.main(["eval", str(folders[0]), *options_given]) == 2
    assert (
        "holds stage 0 alone; make a checkpoint of the whole model with p2p-co2 gather"
        in capsys.readouterr().err
    )
    assert cli.main(["gather", str(folders[0]), "--out", str(tmp_path / "none")]) == 2
    assert "missing" in capsys.readouterr().err
    assert cli.main([*command[:1], str(folders[0]), "p2pco2-x", *command[-2 - len(options_given) :]]) == 2
    assert "one ticket alone" in capsys.readouterr().err


# ---- what is refused


def test_missing_stages_are_named(tmp_path: Path) -> None:
    run, modules = run_of(3), byte_stages(3)
    folders = write_all(tmp_path, run, modules)
    with pytest.raises(ConfigError, match="stages 0, 2 are missing, of 3; add a checkpoint folder"):
        sources_of([folders[1]])
    with pytest.raises(ConfigError, match="stage 1 is missing, of 3"):
        sources_of([folders[0], folders[2], folders[0]])
    with pytest.raises(ConfigError, match="of each stage"):
        sources_of([])


def test_another_run_another_stage_and_another_history_are_refused(tmp_path: Path) -> None:
    run, modules = run_of(2), [drawn(0), drawn(1)]
    first, second = write_all(tmp_path, run, modules)
    for folder, words in {
        write(tmp_path / "run", run_of(2, "other"), 1, modules[1]): r'another run \("other"\) than .*of-0',
        write(
            tmp_path / "whole", run, None, Chain(modules)
        ): "holds the whole model already: sample and eval",
        write(tmp_path / "beyond", run, 2, modules[1]): "stage 2 of a run that has 2",
        write(tmp_path / "below", run, -1, modules[1]): "stage -1 of a run that has 2",
        write(tmp_path / "fork", run, 0, drawn(7)): "another state of stage 0 at round 3 than .*of-0: one of",
        tmp_path / "nowhere": "no checkpoint there",
    }.items():
        with pytest.raises(ConfigError, match=words) as refused:
            sources_of([first, second, folder])
        assert refused.value.where == str(folder)


def test_stages_of_another_model_and_a_folder_in_use_are_refused(tmp_path: Path) -> None:
    run, modules = run_of(2), [drawn(0), drawn(1)]
    sources = sources_of(write_all(tmp_path, run, modules))
    other = [modules[0], nn.Linear(4, 5)]
    with pytest.raises(ConfigError, match="of-1: is of another stage 1 than the recipe makes here"):
        write_whole(sources, tmp_path / "whole", Chain(other), other)
    assert not (tmp_path / "whole").exists()
    with pytest.raises(ConfigError, match=r"--out: .* holds a checkpoint already"):
        write_whole(sources, sources[0].folder, Chain(modules), modules)


def test_a_whole_that_is_not_made_of_its_stages_is_refused() -> None:
    modules = [drawn(0), drawn(1)]
    for whole in (Chain([*modules, drawn(2)]), Chain(modules[:1]), Chain([drawn(0), drawn(1)])):
        with pytest.raises(ConfigError, match="the very parameters of its stages"):
            whole_names(whole, modules)
    with pytest.raises(ConfigError, match="the very parameters of its stages"):
        whole_names(Chain(modules), [*modules, modules[0]])


def test_a_torn_checkpoint_falls_back_to_the_one_before_it_and_says_so(tmp_path: Path) -> None:
    run, modules = run_of(2), [drawn(0), drawn(1)]
    first, second = write_all(tmp_path, run, modules)
    write(second, run, 1, drawn(3), (9, 9, 9), inner_steps=50)
    newest = max(second.glob("state-*"))
    part = newest / "part-00000.safetensors"
    data = part.read_bytes()
    for torn in (data[:-9], b"", data[:-1] + bytes([data[-1] ^ 1])):
        part.write_bytes(torn)
        source = sources_of([first, second])[1]
        assert source.versions == (3, 4, 4)
        assert len(source.damaged) == 1
        assert newest.name in source.damaged[0]
    for path in second.rglob("*.json"):
        path.write_bytes(b"hostile")
    with pytest.raises(ConfigError, match="no whole checkpoint there"):
        sources_of([first, second])


def rewritten(folder: Path, change: Callable[[dict[str, str], dict[str, torch.Tensor]], None]) -> None:
    """Its newest with other content, and the digest of that."""
    path = max(folder.glob("state-*"))
    tensors, metadata = parts.read(path, lambda name: True)
    change(metadata, tensors)
    shutil.rmtree(path)
    writing = parts.Writing(path, metadata)
    writing.put(tensors)
    writing.finish()


def test_hostile_content_is_refused_by_its_folder(tmp_path: Path) -> None:
    run, modules = run_of(2), [drawn(0), drawn(1)]

    def without_a_fragment(metadata: dict[str, str], tensors: dict[str, torch.Tensor]) -> None:
        metadata["states"] = json.dumps(json.loads(metadata["states"])[:-1])

    def longer(metadata: dict[str, str], tensors: dict[str, torch.Tensor]) -> None:
        state = outer.init(torch.zeros(999))
        metadata["states"] = json.dumps([*json.loads(metadata["states"])[1:], header_bytes(state).hex()])
        for what in ("params", "momentum"):
            moved = [tensors[f"agreed.{index}.{what}"] for index in (1, 2)]
            tensors |= {f"agreed.{index}.{what}": one for index, one in enumerate([*moved, state.params])}

    def endless(metadata: dict[str, str], tensors: dict[str, torch.Tensor]) -> None:
        tensors["agreed.1.params"].fill_(torch.inf)

    for number, (change, words) in enumerate(
        (
            (lambda metadata, tensors: metadata.update(stage="x"), "its content is not a checkpoint"),
            (lambda metadata, tensors: metadata.update(stage="99999999999"), "of a run that has 2"),
            (lambda metadata, tensors: metadata.update(run="{}"), "of a run that has 1"),
            (lambda metadata, tensors: metadata.update(states="[]"), "is of another stage 1 than the recipe"),
            (without_a_fragment, "is of another stage 1 than the recipe makes here"),
            (longer, "is of another stage 1 than the recipe makes here"),
            (endless, "its content is not a checkpoint .* not finite"),
        )
    ):
        first, second = write_all(tmp_path / str(number), run, modules)
        rewritten(second, change)
        with pytest.raises(ConfigError, match=words) as refused:
            write_whole(sources_of([first, second]), tmp_path / "whole", Chain(modules), modules)
        assert refused.value.where == str(second)
        assert not (tmp_path / "whole").exists()
