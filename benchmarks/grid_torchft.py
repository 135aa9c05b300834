from __future__ import annotations
from pathlib import Path
ENVIRONMENT = Path("~/.cache/p2p-co2-bench/torchft").expanduser()
