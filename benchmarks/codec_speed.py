"""How fast every codec encodes and decodes on one CPU thread, beside bitsandbytes' own functions, as JSON.

``python benchmarks/codec_speed.py [--mb 24] [--repeats 9] [--device cpu]``. MB/s are megabytes of fp32 per
second, whatever the codec's size. Repeats of all contestants are interleaved, so that a busy moment of the
machine hits all alike; "wall" is the median of elapsed time, "cpu" of this process's CPU time, which other
processes disturb less. Memory for results is allocated in each call, as the library's own functions do. On
a CUDA device only "wall" means anything.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, get_args

os.environ["OMP_NUM_THREADS"] = "1"  # bitsandbytes' CPU kernels ask OpenMP, before torch is told

import torch
from bitsandbytes import functional

from p2p_co2.codec import get_codec, relative_error
from p2p_co2.config import CodecName

NAMES: tuple[CodecName, ...] = get_args(CodecName)


def contestants(values: torch.Tensor) -> dict[str, Callable[[], object]]:
    """What is timed, by "who operation": each codec and the library's own encoders and decoders."""
    calls: dict[str, Callable[[], object]] = {}
    for name in NAMES:
        codec = get_codec(name)
        payload = codec.encode(values)
        calls[f"{name} encode"] = partial(codec.encode, values)
        calls[f"{name} decode"] = partial(codec.decode, payload)
        calls[f"{name} check"] = partial(codec.check, payload)
    for kind in ("fp4", "nf4"):
        encode = partial(functional.quantize_4bit, values, blocksize=128, quant_type=kind)
        calls[f"bitsandbytes-{kind} encode"] = encode
        calls[f"bitsandbytes-{kind} decode"] = partial(functional.dequantize_4bit, *encode())
    encode = partial(functional.quantize_blockwise, values, blocksize=128)
    calls["bitsandbytes-int8 encode"] = encode
    calls["bitsandbytes-int8 decode"] = partial(functional.dequantize_blockwise, *encode())
    return calls


def measure(values: torch.Tensor, repeats: int) -> dict[str, dict[str, dict[str, float]]]:
    """MB/s by contestant, operation and clock."""
    calls = contestants(values)
    wall_s: dict[str, list[float]] = {what: [] for what in calls}
    cpu_s: dict[str, list[float]] = {what: [] for what in calls}
    for _ in range(repeats):
        for what, call in calls.items():
            cpu, start = time.process_time(), time.perf_counter()
            call()
            if values.is_cuda:
                torch.cuda.synchronize()
            wall_s[what].append(time.perf_counter() - start)
            cpu_s[what].append(time.process_time() - cpu)
    megabytes = values.numel() * 4 / 1e6
    table: dict[str, dict[str, dict[str, float]]] = {}
    for what in calls:
        who, operation = what.split()
        table.setdefault(who, {})[operation] = {
            "wall_mb_per_s": round(megabytes / median(wall_s[what]), 1),
            "cpu_mb_per_s": round(megabytes / median(cpu_s[what]), 1),
        }
    return table


def verdict(table: dict[str, dict[str, dict[str, float]]]) -> dict[str, Any]:
    """int4 and e3m0 against 400 MB/s and against the faster of the library's two 4-bit formats (wall
    clock)."""

    def best(operation: str) -> float:
        return max(table[f"bitsandbytes-{kind}"][operation]["wall_mb_per_s"] for kind in ("fp4", "nf4"))

    result: dict[str, Any] = {}
    library_both = 1 / (1 / best("encode") + 1 / best("decode"))
    for name in ("int4", "e3m0"):
        encode, decode = (table[name][operation]["wall_mb_per_s"] for operation in ("encode", "decode"))
        result[name] = {
            "at_least_400_mb_per_s": min(encode, decode) >= 400,
            "encode_times_bitsandbytes": round(encode / best("encode"), 2),
            "decode_times_bitsandbytes": round(decode / best("decode"), 2),
            "both_times_bitsandbytes": round(1 / (1 / encode + 1 / decode) / library_both, 2),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=int, default=24, help="megabytes of fp32 to encode")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    values = torch.randn(options.mb * 250_000 // 128 * 128, generator=torch.Generator().manual_seed(0))
    errors = {
        name: relative_error(values, get_codec(name).decode(get_codec(name).encode(values))) for name in NAMES
    }
    table = measure(values.to(options.device), options.repeats)
    report = {
        "input_mb": options.mb,
        "repeats": options.repeats,
        "threads": torch.get_num_threads(),
        "device": options.device,
        "machine": {
            "processor": platform.machine(),
            "torch_vectors": torch.backends.cpu.get_cpu_capability(),
        },
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "speed": table,
        "relative_error": {name: float(f"{error:.3g}") for name, error in errors.items()},
        "bits_per_value": {
            name: get_codec(name).block_bytes * 8 / get_codec(name).block_values for name in NAMES
        },
        "verdict": verdict(table),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
