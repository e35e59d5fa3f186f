"""Which device a run takes, and what it says when it cannot."""

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from quengine.block_pool import CachePool
from quengine.config import EngineConfig
from quengine.errors import CannotRunError, EngineError
from quengine.kernels.cuda.backend import CudaBackend
from quengine.kernels.cuda.launch.gpu import Gpu
from quengine.load import load_model
from quengine.loading.machine import Machine, make_backend
from quengine.loading.placement import choose_cache
from quengine.memory import WORKSPACE, CacheNeeds, adapted_step_bytes, kv_cache_bytes, workspace_bytes
from quengine.models.checkpoint import open_checkpoint
from quengine.models.synthetic.synthetic import write_synthetic
from quengine.platform.device import choose_device
from quengine.platform.host_experts import ExpertPlacement
from quengine.runners.compile_kernels import KernelPlan
from tests.tiny_models import write_tiny


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices, of which the second is too old."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: ((9, 0), (7, 5))[index])


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_auto_takes_the_cpu_where_there_is_no_gpu() -> None:
    assert choose_device(EngineConfig()) == (torch.device("cpu"), [])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.usefixtures("gpu")
def test_a_deterministic_run_has_batch_invariant_kernels(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quengine.platform.device.announce_compilation", lambda _: None)
    monkeypatch.setattr("quengine.kernels.cuda.backend.has_dependent_launch", lambda _: True)
    config = EngineConfig(device="cuda", deterministic=deterministic)
    device, _ = choose_device(config)
    checkpoint: Any = None  # a GPU's backend looks at no weights yet
    backend = make_backend(config, checkpoint, device, 1, 0)
    assert isinstance(backend, CudaBackend) and backend.batch_invariant == deterministic


@pytest.mark.usefixtures("no_gpu")
def test_cuda_without_a_gpu_is_an_error_and_no_fallback() -> None:
    with pytest.raises(CannotRunError, match="finds no CUDA device"):
        choose_device(EngineConfig(device="cuda"))


def test_a_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(CannotRunError, match="built without CUDA"):
        choose_device(EngineConfig(device="cuda:0"))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", ["auto", "cuda", "cuda:0"])
def test_a_usable_gpu_is_taken(name: str) -> None:
    assert choose_device(EngineConfig(device=name))[0] == torch.device("cuda", 0)


@pytest.mark.usefixtures("gpu")
def test_a_device_that_is_too_old_or_not_there_is_refused_with_the_reason() -> None:
    with pytest.raises(CannotRunError, match=r"GPU 1 has compute capability 7\.5"):
        choose_device(EngineConfig(device="cuda:1"))
    with pytest.raises(CannotRunError, match="there are 2 CUDA devices"):
        choose_device(EngineConfig(device="cuda:2"))


@pytest.mark.usefixtures("gpu")
def test_auto_says_why_it_left_a_gpu_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    device, notes = choose_device(EngineConfig())
    assert device.type == "cpu"
    assert "7.5" in notes[0]


@pytest.mark.usefixtures("gpu")
def test_the_reference_runs_on_the_cpu_and_says_so_when_asked_otherwise() -> None:
    assert choose_device(EngineConfig(backend="reference"))[0].type == "cpu"
    with pytest.raises(EngineError, match="reference runs on the CPU"):
        choose_device(EngineConfig(backend="reference", device="cuda"))


@pytest.mark.parametrize("cached_blocks", [11, 40])
def test_a_cache_for_many_takes_what_memory_holds_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached_blocks: int
) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", kind="Q8_0")
    checkpoint = open_checkpoint(path)
    cache = kv_cache_bytes(checkpoint.config, cached_blocks * 32)
    free = checkpoint.nbytes + WORKSPACE["cpu"] + cache + 64 * 4 * checkpoint.config.rope_dim
    checkpoint.close()
    monkeypatch.setattr("quengine.loading.placement.available_memory", lambda: free)
    loaded = load_model(path, EngineConfig("cpu", 64, 1, parallel=8))
    blocks = min(16, cached_blocks - 1)
    assert loaded.cache.pools[0].num_blocks == blocks and loaded.cache.nbytes <= cache
    assert loaded.cache.layers[0].k.shape[0] == (blocks + 1) * 32
    assert f"for {blocks * 32} tokens of up to 8 sequences at once" in loaded.notes[-1]
    loaded.checkpoint.close()


@pytest.mark.parametrize("missing", [0, 1])
def test_a_cache_for_many_holds_one_of_them_whole_and_a_padding_block_or_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: int
) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", kind="Q8_0")
    checkpoint = open_checkpoint(path)
    context = kv_cache_bytes(checkpoint.config, 128 + 2 * 32) + 128 * 4 * checkpoint.config.rope_dim
    free = checkpoint.nbytes + WORKSPACE["cpu"] + context
    checkpoint.close()
    monkeypatch.setattr("quengine.loading.placement.available_memory", lambda: free - missing)
    config = EngineConfig("cpu", 128, 1, parallel=4)
    if not missing:
        load_model(path, config).checkpoint.close()
        return
    with pytest.raises(CannotRunError, match="not enough memory"):
        load_model(path, config)


def test_experts_on_the_host_are_no_choice_where_all_is_on_the_cpu(tmp_path: Path) -> None:
    path = write_synthetic(tmp_path / "m.gguf", "mixtral-tiny")
    loaded = load_model(path, EngineConfig("cpu", 64, 1, n_cpu_moe=1))
    loaded.close()
    assert loaded.notes[-1].endswith("--cpu-moe and --n-cpu-moe change nothing")


def test_experts_on_the_host_have_room_for_the_rows_of_every_step() -> None:
    """Also for those of more sequences than a captured step has rows, or a chunk."""
    for parallel, rows in ((1, 64), (600, 600)):
        experts, config = MagicMock(layers=1), EngineConfig(parallel=parallel, chunk_size=64)
        machine = Machine(config, torch.device("cuda"), 2, 0, None, experts)
        machine._host_experts(experts, MagicMock(), MagicMock())
        assert experts.operations.call_args.args[-1] == rows


def test_too_little_gpu_memory_names_the_layers_whose_experts_would_make_room(tmp_path: Path) -> None:
    """The device is taken for a GPU with room for all but the first layer's experts."""
    checkpoint = open_checkpoint(write_synthetic(tmp_path / "m.gguf", "mixtral-tiny"))
    device, shape = torch.device("cuda"), checkpoint.config
    workspace = workspace_bytes("cuda", shape, checkpoint.nbytes, 64, 1)
    # Of the blocks two are for padding.
    context = 4 * kv_cache_bytes(shape, 32) + CacheNeeds(shape, 64, rows=1).table_bytes(64)

    def choose(config: EngineConfig, missing: int) -> int:
        experts = ExpertPlacement.choose(config, checkpoint, "cuda")
        free = checkpoint.nbytes + workspace + context - missing
        return choose_cache(config, checkpoint, None, device, free, experts)[0]

    first = ExpertPlacement.choose(EngineConfig(), checkpoint, "cuda").sizes[0]
    assert choose(EngineConfig(ctx_size=64), 0) == 64
    for missing, layers in ((first, 1), (first + 1, 2)):
        with pytest.raises(CannotRunError, match=rf"not enough memory.*--n-cpu-moe {layers}$"):
            choose(EngineConfig(ctx_size=64), missing)
        assert choose(EngineConfig(ctx_size=64, n_cpu_moe=layers), missing) == 64
    adapted = adapted_step_bytes(shape, 64, 1)  # captured steps twice
    assert choose(EngineConfig(ctx_size=64, lora=("a.gguf",)), -adapted) == 64
    with pytest.raises(CannotRunError, match="not enough memory"):
        choose(EngineConfig(ctx_size=64, lora=("a.gguf",)), 1 - adapted)
    with pytest.raises(CannotRunError, match=r"1 experts of each layer need .* lower --gpu-experts"):
        choose(EngineConfig(ctx_size=64, n_cpu_moe=1, gpu_experts=1), first)
    checkpoint.close()


def test_room_is_asked_for_until_nothing_more_is_freed_and_the_context_takes_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_synthetic(tmp_path / "m.gguf", "tiny")
    free = [2**28 + 2**20, 2**29, 2**30]
    monkeypatch.setattr("quengine.loading.placement.available_memory", lambda: free[0])
    asked: list[tuple[int, int, str]] = []

    def make_room(needed: int, there: int, device: str) -> bool:
        asked.append((needed, there, device))
        del free[: len(free) > 1]
        return len(asked) < 3

    loaded = load_model(path, EngineConfig("cpu", 64, 1, parallel=4, make_room=make_room))
    assert [there for _, there, _ in asked] == [2**28 + 2**20, 2**29, 2**30]
    ((needed, device),) = {(needed, device) for needed, _, device in asked}
    assert device == "cpu" and needed >= loaded.nbytes > loaded.checkpoint.nbytes
    assert max(pool.num_blocks for pool in loaded.cache.pools) >= 4 * 2
    loaded.close()


def test_experts_that_host_memory_does_not_hold_are_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_synthetic(tmp_path / "m.gguf", "mixtral-tiny")
    monkeypatch.setattr("quengine.load.choose_device", lambda _: (torch.device("cuda"), []))
    monkeypatch.setattr("quengine.load.device_name", lambda _: "a GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**34, 2**34))
    monkeypatch.setattr("quengine.load.available_memory", lambda: 1000)
    with pytest.raises(CannotRunError, match="not enough host memory: the experts of the first 1 layers"):
        load_model(path, EngineConfig(ctx_size=64, n_cpu_moe=1))


@pytest.mark.parametrize(("parallel", "rows"), [(1, 1), (64, 64), (2000, 512)])
def test_kernels_are_compiled_for_the_steps_that_will_be_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parallel: int, rows: int
) -> None:
    plans: list[tuple[KernelPlan, Gpu]] = []
    gpu = Gpu("GPU X", (9, 0))
    monkeypatch.setattr("quengine.kernels.cuda.launch.gpu.gpu_of", lambda _: gpu)
    monkeypatch.setattr(
        "quengine.runners.compile_kernels.compile_ahead", lambda *given: plans.append(given[:2])
    )
    checkpoint = open_checkpoint(write_tiny(tmp_path / "tiny.gguf", kind="Q8_0"))
    config = EngineConfig("cuda", 64, parallel=parallel, cache_type="q8_0", deterministic=True)
    machine = Machine(config, torch.device("cuda"), 1, 0, None, ExpertPlacement())
    machine._compile_ahead(checkpoint, 64, [CachePool(8)], 64, drafts=False)
    ((plan, told),) = plans
    assert told is gpu and plan.config == checkpoint.config
    assert (plan.slots, plan.cache_type, plan.batch_invariant, plan.ctx_size) == (rows, "q8_0", True, 64)
    assert plan.tensors == {name: (each.format.name, each.shape) for name, each in checkpoint.tensors.items()}
    checkpoint.close()
