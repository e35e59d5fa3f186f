"""Milliseconds and GB/s of moving a state between a GPU and pinned host memory, of presets' shapes.

    python -m benchmarks.cuda.cold_states [PRESET ...]

A state is moved to host memory where a newer checkpoint needs its block, and back where a prompt goes on from it: in
the stream of the steps, which wait for it. The first move pins the memory, which is timed by itself.
"""

import sys
import time
from dataclasses import replace
from statistics import median

import torch

from quengine.block_pool import BlockCopy
from quengine.kv_cache import KVCache, pools_of_one
from quengine.models.synthetic.presets import synthetic_preset

PRESETS = ("qwen3.6-35b-a3b", "qwen3.6-27b", "qwen3.5-0.8b")
ROUNDS = 20


def timed(cache: KVCache, copy: BlockCopy) -> float:
    """Seconds of a copy, behind all that was launched before."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    cache.copy_blocks([copy])
    torch.cuda.synchronize()
    return time.perf_counter() - began


def measure(name: str, device: torch.device) -> str:
    """The line of a preset. Raises SystemExit where there is no such preset."""
    preset = synthetic_preset(name)
    if preset is None:
        raise SystemExit(f"{name}: there is no such preset")
    config = preset.config()
    pools = [
        replace(pool, num_blocks=2, cold=2) if pool.is_state else pool for pool in pools_of_one(config, 256)
    ]
    group = next(n for n, pool in enumerate(pools) if pool.is_state)
    cache = KVCache.allocate(config, 256, device, pools=pools)
    size = sum(part[:, 0].nbytes for part in cache.states[group])
    for part in cache.states[group]:
        part.normal_()
    first = timed(cache, BlockCopy(group, 1, 3))
    there = median(timed(cache, BlockCopy(group, 1, 3)) for _ in range(ROUNDS))
    back = median(timed(cache, BlockCopy(group, 3, 2)) for _ in range(ROUNDS))
    assert all(torch.equal(part[:, 1], part[:, 2]) for part in cache.states[group])
    rate = f"to host {1e3 * there:.2f} ms ({size / there / 1e9:.1f} GB/s), back {1e3 * back:.2f} ms"
    rate += f" ({size / back / 1e9:.1f} GB/s), first {1e3 * first:.1f} ms"
    return f"{name:18} {size / 1e6:7.1f} MB  {rate}"


if __name__ == "__main__":
    for each in sys.argv[1:] or PRESETS:
        print(measure(each, torch.device("cuda")))
