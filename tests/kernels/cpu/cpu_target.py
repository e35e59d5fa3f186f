"""Runs the CPU kernels against their definitions, for whatever processor numba is told to compile for.

    NUMBA_CPU_NAME=x86-64-v3 NUMBA_CPU_FEATURES=+avx,+avx2,+fma,+f16c python -m tests.kernels.cpu.cpu_target check
    python -m tests.kernels.cpu.cpu_target check aarch64-linux-gnu neoverse-n1
    NUMBA_CPU_NAME=sapphirerapids NUMBA_CPU_FEATURES=... python -m tests.kernels.cpu.cpu_target matrix
    python -m tests.kernels.cpu.cpu_target emulate

`check` prints the tile in use, `tile` does too and checks only what depends on it. Given another architecture, `tile`
takes the tile for that, and either compiles what it has checked for it and prints the machine of the object files (ELF
e_machine). `matrix`, `bytes` and `rows` compile the products on AMX tiles and count their instructions, without
running them; `emulate` runs them with those instructions in portable code (tile_emulator.py).
"""

import dataclasses
import gc
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from llvmlite import binding

from quengine.kernels import sampling
from quengine.kernels.activations import quantize_activations
from quengine.kernels.attention import gate_output, split_gates
from quengine.kernels.backend import AttentionSpec, KVLayer, SlotLayer
from quengine.kernels.block_formats import FORMATS, dequantize, unpack
from quengine.kernels.cpu import glu, output_gate, prompt_linear, rms_norm
from quengine.kernels.cpu.attention import prefill_attention
from quengine.kernels.cpu.gemm import tile_matmul, tiles
from quengine.kernels.cpu.gemm.vnni import uses_vnni, vnni_product
from quengine.kernels.cpu.moe.operations import (
    down_experts,
    gate_up_experts,
    prompt_experts_add,
    prompt_experts_glu,
)
from quengine.kernels.cpu.ops import sampling as cpu_sampling
from quengine.kernels.cpu.quantize.quantizers import COMPILED
from quengine.kernels.cpu.runtime import compiled, kernel_table, target
from quengine.kernels.cpu.step_recorder import recorded
from quengine.kernels.forward_batch import decode_batch
from quengine.kernels.glu import glu as definition_of_glu
from quengine.kernels.kv.cache_types import CACHE_TYPES, CacheType
from quengine.kernels.kv.kv_rows import allocate_layer, read_rows, write_rows
from quengine.kernels.moe.experts import experts_add as definition_of_experts_add
from quengine.kernels.moe.experts import experts_glu as definition_of_experts_glu
from quengine.kernels.moe.router import Router, Routing
from quengine.kernels.moe.router import route as definition_of_route
from quengine.kernels.moe.router_kind import RouterKind
from quengine.kernels.phase import Phase
from quengine.kernels.q_dot import q_dot
from quengine.kernels.quantize.quantize import quantize
from tests.kernels.cpu import tile_emulator
from tests.kernels.cpu.cpu_runs import (
    STEP,
    attend_chunk,
    attend_token,
    batch_attention,
    decode_linear,
    embed,
    gated_delta,
    linear,
    route,
)
from tests.kernels.cpu.test_cpu_attention import definition, restored
from tests.kernels.gated_delta_steps import STEPS, Shape, expected, rows_of, spec_of, states
from tests.kernels.weights import nmse, random_weight

WEIGHTS = [("Q6_K", 1), ("IQ4_NL", 3), ("IQ3_S", 1), ("NVFP4", 3), ("F16", 40)]


def errors_of_the_tile() -> Iterator[tuple[str, float]]:
    """Of prompts' matmul and attention, against fp64: their names and NMSE."""
    generator = torch.Generator().manual_seed(3)
    w, x = random_weight("F16", 37, 40), torch.randn(13, 40, generator=generator)
    yield "F16 prompt", nmse(prompt_linear(x, [w]), x.double() @ dequantize(w.format, w.data).double().T)
    q, layer, expected = attention("f16", generator)
    yield "f16 prompt attention", nmse(attend_chunk(q, layer, 0, 0.125), expected)


def attention(
    cache_type: CacheType, generator: torch.Generator
) -> tuple[torch.Tensor, KVLayer, torch.Tensor]:
    """50 tokens' queries, a cache of their keys and values, and what attention gives, in fp64."""
    q, mask = torch.randn(50, 4, 64, generator=generator), torch.ones(50, 50, dtype=torch.bool).tril()
    layer = allocate_layer(50, 2, 64, "cpu", cache_type)
    write_rows(layer, 0, *(torch.randn(50, 2, 64, generator=generator) for _ in range(2)))
    return q, layer, restored(definition(q, *read_rows(layer, slice(0, 50)), mask, 0.125), layer)


def errors() -> Iterator[tuple[str, float]]:
    """Of each kernel, against fp64: its name and NMSE."""
    generator = torch.Generator().manual_seed(1)
    for name, blocks in WEIGHTS:
        w = random_weight(name, 37, blocks)
        x, values = torch.randn(13, w.cols, generator=generator), dequantize(w.format, w.data).double()
        exact = x[:1].double() @ values.T
        if w.format.is_quantized:
            exact = q_dot(quantize_activations(x[:1]), unpack(w.format, w.data), torch.float64)
        yield f"{name} decode", nmse(linear(x[:1], [w]), exact)
        yield f"{name} decode of rows", nmse(linear(torch.cat([x[3:5], x[:1]]), [w])[2:], exact)
        if uses_vnni(w):  # an activation halfway between two integers may become the other one: up to 5e-10
            yield f"{name} prompt, a fiftieth", nmse(prompt_linear(x, [w]), vnni_product(x, w)) / 50
        else:
            yield f"{name} prompt", nmse(prompt_linear(x, [w]), x.double() @ values.T)
        yield f"{name} rows", nmse(embed(w, torch.tensor([36, 0])), values[[36, 0]])
    for cache_type in CACHE_TYPES:
        q, layer, expected = attention(cache_type, generator)
        yield f"{cache_type} prompt attention", nmse(attend_chunk(q, layer, 0, 0.125), expected)
        yield f"{cache_type} attention", nmse(attend_token(q[49], layer, 50, 0.125), expected[49])
        newest = decode_batch([0, 0], [20, 31], [[[0]], [[0]]], torch.device("cpu"))
        yield (
            f"{cache_type} attention of rows",
            nmse(batch_attention(q[[20, 31]], layer, newest, 0.125, None), expected[[20, 31]]),
        )
    x, norm = torch.randn(3, 84, generator=generator), torch.randn(84, generator=generator)
    for activation in ("silu", "gelu_tanh", "clamped_swish"):
        yield activation, nmse(glu(x, activation), definition_of_glu(x.double(), activation))
    scaled = x.double() * (x.double().square().mean(1, keepdim=True) + 1e-5).rsqrt() * norm.double()
    yield "rms_norm", nmse(rms_norm(x, norm, 1e-5), scaled)


def errors_of_gated_delta() -> Iterator[tuple[str, float]]:
    """Of results and memories, and of output gates."""
    for shape in (Shape(2, 4, 32), Shape(1, 2, 8)):
        for step in ("chunks of one and of few tokens", "tokens"):
            batch, spec, (history, memory) = STEPS[step], spec_of(shape), states(shape)
            x = rows_of(len(batch), shape, 3)
            wanted, _, after = expected(batch, x, spec, history, memory)
            layer = SlotLayer((history.clone(), memory.clone()))
            yield f"gated delta, {step}", nmse(gated_delta(batch, x, spec, layer), wanted)
            yield f"its memory, {step}", nmse(layer.parts[1].flatten(1), after.flatten(1))
    spec, qkv = spec_of_attention(), torch.randn(3, 96, generator=torch.Generator().manual_seed(4))
    y, (_, gates) = torch.ones(3, 32), split_gates(qkv, 4, 8)
    yield (
        "output gates",
        nmse(output_gate(y, qkv, spec), gate_output(torch.ones(3, 32).double(), gates.double())),
    )


def spec_of_attention() -> AttentionSpec:
    """Four heads of 8 with output gates, and two key heads."""
    nothing = torch.empty(0)
    return AttentionSpec(4, 2, 8, 1.0, None, "halves", nothing, nothing, nothing, gated=True)


def errors_of_experts() -> Iterator[tuple[str, float]]:
    """Of the router against fp64, and of experts against dense layers' matmuls."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(7, 256, generator=generator)
    router = Router(RouterKind(2), torch.randn(4, 256, generator=generator) / 16)
    routing, exact = route(x, router), dataclasses.replace(router, weight=router.weight.double())
    chosen = definition_of_route(x.double(), exact)
    assert torch.equal(routing.experts, chosen.experts)
    yield "router", nmse(routing.weights, chosen.weights)
    for kind in ("Q6_K", "F16"):
        yield f"{kind} experts of a prompt", experts_error(kind, x, routing, "prefill", prompt_linear)
        yield f"{kind} experts", experts_error(kind, x, routing, "decode", decode_linear)


def experts_error(
    kind: str, x: torch.Tensor, routing: Routing, phase: Phase, dense: Callable[..., torch.Tensor]
) -> float:
    gate, up, down = (
        [random_weight(kind, 256, 256 // FORMATS[kind].block, 4 * part + i) for i in range(4)]
        for part in range(3)
    )
    gate_up, down_weights = gate_up_experts(gate, up, None), down_experts(down, None)
    if phase == "prefill":
        gated = prompt_experts_glu(x, routing, gate_up, "silu")
        y = prompt_experts_add(gated, routing, down_weights, x)
    else:
        with recorded(STEP, len(x)) as step:
            gated = step.experts_glu(x, None, routing, gate_up, "silu")
        with recorded(STEP, len(x)) as step:
            y = step.experts_add(gated, routing, down_weights, x)
    rows = definition_of_experts_glu(x, routing, lambda e, r: dense(r, [gate[e], up[e]]), "silu")
    expected = definition_of_experts_add(rows, routing, lambda e, r: dense(r, [down[e]]), x)
    return max(nmse(gated.by_slot(), rows), nmse(y, expected))


def check_sampling() -> None:
    logits = np.random.default_rng(1).standard_normal(777).astype(np.float32)
    for number in range(20):
        settings = {"top_k": 40, "typical_p": 1.0, "top_p": 0.9, "min_p": 0.01, "temperature": 1.5}
        given = settings | {"uniform": (number + 0.5) / 20}
        assert cpu_sampling.sample(logits, **given) == sampling.sample(logits, **given)


def check_quantizers() -> None:
    rows = torch.randn(9, 512, generator=torch.Generator().manual_seed(5)) * 0.02
    for name in ("IQ3_S", "Q5_K", "IQ4_XS"):
        found = quantize(FORMATS[name], rows, rows[0].square(), COMPILED)
        assert torch.equal(found, quantize(FORMATS[name], rows, rows[0].square())), name


def check() -> None:
    check_sampling()
    check_quantizers()
    hold(errors(), errors_of_gated_delta(), errors_of_experts())


def hold(*parts: Iterator[tuple[str, float]]) -> None:
    """Prints the tile in use. Raises AssertionError where an error is not one of rounding in fp32."""
    for name, error in chain(*parts):
        assert error <= 1e-11, f"{name}: {error:.1e}"
    tile = target.host_tile()
    print(f"{tile.lanes} lanes, {tile.vectors} x {tile.rows} accumulators")


def collect_libraries() -> list[Any]:
    """The numba libraries of all that is compiled from now on."""
    libraries = []
    object_code = compiled._object_code

    def collect(library: Any) -> bytes:
        libraries.append(library)
        return object_code(library)

    compiled._object_code = collect
    return libraries


_PAUSES = (
    ("declare void @llvm.x86.sse2.pause()", "declare void @llvm.aarch64.hint(i32)"),
    ("@llvm.x86.sse2.pause()", "@llvm.aarch64.hint(i32 1)"),
)
"""The one instruction that kernels name for a processor (`atomics.pause`), as either has it."""


def without_amx() -> None:
    tile_matmul.has_amx = prefill_attention.has_amx = lambda: False


def use_the_tile_for(triple: str) -> None:
    target.tile_for = lambda _triple, _features: tiles.tile_for(triple, "")


def assemble(libraries: list[Any], triple: str, cpu: str) -> None:
    """The kernels' code with LLVM's code generator for the target."""
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    # Instructions are selected as with optimization, which takes three times as long.
    for option in ("--global-isel=0", "--fast-isel=0"):
        binding.set_option("llvm", option)
    machine = binding.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=0)
    machines = set()
    for library in libraries:
        lines = [line for line in library.get_llvm_str().splitlines() if not line.startswith("target ")]
        code = "\n".join(lines)
        for here, there in _PAUSES:
            code = code.replace(here, there)
        module = binding.parse_assembly(code)
        module.triple, module.data_layout = triple, str(machine.target_data)
        module.verify()
        machines.add(int.from_bytes(machine.emit_object(module)[18:20], "little"))
    print(f"{len(libraries)} kernels, machine {sorted(machines)}")


def compile_matrix_kernels(kernel: Callable[[], int], *names: str) -> None:
    libraries = collect_libraries()
    kernel()
    code = libraries[-1].get_asm_str()
    print(", ".join(f"{name} {code.count(name)}" for name in names))


if __name__ == "__main__":
    gc.disable()  # an eighth of the time of compiling
    what, others = sys.argv[1], sys.argv[2:]
    if what in ("check", "tile"):
        compiled_here = collect_libraries()
        without_amx()
        if what == "check":
            check()
        else:
            if others:
                use_the_tile_for(others[0])
            hold(errors_of_the_tile())
        if others:
            assemble(compiled_here, *others)
    elif what == "matrix":
        compile_matrix_kernels(kernel_table.amx_matmul_kernel, "tdpbf16ps", "ldtilecfg", "tilerelease")
    elif what == "bytes":
        product = partial(kernel_table.amx_bytes_matmul_kernel, "Q4_K")
        compile_matrix_kernels(product, "tdpbssd", "tdpbf16ps", "ldtilecfg")
    elif what == "rows":
        product = partial(kernel_table.amx_matvec_kernel, "Q4_K")
        compile_matrix_kernels(product, "tdpbssd", "ldtilecfg", "tilerelease")
    else:
        tile_emulator.main()
