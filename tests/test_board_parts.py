"""Parts of the board: words, this machine, seeds, the invitation, marks, smooth lines, today's traffic."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute

from monitoring import charts
from monitoring.board.cards import at_least_told, machine_told
from monitoring.board.run_page import invitation, setting_rows
from monitoring.board.server import make_app
from monitoring.columns import a_month
from monitoring.feeds import JournalFeed, read_ticket
from monitoring.glossary import GLOSSARY, explained
from monitoring.history import MEASURES, TIERS, Batch, BoardHistory, Happening
from monitoring.machine import GpuFacts, MachineFacts, ask_nvidia, read_machine, read_nvidia
from monitoring.model import Model, Recorder
from monitoring.seeds import ask_seeds
from monitoring.words import staleness_verdict
from p2p_co2.config import OWN_LOOP, PipelineConfig, RunConfig
from p2p_co2.ticket import Ticket
from tests.made_swarm import EVIL, MadeFeed, MadeSwarm, peer_id
from tests.stories import RUN, START, Told

MIB = 1 << 20


# ---- words


@pytest.mark.parametrize(
    ("caption", "words"),
    [
        ("Current round", ["round"]),
        ("Fragment exchanges", ["fragment exchange"]),
        ("Staleness (outer steps)", ["outer step", "staleness"]),
        ("Communication hidden", ["exposed"]),
        ("Tokens per second", []),
        ("Background", []),
    ],
)
def test_words_are_explained_where_they_stand(caption: str, words: list[str]) -> None:
    told = explained(caption)
    assert told == " ".join(f"{word.capitalize()}: {GLOSSARY[word]}" for word in words)


# ---- this machine


def written(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_machine_is_read_from_the_kernels_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    root = written(tmp_path, {
        "proc/meminfo": "MemTotal:  16000 kB\nMemFree: 1 kB\nMemAvailable:  4000 kB\n",
        "proc/77/status": "Name: python\nVmRSS:\t  900 kB\n",
        "sys/class/hwmon/hwmon0/temp1_input": "41000\n",
        "sys/class/hwmon/hwmon1/temp2_input": "127500000\n",  # a sensor that is not connected
        "sys/class/thermal/thermal_zone0/temp": "55500\n",
        "sys/class/drm/card1/device/mem_info_vram_total": f"{8 * MIB}\n",
        "sys/class/drm/card1/device/mem_info_vram_used": f"{2 * MIB}\n",
        "sys/class/drm/card1/device/hwmon/hwmon3/temp1_input": "62000\n",
    })  # fmt: skip
    found = read_machine(77, root)
    assert found == MachineFacts(
        total_bytes=16000 * 1024, used_bytes=12000 * 1024, peer_bytes=900 * 1024, celsius=55.5,
        gpus=(GpuFacts("AMD GPU", 2.0 * MIB, 8.0 * MIB, 62.0),),
    )  # fmt: skip
    assert read_machine(78, written(tmp_path / "bare", {"proc/meminfo": "x\n"})) == MachineFacts()


def test_the_real_machine_has_memory_and_this_process_takes_some() -> None:
    found = read_machine(os.getpid())
    assert found.used_bytes is not None
    assert 0 < (found.peer_bytes or 0) < (found.total_bytes or 0)


def test_what_nvidia_smi_says_is_read_and_what_it_does_not_know_is_left_out() -> None:
    told = "NVIDIA H100, 1024, 81559, 36\nGRID, [N/A], [N/A], [N/A]\nnonsense\n"
    assert list(read_nvidia(told)) == [
        GpuFacts("NVIDIA H100", 1024.0 * MIB, 81559.0 * MIB, 36.0),
        GpuFacts("GRID"),
    ]


@pytest.mark.parametrize(("does", "found"), [("echo 'GPU X, 1, 2, 33'", ("GPU X",)), ("exit 9", ())])
def test_nvidia_smi_is_asked_where_there_is_one_and_not_for_the_rest(
    does: str, found: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\n{does}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert read_machine(os.getpid()).total_bytes is not None
    assert not (tmp_path / "asked").exists()  # a driver that does not answer holds up nothing else
    assert tuple(gpu.name for gpu in ask_nvidia()) == found


def test_the_machines_card_says_no_gpu_and_holds_the_traffic_against_the_cap() -> None:
    told = machine_told(MachineFacts(), (50e6, 1e6), 1000.0, 1e5)
    assert told["machine-gpu"][1] == "no\u00a0GPU"
    assert told["machine-traffic"][1:] == ("50.0 MB", "", "50.0 % of what 100 kB/s lets through")
    assert "no cap" in machine_told(MachineFacts(), (50e6, 1e6), 0.0, None)["machine-traffic"][3]
    found = MachineFacts(8e9, 6e9, 1e9, 61.0, (GpuFacts("a", 3e9, 4e9, 70.0), GpuFacts("b", 1e9, 4e9, 50.0)))
    told = machine_told(found, (0.0, 0.0), 1.0, None)
    assert told["machine-ram"][1] == "75.0 %"
    assert told["machine-gpu"][1] == "50.0 %"
    assert told["machine-heat"][1:] == ("61", "°C", "GPU 70 °C; the warmest sensor")
    assert told["machine-cpu"][1] == "-"
    assert (
        machine_told(replace(found, peer_cpu_share=0.25), (0.0, 0.0), 1.0, None)["machine-cpu"][1] == "25.0 %"
    )


def test_a_months_traffic_is_told_once_the_rate_says_something() -> None:
    """A day and a half of 10 kB/s, both ways together; and a minute of it."""
    told = machine_told(MachineFacts(), (9e6, 1e6), 5000.0, None, 1000.0)
    assert "at this rate 25.9 GB a month both ways" in told["machine-traffic"][3]
    assert "month" not in machine_told(MachineFacts(), (9e6, 1e6), 60.0, None, 60.0)["machine-traffic"][3]


def test_the_processor_time_of_a_process_is_read() -> None:
    before = read_machine(os.getpid()).peer_cpu_s
    assert before is not None
    while time.process_time() < before + 0.1:
        pass
    after = read_machine(os.getpid()).peer_cpu_s
    assert after is not None
    assert after > before
    assert read_machine(2**22 + 1).peer_cpu_s is None


def test_what_a_peer_sent_is_summed_over_all_tiers() -> None:
    history, seconds = BoardHistory(None), TIERS[0][1] + 2400
    row = [math.nan] * len(MEASURES)
    row[MEASURES.index("up_bytes_per_s")], row[MEASURES.index("down_bytes_per_s")] = 1000.0, 10.0
    for t in range(0, seconds, 2):
        history.write(Batch(at=START + t, samples={"me": row} if t < 600 or t >= 900 else {}))
    sent, received = history.moved("me", START)
    assert sent == pytest.approx(1000.0 * (seconds - 300), rel=0.03)  # it slept for 300 s
    assert received == pytest.approx(sent / 100)
    late, _ = history.moved("me", START + seconds - 60)
    assert late == pytest.approx(60_000, rel=0.07)
    assert history.moved("nobody", START) == (0.0, 0.0)
    history.close()


# ---- the invitation


def ticket_of(*seeds: str) -> Ticket:
    return Ticket(RUN.digest(), peer_id(5), tuple(f"{seed}/p2p/{peer_id(5)}" for seed in seeds))


async def test_seeds_are_dialled_and_told_apart() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_server(("127.0.0.1", 0)) as gone:
        port, closed = listening.getsockname()[1], gone.getsockname()[1]
        gone.close()
        ticket = ticket_of(f"/ip4/127.0.0.1/tcp/{port}", f"/ip4/127.0.0.1/tcp/{closed}",
                           "/ip4/127.0.0.1/udp/9/quic-v1", "/ip4/127.0.0.1/tcp/99999")  # fmt: skip
        found = await ask_seeds(ticket, 5.0)
    assert [seed.answers for seed in found] == [True, False, None, False]
    assert found[0].place == f"127.0.0.1, port {port}"


LOCAL, FAR = "/ip4/127.0.0.1/tcp/9", "/ip4/203.0.113.5/tcp/9"


@pytest.mark.parametrize(
    ("seed", "recipe", "command", "said"),
    [
        (LOCAL, "", "p2p-co2 join {}", "only peers on this machine"),
        (FAR, "", "p2p-co2 join {}", "no secret"),
        (FAR, "mine.py:recipe", "p2p-co2 join {} --recipe mine.py:recipe", "own recipe"),
        (FAR, OWN_LOOP, "P2P_CO2_TICKET={} python my_loop.py", "program of its own"),  # join refuses it
        ("", "", "p2p-co2 join TICKET", "The seed prints one"),
    ],
)
def test_an_invitation_is_the_command_that_a_volunteer_runs(
    seed: str, recipe: str, command: str, said: str
) -> None:
    ticket = str(ticket_of(seed)) if seed else ""
    found, about = invitation(ticket, RunConfig(recipe=recipe) if recipe else RUN)
    assert found == command.format(ticket)
    assert said in about


def test_a_ticket_is_read_from_a_folder_and_a_damaged_one_is_not(tmp_path: Path) -> None:
    ticket = ticket_of("/ip4/127.0.0.1/tcp/9")
    written(tmp_path, {"ticket": "p2pco2-damaged\n", "peers/a/ticket": "", "peers/b/ticket": f"{ticket}\n"})
    assert JournalFeed(tmp_path).invitation() == str(ticket)
    (tmp_path / "peers" / "b" / "ticket").write_bytes(b"\xff" * 9000)
    assert JournalFeed(tmp_path).invitation() == read_ticket() == ""


def test_settings_are_those_of_the_run_file() -> None:
    rows = {name: (value, usual) for name, value, usual, _ in setting_rows(RUN)}
    assert rows["clock.round_s"] == ("5.0", "30.0")
    assert rows["outer.nesterov"] == ("true", "")
    assert "pipeline.stages" not in rows
    assert setting_rows(None) == []


def test_each_setting_is_explained_and_what_is_not_the_default_comes_first() -> None:
    rows = setting_rows(RunConfig(pipeline=PipelineConfig(stages=4), recipe_options={"batch": 4}))
    others = [row[:3] for row in rows if row[2]]
    assert others == [("recipe_options.batch", "4", "-"), ("pipeline.stages", "4", "1")]
    assert [row[:3] for row in rows[:2]] == others
    assert all(words for *_, words in rows)
    told = {name: words for name, _, _, words in rows}
    assert told["outer.gap_penalty"] == "CO2's staleness gap penalty."
    assert len({told["codec.name"], told["name"], told["aggregation.rule"], told["outer.rule"]}) == 4


@pytest.mark.parametrize(
    ("staleness", "is_delayed", "words"),
    [
        ({}, False, "No answer"),
        ({"0": 94, "1": 6}, False, "94 % fresh, 6 % one step late: as it should be."),
        ({"1": 10}, True, "100 % one step late: as it should be."),
        ({"0": 4, "1": 6}, False, "40 % fresh, 60 % one step late: little is lost by it"),
        ({"0": 80, "1": 10, "3": 10}, True, "10 % later than that: lines or processors are too slow"),
    ],
)
def test_staleness_begins_with_a_verdict(staleness: dict[str, int], is_delayed: bool, words: str) -> None:
    assert words in staleness_verdict(staleness, is_delayed)


def test_a_month_at_this_rate() -> None:
    told = Told("ada")
    told.tell(0, "peer_started", "ada")
    told.tell(5, "progress", "ada", up_bytes=75_000, wall_s=10.0)
    own = told.at(6).own
    assert own is not None
    assert a_month(own, own.up_bytes) == pytest.approx(7500 * 30 * 86400)  # 19.4 GB
    told.tell(7, "peer_finished", "ada")
    own = told.at(8).own
    assert own is not None
    assert a_month(own, own.up_bytes) is None


# ---- charts


def test_the_matrix_of_links_is_of_the_busiest_in_one_unit_and_no_liar_sets_its_scale() -> None:
    told = Told()
    for number in range(20):
        name, other = f"p{number}", f"p{(number - 1) % 20}"
        told.tell(0, "peer_started", name)
        told.tell(1, "progress", name, up_bytes=number)
        told.tell(1, "link_measured", name, other=other, bytes_per_s=1e6, sent_bytes=number * 1000)
    for other in ("p18", "nobody"):
        told.tell(2, "link_measured", "p19", other=other, bytes_per_s=1e15, sent_bytes=2**53)
    made = charts.links(charts.LIGHT, told.at(3).peers)
    shown = made["yAxis"]["data"]
    assert shown == made["xAxis"]["data"]
    assert set(shown) == {f"p{number}" for number in range(4, 20)}
    cells = {
        (shown[y], shown[x]): rest for x, y, *rest in (one["value"] for one in made["series"][0]["data"])
    }
    assert cells["p10", "p9"] == [8.0, "8.0"]  # 1 MB/s
    assert cells["p19", "p18"] == [64.0, "99,999"]  # so it claims
    assert made["visualMap"]["max"] == 64.0


def row(at: float, loss: float) -> tuple[float, ...]:
    made = [math.nan] * (1 + len(MEASURES))
    made[0], made[charts.column("loss")] = at, loss
    return tuple(made)


def named(options: charts.Options, name: str) -> dict[str, Any]:
    (found,) = (one for one in options["series"] if one["name"] == name)
    return dict(found)


def test_a_smooth_line_is_the_mean_of_what_was_and_begins_anew_after_a_gap() -> None:
    rows = [row(0, 4.0), row(2, 2.0), row(4, math.nan), row(6, 8.0)]
    made = charts.loss(charts.LIGHT, rows, look=charts.ChartLook(smooth=0.5))
    smooth = named(made, "training, mean of the peers")["data"]
    # By hand: (0.5 * 4) / 0.5; (0.25 * 4 + 0.5 * 2) / 0.75.
    assert smooth == [[0, 4.0], [2000, 2.66667], [4000, None], [6000, 8.0]]
    raw = named(made, "training, mean of the peers, as measured")["data"]
    assert [value for _, value in raw] == [4.0, 2.0, None, 8.0]
    assert "training, mean of the peers, as measured" not in made["legend"]["data"]


def test_a_logarithmic_axis_has_no_place_for_what_is_not_above_zero() -> None:
    made = charts.loss(
        charts.LIGHT, [row(0, 2.0), row(2, -1.0), row(4, 0.0)], look=charts.ChartLook(log=True)
    )
    assert made["yAxis"]["type"] == "log"
    assert [value for _, value in named(made, "training, mean of the peers")["data"]] == [2.0, None, None]


def happened(at: float, kind: str, words: str) -> Happening:
    return Happening(at, kind, "p", -1, -1, words, f"{kind} {at}")


def test_who_came_and_went_is_marked_and_what_is_near_is_one_mark() -> None:
    rows = [row(float(at), 2.0) for at in range(0, 242, 2)]
    told = [
        happened(1, "peer_started", "ada started on cpu"), happened(2, "peer_started", "bob started on cpu"),
        happened(100, "paused", "ada rests: the hours"),
        happened(180, "peer_left", f"{EVIL} is gone: silent"),
        happened(182, "peer_started", "eve started"), happened(900, "peer_left", "outside of the chart"),
    ]  # fmt: skip
    made = charts.loss(charts.LIGHT, rows, marks=told[::-1])
    marks = named(made, "who came and went")["markLine"]["data"]
    assert [mark["xAxis"] for mark in marks] == [1000, 100_000, 180_000]
    assert [mark["label"]["formatter"] for mark in marks] == ["2 started", "ada rests", "2 changes"]
    assert "{" not in json.dumps([mark["name"] for mark in marks])
    assert marks[0]["name"] == "ada started on cpu\nbob started on cpu"
    over_tokens = charts.loss(charts.LIGHT, rows, over_tokens=True, marks=told)
    assert all("markLine" not in one for one in over_tokens["series"])


def test_every_chart_says_what_it_shows_in_a_sentence() -> None:
    made = charts.loss(charts.LIGHT, [row(0, 5.5), row(2, 2.25)], [row(1, 3.0)])
    assert made["aria"]["label"]["description"] == (
        "Loss. agreed parameters, held-out: 3 at the end, between 3 and 3. "
        "training, mean of the peers: 2.25 at the end, between 2.25 and 5.5."
    )
    assert "Nothing yet." in charts.loss(charts.LIGHT, [])["aria"]["label"]["description"]
    histogram = charts.staleness(charts.LIGHT, {0: {0: 3, 1: 1}})["aria"]["label"]["description"]
    assert histogram.startswith("Staleness of 4 outer steps: 3 at 0, 1 at 1")


def test_what_no_board_saw_of_today_is_told_by_the_peer_itself() -> None:
    told = Told("ada")
    told.tell(0, "peer_started", "ada")
    told.tell(5, "progress", "ada", up_bytes=9000, down_bytes=50)
    own = told.at(6).own
    assert at_least_told((700.0, 80.0), own, START - 60) == (9000, 80.0)
    assert at_least_told((700.0, 80.0), own, START + 3) == (700.0, 80.0)  # some of it was yesterday
    assert at_least_told((700.0, 80.0), None, START) == (700.0, 80.0)


# ---- who asks by program


async def test_a_program_that_asks_is_somebody_who_looks() -> None:
    """Else a peer's own board, which asks the others for those who look, calls its peer alone."""
    looked_at = list[float]()

    class Looked(MadeFeed):
        def watched(self, now: float) -> None:
            looked_at.append(now)

    model = Model(Looked(MadeSwarm(1)))
    app = make_app(model, Recorder(model, BoardHistory(None)))
    endpoints = {route.path: route.endpoint for route in app.routes if isinstance(route, APIRoute)}
    await endpoints["/metrics"]()
    assert not looked_at  # tells of its own peer alone
    await endpoints["/api/swarm"]()
    assert len(looked_at) == 1
