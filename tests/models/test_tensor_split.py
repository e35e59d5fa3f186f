"""A model that ranks share gives what it gives alone, whatever its architecture; their parts make up the file."""

from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quengine.errors import EngineError
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.ranks.communicator import ONE_RANK, Communicator
from quengine.kernels.reference import ReferenceBackend
from quengine.kv_cache import KVCache
from quengine.models.architectures import ARCHITECTURES
from quengine.models.checkpoint import open_checkpoint
from quengine.models.decoder import Decoder
from quengine.models.split_checkpoint import SplitCheckpoint
from quengine.models.tensor_split import Rank, cut_of, shares, vocab_shares
from tests.engine.parallel.rank_threads import as_ranks
from tests.forward import forward
from tests.gguf_builder import ENCODERS, UNSHARED, ModelSizes
from tests.tiny_models import with_sinks_and_output_biases, write_tiny

IDS = [5, 17, 250, 3, 99, 42, 42, 8]


def sized(architecture: str = "llama", **sizes: Any) -> ModelSizes:
    given = {
        "feed_forward": 160,
        "expert_feed_forward": 128,
        "shared_feed_forward": 160,
        "head_dim": 32,
        "embedding": 128
        if architecture.startswith("lfm2")
        else 64,  # a group of channels for each of four ranks
    } | sizes
    return ModelSizes(architecture, **given)


def logits_of(checkpoint, communicator: Communicator = ONE_RANK) -> torch.Tensor:
    """Of a prompt in one chunk, and of a token after it."""
    backend = ReferenceBackend(keep=True)
    backend.communicator = communicator
    decoder = Decoder(checkpoint.config, checkpoint.tensors, backend, 64, 64)
    layers = KVCache.allocate(checkpoint.config, 64, torch.device("cpu")).layers
    prompt = forward(decoder, IDS, layers, all_logits=True)
    return torch.cat([prompt, forward(decoder, [7], layers, len(IDS))])


def check_shared_alike(checkpoint, count: int, by_expert: bool = False) -> None:
    """The ranks' logits are the same bits, and those of one rank but for the order of fp64 sums."""
    whole = logits_of(checkpoint)
    ranks = as_ranks(
        count, lambda group: logits_of(SplitCheckpoint(checkpoint, Rank(group.rank, count, by_expert)), group)
    )
    assert all(torch.equal(logits, ranks[0]) for logits in ranks)
    # The cache rounds to fp16: a last bit of fp64 may turn a value there, by 2^-11.
    error = (ranks[0] - whole).square().sum() / whole.square().sum()
    assert error < 1e-9
    assert ranks[0].shape == whole.shape


@pytest.mark.parametrize("architecture", sorted(set(ARCHITECTURES) - {*ENCODERS, *UNSHARED}))
@pytest.mark.parametrize("count", [2, 4])
def test_every_architecture_is_shared_by_ranks(tmp_path: Path, architecture: str, count: int) -> None:
    """Four ranks have more than there are key/value heads."""
    path = write_tiny(tmp_path / "m.gguf", sizes=sized(architecture), kind="Q8_0")
    check_shared_alike(open_checkpoint(path), count)


@pytest.mark.parametrize("form", ["separate", "gate_up"])
def test_experts_in_every_form_of_file(tmp_path: Path, form: str) -> None:
    sizes = sized("qwen3moe", **{form: True})
    check_shared_alike(open_checkpoint(write_tiny(tmp_path / "m.gguf", sizes=sizes, kind="Q4_0")), 2)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(
    "sizes",
    [
        sized("qwen3moe", heads=6, kv_heads=6, gate_up=True),
        sized("qwen2moe", heads=6, kv_heads=6),
        sized("gpt-oss", heads=6, kv_heads=6),
    ],
    ids=["gate and up in one", "shared expert", "biases"],
)
def test_experts_that_are_shared_whole(tmp_path: Path, sizes: ModelSizes, count: int) -> None:
    """Also by three ranks, of which one has more than the others."""
    checkpoint = open_checkpoint(write_tiny(tmp_path / "m.gguf", sizes=sizes, kind="Q8_0"))
    check_shared_alike(checkpoint, count, by_expert=True)
    held = [SplitCheckpoint(checkpoint, Rank(number, count, True)) for number in range(count)]
    experts = [part.config.experts.held for part in held if part.config.experts is not None]
    assert [number for some in experts if some is not None for number in some] == list(range(4))
    name = "blk.1.ffn_down_exps.weight"
    matrices = [matrix.data for part in held for matrix in part.tensors[name].matrices()]
    wanted = [matrix.data for matrix in checkpoint.tensors[name].matrices()]
    assert len(matrices) == len(wanted) == 4 and all(map(torch.equal, matrices, wanted))


@pytest.mark.parametrize(
    ("sizes", "count", "message"),
    [
        (sized(), 2, "--expert-parallel is for models with experts"),
        (sized("qwen3moe", heads=8, kv_heads=8), 8, "--tensor-parallel 8: 4 experts for 8 ranks"),
        (sized("qwen3moe", separate=True), 2, r"blk.0.ffn_\w+.0.weight is of one expert"),
    ],
)
def test_experts_that_cannot_be_shared_whole(
    tmp_path: Path, sizes: ModelSizes, count: int, message: str
) -> None:
    checkpoint = open_checkpoint(write_tiny(tmp_path / "m.gguf", sizes=sizes, kind="Q8_0"))
    with pytest.raises(EngineError, match=message):
        SplitCheckpoint(checkpoint, Rank(0, count, True))


def test_an_embedding_that_is_the_output_matrix_too(tmp_path: Path) -> None:
    check_shared_alike(open_checkpoint(write_tiny(tmp_path / "m.gguf", sizes=sized(), tied=True)), 2)


def test_sinks_and_biases_of_the_output_projection(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_tiny(tmp_path / "m.gguf", sizes=sized()))
    config, tensors, _ = with_sinks_and_output_biases(checkpoint.config, checkpoint.tensors)
    check_shared_alike(SimpleNamespace(path=checkpoint.path, config=config, tensors=tensors), 2)


@pytest.mark.parametrize("count", [2, 4])
def test_query_key_and_value_rows_in_one_tensor(tmp_path: Path, count: int) -> None:
    """With their biases; the logits are those of three tensors, to the bit."""
    checkpoint = open_checkpoint(write_tiny(tmp_path / "m.gguf", "qwen2", "Q8_0", sizes=sized("qwen2")))
    tensors = dict(checkpoint.tensors)
    for kind, dim in (("weight", 0), ("bias", 1)):
        for layer in range(checkpoint.config.block_count):
            parts = [tensors.pop(f"blk.{layer}.attn_{part}.{kind}") for part in "qkv"]
            rows = sum(part.shape[0] for part in parts)
            data = torch.cat([part.data for part in parts], dim)
            name = f"blk.{layer}.attn_qkv.{kind}"
            tensors[name] = QuantTensor(name, parts[0].format, (rows, *parts[0].shape[1:]), data)
    joined = SimpleNamespace(path=checkpoint.path, config=checkpoint.config, tensors=tensors)
    assert torch.equal(logits_of(joined), logits_of(checkpoint))
    check_shared_alike(joined, count)


@pytest.mark.parametrize("architecture", ["llama", "phi3", "qwen2moe", "gpt-oss"])
def test_a_rank_has_the_bytes_of_its_part_alone(tmp_path: Path, architecture: str) -> None:
    whole = open_checkpoint(write_tiny(tmp_path / "m.gguf", sizes=sized(architecture), kind="Q8_0"))
    parts = [SplitCheckpoint(whole, Rank(number, 2)) for number in range(2)]
    for part in parts:
        tensors = [part.tensors[name] for name in part.tensors]
        assert part.nbytes == sum(tensor.nbytes for tensor in tensors)
        assert part.weights == sum(prod(tensor.shape) for tensor in tensors)
    for name, tensor in whole.tensors.items():
        cut = cut_of(name, whole.config)
        held = sum(part.tensors[name].nbytes for part in parts)
        on_all = cut is None or cut.along == "first"
        assert held == (2 if on_all else 1) * tensor.nbytes, name


def test_rows_are_views_of_the_file(tmp_path: Path) -> None:
    whole = open_checkpoint(write_tiny(tmp_path / "m.gguf", sizes=sized(), kind="Q8_0"))
    part = SplitCheckpoint(whole, Rank(1, 2)).tensors["blk.1.ffn_up.weight"]
    stored = whole.tensors["blk.1.ffn_up.weight"].data
    assert part.data.data_ptr() == stored.data_ptr() + stored.nbytes // 5 * 2  # 64 of 160 rows before it


def test_units_are_shared_as_equally_as_they_come() -> None:
    assert [len(share) for share in shares(11008, 256, 2)] == [21 * 256, 22 * 256]
    assert sum(vocab_shares(49157, 4)) == 49157 and max(vocab_shares(49157, 4)) < 49157 / 4 + 16


@pytest.mark.parametrize(
    ("sizes", "count", "message"),
    [
        (
            {},
            3,
            r"--tensor-parallel 3: blk.0.attn_q has 4 heads, which 3 ranks cannot share.*takes 1 or 2 or 4",
        ),
        ({"heads": 12, "kv_heads": 3}, 2, "blk.0.attn_k has 3 heads, which neither divide 2 ranks"),
        ({"heads": 8, "kv_heads": 8, "head_dim": 16}, 4, None),
        (
            {"heads": 2, "head_dim": 16},
            2,
            r"blk.0.attn_output.weight \(Q8_0\) has 16 columns a rank, not a mul",
        ),
        ({"feed_forward": 96}, 4, "ffn_down has 96 columns, 3 pieces of 32 for 4 ranks"),
    ],
)
def test_what_cannot_be_shared_is_named(tmp_path: Path, sizes: dict, count: int, message: str | None) -> None:
    path = write_tiny(tmp_path / "m.gguf", sizes=sized(**sizes), kind="Q8_0")
    if message is None:
        SplitCheckpoint(open_checkpoint(path), Rank(0, count))
        return
    with pytest.raises(EngineError, match=message):
        SplitCheckpoint(open_checkpoint(path), Rank(0, count))
