"""``p2p-co2 model``: what a swarm has trained, loaded by other libraries, is what the swarm agrees on."""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import (
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from safetensors.torch import load_file, load_model
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import p2p_co2
from p2p_co2.cli import main as cli
from p2p_co2.config import OWN_LOOP, ClockConfig, PeerConfig, RunConfig
from p2p_co2.recipes import load_recipe, recipe_digest
from p2p_co2.telemetry.events import Event, FragmentApplied, PeerJoined
from p2p_co2.tensors.checkpoint.folder import load_agreed, save
from p2p_co2.tensors.checkpoint.layout import KEPT, keep_layout
from p2p_co2.tensors.fragments import plan_fragments
from p2p_co2.tensors.pretrained import read_pretrained
from p2p_co2.trained import ORIGIN, Trained
from tests import swarms
from tests.test_recipes import TINY, checkpoint_of
from tests.test_swarm import START_S, opened

GPT2_RECIPE = """
import math
import torch
from pathlib import Path
from transformers import GPT2Config, GPT2LMHeadModel
from p2p_co2.recipes import Recipe
from counted_words import WORDS

def make(tied: bool = True, data: str = ""):
    if data:
        Path(data).write_text("read")
    model = GPT2LMHeadModel(GPT2Config(
        vocab_size=WORDS, n_positions=32, n_embd=32, n_layer=2, n_head=2, tie_word_embeddings=tied,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ))
    def batches(seed, batch):
        draw = torch.Generator().manual_seed(seed)
        while True:
            yield (torch.randint(32, (batch, 1), generator=draw) + torch.arange(16)) % 32
    def loss(model, batch):
        return model(input_ids=batch, labels=batch).loss
    def held_out(model):
        model.eval()
        with torch.no_grad():
            told = float(loss(model, next(batches(2**40, 16))))
        return {"loss": told, "perplexity": math.exp(told)}
    optimizer = lambda parameters: torch.optim.AdamW(parameters, lr=3e-3)
    return Recipe(model, batches, loss, optimizer=optimizer, held_out=held_out,
                  accumulate=2, max_grad_norm=1.0, autocast="bf16",
                  tokenizer=Path(__file__).parent / "tokenizer")
"""
WORDS = (torch.arange(8)[:, None] + torch.arange(16)) % 32


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    """A GPT-2 as an own recipe, with a helper and a tokenizer's folder beside it."""
    (tmp_path / "recipe" / "tokenizer").mkdir(parents=True)
    (tmp_path / "recipe" / "gpt2.py").write_text(GPT2_RECIPE)
    (tmp_path / "recipe" / "tokenizer" / "tokenizer.json").write_text("{}")
    (tmp_path / "recipe" / "counted_words.py").write_text("WORDS = 32\n")
    return f"{tmp_path / 'recipe' / 'gpt2.py'}:make"


def asked(*arguments: object) -> int:
    """The exit status of a command."""
    try:
        return cli.main([str(argument) for argument in arguments])
    except SystemExit as end:
        return int(end.code or 0)


def loss_of(model: nn.Module) -> float:
    model.eval()
    with torch.no_grad():
        return float(model(input_ids=WORDS, labels=WORDS).loss)


def gpt2(seed: int = 0, words: int = 32) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(vocab_size=words, n_positions=32, n_embd=32, n_layer=2, n_head=2))


# From recipes


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_checkpoint_of_an_own_recipe_loads_with_the_same_loss(
    tmp_path: Path, recipe: str, is_tied: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"tied": is_tied}
    run = RunConfig(
        name="r", recipe=recipe, recipe_options=options, recipe_digest=recipe_digest(recipe, options),
        fragments=3,
    )  # fmt: skip
    saved, agreed = checkpoint_of(run)
    save(tmp_path / "checkpoint", saved)
    assert asked("model", tmp_path / "checkpoint", "--out", tmp_path / "out", "--recipe", recipe) == 0
    assert capsys.readouterr().out == f"written to {tmp_path / 'out'}\n"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    trained = Trained.load(tmp_path / "checkpoint", recipe)
    assert abs(loss_of(loaded) - loss_of(trained.recipe.model)) < 1e-6
    assert torch.equal(loaded.get_parameter("transformer.wte.weight"), agreed["transformer.wte.weight"])
    is_same = loaded.lm_head.weight is loaded.transformer.wte.weight
    assert is_same == is_tied
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert asked("model", tmp_path / "checkpoint", "--out", tmp_path / "out", "--recipe", recipe) == 2
    assert "is not empty; name another folder" in capsys.readouterr().err
    assert asked("model", tmp_path / "checkpoint", "--out", tmp_path / "other") == 2
    assert "name it with --recipe FILE.py:function" in capsys.readouterr().err
    command = ("model", tmp_path / "checkpoint", "--out", tmp_path / "other", "--recipe", recipe)
    assert asked(*command, "--base", tmp_path) == 2
    assert "--base: is for own loops without a recipe" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_byte_gpt_goes_out_in_its_own_names_with_its_shape(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunConfig(
        name="r", recipe="byte-gpt", recipe_options=TINY, recipe_digest=recipe_digest("byte-gpt", TINY)
    )
    saved, agreed = checkpoint_of(run)
    save(tmp_path / "checkpoint", saved)
    assert asked("model", tmp_path / "checkpoint", "--out", tmp_path / "out") == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    shape = {"layers": 2, "width": 32, "heads": 2, "context": 32, "vocab_size": 256}
    assert config == {"model_type": "byte-gpt", **shape}
    loaded = load_recipe("byte-gpt", TINY, seed=3).model
    load_model(loaded, tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(one, agreed[name]) for name, one in loaded.named_parameters())
    said = list[str]()
    for source in (tmp_path / "checkpoint", tmp_path / "out"):
        capsys.readouterr()
        assert asked("eval", source) == 0
        assert asked("sample", source, "--length", 9) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert re.match(r"\d\.\d{3} nats per token, r, round 1\ndef ", said[0])
    (tmp_path / "out" / ORIGIN).write_text("{}")
    assert asked("eval", tmp_path / "out") == 2
    assert "write the model anew with p2p-co2 model" in capsys.readouterr().err


@pytest.mark.swarm
def test_the_model_of_a_swarm_that_trains_comes_out_and_the_swarm_goes_on(
    tmp_path: Path, recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = ClockConfig(mode="time", round_s=1.0)
    run = RunConfig(
        name="r", recipe=recipe, recipe_digest=recipe_digest(recipe, {}), fragments=2, clock=clock
    )
    out = tmp_path / "out"
    with opened(tmp_path / "swarm") as swarm:
        swarm.start_seed(run)
        assert asked("model", swarm.ticket, "--out", out, "--recipe", recipe) == 1
        assert "nobody gives the model now: none of its peers is there" in capsys.readouterr().err
        peers = [
            swarm.join(name, "--min-peers", "2", "--data", str(tmp_path / name), recipe=recipe)
            for name in ("one", "two")
        ]
        shutil.copytree(tmp_path / "recipe", tmp_path / "changed")
        (tmp_path / "changed" / "counted_words.py").write_text("WORDS = 32  # and more\n")
        stranger = swarm.join("stranger", recipe=f"{tmp_path / 'changed' / 'gpt2.py'}:make")
        stranger.asked_to_end = True  # it is refused
        swarm.wait_until("rounds", lambda: all(swarm.commits(name) >= 6 for name in ("one", "two")))
        assert swarm.wait([stranger], START_S), swarm.tails()
        assert stranger.exit_status() == 2
        assert "is another than the run's" in stranger.last_lines()
        assert asked("model", swarm.ticket, "--out", out, "--recipe", recipe) == 0, capsys.readouterr()
        assert "as the swarm agrees on it" in capsys.readouterr().out
        seen = swarm.commits("one")
        swarm.wait_until("more rounds", lambda: swarm.commits("one") > 2 + seen)
        for peer in peers:
            swarm.interrupt(peer)
        assert swarm.wait(peers, START_S), swarm.tails()
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loss_of(loaded) < loss_of(load_recipe(recipe, {}, 0).model) - 0.1
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".out")]
    # A checkpoint of the same swarm by both ways: the recipe's measure, and the folder that goes out.
    checkpoint = swarm.folder / "one" / "checkpoint"
    assert [(tmp_path / name).read_text() for name in ("one", "two")] == ["read", "read"]
    counted = load_agreed(checkpoint)
    assert counted.tokens == counted.inner_steps * 2 * 8 * 16  # two micro-steps of eight sequences
    assert asked("model", checkpoint, "--out", tmp_path / "late", "--recipe", recipe) == 0
    held_out = load_recipe(recipe, {}, 0).held_out
    assert held_out is not None
    late = AutoModelForCausalLM.from_pretrained(tmp_path / "late")
    assert abs(held_out(late)["loss"] - Trained.load(checkpoint, recipe).held_out_loss()) < 1e-6


class Elsewhere(nn.Sequential):
    """Its own file is none that anything here can read."""

    def save_pretrained(self, folder: Path, state_dict: dict[str, torch.Tensor]) -> None:
        torch.save(state_dict, folder / "weights.bin")
        (folder / "config.json").write_text("{}")


def test_stand_ins_in_another_format_do_not_come_out_as_a_model(tmp_path: Path) -> None:
    model = Elsewhere(nn.Linear(4, 4))
    kept(tmp_path, model)
    assert asked("model", tmp_path / "checkpoint", "--out", tmp_path / "out") == 0
    assert {one.name for one in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors", ORIGIN}


# From own loops


def kept(folder: Path, model: nn.Module) -> dict[str, torch.Tensor]:
    """The agreed parameters of a peer's ``folder`` as a user's own loop leaves it."""
    saved, agreed = checkpoint_of(RunConfig(name="own", recipe=OWN_LOOP, fragments=2), model)
    save(folder / "checkpoint", saved)
    keep_layout(model, plan_fragments(model, 2), folder / "checkpoint")
    return agreed


def swap_in(model: nn.Module, agreed: dict[str, torch.Tensor]) -> None:
    assert not model.load_state_dict(agreed, strict=False).unexpected_keys


def test_an_own_loop_of_transformers_is_loaded_after_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recipe: str
) -> None:
    model = gpt2()
    agreed = kept(tmp_path / "peer", model)
    checkpoint, out = tmp_path / "peer" / "checkpoint", tmp_path / "out"
    assert asked("model", checkpoint.parent, "--out", out) == 0, capsys.readouterr().err  # the peer's folder
    loaded = AutoModelForCausalLM.from_pretrained(out)
    swap_in(model, agreed)
    assert abs(loss_of(loaded) - loss_of(model)) < 1e-6
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert json.loads((out / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
    assert (out / "generation_config.json").exists()
    assert sum(path.stat().st_size for path in (checkpoint / KEPT).rglob("*")) < 100_000

    capsys.readouterr()
    assert asked("eval", checkpoint) == 2
    assert "name a recipe file that makes their model, --recipe FILE.py:function" in capsys.readouterr().err
    assert asked("eval", checkpoint, "--recipe", recipe) == 0
    measured, perplexity = capsys.readouterr().out.splitlines()
    held_out = load_recipe(recipe, {}, 0).held_out
    assert held_out is not None
    assert measured == f"{held_out(model)['loss']:.3f} in the recipe's own unit, own, round 1"
    assert perplexity.startswith("perplexity ")
    assert asked("eval", out, "--recipe", recipe) == 0  # what was written just before
    assert capsys.readouterr().out.splitlines() == [measured, perplexity]
    assert asked("model", checkpoint, "--out", tmp_path / "again", "--recipe", recipe) == 0
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert abs(loss_of(again) - loss_of(model)) < 1e-6
    other = tmp_path / "recipe" / "other.py"
    other.write_text(GPT2_RECIPE.replace("n_positions=32", "n_positions=64"))
    assert asked("eval", checkpoint, "--recipe", f"{other}:make") == 2
    said = capsys.readouterr().err
    assert "another model than the recipe makes here: transformer.wpe.weight is (32, 32) there" in said


@pytest.mark.swarm
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch.compile's own
def test_the_ticket_of_an_own_loop_needs_a_recipe_that_makes_its_model_and_its_folder_none(
    tmp_path: Path, recipe: str
) -> None:
    plain, out = gpt2(), tmp_path / "out"
    model = torch.compile(plain, backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    clock = ClockConfig(mode="time", round_s=1.0)
    with swarms.swarm(tmp_path, RunConfig(name="own", recipe=OWN_LOOP, fragments=2, clock=clock)) as running:
        config = PeerConfig(folder=tmp_path / "peer", board=False)
        seen = list[Event]()
        with p2p_co2.join(running.ticket, model, optimizer, config, seen.append) as peer:
            bare = ["model", running.ticket, "--out", str(out)]
            never = tmp_path / "never"
            commands = {"bare": bare, "named": [*bare, "--recipe", recipe]}
            commands["join"] = ["join", running.ticket, "--no-board", "--folder", str(never)]
            ends_at = time.monotonic() + START_S
            asked_for = list[Any]()
            while not asked_for or any(one.poll() is None for one in asked_for):
                assert time.monotonic() < ends_at
                loss = model(input_ids=WORDS, labels=WORDS).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                peer.step(WORDS.numel(), loss)
                rounds = sum(isinstance(event, FragmentApplied) for event in seen)
                for name in commands if rounds >= 4 and not asked_for else ():
                    command = [sys.executable, "-m", "p2p_co2", *commands[name]]
                    asked_for.append(running.start(name, command))
        statuses = [running.processes[name].wait() for name in commands]
    assert statuses == [2, 0, 2], [running.log(name) for name in commands]
    assert not any(isinstance(event, PeerJoined) for event in seen), "visitors are no peers"
    assert "get that from the organiser, and start it: P2P_CO2_TICKET=p2pco2-" in running.log("join")
    assert not never.exists()
    assert "taking the model out ..." in running.log("named")
    assert "trained by programs of their own; name a recipe file" in running.log("bare")
    assert "a peer's checkpoint folder goes out without one" in running.log("bare")
    assert loss_of(AutoModelForCausalLM.from_pretrained(out)) < loss_of(gpt2()) - 0.01
    assert asked("model", tmp_path / "peer", "--out", tmp_path / "late") == 0
    swap_in(plain, peer.agreed_parameters())
    assert abs(loss_of(AutoModelForCausalLM.from_pretrained(tmp_path / "late")) - loss_of(plain)) < 1e-6


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's own
def test_of_adapters_only_the_adapters_come_out_and_peft_loads_them(tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    config = LoraConfig(r=4, target_modules=["c_attn"], modules_to_save=["ln_f"], fan_in_fan_out=True)
    model = get_peft_model(base, config)
    agreed = kept(tmp_path / "peer", model)
    assert asked("model", tmp_path / "peer" / "checkpoint", "--out", tmp_path / "out") == 0
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= files
    assert len(load_file(tmp_path / "out" / "adapter_model.safetensors")) == len(agreed)
    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "out"
    )
    swap_in(model, agreed)
    assert abs(loss_of(loaded) - loss_of(model)) < 1e-6
    fresh = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), config)
    assert abs(loss_of(read_pretrained(fresh, tmp_path / "out")) - loss_of(model)) < 1e-6


def test_what_was_frozen_comes_from_the_base_and_its_lack_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = gpt2(words=140_000)  # its table is more than is kept beside a checkpoint
    model.save_pretrained(tmp_path / "base")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".h.1." in name)
    agreed = kept(tmp_path / "peer", model)
    command = ("model", tmp_path / "peer" / "checkpoint", "--out", tmp_path / "out")
    capsys.readouterr()
    assert asked(*command) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "a checkpoint has no frozen parameters, and 16 are missing, such as transformer." in said
    assert "swarm.save_pretrained" in said
    assert not (tmp_path / "out").exists()
    assert asked(*command, "--base", tmp_path) == 2
    assert "no safetensors file" in capsys.readouterr().err
    assert asked(*command, "--base", tmp_path / "base") == 0
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    swap_in(model, agreed)
    assert abs(loss_of(loaded) - loss_of(model)) < 1e-6


SMALL = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        transformers.BertConfig(**SMALL),
        transformers.T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2),
        transformers.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4),
        transformers.LlamaConfig(**SMALL, tie_word_embeddings=True, dtype=torch.bfloat16),
    ],
    ids=lambda config: config.model_type,
)
def test_every_tensor_of_an_architecture_comes_out_without_its_program(
    tmp_path: Path, config: transformers.PretrainedConfig
) -> None:
    """An encoder, tied both ways, experts that are stored together, 16 bits."""
    auto = {"bert": transformers.AutoModelForMaskedLM, "t5": transformers.AutoModelForSeq2SeqLM}
    loader = auto.get(config.model_type, AutoModelForCausalLM)
    torch.manual_seed(0)
    model = loader.from_config(config)
    kept(tmp_path, model)
    assert asked("model", tmp_path / "checkpoint", "--out", tmp_path / "out") == 0
    loaded, info = loader.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert type(loaded) is type(model)
    theirs = loaded.state_dict()
    assert all(torch.equal(theirs[name], one) for name, one in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's own
@pytest.mark.parametrize("config", [PromptTuningConfig, PrefixTuningConfig])
def test_prompts_come_out_without_their_program_as_they_are_in_the_checkpoint(
    config: Any, tmp_path: Path
) -> None:
    model = get_peft_model(gpt2(), config(task_type="CAUSAL_LM", num_virtual_tokens=2))
    keep_layout(model, plan_fragments(model, 2), tmp_path / "checkpoint")
    saved, agreed = checkpoint_of(RunConfig(name="own", recipe=OWN_LOOP, fragments=2), model)
    save(tmp_path / "checkpoint", saved)
    assert asked("model", tmp_path / "checkpoint", "--out", tmp_path / "out") == 0
    written = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert torch.equal(written.pop("prompt_embeddings"), agreed["prompt_encoder.default.embedding.weight"])
    assert not written
    assert PeftModel.from_pretrained(gpt2(), tmp_path / "out").peft_type == model.peft_type


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's own
def test_prompts_that_are_computed_are_not_laid_out(tmp_path: Path) -> None:
    model = get_peft_model(gpt2(), PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ValueError, match="computes what it writes"):
        keep_layout(model, plan_fragments(model, 2), tmp_path / "checkpoint")
    assert not list((tmp_path / "checkpoint").iterdir())


def test_a_little_that_is_frozen_is_kept_beside_the_checkpoint(tmp_path: Path) -> None:
    def made(seed: int) -> nn.Sequential:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False))

    model = made(0)
    kept(tmp_path, model)
    assert asked("model", tmp_path / "checkpoint", "--out", tmp_path / "out") == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.safetensors", ORIGIN}
    loaded = made(1)
    load_model(loaded, tmp_path / "out" / "model.safetensors")
    assert torch.equal(loaded.get_parameter("1.weight"), model.get_parameter("1.weight"))


# Faults


def damaged(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def write(file: Path) -> None:
        said = json.loads(file.read_text())
        change(said)
        file.write_text(json.dumps(said))

    return write


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (Path.unlink, "is not there"),
        (lambda file: file.write_text("{"), "is damaged"),
        (damaged(lambda said: said.update(format="x")), "another version"),
        (damaged(lambda said: said["plan"][0][0].__setitem__(3, 1)), "another model than the checkpoint"),
        (damaged(lambda said: said["files"].update({"../x": [{}, {}]})), "is damaged"),
        (damaged(lambda said: said["files"].update({"x": [{"a": "none"}, {}]})), "is damaged"),
        (damaged(lambda said: said["files"].update({"x": [{"a": []}, {}]})), "is damaged"),
        (damaged(lambda said: said["tensors"]["0.weight"].__setitem__(1, [10**14])), "is damaged"),
        (damaged(lambda said: said["tensors"]["0.weight"].__setitem__(1, [2])), "is damaged"),
        (damaged(lambda said: said["tensors"]["0.weight"].__setitem__(0, "quint8")), "is damaged"),
        (damaged(lambda said: said["tensors"].pop("0.weight")), "is damaged"),
        (lambda file: file.write_text("[" * 10**5), "is damaged"),
        (lambda file: file.with_name("config.json").symlink_to("/etc/passwd"), "is a link"),
        (lambda file: file.with_name("more").symlink_to("/etc"), "is a link"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(
    tmp_path: Path, spoil: Callable[[Path], object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    run = RunConfig(name="own", recipe=OWN_LOOP, fragments=2)
    saved, agreed = checkpoint_of(run, model)
    save(tmp_path / "checkpoint", saved)
    keep_layout(model, plan_fragments(model, 2), tmp_path / "checkpoint")
    assert asked("model", tmp_path / "checkpoint", "--out", tmp_path / "out") == 0
    loaded = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    load_model(loaded, tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(one, agreed[name]) for name, one in loaded.named_parameters())
    assert loaded.get_buffer("1.running_mean").tolist() == [3.0] * 4
    spoil(tmp_path / "checkpoint" / KEPT / "tensors.json")
    assert asked("model", tmp_path / "checkpoint", "--out", tmp_path / "other") == 2
    assert message in capsys.readouterr().err
    assert load_agreed(tmp_path / "checkpoint").inner_steps == 7
