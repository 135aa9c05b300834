"""Recipes: the byte GPT, the corpora, and the user's own file."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from p2p_co2.config import ClockConfig, RunConfig
from p2p_co2.errors import ConfigError
from p2p_co2.recipes import BYTE_GPT, Recipe, load_recipe, load_run_recipe, recipe_digest
from p2p_co2.recipes import corpus as corpora
from p2p_co2.recipes.byte_gpt import ByteGPT, ByteGPTStage, Shape, next_token_loss
from p2p_co2.tensors import outer
from p2p_co2.tensors.checkpoint.folder import Checkpoint, save
from p2p_co2.tensors.fragments import LiveParameters, plan_fragments
from p2p_co2.trained import Trained

TINY: dict[str, str | int | float | bool] = {"layers": 2, "width": 32, "heads": 2, "context": 32, "batch": 4}

OWN = """
import torch
from torch import nn

def make(width: int = 3):
    batches = [torch.ones(2, width), torch.zeros(2, width)]
    return nn.Linear(width, 1), batches, lambda model, x: model(x).square().mean()

def wrong():
    return 7

def frozen():
    return nn.Linear(1, 1).requires_grad_(False), [], lambda model, x: x

def spent():
    return nn.Linear(1, 1), iter([torch.ones(1, 1)]), lambda model, x: model(x).sum()

not_a_function = 3
"""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 200, encoding="utf-8")
    return path


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN, encoding="utf-8")
    return path


# By hand


def test_default_shape_has_between_one_and_two_million_parameters_and_starts_near_a_uniform_guess() -> None:
    model = ByteGPT(Shape())
    assert 1e6 < sum(parameter.numel() for parameter in model.parameters()) < 2e6
    tokens = torch.randint(256, (2, 64))
    assert model(tokens).shape == (2, 64, 256)
    loss = next_token_loss(model, (tokens, tokens.roll(-1, 1)))
    assert loss.item() == pytest.approx(math.log(256), abs=0.2)


def test_windows_are_the_text_shifted_by_one(text: Path) -> None:
    recipe = load_recipe(BYTE_GPT, TINY, seed=0, data={"text": str(text)})
    inputs, targets = next(recipe.batches(1, 3))
    assert inputs.shape == targets.shape == (3, 32)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert bytes(inputs[0].tolist()) in text.read_bytes()
    assert recipe.tokens((inputs, targets)) == 96
    assert recipe.default_batch == 4


def test_token_file_in_sixteen_bits_and_its_recipe(tmp_path: Path) -> None:
    path = tmp_path / "ids.bin"
    path.write_bytes(torch.arange(2000).remainder(900).to(torch.uint16).numpy().tobytes())
    recipe = load_recipe(BYTE_GPT, TINY | {"vocab_size": 900}, seed=0, data={"tokens": str(path)})
    inputs, targets = next(recipe.batches(0, 2))
    assert torch.equal((inputs + 1).remainder(900), targets)
    assert recipe.generate is None
    assert recipe.loss(recipe.model, (inputs, targets)).item() == pytest.approx(math.log(900), abs=0.2)


# Against a reference


def test_model_is_causal() -> None:
    model = load_recipe(BYTE_GPT, TINY, seed=0).model
    for parameter in model.parameters():  # the residual projections start at zero and would hide a leak
        torch.nn.init.normal_(parameter, std=0.2)
    first = torch.randint(256, (1, 32))
    second = first.clone()
    second[0, 20] = (second[0, 20] + 1) % 256
    same = torch.isclose(model(first), model(second), atol=1e-5).all(-1)[0]
    assert same[:20].all()
    assert not same[20:].any()


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_loss_falls_in_thirty_steps(text: Path, kind: str) -> None:
    options = TINY | {"learning_rate": 1e-2, "optimizer": kind}
    recipe = load_recipe(BYTE_GPT, options, seed=0, data={"text": str(text)})
    assert recipe.held_out is not None
    before = recipe.held_out(recipe.model)
    optimizer = recipe.optimizer(recipe.model.parameters())
    for batch in islice(recipe.batches(0, 8), 30):
        optimizer.zero_grad()
        recipe.loss(recipe.model, batch).backward()
        optimizer.step()
    after = recipe.held_out(recipe.model)
    assert after < before - 1.5
    assert recipe.held_out(recipe.model) == after


@pytest.mark.parametrize(
    ("clock", "factors"),
    [
        ({"round_s": 30}, {0: 0.1, 5: 0.55, 10: 1.0, 1000: 1.0}),  # without an end; 300 s
        (
            {"mode": "steps", "inner_steps_per_round": 10, "rounds": 120},
            {15: 0.55, 30: 1, 75: 0.55, 120: 0.1},
        ),
        ({"round_s": 2.5, "rounds": 12}, {0: 0.1, 2: 0.55, 4: 1.0, 8: 0.55, 12: 0.1, 20: 0.1}),  # a third
    ],
)
def test_the_built_in_recipes_rate_warms_up_and_has_fallen_when_the_run_ends(
    clock: dict[str, Any], factors: dict[float, float]
) -> None:
    run = RunConfig(clock=ClockConfig(**clock), recipe_digest=recipe_digest("byte-gpt", {}))
    recipe = load_run_recipe(run)
    assert recipe.fits_swarm
    assert {at: recipe.learning_rate(at) for at in factors} == pytest.approx(factors)


@pytest.mark.parametrize("width", [32, 64, 256])  # 4 * 64 and 256 are the vocabulary's size
def test_muon_trains_the_matrices_of_the_blocks_and_adamw_the_rest(width: int) -> None:
    recipe = load_recipe(BYTE_GPT, TINY | {"width": width, "optimizer": "muon"}, seed=0)
    optimizer = recipe.optimizer(recipe.model.parameters())
    muon, adamw = optimizer.param_groups
    named = {id(parameter): name for name, parameter in recipe.model.named_parameters()}
    assert {named[id(one)] for one in adamw["params"]} == {"embedding.weight", "smear"}
    assert all(named[id(one)].startswith("blocks.") for one in muon["params"])
    assert len(muon["params"]) + 2 == len(named)
    assert (muon["lr"], adamw["lr"]) == (4e-3, 4e-3)
    block = recipe.optimizer(recipe.model.get_submodule("blocks").parameters())  # a stage without a table
    assert len(block.param_groups) == 1
    last = ByteGPTStage(Shape(2, width, 2, 8), 1, 2)
    of_head = recipe.optimizer(last.parameters()).param_groups[1]["params"]
    assert [one is last.head.weight for one in of_head] == [True]
    plain = recipe_digest(BYTE_GPT, TINY)
    assert plain == recipe_digest(BYTE_GPT, TINY | {"optimizer": "muon"})  # the shape is what must agree


def test_the_device_chooses_the_optimizer_of_a_run_that_names_none(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(BYTE_GPT, TINY, seed=0)
    there = [torch.nn.Parameter(torch.empty(4, 4, device="meta")) for _ in range(3)]
    for one in there:  # none is at hand everywhere; what asks looks no further than this
        monkeypatch.setattr(type(one), "device", torch.device("cuda"), raising=False)
    assert [type(one) for one in recipe.optimizer(there).parts] == [torch.optim.Muon]
    monkeypatch.undo()
    assert type(recipe.optimizer(recipe.model.parameters())) is torch.optim.AdamW


def test_muon_needs_a_torch_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ConfigError, match=r"recipe_options\.optimizer.*2\.9 or newer"):
        load_recipe(BYTE_GPT, TINY | {"optimizer": "muon"}, seed=0)
    assert load_recipe(BYTE_GPT, TINY, seed=0)


# Laws


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31), drawn=st.integers(0, 5))
def test_every_peer_starts_with_the_same_bits_and_torch_keeps_its_random_state(seed: int, drawn: int) -> None:
    first = load_recipe(BYTE_GPT, TINY, seed).model.state_dict()
    torch.rand(drawn)
    state = torch.get_rng_state()
    second = load_recipe(BYTE_GPT, TINY, seed).model.state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = load_recipe(BYTE_GPT, TINY, seed + 1).model.state_dict()
    assert not torch.equal(first["embedding.weight"], other["embedding.weight"])


def test_embedded_corpus_is_the_same_each_time_and_holds_out_whole_documents() -> None:
    corpus, again = corpora.embedded_corpus(), corpora.embedded_corpus()
    assert torch.equal(corpus.train, again.train)
    assert torch.equal(corpus.held_out, again.held_out)
    assert 5_000_000 < len(corpus.train) + len(corpus.held_out) <= corpora.CAP_BYTES
    assert 0.02 < len(corpus.held_out) / len(corpus.train) < 0.08
    assert bytes(corpus.held_out[:2000].tolist()) not in bytes(corpus.train.tolist())


def test_folder_holds_out_whole_files(tmp_path: Path) -> None:
    for index in range(60):
        (tmp_path / f"{index}.md").write_text(f"file {index:02d} ", encoding="utf-8")
    corpus = corpora.text_corpus(tmp_path)
    train, held_out = (set(bytes(part.tolist()).decode().split("file ")[1:]) for part in corpus)
    assert held_out
    assert not train & held_out
    assert len(train | held_out) == 60


def test_digest_covers_what_must_agree_and_no_more(own: Path, tmp_path: Path) -> None:
    plain = recipe_digest(BYTE_GPT, {})
    assert len(plain) == 64
    assert plain == recipe_digest(BYTE_GPT, {"layers": Shape().layers, "batch": 2})
    assert plain != recipe_digest(BYTE_GPT, {"layers": 5})
    elsewhere = tmp_path / "elsewhere.py"
    elsewhere.write_text(OWN, encoding="utf-8")
    mine = recipe_digest(f"{own}:make", {"width": 4})
    assert mine == recipe_digest(f"{elsewhere}:make", {"width": 4})
    assert mine != recipe_digest(f"{own}:make", {"width": 5})
    assert mine != recipe_digest(f"{own}:wrong", {"width": 4})
    elsewhere.write_text(OWN + "\n", encoding="utf-8")
    assert mine != recipe_digest(f"{elsewhere}:make", {"width": 4})


def test_users_own_recipe(own: Path) -> None:
    recipe = load_recipe(f"{own}:make", {"width": 4}, seed=3)
    assert isinstance(recipe, Recipe)
    sums = [float(batch.sum()) for batch in islice(recipe.batches(0, 1), 5)]
    assert sums == [8.0, 0.0, 8.0, 0.0, 8.0]
    batch = next(recipe.batches(0, 1))
    assert recipe.tokens(batch) == 8
    recipe.loss(recipe.model, batch).backward()
    assert isinstance(recipe.optimizer(recipe.model.parameters()), torch.optim.AdamW)
    assert not (own.parent / "__pycache__").exists()
    again = load_recipe(f"{own}:make", {"width": 4}, seed=3)
    for first, second in zip(recipe.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(first, second)


def test_sampling_keeps_the_prompt_and_repeats_with_its_seed() -> None:
    recipe = load_recipe(BYTE_GPT, TINY, seed=0)
    assert recipe.generate is not None
    sample = recipe.generate(recipe.model, "def ", 40, 7)
    assert sample.startswith("def ")
    assert sample == recipe.generate(recipe.model, "def ", 40, 7)
    assert recipe.generate(recipe.model, "", 3, 7) != ""


# Faults


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer": 3}, "unknown option; byte-gpt knows batch, context, heads, layers"),
        ({"layers": 0}, "whole number from 1 to 65536"),
        ({"context": 10**12}, "whole number from 1 to 65536"),
        ({"layers": 65536, "width": 65536}, r"the model alone needs .* GB"),
        ({"layers": True}, "whole number"),
        ({"learning_rate": -1.0}, "positive number"),
        ({"optimizer": "sgd"}, "adamw or muon"),
        ({"heads": 3}, "multiple of 2"),
        ({"text": "mine.txt"}, "names no file of a volunteer; .* joins with --text PATH"),
        (
            {"tokens": "ids.bin", "vocab_size": 300},
            "names no file of a volunteer; .* joins with --tokens PATH",
        ),
        ({"vocab_size": 70000}, "from 1 to 65536"),
    ],
)
def test_bad_option_is_refused_with_what_would_be_right(
    options: dict[str, str | int | float | bool], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe(BYTE_GPT, options, seed=0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"text": "a", "tokens": "b"}, "either text or tokens"),
        ({"text": "no/such/file"}, "cannot read no/such/file"),
        ({"tokens": "no/such/file"}, "cannot read no/such/file"),
    ],
)
def test_data_that_cannot_be_used_is_refused(data: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe(BYTE_GPT, TINY, seed=0, data=data)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\xff\xfe\x00x" * 99, "not UTF-8"),
        (b"short", "only 5 tokens"),
        (b"x" * 60, "context 64"),
    ],
)
def test_bad_text_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_recipe(BYTE_GPT, {}, seed=0, data={"text": str(path)})


@pytest.mark.parametrize(
    ("content", "vocab_size", "message"),
    [
        (b"\x00\x01" * 50 + b"\x07", 300, "positive multiple of 2"),
        (b"", 10, "positive multiple of 1"),
        (b"\x01\x09" * 50, 9, "token id 9, so vocab_size must be at least 10"),
        (b"\x00\x04" * 50, 1000, "token id 1024"),
    ],
)
def test_bad_token_file_is_refused(content: bytes, vocab_size: int, message: str, tmp_path: Path) -> None:
    path = tmp_path / "ids"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_recipe(BYTE_GPT, {"vocab_size": vocab_size}, seed=0, data={"tokens": str(path)})


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("none_such", {}, "has no function 'none_such'"),
        ("not_a_function", {}, "has no function"),
        ("wrong", {}, "must return a Recipe, or .* got int"),
        ("frozen", {}, "nothing to train"),
        ("make", {"depth": 3}, "do not fit make.*unexpected keyword argument 'depth'"),
    ],
)
def test_bad_user_recipe_is_refused(
    own: Path, function: str, options: dict[str, str | int | float | bool], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe(f"{own}:{function}", options, seed=0)


def test_user_batches_that_run_out_say_so(own: Path) -> None:
    recipe = load_recipe(f"{own}:spent", {}, seed=0)
    assert recipe.loader is None  # an iterator: it cannot be begun again
    batches = recipe.batches(0, 1)
    next(batches)
    with pytest.raises(ConfigError, match="run out"):
        next(batches)


OWN_OF_RUN = """
from pathlib import Path
import torch
from torch import nn

Path(__file__).with_suffix(".ran").touch()

def make(width: int = 3):
    return nn.Linear(width, 1), [torch.ones(2, width)], lambda model, x: model(x).square().mean()
"""


@pytest.fixture
def own_file(own: Path) -> Path:
    own.write_text(OWN_OF_RUN, encoding="utf-8")
    return own


def has_run(own_file: Path) -> bool:
    return own_file.with_suffix(".ran").exists()


def run_of(name: str, options: dict[str, str | int | float | bool]) -> RunConfig:
    """A run as its organiser publishes it."""
    digest = recipe_digest(name, options)
    return RunConfig(recipe=name, recipe_options=options, recipe_digest=digest, fragments=2)


# ---- by hand


def test_a_peer_may_train_on_a_text_of_its_own(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh" * 100)
    inputs, _ = next(load_run_recipe(run_of("byte-gpt", TINY), data={"text": str(text)}).batches(0, 4))
    assert set(inputs.flatten().tolist()) <= set(b"abcdefgh")


def test_a_run_of_token_ids_needs_a_file_of_them() -> None:
    run = run_of("byte-gpt", TINY | {"vocab_size": 300})
    with pytest.raises(ConfigError, match=r"--tokens: this run trains on token ids"):
        load_run_recipe(run)
    with pytest.raises(ConfigError, match=r"--text: is bytes.*this run's is 300"):
        load_run_recipe(run, data={"text": __file__})


# ---- refused, and nothing of a stranger's file has run


@pytest.mark.parametrize(
    ("trains_own", "is_named", "data", "words"),
    [
        (True, False, {}, r"get that file from the organiser.*--recipe FILE.py:function"),
        (False, True, {}, "built-in recipe 'byte-gpt'; leave it out"),
        (True, True, {"text": "mine.txt"}, "only built-in recipes let a peer choose"),
    ],
)
def test_a_file_is_run_only_where_run_and_peer_name_it(
    own_file: Path, trains_own: bool, is_named: bool, data: dict[str, str], words: str
) -> None:
    name = f"{own_file}:make"
    run = run_of(name, {}) if trains_own else run_of("byte-gpt", TINY)
    with pytest.raises(ConfigError, match=words):
        load_run_recipe(run, name if is_named else "", data)
    assert not has_run(own_file)


@pytest.mark.parametrize("change", ["file", "function", "option"])
def test_another_recipe_than_the_organisers_is_refused_before_it_runs(own_file: Path, change: str) -> None:
    run = run_of(f"{own_file}:make", {"width": 5})
    function = "make"
    if change == "file":
        own_file.write_text(OWN_OF_RUN + "\n# one more line\n")
    elif change == "function":
        function = "other"
    else:
        run = run.model_copy(update={"recipe_options": {"width": 6}})
    with pytest.raises(
        ConfigError, match=r"is another than the run's \(digest [0-9a-f]{12} here, [0-9a-f]{12} "
    ):
        load_run_recipe(run, f"{own_file}:{function}")
    assert not has_run(own_file)


OWN_WITH_BUFFERS = """
import torch
from torch import nn

def make():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return model, [torch.ones(2, 3)], lambda model, x: model(x).square().mean()
"""


def checkpoint_of(run: RunConfig, own: nn.Module | None = None) -> tuple[Checkpoint, dict[str, Tensor]]:
    """A checkpoint whose agreed parameters are random; and those, without what is frozen. ``own``: a model
    that is no recipe's."""
    model = own or load_recipe(run.recipe, run.recipe_options, seed=0).model
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in (one for one in model.parameters() if one.requires_grad):
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    agreed = {name: one.detach().clone() for name, one in model.named_parameters() if one.requires_grad}
    plan = plan_fragments(model, run.fragments)
    live = LiveParameters(model, plan)
    states = tuple(outer.init(live.snapshot(fragment.index)) for fragment in plan.fragments)
    saved = Checkpoint(
        run_config_json=run.canonical_bytes().decode(),
        plan_digest=plan.digest,
        states=states,
        buffers={name: buffer + 3 * name.endswith("running_mean") for name, buffer in model.named_buffers()},
        optimizer={},
        position=1.0,
        inner_steps=7,
        tokens=70,
        parameters=tuple((name, tuple(one.shape)) for name, one in agreed.items()),
    )
    return saved, agreed


def parameters_of(trained: Trained) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in trained.recipe.model.named_parameters()}


def test_what_is_sampled_and_measured_are_the_agreed_parameters(tmp_path: Path) -> None:
    saved, agreed = checkpoint_of(run_of("byte-gpt", TINY))
    save(tmp_path, saved)
    trained = Trained.load(tmp_path)
    loaded = parameters_of(trained)
    assert loaded.keys() == agreed.keys()
    assert all(loaded[name].equal(agreed[name]) for name in agreed)
    reference = load_recipe("byte-gpt", TINY, seed=1)
    reference.model.load_state_dict(agreed, strict=False)
    assert reference.held_out is not None
    assert trained.held_out_loss() == reference.held_out(reference.model)


def test_an_own_recipe_is_named_again_and_its_buffers_come_along(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN_WITH_BUFFERS, encoding="utf-8")
    saved, agreed = checkpoint_of(run_of(f"{own}:make", {}))
    save(tmp_path / "checkpoint", saved)
    with pytest.raises(ConfigError, match=r"--recipe FILE\.py:function"):
        Trained.load(tmp_path / "checkpoint")
    trained = Trained.load(tmp_path / "checkpoint", f"{own}:make")
    loaded = parameters_of(trained)
    assert all(loaded[name].equal(agreed[name]) for name in agreed)
    assert dict(trained.recipe.model.named_buffers())["1.running_mean"].tolist() == [3.0] * 4
    assert not trained.recipe.model.training
    with pytest.raises(ConfigError, match="no held-out data"):
        trained.held_out_loss()
    with pytest.raises(ConfigError, match="makes no text"):
        trained.sample("x", 1, 0)


def test_parameters_of_another_model_are_refused(tmp_path: Path) -> None:
    saved, _ = checkpoint_of(run_of("byte-gpt", TINY))
    save(tmp_path, replace(saved, plan_digest=bytes(32)))
    with pytest.raises(ConfigError, match="is of another model"):
        Trained.load(tmp_path)
