"""Compiles kernels for a GPU that need not be present: launches are recorded instead of run, then compiled."""

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quengine.kernels.cuda.launch.record_kernels import specialized_on
from quengine.kernels.cuda.launch.triton_changes import launches_handed_to

SHARED_LIMIT = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
"""Bytes of shared memory available to one block, by compute capability."""

SAME_PTX = {89: 80}
"""GPUs for which Triton writes the PTX of another, except for the target's name: no kernel here uses what
only sm_89 has (fp8). Only the assembler is run for them, in a tenth of the time.
"""

_STATIC = re.compile(r"\.shared \.align \d+ \.b8 \w+\[(\d+)\]")
"""Matches shared memory that PTX declares with its size; Triton declares none so."""

_TYPES = {
    torch.float64: "*fp64", torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16",
    torch.int64: "*i64", torch.int32: "*i32", torch.int16: "*i16", torch.int8: "*i8", torch.uint8: "*u8",
    torch.bool: "*i1",
}  # fmt: skip


@dataclass(frozen=True)
class RecordedLaunch:
    """A recorded launch: the kernel, its arguments by name, the compile options."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__).strip("_")

    @property
    def pointers(self) -> dict[int, str]:
        """The names of the machine code's pointer parameters, by number; `tuple.field` for one in a named tuple."""
        passed: list[tuple[str, str]] = []
        for name, kind in source(self).signature.items():
            if isinstance(kind, tuple):
                fields: tuple[str, ...] = kind._fields  # type: ignore[attr-defined]
                passed += [(f"{name}.{field}", of_it) for field, of_it in zip(fields, kind, strict=True)]
            elif kind.startswith("tensordesc"):  # a tensor map, and the shape and strides of a matrix
                passed += [(name, "map"), *[(name, "size")] * 4]
            elif kind != "constexpr":
                passed.append((name, kind))
        return {number: name for number, (name, kind) in enumerate(passed) if kind.startswith("*")}

    @property
    def key(self) -> str:
        """A key that is equal for launches of the same machine code."""
        made = source(self)
        parts = (made.signature, made.constants, made.attrs, self.options)
        return f"{self.kernel.fn.__module__}.{self.name} {parts}"


@dataclass(frozen=True)
class Compiled:
    """A kernel compiled for one GPU. registers and stack (bytes of spilled registers and local arrays) are
    per thread; shared and static are bytes per block: the shared memory that Triton counts, and that which assembly
    declares beside it.
    """

    registers: int
    stack: int
    shared: int
    static: int
    ptx: str


def record(call: Callable[[], object]) -> list[RecordedLaunch]:
    """The launches of `call`, none of which is run; tensors may be on the meta device."""
    launches: list[RecordedLaunch] = []

    def note(kernel: Any, _grid: object, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        launches.append(_recorded(kernel, args, named))

    with launches_handed_to(note):
        call()
    return launches


def record_distinct(call: Callable[[], object]) -> list[RecordedLaunch]:
    """`record` without launches of the same machine code, which takes a tenth of the time for steps of many layers."""
    launches: dict[object, RecordedLaunch] = {}

    def note(kernel: Any, _grid: object, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        alike = (kernel, *map(specialized_on, args), *named.items())
        if alike not in launches:
            launches[alike] = _recorded(kernel, args, named)

    with launches_handed_to(note):
        call()
    return list(launches.values())


def _recorded(kernel: Any, args: tuple[Any, ...], named: dict[str, Any]) -> RecordedLaunch:
    arguments = dict(zip(kernel.arg_names, args, strict=False))
    arguments.update({name: value for name, value in named.items() if name in kernel.arg_names})
    options = {name: value for name, value in named.items() if name not in kernel.arg_names}
    return RecordedLaunch(kernel, arguments, options)


def source(launch: RecordedLaunch) -> ASTSource:
    """The launch specialized as by Triton's launcher: pointers aligned, integers by divisibility."""
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            if parameter.name == "ASM":
                value = True  # launchers pass False where there is no GPU
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = _TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, tuple):
            signature[parameter.name] = type(value)(*(_TYPES[tensor.dtype] for tensor in value))
            attributes.update({(index, i): [["tt.divisibility", 16]] for i in range(len(value))})
        elif isinstance(value, TensorDescriptor):
            element = _TYPES[value.base.dtype][1:]
            signature[parameter.name] = f"tensordesc<{element}{value.block_shape},{value.layout!r}>"
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        elif value == 1 and not parameter.do_not_specialize:
            signature[parameter.name] = "constexpr"
            constants[(index,)] = 1
        else:
            signature[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(index,)] = [["tt.divisibility", 16]]
    language = GluonASTSource if launch.kernel.is_gluon() else ASTSource
    return language(launch.kernel, signature, constants, attributes)


def compile_launch(launch: RecordedLaunch, arch: int) -> Compiled:
    """Compiles for compute capability `arch` (90: 9.0). Raises the compiler's errors.

    Earlier results come from Triton's cache: a GPU that shares another's PTX costs only the assembler.
    """
    first = SAME_PTX.get(arch, arch)
    target = GPUTarget("cuda", first, 32)
    made = triton.compile(source(launch), target=target, options=launch.options)
    if "ptx" not in made.asm:  # compiled by the engine, which keeps only the machine code
        with triton.knobs.compilation.scope():
            triton.knobs.compilation.always_compile = True
            triton.knobs.compilation.store_binary_only = False
            made = triton.compile(source(launch), target=target, options=launch.options)
    cubin, ptx = made.asm["cubin"], made.asm["ptx"]
    if arch != first:
        ptx = re.sub(rf"^\.target sm_{first}\b", f".target sm_{arch}", ptx, flags=re.MULTILINE)
        cubin = _assemble(ptx, launch, arch)
    registers, stack = _resources(cubin)
    static = sum(map(int, _STATIC.findall(ptx)))
    return Compiled(registers, stack, made.metadata.shared, static, ptx)


def _assemble(ptx: str, launch: RecordedLaunch, arch: int) -> bytes:
    """Assembles as Triton does, with the options of the launch."""
    backend: Any = make_backend(GPUTarget("cuda", arch, 32))
    return bytes(backend.make_cubin(ptx, {}, backend.parse_options(launch.options), arch))


def _resources(cubin: bytes) -> tuple[int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise ValueError(f"no register count in what cuobjdump says: {text.strip()!r}")
    return int(found[1]), int(found[2])
