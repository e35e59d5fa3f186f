"""The reference backend over a paged cache: the same numbers as over a contiguous one, wherever the blocks lie."""

import random
from collections.abc import Iterator

import pytest
import torch

from quengine.block_pool import CachePool
from quengine.config import EngineConfig
from quengine.kernels.backend import Backend
from quengine.kernels.cpu.backend import CpuBackend
from quengine.kernels.forward_batch import decode_batch, prefill_batch
from quengine.kernels.kv.cache_types import BLOCK_SIZE, CACHE_TYPES, PADDING_BLOCK, CacheType
from quengine.kernels.kv.kv_rows import slot_mapping
from quengine.kv_cache import KVCache
from quengine.load import LoadedModel, load_model
from quengine.models.decoder import Decoder
from tests.forward import forward
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny

LENGTHS = (70, 1, 33, 32)
CTX = 96


@pytest.fixture(scope="module", params=[None, 20], ids=["whole", "window"])
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[LoadedModel]:
    sizes = ModelSizes(embedding=128, feed_forward=128, head_dim=32, context=CTX)
    changes = {} if request.param is None else {"llama.attention.sliding_window": request.param}
    path = write_tiny(tmp_path_factory.mktemp("paged") / "tiny.gguf", sizes=sizes, changes=changes)
    loaded = load_model(path, EngineConfig("cpu", backend="reference", chunk_size=40))
    yield loaded
    loaded.checkpoint.close()


def test_a_position_lies_where_its_table_says() -> None:
    table = torch.tensor([5, 2], dtype=torch.int32)
    assert slot_mapping(torch.tensor([0, 31, 32]), table).tolist() == [160, 191, 64]
    both = torch.tensor([[5, 2], [7, 1]], dtype=torch.int32)
    assert slot_mapping(torch.tensor([33, 33]), both).tolist() == [65, 33]


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
@torch.no_grad()
def test_chunks_and_batches_over_scattered_blocks_are_the_contiguous_run(
    model: LoadedModel, cache_type: CacheType
) -> None:
    numbers = random.Random(3)
    decoder, config = model.decoder, model.decoder.config
    texts = [[numbers.randrange(config.vocab_size) for _ in range(n + 1)] for n in LENGTHS]
    expected = []
    for ids in texts:
        alone = KVCache.allocate(config, CTX, torch.device("cpu"), cache_type).layers
        for at in range(0, len(ids) - 1, 40):
            forward(decoder, ids[at : min(at + 40, len(ids) - 1)], alone, at)
        expected.append(forward(decoder, ids[-1:], alone, len(ids) - 1)[0])

    pool = KVCache.allocate(config, CTX, torch.device("cpu"), cache_type, pools=[CachePool(12)])
    for layer in pool.layers:
        for tensor in layer.tensors:
            tensor.fill_(
                float("nan") if tensor.is_floating_point() else 77
            )  # rows never written are never read
    free = numbers.sample(range(1, 13), 12)
    tables = [[free.pop() for _ in range(len(ids) // BLOCK_SIZE + 1)] for ids in texts]
    for ids, table in zip(texts, tables, strict=True):
        for at in range(0, len(ids) - 1, 40):
            forward(decoder, ids[at : min(at + 40, len(ids) - 1)], pool.layers, at, table=table)
    padding = [PADDING_BLOCK]
    newest = [*(ids[-1] for ids in texts), 0, 0]
    batch = decode_batch(
        newest, [*LENGTHS, 0, 0], [[table] for table in (*tables, padding, padding)], torch.device("cpu")
    )
    logits = decoder.forward(batch, pool.layers)
    torch.testing.assert_close(logits[: len(texts)], torch.stack(expected), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["reference", "cpu"])
@torch.no_grad()
def test_chunks_of_several_prompts_in_one_step_are_those_of_each(model: LoadedModel, name: str) -> None:
    config = model.decoder.config
    backend: Backend[object] = CpuBackend(1) if name == "cpu" else model.decoder.backend
    decoder = Decoder(config, model.checkpoint.tensors, backend, CTX, 40)
    numbers = random.Random(5)
    starts, lengths, tables = (0, 7, 30), (33, 1, 12), [[4, 2], [0], [1, 5]]
    texts = [
        [numbers.randrange(config.vocab_size) for _ in range(sum(n))]
        for n in zip(starts, lengths, strict=True)
    ]
    together = KVCache.allocate(config, CTX, torch.device("cpu"), pools=[CachePool(6)]).layers
    expected = []
    for ids, start, table in zip(texts, starts, tables, strict=True):
        for layers in (
            alone := KVCache.allocate(config, CTX, torch.device("cpu"), pools=[CachePool(6)]).layers,
            together,
        ):
            if start:
                forward(decoder, ids[:start], layers, table=table)
        expected.append(forward(decoder, ids[start:], alone, start, table=table, phase="prefill")[0])
    chunks = [text[start:] for text, start in zip(texts, starts, strict=True)]
    logits = decoder.forward(
        prefill_batch(chunks, starts, [[table] for table in tables], torch.device("cpu")), together
    )
    near = 1e-9 if name == "reference" else 1e-3  # one row of logits is a row dot, of rounded activations
    torch.testing.assert_close(logits, torch.stack(expected), rtol=near, atol=near)
