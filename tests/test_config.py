"""Settings: a wrong value names its file, its key and what would be right; a digest covers every field."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from p2p_co2 import errors
from p2p_co2.config import (
    AggregationConfig,
    ClockConfig,
    CodecConfig,
    OuterConfig,
    RunConfig,
    read_peer_config,
    read_run_config,
    write_toml,
)
from p2p_co2.errors import ConfigError, P2PCo2Error

WRONG = [
    ("name = [", "", "not valid TOML"),
    ("fragmants = 4", "fragmants", "did you mean fragments?"),
    ("round_s = 2.0", "round_s", "it belongs below [clock]"),
    ("[outer]\nlearning_rate = 1", "outer.learning_rate", "unknown key; remove it"),
    ("[outer]\nlr = -0.1", "outer.lr", "greater than 0"),
    ("[outer]\nmomentum = 1.0", "outer.momentum", "less than 1"),
    ("[outer]\nlr = nan", "outer.lr", ""),
    ("[codec]\nname = 'int3'", "codec.name", "int4"),
    ("[clock]\nmode = 'hours'", "clock.mode", "steps"),
    ("[clock]\nround_s = 0", "clock.round_s", "greater than 0"),
    ("fragments = 8\n[clock]\nmode = 'steps'\ninner_steps_per_round = 4", "", "at least 8 steps"),
    ("[clock]\nmode = 'steps'\n[outer]\nsync_delay_steps = 99", "", "more than a round"),
    ("[outer]\nrule = 'co2'\nsync_delay_steps = 3", "", "leave it at 0"),
    ("name = 'a b'", "name", "letters, digits"),
    ("seed = 'one'", "seed", "whole number"),
    ("[pipeline]\nforward = 'int4'", "pipeline.forward", "'fp32', 'bf16' or 'int8'"),
    ("[pipeline]\nbackward = 'rank16'", "pipeline.backward", "'int8' or 'int4'"),
    ("[pipeline]\nbackward_critical = 'rank0'", "pipeline.backward_critical", 'low rank as "rank16"'),
    ("[pipeline]\nbackward_critical = 'int8'", "pipeline.backward_critical", 'use "int4"'),
    ("[pipeline]\nbackward = 'int4'\nbackward_critical = 'int4'", "pipeline", "leave it out"),
    ("recipe_digest = 'abc'", "recipe_digest", "64 hexadecimal digits"),
]


@pytest.mark.parametrize(("text", "key", "words"), WRONG, ids=[text[:30] for text, _, _ in WRONG])
def test_a_wrong_run_file_names_file_key_and_cure(tmp_path: Path, text: str, key: str, words: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_run_config(path)
    assert (caught.value.where, caught.value.key) == (str(path), key)
    assert words in caught.value.problem
    assert "\n" not in str(caught.value)
    line = text[: text.rindex(key.rpartition(".")[2])].count("\n") + 1 if key else 0
    assert str(caught.value).startswith(f"{path}, line {line}: " if line else f"{path}: ")


def test_files_that_are_not_there_or_not_text_or_not_readable(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_run_config(tmp_path / "nothing.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_run_config(tmp_path / "binary.toml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_run_config(tmp_path)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be"])
def test_files_as_editors_of_other_systems_save_them(tmp_path: Path, encoding: str) -> None:
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    path = tmp_path / "file.toml"
    path.write_text(mark + '# Müller\nname = "a"\n', encoding=encoding, newline="\r\n")
    assert read_run_config(path).name == "a"
    path.write_text(mark + "[limits]\nthreads = 3\n", encoding=encoding, newline="\r\n")
    assert read_peer_config(path).limits.threads == 3


def test_a_peers_hours_are_read_and_a_useless_cap_refused(tmp_path: Path) -> None:
    path = tmp_path / "peer.toml"
    path.write_text("[limits]\nhours = '22:00-07:00'\ndownload_bytes_per_s = 1e6\n")
    limits = read_peer_config(path).limits
    assert (limits.hours, limits.download_bytes_per_s) == ("22:00-07:00", 1e6)
    path.write_text("[limits]\nhours = 'at night'\n")
    with pytest.raises(ConfigError, match=r"limits\.hours: 'at night' is no span of the day; write 22:00"):
        read_peer_config(path)
    path.write_text("[limits]\nrest_while = 'gpu, load'\nrest_for = 'blender'\nidle_for_s = '1.5m'\n")
    limits = read_peer_config(path).limits
    assert (limits.rest_while, limits.rest_for, limits.idle_for_s) == ("gpu, load", "blender", 90.0)
    path.write_text("[limits]\nrest_while = 'gpu, mouse'\n")
    with pytest.raises(ConfigError, match="rest_while: 'mouse' is nothing to rest for; use gpu, inp"):
        read_peer_config(path)
    path.write_text("[limits]\nidle_for_s = 'a while'\n")
    with pytest.raises(ConfigError, match=r"idle_for_s: is no duration; write seconds, or 90s, 5m, 1h"):
        read_peer_config(path)
    path.write_text("[limits]\ndownload_bytes_per_s = 5\n")
    with pytest.raises(ConfigError, match="below 10000 bytes/s no round gets through"):
        read_peer_config(path)


RUNS = st.builds(
    RunConfig,
    name=st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,19}", fullmatch=True),
    seed=st.integers(0, 2**31 - 1),
    fragments=st.integers(1, 16),
    recipe_options=st.dictionaries(
        st.from_regex(r"[a-z_]{1,10}", fullmatch=True),
        st.one_of(st.text("abc \"'\\é", max_size=8), st.integers(-5, 5), st.booleans(), st.floats(-1, 1)),
        max_size=3,
    ),
    clock=st.builds(ClockConfig, round_s=st.floats(0.1, 1e6), rounds=st.integers(0, 10**6)),
    codec=st.builds(
        CodecConfig, name=st.sampled_from(["fp32", "int4", "sign"]), error_feedback=st.booleans()
    ),
    weight_cap=st.just(0.0) | st.floats(1, 1e6),
    outer=st.builds(OuterConfig, lr=st.floats(0.01, 10), momentum=st.floats(0, 0.99), nesterov=st.booleans()),
)


@given(run=RUNS)
def test_a_run_survives_toml_and_its_published_bytes(
    run: RunConfig, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "run.toml"
    path.write_text(write_toml(run))
    assert read_run_config(path) == run
    assert RunConfig.from_canonical_bytes(run.canonical_bytes()) == run
    assert read_run_config(path).digest() == run.digest()


@pytest.mark.parametrize(
    "change",
    [
        {"name": "other"}, {"seed": 1}, {"fragments": 5}, {"group_size": 3}, {"recipe": "x.py:f"},
        {"recipe_digest": "0" * 64}, {"recipe_options": {"layers": 1}}, {"clock": ClockConfig(round_s=61)},
        {"salt": "a"}, {"codec": CodecConfig(error_feedback=False)}, {"outer": OuterConfig(clip_phi=9)},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_every_field_is_in_the_digest(change: dict[str, object]) -> None:
    assert RunConfig(**change).digest() != RunConfig().digest()  # type: ignore[arg-type]


@pytest.mark.parametrize("codec", ["sign", "q2", "int4"])
def test_error_feedback_is_on_where_a_codec_needs_it_unless_the_run_says_otherwise(codec: str) -> None:
    is_on = codec != "int4"
    given = RunConfig.model_validate({"codec": {"name": codec, "error_feedback": is_on}})
    for left_out in ({}, {"error_feedback": ""}):
        run = RunConfig.model_validate({"codec": {"name": codec} | left_out})
        assert run.canonical_bytes() == given.canonical_bytes()
        assert f'"error_feedback":{str(is_on).lower()}'.encode() in run.canonical_bytes()
    for rule in ("keep", "blend", "co2", "eager"):
        wanted = {"codec": {"name": codec, "error_feedback": False}, "outer": {"rule": rule}}
        if is_on and rule in {"co2", "eager"}:
            with pytest.raises(ValidationError, match="leave error_feedback out"):
                RunConfig.model_validate(wanted)
        else:
            assert not RunConfig.model_validate(wanted).codec.error_feedback


def test_a_manifest_from_another_version_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match=r"quantum: unknown key; .*install the organiser's$") as refused:
        RunConfig.from_canonical_bytes(b'{"name": "x", "quantum": true}')
    assert "spelling" not in str(refused.value)  # a volunteer did not spell it
    with pytest.raises(ConfigError):
        RunConfig.from_canonical_bytes(b"not json at all")


def test_the_docstring_draws_the_tree() -> None:
    drawn = set(re.findall(r"[├└]── (\w+)", errors.__doc__ or ""))
    defined = {
        name
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, P2PCo2Error) and kind is not P2PCo2Error
    }
    assert drawn == defined


def test_the_aggregation_rule_is_the_run_files_and_one_that_is_implied_changes_no_digest() -> None:
    """Runs that were published before there was a rule to name keep their digests."""
    implied = {
        "scored": RunConfig(), "centred": RunConfig(members=True), "mean": RunConfig(weight_cap=0.0),
    }  # fmt: skip
    for rule, config in implied.items():
        assert config.aggregation.rule == rule
        assert b"aggregation" not in config.canonical_bytes()
        assert RunConfig.from_canonical_bytes(config.canonical_bytes()) == config
    named = RunConfig(aggregation=AggregationConfig(rule="mean"))
    assert named.digest() != RunConfig().digest()
    assert RunConfig.from_canonical_bytes(named.canonical_bytes()) == named
    for settings in ({}, {"rule": ""}):
        given = RunConfig.model_validate({"weight_cap": 0.0, "aggregation": settings})
        assert given == RunConfig(weight_cap=0.0)
    for settings in ({"rule": "scored"}, {"rule": "centred"}):
        with pytest.raises(ValidationError, match="use"):
            RunConfig.model_validate({"weight_cap": 0.0, "aggregation": settings})
