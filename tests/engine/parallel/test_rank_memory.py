"""The CUDA backend on two ranks that are processes of Triton's interpreter, over memory that they share.

Their kernels wait for each other as those of two GPUs do: sums in the launches that multiply, and in two shots.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor

from quengine.block_pool import CachePool
from quengine.kernels.cuda.backend import CudaBackend
from quengine.kernels.cuda.ranks.peers import PeerBuffers, peer_buffers, received_buffer_shape
from quengine.kernels.cuda.ranks.push import push_all_gather, push_all_reduce
from quengine.kernels.cuda.ranks.two_shot import shared_sums, shared_words, two_shot_all_reduce
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.phase import Phase
from quengine.kernels.ranks.communicator import ONE_RANK, Communicator
from quengine.kv_cache import KVCache
from quengine.models.checkpoint import open_checkpoint
from quengine.models.decoder import Decoder
from quengine.models.split_checkpoint import SplitCheckpoint
from quengine.models.tensor_split import Rank
from quengine.step_plan import SequenceRows, forward_batch
from tests.gguf_builder import ModelSizes
from tests.kernels.cuda import interpreter
from tests.tiny_models import write_tiny

RANKS, CTX, DEVICE = 2, 64, torch.device("cpu")
FEW, MANY, LOGITS = 256, 1 << 16, 4096
"""Values that are exchanged: four rows of a layer, a prompt's, and logits."""

PROMPT = [5, 17, 250, 3, 99]


@dataclass(frozen=True)
class SharedMemory:
    """Of all ranks, by rank."""

    few: list[Tensor]
    many: list[Tensor]
    logits: list[Tensor]

    @classmethod
    def empty(cls) -> "SharedMemory":
        def words(values: int) -> list[Tensor]:
            shape = received_buffer_shape(RANKS, values)
            return [torch.zeros(shape, dtype=torch.int64).share_memory_() for _ in range(RANKS)]

        many = [torch.zeros(shared_words(RANKS, MANY)).share_memory_() for _ in range(RANKS)]
        return cls(words(FEW), many, words(LOGITS))


class SharedMemoryRanks:
    """A `Communicator` of a process."""

    size = RANKS

    def __init__(self, rank: int, memory: SharedMemory) -> None:
        def buffers(received: list[Tensor]) -> PeerBuffers:
            return peer_buffers(received[rank], [each.data_ptr() for each in received], rank)

        self.rank, self._few, self._logits = rank, buffers(memory.few), buffers(memory.logits)
        addresses = [each.data_ptr() for each in memory.many]
        self._many = shared_sums(memory.many[rank], addresses, rank, MANY)

    def all_reduce(self, x: Tensor) -> Tensor:
        few = x.numel() <= self._few.capacity
        return push_all_reduce(x, self._few) if few else two_shot_all_reduce(x, self._many)

    def peers(self, rows: int, width: int) -> PeerBuffers | None:
        return self._few.for_rows(rows, width)

    def all_gather(self, x: Tensor, widths: list[int]) -> Tensor:  # type: ignore[override]
        starts = torch.tensor([sum(widths[:rank]) for rank in range(RANKS + 1)], dtype=torch.int32)
        return push_all_gather(x, widths, starts, self._logits)

    def broadcast(self, _x: Tensor) -> None:
        raise AssertionError("nothing is broadcast")


@torch.no_grad()
def outputs_of(path: Path, communicator: Communicator = ONE_RANK) -> list[Tensor]:
    """The logits of a prompt's last row, its hidden rows, and the logits of a step."""
    checkpoint = open_checkpoint(path)
    if communicator.size > 1:
        checkpoint = SplitCheckpoint(checkpoint, Rank(communicator.rank, communicator.size))
    backend = CudaBackend(DEVICE)
    backend.communicator = communicator
    decoder = Decoder(checkpoint.config, checkpoint.tensors, backend, CTX, CTX)
    layers = KVCache.allocate(checkpoint.config, CTX, DEVICE, pools=[CachePool(4)]).layers

    def batch(phase: Phase, ids: list[int], start: int) -> ForwardBatch:
        return forward_batch(phase, [SequenceRows(ids, start, [[2, 1]])], DEVICE)

    prompt = batch("prefill", PROMPT, 0)
    step = batch("decode", [7], len(PROMPT))
    return [
        decoder.forward(prompt, layers),
        decoder.hidden(prompt, layers).float(),
        decoder.forward(step, layers),
    ]


def run_rank(rank: int, path: Path, memory: SharedMemory, found: list[list[Tensor]]) -> None:
    interpreter.patch(pytest.MonkeyPatch())
    for target, value in zip(found[rank], outputs_of(path, SharedMemoryRanks(rank, memory)), strict=True):
        target.copy_(value)


@pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="processes of the interpreter")
def test_two_ranks_compute_what_one_does(tmp_path: Path) -> None:
    sizes = ModelSizes(
        "qwen2", blocks=2, embedding=64, feed_forward=64, heads=2, kv_heads=1, head_dim=32, context=CTX
    )
    path = write_tiny(tmp_path / "m.gguf", kind="Q8_0", sizes=sizes)
    wanted = outputs_of(path)
    found = [[torch.zeros_like(each).share_memory_() for each in wanted] for _ in range(RANKS)]
    multiprocessing.spawn(run_rank, (path, SharedMemory.empty(), found), nprocs=RANKS)
    for exact, *parts in zip(wanted, *found, strict=True):
        assert all(torch.equal(part, parts[0]) for part in parts)
        error = (parts[0] - exact).double().square().sum() / exact.double().square().sum()
        assert error < 1e-6 and exact.abs().sum() > 0
