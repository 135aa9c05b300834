"""How fast every codec encodes and decodes on one CPU thread, beside bitsandbytes' own functions, as JSON.

``python benchmarks/codec_speed.py [--mb 32 256] [--repeats 9] [--only 4bit]``. MB/s are
megabytes of fp32 per second, whatever the codec's size. Repeats of all contestants are interleaved, so that a
busy moment of the machine hits all alike; "wall" is the median of elapsed time, "cpu" of this process's CPU
time, which other processes disturb less: the verdict takes medians of its ratios within a repeat (on CUDA, of
those of "wall").

Memory for results is allocated in each call, as the library's own functions do, and freed memory stays with
the process (mallopt): otherwise the kernel's zeroing of fresh pages, at about 2.5 GB/s, hits one contestant
and spares the next, by the history of the heap. ``--fresh`` has all of them pay for fresh pages, as a peer
does for large tensors (``p2p_co2.system.memory``).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # bitsandbytes' CPU kernels ask OpenMP, before torch is told

import torch
from bitsandbytes import functional

from p2p_co2.codec_specs import SPECS
from p2p_co2.tensors.codec import get_codec

NAMES: tuple[str, ...] = tuple(SPECS)
OURS_OF_4_BITS: tuple[str, ...] = ("int4", "e3m0")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _NEVER = -1, -3, 2**31 - 1
Seconds = dict[str, list[float]]


def contestants(values: torch.Tensor, names: tuple[str, ...]) -> dict[str, Callable[[], object]]:
    """What is timed, by "who operation": each codec and the library's own encoders and decoders."""
    calls: dict[str, Callable[[], object]] = {}
    for name in names:
        codec = get_codec(name)
        payload = codec.encode(values)
        calls[f"{name} encode"] = partial(codec.encode, values)
        calls[f"{name} decode"] = partial(codec.decode, payload)
        calls[f"{name} check"] = partial(codec.check, payload)
    for kind in ("fp4", "nf4"):
        encode = partial(functional.quantize_4bit, values, blocksize=128, quant_type=kind)
        calls[f"bitsandbytes-{kind} encode"] = encode
        calls[f"bitsandbytes-{kind} decode"] = partial(functional.dequantize_4bit, *encode())
    if "int8" in names:
        encode = partial(functional.quantize_blockwise, values, blocksize=128)
        calls["bitsandbytes-int8 encode"] = encode
        calls["bitsandbytes-int8 decode"] = partial(functional.dequantize_blockwise, *encode())
    return calls


def measure(values: torch.Tensor, names: tuple[str, ...], repeats: int) -> tuple[Seconds, Seconds]:
    """Wall and CPU seconds of each repeat, by contestant and operation."""
    calls = contestants(values, names)
    wall_s: Seconds = {what: [] for what in calls}
    cpu_s: Seconds = {what: [] for what in calls}
    for _ in range(repeats):
        for what, call in calls.items():
            cpu, start = time.process_time(), time.perf_counter()
            result = call()
            wall_s[what].append(time.perf_counter() - start)
            cpu_s[what].append(time.process_time() - cpu)
            del result
    return wall_s, cpu_s


def speeds(megabytes: float, wall_s: Seconds, cpu_s: Seconds) -> dict[str, dict[str, dict[str, float]]]:
    """MB/s by contestant, operation and clock."""
    table: dict[str, dict[str, dict[str, float]]] = {}
    for what in wall_s:
        who, operation = what.split()
        table.setdefault(who, {})[operation] = {
            "wall_mb_per_s": round(megabytes / median(wall_s[what]), 1),
            "cpu_mb_per_s": round(megabytes / median(cpu_s[what]), 1),
        }
    return table


def verdict(megabytes: float, taken_s: Seconds) -> dict[str, Any]:
    """int4 and e3m0 against 400 MB/s and against the faster of the library's two 4-bit formats."""

    def best(operation: str) -> list[float]:
        return min((taken_s[f"bitsandbytes-{kind} {operation}"] for kind in ("fp4", "nf4")), key=median)

    def times(theirs: list[float], ours: list[float]) -> float:
        return round(median(their / our for their, our in zip(theirs, ours, strict=True)), 2)

    result: dict[str, Any] = {}
    for name in OURS_OF_4_BITS:
        encode, decode = taken_s[f"{name} encode"], taken_s[f"{name} decode"]
        result[name] = {
            "at_least_400_mb_per_s": megabytes / max(median(encode), median(decode)) >= 400,
            "encode_times_bitsandbytes": times(best("encode"), encode),
            "decode_times_bitsandbytes": times(best("decode"), decode),
            "both_times_bitsandbytes": times(
                [sum(pair) for pair in zip(best("encode"), best("decode"), strict=True)],
                [sum(pair) for pair in zip(encode, decode, strict=True)],
            ),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=int, nargs="+", default=[32], help="megabytes of fp32 to encode")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", choices=("all", "4bit"), default="all")
    parser.add_argument("--fresh", action="store_true", help="fresh pages for every result")
    options = parser.parse_args()
    torch.set_num_threads(1)
    threshold = 4 << 20 if options.fresh else _NEVER
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, threshold)
    ctypes.CDLL(None).mallopt(_M_TRIM_THRESHOLD, _NEVER)
    names = NAMES if options.only == "all" else OURS_OF_4_BITS
    report: dict[str, Any] = {
        "repeats": options.repeats,
        "fresh_pages": options.fresh,
        "threads": torch.get_num_threads(),
        "machine": {
            "processor": platform.machine(),
            "torch_vectors": torch.backends.cpu.get_cpu_capability(),
        },
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "relative_error": {name: _error(name) for name in names},
        "bits_per_value": {
            name: get_codec(name).block_bytes * 8 / get_codec(name).block_values for name in names
        },
    }
    for input_mb in options.mb:
        values = _gaussians(input_mb * 250_000)
        wall_s, cpu_s = measure(values, names, options.repeats)
        megabytes = values.numel() * 4 / 1e6
        report[f"{input_mb} MB"] = {
            "speed": speeds(megabytes, wall_s, cpu_s),
            "verdict": verdict(megabytes, cpu_s),
        }
    print(json.dumps(report, indent=2))


def _gaussians(numel: int) -> torch.Tensor:
    return torch.randn(numel // 128 * 128, generator=torch.Generator().manual_seed(0))


def _error(name: str) -> float:
    values, codec = _gaussians(1 << 20), get_codec(name)
    lost = values - codec.decode(codec.encode(values))
    return float(f"{lost.square().sum() / values.square().sum():.3g}")


if __name__ == "__main__":
    main()
