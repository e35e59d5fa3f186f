"""A model whose layers ranks share has the bits that it has alone, whatever its architecture."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quengine.errors import EngineError
from quengine.kernels.cpu.backend import CpuBackend
from quengine.kernels.ranks.communicator import ONE_RANK, Communicator
from quengine.kernels.reference import ReferenceBackend
from quengine.kv_cache import KVCache
from quengine.models.architectures import ARCHITECTURES
from quengine.models.checkpoint import open_checkpoint
from quengine.models.config import Stage
from quengine.models.decoder import Decoder
from quengine.models.layer_split import layer_bounds, layer_bytes
from quengine.models.split_checkpoint import SplitCheckpoint
from tests.engine.parallel.rank_threads import as_ranks
from tests.forward import forward
from tests.gguf_builder import ENCODERS, UNSHARED, ModelSizes
from tests.tiny_models import write_tiny

IDS = [5, 17, 250, 3, 99, 42, 42, 8]
BACKENDS: dict[str, Callable[[], Any]] = {
    "reference": lambda: ReferenceBackend(keep=True),
    "cpu": lambda: CpuBackend(1),
}


def results_of(
    checkpoint: Any, make: Callable[[], Any], communicator: Communicator = ONE_RANK
) -> torch.Tensor:
    """Logits of a prompt in one chunk, and of a token after it."""
    backend = make()
    backend.communicator = communicator
    decoder = Decoder(checkpoint.config, checkpoint.tensors, backend, 64, 64)
    layers = KVCache.allocate(checkpoint.config, 64, torch.device("cpu")).layers
    prompt = forward(decoder, IDS, layers, all_logits=True, blocks=3)
    return torch.cat([prompt, forward(decoder, [7], layers, len(IDS), blocks=3)])


def check_same_bits(checkpoint: Any, bounds: tuple[int, ...], make: Callable[[], Any]) -> None:
    whole = results_of(checkpoint, make)

    def of_rank(group: Communicator) -> torch.Tensor:
        return results_of(SplitCheckpoint(checkpoint, Stage(group.rank, bounds)), make, group)

    ranks = as_ranks(len(bounds) - 1, of_rank)
    assert all(torch.equal(logits, whole) for logits in ranks) and whole.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("architecture", sorted(set(ARCHITECTURES) - {*ENCODERS, *UNSHARED}))
def test_every_architecture_has_the_bits_of_one_device(
    tmp_path: Path, architecture: str, backend: str
) -> None:
    path = write_tiny(tmp_path / "m.gguf", sizes=ModelSizes(architecture, blocks=3), kind="Q8_0")
    check_same_bits(open_checkpoint(path), (0, 2, 3), BACKENDS[backend])


@pytest.mark.parametrize("tied", [False, True])
def test_as_many_ranks_as_layers(tmp_path: Path, tied: bool) -> None:
    """Where the output matrix is the embedding, the last rank has that, too."""
    checkpoint = open_checkpoint(write_tiny(tmp_path / "m.gguf", sizes=ModelSizes(blocks=3), tied=tied))
    check_same_bits(checkpoint, (0, 1, 2, 3), BACKENDS["cpu"])


def test_the_parts_make_up_the_file(tmp_path: Path) -> None:
    whole = open_checkpoint(
        write_tiny(tmp_path / "m.gguf", sizes=ModelSizes("qwen3moe", blocks=3), kind="Q8_0")
    )
    parts = [SplitCheckpoint(whole, Stage(number, (0, 1, 3))) for number in range(2)]
    next_norm = "blk.1.attn_norm.weight"  # the first rank has it, too
    assert sorted(name for part in parts for name in part.tensors) == sorted([*whole.tensors, next_norm])
    assert sum(part.nbytes for part in parts) == whole.nbytes + whole.tensors[next_norm].nbytes
    assert [len(group.layers) for part in parts for group in part.config.cache_groups] == [1, 2]
    caches = [KVCache.allocate(part.config, 64, torch.device("cpu")) for part in parts]
    assert 2 * caches[0].nbytes == caches[1].nbytes > 0


def test_windows_of_layers_on_another_rank_keep_their_groups(tmp_path: Path) -> None:
    """Block tables are those of all ranks."""
    config = open_checkpoint(write_tiny(tmp_path / "m.gguf", sizes=ModelSizes(blocks=3))).config
    whole = replace(config, sliding_window=32, full_attention_layers=(1,))
    assert [(group.window, group.layers) for group in whole.cache_groups] == [(None, (1,)), (32, (0, 2))]
    parts = [replace(whole, stage=Stage(number, (0, 1, 3))).cache_groups for number in range(2)]
    assert [[(group.window, group.layers) for group in part] for part in parts] == [
        [(None, ()), (32, (0,))],
        [(None, (1,)), (32, (2,))],
    ]


@pytest.mark.parametrize(
    ("sizes", "shares", "bounds"),
    [
        ([1] * 8, [1, 1], (0, 4, 8)),
        ([1] * 8, [3, 1], (0, 6, 8)),
        ([1] * 8, [80.0, 24.0, 24.0], (0, 5, 6, 8)),
        ([5, 1, 1, 1, 1, 5], [1, 1], (0, 3, 6)),
        ([9, 1, 1], [1, 9], (0, 1, 3)),  # each rank has a layer, whatever its share
        ([1, 1, 9], [1, 1, 1], (0, 1, 2, 3)),
    ],
)
def test_layers_are_divided_by_shares(sizes: list[int], shares: list[float], bounds: tuple[int, ...]) -> None:
    assert layer_bounds(sizes, shares) == bounds


def test_more_ranks_than_layers_is_an_error() -> None:
    with pytest.raises(EngineError, match="--split layer: 3 devices cannot share 2 layers; take 2 at most"):
        layer_bounds([1, 1], [1, 1, 1])


@pytest.mark.parametrize("tied", [False, True])
def test_the_embedding_counts_for_the_first_layer_and_the_output_for_the_last(
    tmp_path: Path, tied: bool
) -> None:
    file = open_checkpoint(write_tiny(tmp_path / "m.gguf", sizes=ModelSizes(blocks=3), tied=tied))
    first, middle, last = layer_bytes(file.config, file.tensors)
    tables = [file.tensors[name].nbytes for name in ("token_embd.weight", "output_norm.weight")]
    output = tables[0] if tied else file.tensors["output.weight"].nbytes
    assert (first - middle, last - middle) == (tables[0], tables[1] + output)
