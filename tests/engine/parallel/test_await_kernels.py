"""Ranks above 0 compile nothing that rank 0 compiles ahead."""

from pathlib import Path

from tests.fork_server import without_interpreter

WAITING = """
import os, sys, threading, time
os.environ["TRITON_CACHE_DIR"] = sys.argv[2]
from pathlib import Path
import torch.distributed as dist
from quengine.kernels.cuda.launch import triton_cache
from quengine.parallel import communicator
from quengine.parallel.communicator import CudaCommunicator

triton_cache.use_private_cache()
store = dist.FileStore(sys.argv[1], 2)
rank = object.__new__(CudaCommunicator)
rank.rank, rank._store = 1, store
rank.await_kernels()
key, name = "A" * 52, "a_kernel.json"

def compile_it():
    time.sleep(0.3)
    cache = triton_cache.CheckedCache(key)
    cache.put(b"machine code", "a_kernel.cubin")
    assert not triton_cache.is_cached(key)  # one file of it
    cache.put_group(name, {"a_kernel.cubin": cache._make_path("a_kernel.cubin")})

thread = threading.Thread(target=compile_it)
thread.start()
found = triton_cache.CheckedCache(key).get_group(name)
assert list(found) == ["a_kernel.cubin"] and triton_cache.is_cached(key)
thread.join()

def end():
    time.sleep(0.3)
    leader = object.__new__(CudaCommunicator)
    leader.rank, leader._store = 0, dist.FileStore(sys.argv[1], 2)
    leader.one_first(lambda: None)

thread = threading.Thread(target=end)
thread.start()
assert triton_cache.CheckedCache("B" * 52).get_group(name) is None  # rank 0 compiles no more: this rank does
thread.join()
done = []
rank.one_first(lambda: done.append(len(triton_cache.when_missing)))
assert done == [0]
"""


OWN = (
    WAITING[: WAITING.index("key, name =")]
    + """
communicator._OWN_AFTER = 0.3
began = time.monotonic()
assert triton_cache.CheckedCache("C" * 52).get_group("a_kernel.json") is None  # rank 0 does not have it
assert triton_cache.CheckedCache("D" * 52).get_group("a_kernel.json") is None  # and is not waited for again
assert not triton_cache.when_missing and 0.3 <= time.monotonic() - began < communicator.WAIT_SECONDS
store.set(communicator._DONE, "1")
rank.one_first(lambda: None)
"""
)


def test_a_missing_kernel_is_awaited_until_it_is_there_or_rank_0_has_compiled_all(tmp_path: Path) -> None:
    without_interpreter(WAITING, tmp_path / "meeting", tmp_path / "cache")


def test_a_kernel_that_rank_0_does_not_have_is_not_awaited_to_its_end(tmp_path: Path) -> None:
    without_interpreter(OWN, tmp_path / "meeting", tmp_path / "cache")
