"""Builds and installs packs of compiled kernels (kernels/cuda/launch/kernel_pack.py); building needs no GPU."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from quengine.config import DEFAULT_CHUNK
from quengine.errors import CannotRunError, EngineError, nearest
from quengine.kernels.cuda.aot.meta_backend import ARCHS, TABLE_GPU
from quengine.kernels.cuda.launch.compile_ahead import CompilePool
from quengine.kernels.cuda.launch.compile_messages import CRASHED, Built
from quengine.kernels.cuda.launch.gpu import Gpu
from quengine.kernels.cuda.launch.kernel_pack import Pack, install_pack, write_pack
from quengine.kernels.cuda.launch.launcher import build_launchers
from quengine.kernels.cuda.launch.triton_cache import use_private_cache
from quengine.kernels.kv.cache_types import CacheType
from quengine.kv_cache import pools_of_one
from quengine.models.checkpoint import open_checkpoint
from quengine.models.config import ModelConfig
from quengine.models.hub.hub import resolve_model
from quengine.models.synthetic.presets import PRESETS, SyntheticModel, synthetic_preset
from quengine.models.synthetic.synthetic import tensor_type
from quengine.models.tensor_table import required_tensors
from quengine.platform.torch_import import PRELUDE
from quengine.runners.compile_kernels import (
    KernelPlan,
    compile_stages,
    compilers,
    stored_tensors,
)
from quengine.runners.graph_keys import DECODE_ROWS, padded_rows

CATALOGUE = "catalogue"
Shape = tuple[ModelConfig, Mapping[str, tuple[str, tuple[int, ...]]]]
"""A model's configuration, and the type and shape of its tensors by name."""
_CONTEXT = 4096
"""Positions of the cache: kernels depend only on whether it is a multiple of 16."""


@dataclass(frozen=True)
class PackPlan:
    """The content of a pack: kernels for up to `parallel` concurrent requests to these models, on these GPUs."""

    models: Sequence[str]
    archs: Sequence[int]
    parallel: int = 64
    cache_type: CacheType = "f16"


def build_pack(plan: PackPlan, path: Path, progress: Callable[[str], None] | None = None) -> Pack:
    """Compiles the kernels missing from Triton's cache, on all processors, and writes the pack.

    Raises:
        EngineError: an unknown model, or one with kernels that do not compile.
        CannotRunError: a compiling process was killed, e.g. for lack of memory.
    """
    use_private_cache()
    names = _named(plan.models)
    built: dict[str, Built] = {}
    shapes = [_shape(name) for name in names]
    for gpu in gpus(plan.archs):
        plans = [each for shape in shapes for each in _plans(shape, plan)]
        task = partial(compile_stages, *plans)
        pool = CompilePool(task, gpu, compilers(), progress, every=True, prelude=PRELUDE)
        found = pool.finish()
        failed = [kernel for kernel in found if kernel.error not in ("", CRASHED)]
        if failed:
            raise EngineError(f"{failed[0].name} for sm_{gpu.arch} was not compiled: {failed[0].error}")
        if not pool.complete or any(kernel.error for kernel in found):
            raise CannotRunError(
                "a process that compiles kernels has ended; run it again: what is compiled is kept"
            )
        built.update({kernel.key: kernel for kernel in found})
    return write_pack(path, list(built.values()), [f"sm_{arch}" for arch in plan.archs], names)


def install(path: Path) -> tuple[Pack, int]:
    """Installs a pack's kernels in Triton's cache, and builds their launchers; returns the number of launchers.

    Raises EngineError for a file that is no pack, is damaged, or is for another Triton or other kernels.
    """
    use_private_cache()
    pack = install_pack(path)
    return pack, build_launchers(pack.launchers, compilers())


def gpus(archs: Sequence[int]) -> list[Gpu]:
    """For each architecture, a generic GPU, and the one whose launch geometry was measured."""
    return [
        Gpu(name, (arch // 10, arch % 10))
        for arch in archs
        for name in ("", *filter(None, [TABLE_GPU.get(arch)]))
    ]


def arch_of(name: str) -> int:
    """The number of an architecture, 80 for "sm_80". Raises EngineError for one that kernels are not compiled for."""
    known = {f"sm_{arch}": arch for arch in ARCHS}
    if name not in known:
        raise EngineError(f"no kernels for {name!r}; there are {', '.join(known)}")
    return known[name]


def _named(models: Sequence[str]) -> list[str]:
    released = [name for name in PRESETS if not name.endswith(("-tiny", "-2l", "-10m")) and name != "tiny"]
    names = [each for name in models for each in (released if name == CATALOGUE else [name])]
    return list(dict.fromkeys(names))


def _shape(name: str) -> Shape:
    """The shape of a synthetic model, or of the model of that name: a file, a folder, or one in the cache."""
    if (spec := synthetic_preset(name)) is not None:
        return synthetic_shape(spec)
    try:
        checkpoint = open_checkpoint(resolve_model(name))
    except EngineError as error:
        raise EngineError(f"{error}{nearest(name, [CATALOGUE, *PRESETS])}") from None
    tensors = stored_tensors(checkpoint.tensors)
    config = checkpoint.config
    checkpoint.close()
    return config, tensors


def synthetic_shape(spec: SyntheticModel) -> Shape:
    """The shape of a synthetic model."""
    config = spec.config()
    shapes = required_tensors(config)
    return config, {name: (tensor_type(spec, name, shape), shape) for name, shape in shapes.items()}


def _plans(shape: Shape, plan: PackPlan) -> list[KernelPlan]:
    """One plan for a single sequence, one for many."""
    config, tensors = shape
    context = min(_CONTEXT, config.context_length)
    pools = pools_of_one(config, context)
    most = DEFAULT_CHUNK["cuda"]
    return [
        KernelPlan(config, tensors, context, pools, min(most, context), plan.cache_type, rows, most)
        for rows in dict.fromkeys((1, padded_rows(min(plan.parallel, DECODE_ROWS[-1]))))
    ]
