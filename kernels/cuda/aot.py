"""Ahead-of-time compilation of every kernel variant, without a GPU: registers, spills and shared memory per GPU.

    python -m quengine.kernels.cuda.aot [--arch 80 89 90] [--only TEXT] [--jobs N]

Launchers run on meta tensors while their launches are recorded, so what is compiled is what a model would launch.
Exit status 1 if a variant does not compile, if one spills that runs in decode, or if one needs more shared memory than
the GPU gives a block. Knows launchers and shapes of models; runs nothing.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from quengine.kernels.backend import AttentionSpec
from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cuda import attention_decode, attention_prefill, rope
from quengine.kernels.cuda.activations import RoundedActivations, round_activations
from quengine.kernels.cuda.embedding import embedding
from quengine.kernels.cuda.kv_store import KVStore
from quengine.kernels.cuda.layout import packed_layout
from quengine.kernels.cuda.matvec import matvec, matvec_swiglu
from quengine.kernels.cuda.packed import FloatPart, PackedPart, PackedWeight
from quengine.kernels.cuda.rms_norm import rms_norm, rms_norm_round
from quengine.kernels.cuda.sampling import DecodeState, SamplingBuffers, sample_step
from quengine.kernels.rope import RopeLayout

META = torch.device("meta")
SHARED_LIMIT = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
"""Bytes of shared memory that one block may take, by compute capability."""

_TYPES = {
    torch.float64: "*fp64", torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16",
    torch.int64: "*i64", torch.int32: "*i32", torch.int16: "*i16", torch.int8: "*i8", torch.uint8: "*u8",
    torch.bool: "*i1",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A call of a launcher: name for the report, whether decode runs it, the call (given: on Hopper, PDL)."""

    name: str
    decode: bool
    call: Callable[[bool], object]


@dataclass(frozen=True)
class Launch:
    """A recorded launch: the kernel, its arguments by name, the compile options."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]


@dataclass(frozen=True)
class Report:
    """What the compiler made of one launch."""

    case: str
    kernel: str
    arch: int
    registers: int
    stack: int
    shared: int
    failure: str


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Collect launches instead of running them."""
    launches: list[Launch] = []

    def record(self: Any, *args: Any, grid: object, warmup: bool, **kwargs: Any) -> None:
        del grid, warmup
        names = dict(zip(self.arg_names, args, strict=False))
        names.update({name: value for name, value in kwargs.items() if name in self.arg_names})
        options = {name: value for name, value in kwargs.items() if name not in self.arg_names}
        launches.append(Launch(self, names, options))

    original = JITFunction.run
    JITFunction.run = record
    try:
        yield launches
    finally:
        JITFunction.run = original


def source(launch: Launch) -> ASTSource:
    """The launch specialised as Triton's own launcher would: pointers aligned, integers by divisibility."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            if parameter.name == "ASM":
                value = True  # launchers leave inline assembly out where there is no GPU
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = _TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        elif value == 1 and not parameter.do_not_specialize:
            signature[parameter.name] = "constexpr"
            constants[(index,)] = 1
        else:
            signature[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature=signature, constexprs=constants, attrs=attributes)


def resources(cubin: bytes) -> tuple[int, int]:
    """(registers a thread, bytes of stack a thread) of a compiled kernel; stack means spilled registers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return tuple(int(number) for number in re.search(r"REG:(\d+) STACK:(\d+)", text).groups())  # type: ignore


def compile_case(index: int, arch: int) -> list[Report]:
    """Compile all launches of case number `index` for one GPU."""
    case = cases()[index]
    reports = []
    try:
        with recorded() as launches:
            case.call(arch >= 90)
    except Exception as error:  # any failure of a variant is a line of the report
        return [Report(case.name, "-", arch, 0, 0, 0, f"launcher: {error}")]
    for launch in launches:
        name = launch.kernel.fn.__name__.strip("_")
        try:
            compiled = triton.compile(
                source(launch), target=GPUTarget("cuda", arch, 32), options=launch.options
            )
        except Exception as error:  # as above
            reason = str(error).strip().splitlines()[-1:]
            reports.append(Report(case.name, name, arch, 0, 0, 0, f"{type(error).__name__}: {reason}"))
            continue
        registers, stack = resources(compiled.asm["cubin"])
        shared = compiled.metadata.shared
        failure = "spills" if stack and case.decode else ""
        if shared > SHARED_LIMIT[arch]:
            failure = f"needs {shared} bytes of shared memory, the GPU has {SHARED_LIMIT[arch]}"
        reports.append(Report(case.name, name, arch, registers, stack, shared, failure))
    return reports


def cases() -> list[Case]:
    """Every variant that a model of the catalogue launches."""
    return [*_attention_cases(), *_norm_cases(), *_weight_cases(), *_sampling_cases()]


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


def _spec(
    heads: int, kv_heads: int, head_dim: int, layout: RopeLayout, window: int | None, norm: bool
) -> AttentionSpec:
    table = _empty(4096, head_dim // 2)
    weight = _empty(head_dim) if norm else None
    return AttentionSpec(
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, scale=0.1, window=window, rope_layout=layout,
        cos=table, sin=table, mask_band=_empty(2048, 6144, dtype=torch.bool),
        q_norm=weight, k_norm=weight, eps=1e-6,
    )  # type: ignore[arg-type]  # fmt: skip


def _decode(spec: AttentionSpec, q8_0: bool, pdl: bool) -> None:
    width = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    cache = KVStore.allocate(1, 4096, spec.kv_heads, spec.head_dim, META, q8_0)
    workspace = attention_decode.DecodeWorkspace.allocate(1, spec.heads, spec.kv_heads, spec.head_dim, META)
    out = RoundedActivations.empty(1, spec.heads * spec.head_dim, META)
    positions = _empty(1, dtype=torch.int32)
    attention_decode.attention_decode_round(_empty(1, width), spec, cache, positions, workspace, out, pdl)


def _prefill(spec: AttentionSpec, q8_0: bool, rows: int, hopper: bool) -> None:
    width = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    cache = KVStore.allocate(1, 4096, spec.kv_heads, spec.head_dim, META, q8_0)
    qkv = _empty(rows, width, dtype=torch.float16)
    original = attention_prefill.is_hopper
    attention_prefill.is_hopper = lambda _: hopper  # type: ignore[assignment]
    try:
        q = rope.rope_store(qkv, spec, cache, 0, _empty(rows, dtype=torch.int32))
        attention_prefill.attention_prefill(q, spec, cache, 0, 0)
    finally:
        attention_prefill.is_hopper = original


def _attention_cases() -> Iterator[Case]:
    shapes = [
        ("smollm 9/3x64", 9, 3, 64, "pairs", None, False),
        ("phi-2 32/32x80", 32, 32, 80, "halves", None, False),
        ("phi-3 32/32x96", 32, 32, 96, "halves", 2048, False),
        ("mistral 32/8x128", 32, 8, 128, "pairs", None, False),
        ("mistral-v0.1 32/8x128", 32, 8, 128, "pairs", 4096, False),
        ("qwen3 16/8x128", 16, 8, 128, "halves", None, True),
        ("wide group 64/4x128", 64, 4, 128, "halves", None, False),
        ("gemma 8/4x256", 8, 4, 256, "halves", None, False),
    ]
    for name, *numbers in shapes:
        spec = _spec(*numbers)  # type: ignore[arg-type]
        for q8_0 in (False, True) if spec.head_dim % 32 == 0 else (False,):
            cache = "q8_0" if q8_0 else "f16"
            yield Case(f"decode {name} {cache}", True, partial(_decode, spec, q8_0))
            for rows in (32, 2048):
                call = partial(_prefill, spec, q8_0, rows)
                yield Case(f"prefill {name} {cache} {rows} rows", False, call)


def _norm(rows: int, width: int, dtype: torch.dtype, residual: bool, rounds: bool, pdl: bool) -> None:
    x, weight = _empty(rows, width, dtype=dtype), _empty(width)
    added = _empty(rows, width, dtype=dtype) if residual else None
    if rounds:
        rms_norm_round(x, weight, 1e-5, added, pdl=pdl)
    else:
        rms_norm(x, weight, 1e-5, added, pdl=pdl)


def _norm_cases() -> Iterator[Case]:
    for width in (576, 4096, 5120, 8192):
        for residual in (False, True):
            name = f"norm {width}" + (" + residual" if residual else "")
            call = partial(_norm, 1, width, torch.float32, residual, True)
            yield Case(f"{name}, rounded", True, call)
            for rows in (1, 2048, 65536):
                plain = partial(_norm, rows, width, torch.float16, residual, False)
                yield Case(f"{name}, {rows} rows", False, plain)
    yield Case("round 4096", True, lambda pdl: round_activations(_empty(1, 4096), pdl=pdl))


def _weight(name: str, rows: int, cols: int, paired: bool = False) -> PackedWeight:
    fmt = FORMATS[name]
    if not fmt.is_quantized:
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[name]
        return PackedWeight((FloatPart(_empty(rows, cols, dtype=dtype)),))
    plane = _empty(16, dtype=torch.uint8)
    return PackedWeight(
        (PackedPart(packed_layout(fmt, cols), rows, cols, plane, plane, plane, plane),), paired
    )


def _weight_cases() -> Iterator[Case]:
    for name in FORMATS:
        ids = _empty(1, dtype=torch.int64)
        weight = _weight(name, 32768, 4096)
        yield Case(f"embedding {name}", True, partial(_embed, weight, ids))
        for rows in (1, 2, 4, 8):
            yield Case(f"matvec {name} {rows} rows", rows == 1, partial(_matvec, weight, rows))
        if FORMATS[name].is_quantized:
            paired = _weight(name, 28672, 4096, paired=True)
            yield Case(f"gate+up {name}", True, partial(_swiglu, paired))


def _embed(weight: PackedWeight, ids: torch.Tensor, pdl: bool) -> None:
    embedding(weight, ids, pdl=pdl)


def _matvec(weight: PackedWeight, rows: int, pdl: bool) -> None:
    matvec(RoundedActivations.empty(rows, weight.cols, META), weight, pdl=pdl)


def _swiglu(weight: PackedWeight, pdl: bool) -> None:
    matvec_swiglu(RoundedActivations.empty(1, weight.cols, META), weight, pdl=pdl)


def _sample(top_k: int, vocab: int, extras: bool, pdl: bool) -> None:
    buffers = SamplingBuffers.allocate(1, vocab, top_k, META, extras, extras)
    sample_step(_empty(1, vocab), DecodeState.allocate(1, 4096, META), buffers, pdl)


def _sampling_cases() -> Iterator[Case]:
    for vocab in (32768, 152064):
        for top_k in (1, 40, 128):
            for extras in (False, True):
                name = f"sample top-k {top_k} of {vocab}" + (", bias and penalties" if extras else "")
                yield Case(name, top_k <= 40, partial(_sample, top_k, vocab, extras))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m quengine.kernels.cuda.aot", description=__doc__)
    parser.add_argument(
        "--arch", type=int, nargs="+", default=sorted(SHARED_LIMIT), choices=sorted(SHARED_LIMIT)
    )
    parser.add_argument("--only", default="", help="compile only the cases whose name holds this text")
    parser.add_argument("--jobs", type=int, default=None)
    args = parser.parse_args()
    chosen = [index for index, case in enumerate(cases()) if args.only in case.name]
    work = [(index, arch) for index in chosen for arch in args.arch]
    failures = 0
    print(f"{'case':44} {'kernel':26} {'sm':>3} {'regs':>5} {'stack':>6} {'shared':>7}")
    with ProcessPoolExecutor(args.jobs) as pool:
        for reports in pool.map(compile_case, *zip(*work, strict=True)):
            for r in reports:
                failures += bool(r.failure)
                numbers = f"{r.arch:3} {r.registers:5} {r.stack:6} {r.shared:7}"
                print(f"{r.case:44} {r.kernel:26} {numbers} {r.failure}", flush=True)
    print(f"{len(work)} compilations of {len(chosen)} cases, {failures} failures", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
