"""A Llama of transformers in stages, as the page of the documentation has it: from a config or from
pretrained weights, trained in two stages, clipped, and out again with ``from_pretrained``."""

from __future__ import annotations

import copy
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from p2p_co2.config import PipelineConfig, RunConfig
from p2p_co2.protocol.pipeline import Key, Place, Work
from p2p_co2.protocol.pipeline.machine import Do
from p2p_co2.recipes import load_run_recipe, recipe_digest
from p2p_co2.tensors.checkpoint.folder import save
from p2p_co2.trainer.gather import gather_folders
from p2p_co2.trainer.stages.peer import StagePeer, TrainedGroup
from p2p_co2.trainer.stages.work import Crossings, Done, StageWork
from p2p_co2.wire.identity import PeerId
from tests.stage_line import Line
from tests.test_docs import DOCS, ROOT, blocks
from tests.test_model_command import asked
from tests.test_recipe_stages import checkpoint_of

PAGE = DOCS / "how-to" / "transformers-in-stages.md"
EXAMPLE = ROOT / "examples" / "staged_llama.py"
WORDS = torch.arange(32).reshape(2, 16)


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    """The example, copied as the page says."""
    (tmp_path / "mine").mkdir()
    shutil.copy(EXAMPLE, tmp_path / "mine" / "staged_llama.py")
    return f"{tmp_path / 'mine' / 'staged_llama.py'}:make"


def run_of(recipe: str, stages: int = 2, **options: Any) -> RunConfig:
    return RunConfig(
        name="llama", recipe=recipe, recipe_options=options, recipe_digest=recipe_digest(recipe, options),
        fragments=3, pipeline=PipelineConfig(stages=stages, microbatches=4),
    )  # fmt: skip


def pretrained(recipe: str, **settings: Any) -> LlamaForCausalLM:
    """A model in the folder beside the recipe, as the hub has it: in files of some kilobytes each."""
    torch.manual_seed(3)
    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, **settings)
    model = LlamaForCausalLM(config).eval()
    folder = Path(recipe.removesuffix(":make")).parent / "pretrained"
    model.save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return model


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=WORDS).logits  # type: ignore[no-any-return]


def test_the_page_has_the_examples_words() -> None:
    """Each block of Python is in the file, but for what a program does with the model afterwards."""
    file = "".join(line.strip() for line in EXAMPLE.read_text().splitlines())
    told = [text for language, text, _ in blocks(PAGE) if language == "python" and "my-llama" not in text]
    assert len(told) == 2
    for text in told:
        assert "".join(line.strip() for line in text.splitlines()) in file


def test_it_trains_in_two_stages_and_goes_out_as_the_library_loads_it(
    tmp_path: Path, recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(recipe)
    made = load_run_recipe(run, recipe)
    line = Line.of(made, run)
    losses = [line.step(4) for _ in range(12)]
    assert losses[-1] < losses[0] - 1.0
    folders = [tmp_path / f"stage-{stage}" for stage in range(2)]
    for stage, (folder, module) in enumerate(zip(folders, line.modules, strict=True)):
        save(folder, replace(checkpoint_of(run, module), stage=stage))
    gather_folders(folders, tmp_path / "whole", recipe)
    assert asked("model", tmp_path / "whole", "--out", tmp_path / "my-llama", "--recipe", recipe) == 0
    assert "note" not in capsys.readouterr().out
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "my-llama")
    assert isinstance(loaded, LlamaForCausalLM)
    assert torch.equal(logits(loaded), logits(made.in_stages(2).join(line.modules)))
    assert made.held_out is not None
    assert made.held_out(loaded) < made.held_out(made.in_stages(2).whole(run.seed)) - 1.0


@pytest.mark.parametrize("is_tied", [False, True])
def test_it_begins_with_pretrained_weights_and_each_peer_reads_its_stage(recipe: str, is_tied: bool) -> None:
    there = pretrained(recipe, tie_word_embeddings=is_tied)
    made = load_run_recipe(run := run_of(recipe, 3), recipe)
    stages = made.in_stages(3)
    assert torch.equal(logits(made.whole_model(run)), logits(there))
    assert not hasattr(stages.build(run.seed, 1).get_submodule("model"), "embed_tokens")
    assert stages.crossing(WORDS) == [(16, 32), (16, 32)]


def test_each_peer_trains_on_a_text_of_its_own_by_the_models_tokenizer(tmp_path: Path, recipe: str) -> None:
    pretrained(recipe)
    folder = Path(recipe.removesuffix(":make")).parent / "pretrained"
    words = Tokenizer(WordLevel({"no": 0, "one": 1, "two": 2}, "no"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    (tmp_path / "text.txt").write_text("one two " * 400)
    run = run_of(recipe, 3)
    made = load_run_recipe(run, recipe, {"data": str(tmp_path / "text.txt")})
    inputs, targets = next(made.batches(0, 2))
    assert targets.equal(3 - inputs)
    assert made.held_out is not None
    assert made.held_out(made.whole_model(run)) > 5.0
    out = tmp_path / "my-llama"
    save(tmp_path / "whole", checkpoint_of(run, made.whole_model(run)))
    assert asked("model", tmp_path / "whole", "--out", out, "--recipe", recipe) == 0
    assert AutoTokenizer.from_pretrained(out)("two one")["input_ids"] == [2, 1]
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(out)), logits(made.whole_model(run)))


def test_what_no_program_loads_is_told(
    tmp_path: Path, recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without its ``join`` the whole is a chain of stages."""
    file = Path(recipe.removesuffix(":make"))
    file.write_text(file.read_text().replace(", join=join", ""))
    run = run_of(recipe)
    save(tmp_path / "whole", checkpoint_of(run, load_run_recipe(run, recipe).whole_model(run)))
    assert asked("model", tmp_path / "whole", "--out", tmp_path / "out", "--recipe", recipe) == 0
    told = capsys.readouterr().out
    assert "note: no other program loads this: its tensors are called stage.S.NAME" in told
    assert "give the recipe's Stages a join" in told


class Told:
    """A pipeline and a peer that go along with everything."""

    def __init__(self) -> None:
        self.node, self.position, self.tokens = SimpleNamespace(handed=SimpleNamespace()), 0.0, 0

    def step(self, tokens: int, loss: float) -> bool:
        self.tokens = tokens
        return True

    def draw(self, round_: int, rate: float) -> None:
        return

    def exchange(self, tell: Any) -> None:
        return


@pytest.mark.parametrize("norm", [None, 1e-3])
def test_each_stage_is_clipped_by_its_own_norm(recipe: str, norm: float | None) -> None:
    made = load_run_recipe(run := run_of(recipe), recipe)
    line, wire = Line.of(made, run), Told()
    before = [copy.deepcopy(module) for module in line.modules]
    done = Done(Work(Do.STEP))
    for work in line.works:
        payload = work.compute(Work(Do.FORWARD, Key(1, 1), done.payload))
        done = payload
    line.works[0].compute(Work(Do.BACKWARD, Key(1, 1), done.payload, done.tokens, done.loss))
    for stage, work in enumerate(line.works):
        optimizer = torch.optim.SGD(work.replica.module.parameters(), lr=1.0)
        groups = [TrainedGroup(cast(Any, wire), optimizer)]
        peer = StagePeer(groups, cast(Any, wire), Place(PeerId("me"), 1, stage, 2), work, norm)
        peer._do(Work(Do.STEP))
        pairs = zip(work.replica.module.parameters(), before[stage].parameters(), strict=True)
        moved = math.sqrt(sum(float((now - then).detach().square().sum()) for now, then in pairs))
        assert wire.tokens == 64
        assert moved > 0.01 if norm is None else abs(moved / norm - 1) < 0.01


def test_a_token_that_is_nearly_nothing_is_no_hostile_gradient(recipe: str) -> None:
    """An embedding of a thousandth of the others' size: RMSNorm makes its gradient a thousand times the
    usual, and it is counted, as a hundred times that."""
    made = load_run_recipe(run := run_of(recipe, 4), recipe)
    stages = made.in_stages(4)
    texts = [(torch.full((1, 64), token), torch.full((1, 64), 7)) for token in (*range(12), 99)]
    crossings = Crossings.of(stages, *texts[0], "int8", "int8")
    modules = [stages.build(run.seed, stage) for stage in range(4)]
    with torch.no_grad():
        table = modules[0].get_parameter("model.embed_tokens.weight")
        table *= 50  # to about one, as training makes them
        table[99] *= 1e-4
    works = [
        StageWork(stages, module, stage, crossings, None if stage else iter(texts))
        for stage, module in enumerate(modules)
    ]
    for number in range(len(texts)):
        done = Done(Work(Do.STEP))
        for work in works:
            done = work.compute(Work(Do.FORWARD, Key(1, number), done.payload, sender=PeerId("before")))
        for work in works[2::-1]:
            told = done.payload, done.tokens, done.loss, PeerId("behind")
            done = work.compute(Work(Do.BACKWARD, Key(1, number), *told))
            assert not done.refused
    assert {work.replica.counted.microbatches for work in works} == {len(texts)}
