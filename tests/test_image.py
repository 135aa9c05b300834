"""The images: what the Dockerfile's steps come to in a bare folder, and a swarm of what comes of them."""

from __future__ import annotations

import re
import socket
import subprocess
from pathlib import Path

import pytest

from tests.image import Image, Stage, as_list, instructions
from tests.installed import ENVIRONMENT, ROOT, link_required, source_copy
from tests.programs import started

pytestmark = pytest.mark.swarm
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "TORCH_INDEX": ""}
RUN = """
recipe_options = { layers = 1, width = 32, heads = 2, batch = 2 }
[clock]
round_s = 3.0
rounds = 2
"""


@pytest.fixture(scope="module", name="image")
def _image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    folder = tmp_path_factory.mktemp("image")
    image = Image(source_copy(folder / "context"), folder, OFFLINE)
    image.build()
    link_required(image.stages["build"].root / "opt" / "p2p-co2")  # its programs' first lines lead there
    return image


def variables_of(image: Image, stage: Stage) -> dict[str, str]:
    return {name: image.led(stage, value) for name, value in stage.variables.items()}


def command_of(image: Image, name: str, *arguments: str) -> list[str]:
    stage = image.stages[name]
    program, *rest = as_list(stage.settings["ENTRYPOINT"])
    for folder in variables_of(image, stage)["PATH"].split(":"):
        if (Path(folder) / program).exists():
            return [str(Path(folder) / program), *rest, *arguments]
    raise AssertionError(f"no {program} on the image's path")


def test_the_images_carry_no_compiler_no_secret_and_no_root(image: Image) -> None:
    noted = image.noted.read_text()
    assert "apt-get install -y --no-install-recommends gcc" in noted
    for name in ("seed", "peer"):
        stage = image.stages[name]
        assert stage.user == "p2p-co2"
        assert "--uid 10001 p2p-co2" in noted
        assert stage.settings["STOPSIGNAL"] == "SIGINT"
        assert {path.name for path in stage.root.iterdir()} == {"opt", "data"}
        assert not list((stage.root / "data").iterdir())
    text = (ROOT / "Dockerfile").read_text()
    assert not re.search(r"(?i)p2pco2-|password|secret|token", text)
    verbs = [verb for verb, _ in instructions(text)]
    assert "ADD" not in verbs, "nothing is fetched but packages"


def test_a_seed_and_a_peer_of_the_images_make_a_swarm(image: Image, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    seed_stage, peer_stage = image.stages["seed"], image.stages["peer"]
    at_home = {"P2P_CO2_HOST": "127.0.0.1"}
    of_seed = {**variables_of(image, seed_stage), **at_home, "P2P_CO2_PORT": port}
    is_well = seed_stage.settings["HEALTHCHECK"].partition("CMD ")[2]

    def health() -> int:
        return subprocess.run(
            ["/bin/sh", "-c", is_well],
            env={**ENVIRONMENT, **of_seed},
            capture_output=True,
            timeout=60,
            check=False,
        ).returncode

    assert health() != 0
    with started(command_of(image, "seed", "run.toml"), tmp_path, of_seed) as seed:
        ticket = seed.wait_for(r"p2pco2-\w+")
        assert health() == 0
        of_peer = {
            **variables_of(image, peer_stage),
            **at_home,
            "P2P_CO2_TICKET": ticket,
            "P2P_CO2_THREADS": "1",
        }
        join = command_of(image, "peer")
        watch_command = [join[0], "watch", ticket, "--folder", "watch"]
        with (
            started(watch_command, tmp_path) as watch,
            started(join, tmp_path, of_peer) as peer,
        ):
            assert peer.ends() == 0, peer.said()
            watch.wait_for("Over: 0 of 1 peers")
        assert watch.ends() == 0, watch.said()
        assert "board: needs an extra" in peer.said()
    assert seed.ends() == 0, seed.said()
    data = {str(path.relative_to(peer_stage.root)) for path in (peer_stage.root / "data").rglob("identity")}
    assert len(data) == 1, "the peer keeps its files where the volume is"
    assert list((seed_stage.root / "data").rglob("identity"))
    assert not (tmp_path / "runs").exists()
