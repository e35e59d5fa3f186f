"""How a context is chosen, and how a run that cannot fit is refused."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quengine.block_pool import CachePool
from quengine.config import EngineConfig
from quengine.errors import CannotRunError, EngineError
from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cuda.gated_delta.chunks import chunk_rows
from quengine.kernels.cuda.gemm.workspace import MatmulWorkspace
from quengine.kernels.cuda.moe import grouped
from quengine.kernels.cuda.moe.expert_weights import ExpertWeights
from quengine.kernels.cuda.weights import launch_table
from quengine.kernels.cuda.weights.layout import packed_layout
from quengine.kernels.cuda.weights.packed import PackedPart
from quengine.kernels.kv.cache_types import CACHE_TYPES
from quengine.kernels.moe.router_kind import RouterKind
from quengine.load import load_model
from quengine.loading import placement
from quengine.memory import (
    BURST_LOGIT_BYTES,
    WORKSPACE,
    CacheNeeds,
    DeviceMemory,
    adapted_step_bytes,
    attended_bytes,
    choose_context,
    choose_pools,
    cpu_expert_bytes,
    grouped_row_bytes,
    kv_cache_bytes,
    workspace_bytes,
)
from quengine.models.blocks.experts import ExpertConfig
from quengine.models.blocks.gated_delta import GatedDeltaSizes
from quengine.models.config import ModelConfig
from quengine.models.synthetic.presets import synthetic_preset
from quengine.models.synthetic.synthetic import write_synthetic
from quengine.platform.host_experts import ExpertPlacement
from quengine.runners.graph_keys import expected_keys, rarer_keys
from tests.tiny_models import small_config

GIB = 2**30


@pytest.fixture
def config() -> ModelConfig:
    return dataclasses.replace(
        small_config(), block_count=32, head_count=32, head_count_kv=8, head_dim=128, context_length=32768
    )


def needs(config: ModelConfig) -> CacheNeeds:
    return CacheNeeds(config, chunk=512)


def memory(free: int) -> DeviceMemory:
    """With 4 GiB of weights to come."""
    return DeviceMemory("cpu", free, 4 * GIB)


def test_the_models_own_context_is_taken_when_it_fits(config: ModelConfig) -> None:
    assert choose_context(needs(config), None, memory(24 * GIB)) == 32768


def test_blocks_are_those_of_all_sequences_or_what_fits_beside_a_padding_block(config: ModelConfig) -> None:
    room = 13 * kv_cache_bytes(config, 32) + needs(config).table_bytes(100)
    assert choose_pools(needs(config), 100, 3, room, "f16") == [CachePool(12, None, 512)]
    assert choose_pools(needs(config), 100, 3, room - 1, "f16") == [CachePool(11, None, 512)]
    assert choose_pools(needs(config), 100, 3, 24 * GIB, "q8_0") == [CachePool(12, None, 512)]
    assert choose_pools(needs(config), 100, 3, 0, "f16") == [CachePool(4, None, 512)]


def test_the_context_is_cut_to_what_fits(config: ModelConfig) -> None:
    chosen = choose_context(needs(config), None, memory(6 * GIB))
    assert 0 < chosen < 32768
    assert kv_cache_bytes(config, chosen) <= 2 * GIB
    assert kv_cache_bytes(config, chosen) > 1.5 * GIB


def test_a_context_that_was_asked_for_is_never_cut(config: ModelConfig) -> None:
    assert choose_context(needs(config), 1000, memory(24 * GIB)) == 1000
    with pytest.raises(
        CannotRunError, match=r"needs 8\.25 GiB .* 32768 tokens in f16.* free 6\.00 GiB; try -c \d+"
    ):
        choose_context(needs(config), 32768, memory(6 * GIB))


@pytest.mark.parametrize("free", [5 * GIB, 6 * GIB, 7 * GIB])
@pytest.mark.parametrize("head_dim", [80, 128])
def test_every_way_out_that_is_advised_works(config: ModelConfig, free: int, head_dim: int) -> None:
    config = dataclasses.replace(config, head_dim=head_dim, context_length=1 << 20)
    with pytest.raises(CannotRunError) as refused:
        choose_context(needs(config), 60000, memory(free))
    ways = str(refused.value).rsplit("; try ", 1)[1].split(" or ")
    assert len(ways) == (3 if head_dim == 128 else 1)
    for way in ways:
        cache_type = next((t for t in CACHE_TYPES if t in way), "f16")
        asked = int(way.split("-c ")[1]) if "-c " in way else 60000
        assert choose_context(needs(config), asked, memory(free), cache_type) == asked


def test_q8_0_is_advised_alone_where_no_context_fits_in_f16(config: ModelConfig) -> None:
    room = WORKSPACE["cpu"] + needs(config).nbytes(256, "q8_0")
    with pytest.raises(CannotRunError, match=r"; try --cache-type q8_0$"):
        choose_context(needs(config), None, memory(4 * GIB + room))
    assert choose_context(needs(config), None, memory(4 * GIB + room), "q8_0") == 256


def test_a_cache_type_is_not_advised_where_it_is_chosen(config: ModelConfig) -> None:
    with pytest.raises(
        CannotRunError, match=r"tokens in q8_0\), free 5\.00 GiB; try -c \d+ or --cache-type q4_0 -c \d+$"
    ):
        choose_context(needs(config), 32768, memory(5 * GIB), "q8_0")
    with pytest.raises(CannotRunError, match=r"tokens in q4_0\), free 5\.00 GiB; try -c \d+$"):
        choose_context(needs(config), 32768, memory(5 * GIB), "q4_0")


def test_nearly_two_and_four_times_the_context_fit_in_codes(config: ModelConfig) -> None:
    config = dataclasses.replace(config, context_length=1 << 20)
    plain, *smaller = (choose_context(needs(config), None, memory(6 * GIB), t) for t in CACHE_TYPES)
    assert smaller == [pytest.approx(plain * 32 / 17, rel=0.02), pytest.approx(plain * 32 / 9, rel=0.04)]


def test_weights_that_do_not_fit_are_refused_with_both_numbers(config: ModelConfig) -> None:
    with pytest.raises(CannotRunError, match=r"weights 4\.00 GiB.*free 2\.00 GiB; use a smaller"):
        choose_context(needs(config), None, memory(2 * GIB))


def test_more_context_than_the_model_was_made_for_is_an_error(config: ModelConfig) -> None:
    with pytest.raises(EngineError, match="40000 tokens is more than the 32768 that this llama model"):
        choose_context(needs(config), 40000, memory(24 * GIB))


def test_room_beside_weights_and_cache_grows_with_the_model_and_the_chunk_on_a_gpu(
    config: ModelConfig,
) -> None:
    def beside(kind: str, blocks: int, width: int, feed_forward: int, weights: int, chunk: int = 2048) -> int:
        shape = {"embedding_length": width, "head_count": width // 128, "feed_forward_length": feed_forward}
        model = dataclasses.replace(config, block_count=blocks, vocab_size=32000, **shape)
        return workspace_bytes(kind, model, weights, chunk, 1) - WORKSPACE[kind]

    # Measured on a GPU with Mistral-7B's shapes: 0.49 GB, of which 57 MB are the program's (cuBLAS, few rows).
    assert 0.40e9 < beside("cuda", 32, 4096, 14336, 4_372_054_016) < 0.50e9
    # 80 layers of 8192: 3% of 42 GB of weights packed, 160 MiB expanded, 0.3 GB for the chunk.
    assert 1.6e9 < beside("cuda", 80, 8192, 28672, 42_500_000_000) < 2.0e9
    assert beside("cuda", 32, 4096, 14336, 4_372_054_016, 512) < 0.32e9
    assert beside("cpu", 80, 8192, 28672, 42_500_000_000) == 0


@pytest.mark.parametrize(
    ("vocab_size", "width", "queries", "feed_forward", "weights", "rows", "measured"),
    [
        (32768, 4096, 32, 14336, 4_372_054_016, 1, 668),
        (32768, 4096, 32, 14336, 4_372_054_016, 8, 776),
        (32768, 4096, 32, 14336, 4_372_054_016, 64, 920),
        (32768, 4096, 32, 14336, 4_372_054_016, 256, 1550),
        (32768, 4096, 32, 14336, 4_372_054_016, 512, 2408),
        (128256, 2048, 16, 8192, 807_690_240, 64, 1218),
        (128256, 2048, 16, 8192, 807_690_240, 256, 3390),
    ],
)
def test_room_is_left_for_every_kind_of_sampling(
    config: ModelConfig,
    vocab_size: int,
    width: int,
    queries: int,
    feed_forward: int,
    weights: int,
    rows: int,
    measured: int,
) -> None:
    """`measured`: MiB beside weights and cache on one H200 with all steps captured, but for those of 64 prompts, after
    requests of every kind, of Mistral-7B's and Llama-3.2-1B's shapes."""
    model = dataclasses.replace(
        config, vocab_size=vocab_size, embedding_length=width, head_count=queries, head_count_kv=8,
        feed_forward_length=feed_forward,
    )  # fmt: skip
    keys = {*expected_keys(rows, 2048, 512, 1024), *rarer_keys(rows, 2048)}
    bursts = [key for key in keys if key.phase == "prefill" and key.sequences == 64]
    of_bursts = sum(4 * key.sequences * vocab_size for key in bursts)
    assert of_bursts == (BURST_LOGIT_BYTES * vocab_size if rows > 16 else 0)
    taken = measured * 2**20 + of_bursts
    assert taken < workspace_bytes("cuda", model, weights, 2048, rows) < taken + 600 * 2**20


def test_adapters_leave_less_room_on_a_gpu(config: ModelConfig) -> None:
    checkpoint = SimpleNamespace(config=config, nbytes=GIB)

    def workspace(device: str, *lora: str) -> int:
        given = EngineConfig(parallel=8, lora=lora, chunk_size=512)
        arguments = given, checkpoint, None, torch.device(device), 0, ExpertPlacement()
        return placement._memory_needs(*arguments)[1].workspace  # type: ignore[arg-type]

    more = workspace("cuda", "a.gguf") - workspace("cuda")
    assert more == adapted_step_bytes(config, 512, 8) > 0
    assert workspace("cpu", "a.gguf") == workspace("cpu")


def test_ranks_have_room_for_a_captured_whole_chunk(config: ModelConfig) -> None:
    """As for as many rows more, since steps that are not captured have memory of their own."""

    def taken(ranks: int, chunk: int) -> int:
        return workspace_bytes("cuda", dataclasses.replace(config, ranks=ranks), GIB, chunk, 1)

    assert taken(2, 2048) - taken(1, 2048) == taken(1, 4096) - taken(1, 2048) > 0
    assert taken(2, 1920) == taken(1, 1920)  # no chunk is captured whole


def test_the_rows_of_experts_take_room_of_their_own_on_the_cpu(config: ModelConfig) -> None:
    """Of a chunk of T tokens T x k rows, which the dense feed-forward of the same model does not have."""
    experts = ExpertConfig(count=128, router=RouterKind(used=8), feed_forward_length=768)
    sparse = dataclasses.replace(
        config, embedding_length=2048, head_count_kv=4, feed_forward_length=6144, experts=experts
    )
    assert cpu_expert_bytes(config, 2048) == 0
    assert workspace_bytes("cpu", sparse, GIB, 512, 1) == WORKSPACE["cpu"] + 512 * 8 * 4 * (3 * 768 + 2048)
    # On a GPU no layer has the dense feed-forward's width, unless it is said to be dense.
    dense = dataclasses.replace(experts, dense_layers=(0,))
    more = [
        workspace_bytes("cuda", dataclasses.replace(sparse, experts=each), GIB, 2048, 1)
        for each in (experts, dense)
    ]
    assert more[0] < more[1]


def test_a_gated_delta_net_takes_room_for_each_row_of_a_chunk_on_a_gpu(config: ModelConfig) -> None:
    """What its kernels allocate for a chunk: 32 + 0.25 + 16 KiB a row of Qwen3.6-35B-A3B's shape."""
    sizes = GatedDeltaSizes(16, 32, 128, 4, tiled=True)
    net = dataclasses.replace(config, embedding_length=2048, gated_delta=sizes)
    taken = [workspace_bytes("cuda", net, GIB, chunk, 1) for chunk in (512, 1024)]
    plain = [
        workspace_bytes("cuda", dataclasses.replace(net, gated_delta=None), GIB, chunk, 1)
        for chunk in (512, 1024)
    ]
    product = 4 * (8192 + 4096 + 64) - 4 * (config.head_count + 2 * config.head_count_kv) * config.head_dim
    more = (taken[1] - taken[0]) - (plain[1] - plain[0])
    assert more == 512 * (product + 1024 * 32 + 256 + 1024 * 16)
    qkv, gates = torch.empty(512, 8192), torch.empty(512, 2, 32)
    matrices = 2 * torch.empty(512, 32, chunk_rows(128)).nbytes
    assert qkv.nbytes + gates.nbytes + matrices == 512 * (1024 * 32 + 256 + 1024 * 16)


def test_a_draft_model_takes_less_beside_than_alone(config: ModelConfig) -> None:
    alone, beside = (workspace_bytes("cuda", config, 2**27, 2048, 8, draft) for draft in (False, True))
    assert beside < alone


@pytest.mark.parametrize(
    ("hidden", "ffn", "count", "used"), [(2048, 768, 128, 8), (4096, 14336, 8, 2), (2880, 2880, 32, 4)]
)
@pytest.mark.parametrize("chunk", [512, 2048, 4096])
def test_the_buffers_of_grouped_rows_are_counted(
    chunk: int,
    hidden: int,
    ffn: int,
    count: int,
    used: int,
    config: ModelConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a Hopper GPU holds after a batch and a prompt, and not much more; without experts nothing."""
    monkeypatch.setattr(grouped, "is_hopper", lambda *_: True)
    monkeypatch.setattr(launch_table, "table_key", lambda: "a GPU without a table")
    room, plane = MatmulWorkspace(0, "meta"), torch.empty(0, dtype=torch.uint8)
    part = PackedPart(
        packed_layout(FORMATS["Q4_0"], hidden), 2 * ffn * count, hidden, plane, plane, plane, plane, 1, 1
    )
    gate_up = ExpertWeights((part,), count, 2 * ffn, True)
    for rows in (3, 128, chunk):
        _, gated = grouped._buffers(rows, used, gate_up, ffn, room)
        room.of_experts("rows", torch.float32, rows, (gated.groups.rows, hidden), 0)
    experts = ExpertConfig(count, RouterKind(used), ffn)
    counted = (
        grouped_row_bytes(dataclasses.replace(config, embedding_length=hidden, experts=experts), chunk)
        - 2**26
    )
    assert 0.98 * room.nbytes < counted < 1.25 * room.nbytes
    assert grouped_row_bytes(config, chunk) == 0


@pytest.fixture
def windowed() -> ModelConfig:
    """Every sixth of 36 layers keeps all positions, the others see 1024."""
    return dataclasses.replace(
        small_config(),
        block_count=36,
        head_count=8,
        head_count_kv=2,
        head_dim=256,
        context_length=131072,
        sliding_window=1024,
        full_attention_layers=tuple(range(5, 36, 6)),
        rope_freq_base_swa=1e5,
    )


def test_a_window_needs_its_own_positions_and_those_of_a_chunk(windowed: ModelConfig) -> None:
    layer = 2 * 2 * 256 * 2  # bytes a position
    assert needs(windowed).cache_bytes(512) == kv_cache_bytes(windowed, 512) == 36 * layer * 512
    assert needs(windowed).cache_bytes(32768) == 6 * layer * 32768 + 30 * layer * (1024 + 512 + 32)
    assert needs(windowed).cache_bytes(32768) < kv_cache_bytes(windowed, 32768) / 4
    assert attended_bytes(windowed, 1000, "f16") == kv_cache_bytes(windowed, 1000)
    assert attended_bytes(windowed, 5000, "f16") == layer * (6 * 5000 + 30 * 1024)


def test_each_rotation_of_layers_has_rotary_tables_of_its_own(windowed: ModelConfig) -> None:
    gemma = dataclasses.replace(windowed, rope_dim=256)
    alike = dataclasses.replace(gemma, rope_freq_base_swa=None)
    assert needs(alike).table_bytes(131072) == 134_217_728
    assert needs(gemma).table_bytes(131072) == 2 * 134_217_728
    assert needs(gemma).nbytes(131072) == needs(gemma).cache_bytes(131072) + 2 * 134_217_728
    shorter = dataclasses.replace(gemma, context_length=8192, rope_dim=64)
    assert CacheNeeds(gemma, 512, shorter).table_bytes(131072) == 2 * 134_217_728 + 2 * 8192 * 64 * 4


@pytest.mark.parametrize("name", ["gemma3-tiny", "qwen3moe-tiny"])
def test_rotary_tables_are_counted_as_the_decoder_holds_them(tmp_path: Path, name: str) -> None:
    loaded = load_model(write_synthetic(tmp_path / "m.gguf", name), EngineConfig("cpu", 100, 1))
    specs = [block.mixer.spec for block in loaded.decoder.blk]
    tables = {id(table): table.nbytes for spec in specs for table in (spec.cos, spec.sin)}
    assert CacheNeeds(loaded.checkpoint.config, 64).table_bytes(100) == sum(tables.values())
    loaded.close()


def test_rotary_tables_decide_what_fits_and_are_in_the_numbers_of_a_refusal(windowed: ModelConfig) -> None:
    wide = dataclasses.replace(windowed, rope_dim=256)
    room = needs(wide).cache_bytes(131072) + 2**28
    assert room == 6 * 2048 * 131072 + 30 * 2048 * (1024 + 512 + 32) + 2**28
    free = 4 * GIB + WORKSPACE["cpu"] + room
    assert choose_context(needs(wide), 131072, memory(free)) == 131072
    with pytest.raises(CannotRunError, match=r"cache and rotary tables 1\.84 GiB for 131072 tokens in f16\)"):
        choose_context(needs(wide), 131072, memory(free - 1))


def test_the_context_that_fits_follows_from_the_windows(windowed: ModelConfig) -> None:
    room = needs(windowed).nbytes(32768)
    free = 4 * GIB + WORKSPACE["cpu"] + room
    assert choose_context(needs(windowed), None, memory(free)) == 32768
    assert choose_context(needs(windowed), None, memory(free - 1)) == 32768 - 256
    assert choose_context(needs(windowed), 32768, memory(free)) == 32768
    with pytest.raises(CannotRunError, match=r"; try -c 32512 or --cache-type q8_0$"):
        choose_context(needs(windowed), 32768, memory(free - 1))


def test_groups_have_as_many_blocks_where_memory_is_short_and_what_they_need_where_it_is_not(
    windowed: ModelConfig,
) -> None:
    full, window = needs(windowed).block_bytes("f16")

    def pools(room: int) -> list[int]:
        made = choose_pools(needs(windowed), 32768, 4, room, "f16")
        assert [pool.window for pool in made] == [None, 1024]
        return [pool.num_blocks for pool in made]

    one = (1024, 49)
    padding = full + window + needs(windowed).table_bytes(32768)
    assert pools(padding + 4 * (one[0] * full + one[1] * window)) == [4 * 1024, 4 * 49]
    assert pools(padding + 1500 * full + 4 * 49 * window) == [1500, 4 * 49]
    assert pools(padding + 1500 * full + 4 * 49 * window - 1) == [1499, 4 * 49]
    assert pools(0) == [1024, 49]
    room = 101 * (full + window) + needs(windowed).table_bytes(1024)
    short = choose_pools(needs(windowed), 1024, 64, room, "f16")
    assert [pool.num_blocks for pool in short] == [100, 100]


def test_with_a_draft_model_the_first_group_keeps_all_positions(windowed: ModelConfig) -> None:
    draft = dataclasses.replace(windowed, block_count=2)
    both = CacheNeeds(windowed, 512, draft)
    assert [pool.window for pool in both.pools()] == [None, 1024]
    assert both.cache_bytes(32768) == needs(windowed).cache_bytes(32768) + kv_cache_bytes(draft, 32768)


def test_heads_of_a_draft_model_that_the_cache_cannot_store_are_named_as_its_own(config: ModelConfig) -> None:
    both = CacheNeeds(config, 512, dataclasses.replace(config, head_dim=48))
    with pytest.raises(
        EngineError, match=r"^draft model: a q4_0 cache needs .* is 48; use --cache-type f16$"
    ):
        choose_context(both, None, memory(8 * GIB), "q4_0")


def test_a_window_of_all_layers_is_kept_with_a_draft_model(config: ModelConfig) -> None:
    config = dataclasses.replace(config, sliding_window=4096)
    assert [pool.window for pool in CacheNeeds(config, 512).pools()] == [4096]
    assert [pool.window for pool in CacheNeeds(config, 512, config).pools()] == [None]


@pytest.fixture
def recurrent() -> ModelConfig:
    """LFM2 with two convolutions so wide that a state takes 64 MiB; keys and values take 1 KiB a token."""
    preset = synthetic_preset("lfm2-tiny")
    assert preset is not None
    config = dataclasses.replace(preset.config(), context_length=32768)
    state = CacheNeeds(config, 512).state_bytes
    assert state % (64 * 4) == 0
    return dataclasses.replace(config, conv_channels=config.conv_channels * 64 * 2**20 // state)


def state_needs(config: ModelConfig, **options: Any) -> CacheNeeds:
    return CacheNeeds(config, 512, None, 4, **options)


def test_states_and_checkpoints_are_counted_and_take_their_share(recurrent: ModelConfig) -> None:
    needed = state_needs(recurrent)
    size = needed.state_bytes
    assert size == 64 * 2**20 and needed.states == 4 and needed.least_checkpoints == 2
    own = needed.cache_bytes(1024)
    assert needed.nbytes(1024) == own + 5 * size + needed.table_bytes(1024)

    def pools(room: int, **options: Any) -> tuple[int, int]:
        paged, states = choose_pools(state_needs(recurrent, **options), 1024, 4, room, "f16")
        assert states.num_blocks == 4 + states.checkpoints
        return paged.num_blocks, states.checkpoints

    padding = sum(needed.block_bytes("f16"))
    least = needed.nbytes(1024) + padding
    assert pools(least) == (32, 2), "blocks of one sequence, states of all"
    assert pools(least + size // 2) == (128, 2), "an eighth of it is no further state"
    assert pools(16 * 2**30) == (128, 34) and pools(64 * 2**30) == (128, 48)
    assert pools(64 * 2**30, checkpoints=3) == (128, 3) and pools(64 * 2**30, checkpoints=0) == (128, 0)
    assert state_needs(recurrent, drafts=True).states == 4, "they go back over drafts"


def test_states_that_do_not_fit_are_refused_with_what_does(recurrent: ModelConfig) -> None:
    needed = state_needs(recurrent)
    free = 4 * GIB + WORKSPACE["cpu"] + needed.nbytes(32768)
    assert choose_context(needed, 32768, memory(free)) == 32768
    with pytest.raises(
        CannotRunError,
        match=r"for 32768 tokens in f16, 0\.38 GiB of them for states: 4 of up to 4 sequences and 2 checkpoints, "
        r"64\.0 MiB each\), free .* GiB; try -c 32512 or .*--parallel 3$",
    ):
        choose_context(needed, 32768, memory(free - 1))
    for states, way in ((5, "--parallel 2"), (4, "--parallel 1"), (3, "--parallel 1 -c 768")):
        room = states * needed.state_bytes + 2**20
        with pytest.raises(CannotRunError, match=rf"; try {way}$"):
            choose_context(needed, 32768, memory(4 * GIB + WORKSPACE["cpu"] + room))
    many = state_needs(recurrent, checkpoints=20)
    with pytest.raises(CannotRunError, match=r"and 20 checkpoints, .*--state-checkpoints 2$"):
        choose_context(many, 32768, memory(free))
