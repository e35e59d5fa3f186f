"""What a pack covers: kernels for fewer requests too, at other contexts, of a file as of a name."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from quengine.errors import CannotRunError, EngineError
from quengine.kernels.cuda.launch.compile_messages import CRASHED, Built
from quengine.kernels.cuda.launch.gpu import Gpu
from quengine.models.synthetic.presets import PRESETS
from quengine.platform.torch_import import PRELUDE
from quengine.runners import kernel_packs
from quengine.runners.kernel_packs import PackPlan, _named, _plans, _shape, arch_of, build_pack, gpus
from tests.fork_server import without_interpreter

COVERED = """
import sys
from dataclasses import replace
from pathlib import Path
from quengine.block_pool import CachePool
from quengine.kernels.cuda.launch.gpu import Gpu
from quengine.kernels.cuda.launch.record_kernels import record_kernels
from quengine.models.checkpoint import open_checkpoint
from quengine.models.synthetic.synthetic import write_synthetic
from quengine.runners.compile_kernels import KernelPlan, compile_stages, stored_tensors
from quengine.runners.kernel_packs import PackPlan, _plans, _shape

name, arch = sys.argv[1], int(sys.argv[2])
gpu = Gpu("", divmod(arch, 10))

def keys(*plans):
    return set(record_kernels(compile_stages(*plans), gpu))

pack = keys(*_plans(_shape(name), PackPlan([name], [arch], 64)))
checkpoint = open_checkpoint(write_synthetic(Path(sys.argv[3]), name))
config = checkpoint.config
for context, rows, blocks in ((4096, 1, 128), (3200, 8, 700), (288, 48, 600)):
    pools = [CachePool(blocks) for _ in config.cache_groups]
    chunk = min(2048, context)
    plan = KernelPlan(config, stored_tensors(checkpoint.tensors), context, pools, chunk, "f16", rows, 2048)
    missing = keys(plan) - pack
    assert not missing, (context, rows, len(missing))
"""


@pytest.mark.parametrize(("name", "arch"), [("tiny", 90), ("qwen3moe-tiny", 80)])
def test_a_pack_covers_a_models_file_with_fewer_requests_and_other_contexts(
    tmp_path: Path, name: str, arch: int
) -> None:
    without_interpreter(COVERED, name, arch, tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("error", "complete", "kind"),
    [
        ("CompilationError: no", True, EngineError),
        (CRASHED, True, CannotRunError),
        ("", False, CannotRunError),
    ],
)
def test_a_pack_that_lacks_a_kernel_is_not_written(
    error: str, complete: bool, kind: type[EngineError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed process is the machine's fault, and building goes on where it ended."""
    pool = Mock(complete=complete, finish=lambda: [Built("KEY", "norm_kernel", None, error)])
    monkeypatch.setattr(kernel_packs, "CompilePool", lambda *_, **__: pool)
    monkeypatch.setattr(kernel_packs, "use_private_cache", lambda: None)
    with pytest.raises(EngineError, match=r"not compiled|run it again") as raised:
        build_pack(PackPlan(["tiny"], [90]), tmp_path / "pack")
    assert type(raised.value) is kind
    assert not list(tmp_path.iterdir())


def test_what_is_to_be_compiled_is_pickled_for_every_model() -> None:
    for name in PRESETS:
        for plan in _plans(_shape(name), PackPlan([name], [90])):
            assert pickle.loads(pickle.dumps(plan)) == plan


def test_the_catalogue_has_the_released_models() -> None:
    names = _named(["catalogue", "mistral-7b", "tiny"])
    assert {"mistral-7b", "gpt-oss-20b", "qwen3-30b-a3b"} < set(names)
    assert [name for name in names if "tiny" in name or name.endswith("-2l")] == ["tiny"]
    assert len(names) == len(set(names))


def test_kernels_are_for_any_gpu_of_an_architecture_and_for_the_measured_one() -> None:
    assert gpus([80, 90]) == [Gpu("", (8, 0)), Gpu("", (9, 0)), Gpu("NVIDIA H200", (9, 0))]
    assert [arch_of(name) for name in ("sm_80", "sm_89", "sm_90")] == [80, 89, 90]
    with pytest.raises(EngineError, match="no kernels for 'sm_75'; there are sm_80, sm_89, sm_90"):
        arch_of("sm_75")


def test_more_requests_than_a_step_has_rows_take_the_largest_step() -> None:
    assert [plan.slots for plan in _plans(_shape("tiny"), PackPlan(["tiny"], [90], 100))] == [1, 128]
    assert [plan.slots for plan in _plans(_shape("tiny"), PackPlan(["tiny"], [90], 1))] == [1]


RECORDED = """
import sys
from quengine.kernels.cuda.launch.gpu import Gpu
from quengine.kernels.cuda.launch.record_kernels import record_kernels
from quengine.runners.compile_kernels import compile_stages
from quengine.runners.kernel_packs import PackPlan, _plans, _shape
for name in ("tiny", "gpt-oss-tiny"):
    plan = _plans(_shape(name), PackPlan([name], [90]))[-1]
    print(name, *sorted(record_kernels(compile_stages(plan), Gpu("NVIDIA H200", (9, 0)))))
"""


def test_the_compiling_process_records_the_same_kernels() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    code = f"{PRELUDE}\n{RECORDED}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == without_interpreter(RECORDED) and len(done.stdout.split()) > 100
