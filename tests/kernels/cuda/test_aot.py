"""Compiling ahead of time: what is compiled, what counts as a fault, and one kernel compiled without a GPU."""

from itertools import product
from types import SimpleNamespace
from typing import Any

from benchmarks.checks.aot import overlap_faults, shared_faults
from benchmarks.checks.aot_cases import COMMON_TYPES
from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cuda.aot.aot_ptx import Early, before_wait
from tests.fork_server import without_interpreter

HEAD = """
.visible .entry kernel(
    .param .u64 .ptr .global .align 1 kernel_param_0,
    .param .u64 .ptr .global .align 1 kernel_param_1,
    .param .u64 .ptr .global .align 1 kernel_param_2,
    .param .u32 kernel_param_3
)
{
    ld.param.b64  %rd1, [kernel_param_0];
    ld.param.b64  %rd2, [kernel_param_1];
    mov.b64       %rd3, kernel_param_2;   // the parameter's own address
    ld.param.b64  %rd4, [%rd3];
    mov.u32       %r1, %tid.x;
"""
WAIT = "    griddepcontrol.wait;\n"


def early(body: str) -> tuple[bool, set[int], set[int]]:
    found = before_wait(HEAD + body + "    ret;\n}\n")
    return found.waits, set(found.reads), set(found.writes)


def test_shared_memory_that_triton_does_not_request_is_a_fault() -> None:
    limit = 227 * 1024
    assert shared_faults(44 * 1024, 4096, limit) == shared_faults(49153, 4096, limit) == []
    assert "needs 49153 bytes of shared memory, of which" in shared_faults(45057, 4096, limit)[0]
    assert shared_faults(limit, 1, limit) == [f"needs {limit + 1} bytes of shared memory, not {limit}"]


def test_loads_above_the_wait_are_traced_to_their_parameters() -> None:
    body = """
    mad.wide.s32  %rd5, %r1, 16, %rd1;
    add.s64       %rd6, %rd5, 4096;
    @%p1 ld.global.v4.b32 { %r2, %r3, %r4, %r5 }, [ %rd6 + 0 ];
    ld.global.b64 { %rd7 }, [ %rd4 + 8 ];
"""
    below = "    ld.global.b32 { %r6 }, [ %rd2 + 0 ];\n    st.global.b32 [ %rd2 + 0 ], { %r6 };\n"
    assert early(body + WAIT + below) == (True, {0, 2}, set())


def test_what_is_loaded_is_no_pointer_of_the_parameter_it_came_through() -> None:
    body = """
    ld.global.b32 { %r2 }, [ %rd1 + 0 ];
    mul.wide.s32  %rd5, %r2, 4;
    add.s64       %rd6, %rd2, %rd5;
"""
    assert early(body + "    ld.global.b32 { %r3 }, [ %rd6 + 0 ];\n" + WAIT) == (True, {0, 1}, set())
    assert early(body + WAIT + "    ld.global.b32 { %r3 }, [ %rd6 + 0 ];\n") == (True, {0}, set())


def test_writes_atomics_and_copies_above_the_wait_are_seen() -> None:
    body = """
    @%p2 st.global.b32 [ %rd1 + 0 ], { %r1 };
    atom.global.gpu.acq_rel.add.u32 %r2, [ %rd2 + 0 ], 1;
    cp.async.cg.shared.global [ %r1 + 0 ], [ %rd4 + 0 ], 0x10;
"""
    assert early(body + WAIT) == (True, {2}, {0, 1})


KINDS = """
    @%p1 bra $L__BB0_3;
{first}
    barrier.sync 1;
    bra.uni $L__BB0_5;
$L__BB0_3:
    barrier.sync 1;
    $L_brx_0: .branchtargets
        $L__BB0_4,
        $L__BB0_5;
    brx.idx %r2, $L_brx_0;
$L__BB0_4:
    st.global.b32 [ %rd1 + 0 ], {{ %r1 }};
    bra.uni $L__BB0_3;
$L__BB0_5:
"""


def test_warps_that_meet_those_that_have_waited_have_waited() -> None:
    assert early(KINDS.format(first=WAIT)) == (True, set(), set())
    late = KINDS.format(first="    barrier.sync 1;") + WAIT
    assert early(late) == (True, set(), {0}), "the warps met before the wait"
    some = KINDS.replace("barrier.sync 1;", "barrier.sync 1, 64;").format(first=WAIT)
    assert early(some) == (True, set(), {0}), "only some warps met"


def test_every_branch_is_followed_up_to_its_own_wait() -> None:
    body = f"""
    @%p1 bra $L__BB0_2;
    ld.global.b32 {{ %r2 }}, [ %rd1 + 0 ];
{WAIT}
    ld.global.b32 {{ %r3 }}, [ %rd4 + 0 ];
    bra.uni $L__BB0_3;
$L__BB0_2:
    ld.global.b32 {{ %r4 }}, [ %rd2 + 0 ];
{WAIT}
$L__BB0_3:
    ld.global.b32 {{ %r5 }}, [ %rd4 + 4 ];
"""
    assert early(body) == (True, {0, 1}, set())


def test_a_kernel_that_never_waits_is_told_apart() -> None:
    assert early("    ld.global.b32 { %r2 }, [ %rd1 + 0 ];\n") == (False, {0}, set())


NAMES = {0: "out_ptr", 1: "x_high", 2: "low_a", 3: "scales_a"}


def faults(
    waits: bool, reads: set[int], writes: set[int], names: dict[int, str] = NAMES, early: bool | None = None
) -> list[str]:
    """early: the constant of a grouped matmul's launch."""
    launch: Any = SimpleNamespace(pointers=names, arguments={} if early is None else {"EARLY": early})
    return overlap_faults(launch, Early(waits, frozenset(reads), frozenset(writes)))


def test_reading_weights_early_is_right_and_all_else_a_fault() -> None:
    assert faults(True, {2, 3}, set()) == []
    assert faults(True, {2, 1}, set()) == ["reads x_high before it waits"]
    assert faults(True, {2}, {0}) == ["writes out_ptr before it waits"]
    assert faults(True, set(), set()) == ["reads no weights before it waits"]
    assert faults(False, {2}, set()) == ["does not wait for the kernel in front"]
    assert faults(True, set(), set(), {0: "out_ptr", 1: "x_ptr"}) == []


def test_a_grouped_matmul_reads_early_which_experts_there_are_only_where_that_is_known() -> None:
    names = {0: "out_ptr", 1: "of_block_ptr", 2: "low"}
    assert faults(True, {1, 2}, set(), names, early=True) == []
    assert faults(True, {1}, set(), names, early=True) == ["reads no weights before it waits"]
    assert faults(True, set(), set(), names, early=False) == []
    assert faults(True, {1}, set(), names, early=False) == ["reads of_block_ptr before it waits"]


COMPILE = """
from benchmarks.checks import aot
work = aot.variants([90], "Q8_0, every matrix")
variant = next(v for v in work if v.launch.name == "matvec_kernel")
launch = variant.launch
made = aot.compile_launch(launch, 90)
early = aot.before_wait(made.ptx)
print(*sorted(launch.pointers[at] for at in early.reads if at in launch.pointers))
(report,) = aot.compile_variant(variant)
print(made.registers, made.stack, report.failure or "right")
"""


def test_the_decode_matvec_for_sm_90_reads_its_weights_and_nothing_else_above_the_wait() -> None:
    """In a process of its own: these tests may run in Triton's interpreter, which compiles nothing."""
    reads, numbers = without_interpreter(COMPILE).splitlines()
    assert {"low_a", "scales_a"} <= set(reads.split()) <= {"low_a", "high_a", "scales_a", "supers_a"}
    registers, stack, verdict = numbers.split()
    assert 16 < int(registers) <= 255 and (int(stack), verdict) == (0, "right")


TWINS = """
import tempfile
import triton
folder = tempfile.TemporaryDirectory()
triton.knobs.cache.dir = folder.name  # what an earlier run left of these kernels may be without PTX
from triton.backends.compiler import GPUTarget
from benchmarks.checks import aot
from quengine.kernels.cuda.aot import aot_compile
for only, name in (("Q8_0, every matrix", "fused_kernel"), ("lfm2-1.2b, narrow, a cache of q8_0", "rope_store_kernel")):
    launch = next(v.launch for v in aot.variants([89], only) if v.launch.name == name)
    made = triton.compile(aot_compile.source(launch), target=GPUTarget("cuda", 89, 32), options=launch.options)
    ours = aot_compile.compile_launch(launch, 89)
    assert ".target sm_89" in ours.ptx and ours.ptx == made.asm["ptx"], name
    assert (ours.registers, ours.stack) == aot_compile._resources(made.asm["cubin"]), name
    assert ours.shared == made.metadata.shared
"""


def test_what_is_made_of_another_gpus_ptx_is_what_triton_makes_for_this_one() -> None:
    without_interpreter(TWINS)


LISTED = """
from benchmarks.checks import aot
work = aot.variants([80, 89, 90])
assert not aot.left_out(work), aot.left_out(work)
assert len({(min(v.archs) // 90, v.launch.key) for v in work}) == len(work)
few = aot.covering(work)
assert not aot.left_out(few) and 3 * len(few) < len(work), len(few)
for v in work:
    launch = v.launch
    outs = (str(x.dtype) for n, x in launch.arguments.items() if n == "out_ptr" and x is not None)
    given = {**launch.arguments, "OUT": next(outs, ""), "DECODE": v.decode, "REGISTERS": launch.options.get("maxnreg")}
    program = launch.arguments.get("P") or launch.arguments.get("A")
    if program is not None:
        flagged = getattr(program, "flags", program)
        given["EXACT"] = getattr(flagged, "exact", False)
        given["EPILOGUE"] = getattr(flagged, "epilogue", 0)
        given["TB"] = getattr(program, "block", 0)
        given["TYPE"] = getattr(getattr(program, "layout", None), "format", "")
    if "ROPE" in given:
        given["QUERY_SCALE"] = given["ROPE"].query_scale
    flags = ("TB", "KIND", "EPILOGUE", "BITS", "ROW_SCALE", "QUERY_SCALE", "PDL", "LEAST", "OUT", "FORM", "EXACT",
        "BATCH_INVARIANT", "QUANTIZE", "WINDOW", "REGISTERS", "TYPE", "DECODE")
    values = [f"{name}={getattr(given[name], 'value', given[name])}" for name in flags if name in given]
    for arch in v.archs:
        print(f"{launch.name}.{arch}", *values)
"""


def test_what_models_launch_is_compiled() -> None:
    """Every kernel, no launch twice; every type, and every variant that batches of some size select."""
    lines = without_interpreter(LISTED).splitlines()
    found = [(line.split()[0], dict(x.split("=") for x in line.split()[1:])) for line in lines]

    def met(kernel: str, *flags: str, arch: int = 90) -> set[tuple[str, ...]]:
        return {
            tuple(given.get(flag, "") for flag in flags)
            for name, given in found
            if name == f"{kernel}.{arch}"
        }

    packed = {(name,) for name, fmt in FORMATS.items() if fmt.is_quantized}
    for kernel in ("matvec_kernel", "glu_kernel", "experts_glu_kernel", "experts_add_kernel"):
        assert met(kernel, "TYPE") == packed, kernel
    assert met("grouped_few_kernel", "TYPE") | met("grouped_wgmma_kernel", "TYPE") == packed
    for exact in ("False", "True"):
        of_each = met("wgmma_kernel", "TYPE", "EXACT") | met("wgmma_blocks_kernel", "TYPE", "EXACT")
        assert {(name, exact) for (name,) in packed} <= of_each
    assert met("matvec_kernel", "TYPE", arch=80) == met("fused_kernel", "TYPE", arch=80) == packed
    assert met("matvec_kernel", "TYPE", arch=89) >= {(name,) for name in COMMON_TYPES}
    assert ("True",) in met("glu_kernel", "DECODE") & met("experts_add_kernel", "DECODE")

    blocks, forms = ("8", "16", "32", "64", "128"), ("0", "1", "2")
    truths = ("False", "True")
    # To 65 rows and more the norm that follows adds the residual, unless no columns are shared.
    assert met("wgmma_kernel", "TB", "EPILOGUE", "EXACT") >= set(product(blocks[:-1], forms, truths))
    assert met("wgmma_kernel", "TB", "EPILOGUE", "EXACT") >= set(product(("128",), ("0", "2"), truths))
    assert met("wgmma_two_parts_kernel", "TB", "EXACT") == set(product(blocks, truths))
    assert met("fused_kernel", "EXACT", arch=80) == {(x,) for x in truths} and not met("fused_kernel")
    both = {(first, second) for first in truths for second in truths}
    bits = ("4", "8", "16")
    assert met("rope_store_kernel", "BITS", "ROW_SCALE") == set(product(bits, truths))
    assert met("rope_store_kernel", "QUERY_SCALE", "ROW_SCALE") == both
    assert met("attention_prefill_kernel", "BATCH_INVARIANT") == {(x,) for x in truths}
    assert met("wgmma_blocks_kernel", "TB", "EPILOGUE") >= set(product(("128",), forms))
    assert met("wgmma_groups_kernel", "TB", "EPILOGUE") >= set(product(("256",), forms))
    gelu = {
        epilogue for (epilogue,) in met("wgmma_kernel", "EPILOGUE") | met("wgmma_blocks_kernel", "EPILOGUE")
    }
    assert gelu == {"-1", "0", "1", "2", "3", "4"}, gelu
    # Few rows over q4_0 are transformed in fp32, and those of batch-invariant kernels keep it.
    outs = {(b, "torch.float16") for b in bits} | {("4", "torch.float32"), ("16", "torch.float32")}
    assert met("attention_prefill_kernel", "BITS", "OUT") == outs
    assert met("attention_tiles_kernel", "BITS", "PDL") == set(product(bits, truths))
    assert ("416",) in met("attention_tiles_kernel", "LEAST")
    assert met("attention_warps_kernel", "BITS", "PDL") == set(product(bits, truths))
    assert met("attention_warps_kernel", "QUANTIZE", "FORM") >= {("True", "-1"), ("False", "2")}
    assert ("1",) in met("attention_warps_kernel", "WINDOW")
    assert met("qk_row_norm_kernel", "PDL") == {("True",)}
    assert met("attention_warps_kernel", "REGISTERS") == {("128",), ("168",), ("255",)}
    assert {form for (form,) in met("rms_norm_kernel", "KIND")} == {"0", "1", "2"}
    assert {kind for (kind,) in met("post_norm_add_kernel", "KIND")} == {"-1", "1", "2"}
    assert met("norm_wgmma_kernel", "PDL") == {("True",)}
    for arch in (80, 89, 90):
        assert met("attention_tiles_kernel", "BITS", arch=arch) == {(x,) for x in bits}
