"""What a first request would wait for, kernel by kernel, is compiled ahead: prompts of every length, alone and in steps
of several, and their captured steps."""

import os
import subprocess
import sys

import pytest

from tests.fork_server import without_interpreter

CHECK = """
import sys
from unittest import mock
import torch
from quengine.block_pool import CachePool
from quengine.runners import cuda_graphs
from quengine.runners.compile_kernels import every_step
from quengine.runners.graph_keys import PREFILL_ROWS, PREFILL_SEQUENCES, GraphKey
from quengine.step_plan import SequenceRows, forward_batch
from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cuda.aot.meta_backend import META, backend_for
from quengine.kernels.cuda.aot.aot_compile import record
from quengine.kernels.kv.cache_types import PADDING_BLOCK
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kv_cache import KVCache
from quengine.models.decoder import Decoder
from quengine.models.synthetic.presets import synthetic_preset
from quengine.models.synthetic.synthetic import tensor_type
from quengine.models.tensor_table import required_tensors

preset = sys.argv[1]
ctx, blocks, arch, fixed = map(int, sys.argv[2:])
MOST = 2048
torch.cuda.Event = mock.MagicMock
cuda_graphs.has_dependent_launch = lambda _: arch >= 90

def tensor(name, shape):
    fmt = FORMATS[tensor_type(spec, name, shape)]
    rows = 1 if len(shape) == 1 else shape[0]
    return QuantTensor(name, fmt, shape, torch.empty(rows, fmt.row_bytes(shape[-1]), dtype=torch.uint8, device=META))

def tables(positions):
    return [[1] if group.is_state else [PADDING_BLOCK] * -(-positions // 32) for group in config.cache_groups]

def keys(call):
    with torch.no_grad():
        return {launch.key: launch.name for launch in record(call)}

spec = synthetic_preset(preset)
config = spec.config()
with backend_for(arch) as backend:
    backend.batch_invariant = bool(fixed)
    shapes = required_tensors(config)
    tensors = {name: tensor(name, shape) for name, shape in shapes.items()}
    decoder = Decoder(config, tensors, backend, ctx, min(MOST, ctx))
    pools = [CachePool(blocks, is_state=group.is_state) for group in config.cache_groups]
    cache = KVCache.allocate(config, ctx, META, pools=pools)
    graphs = cuda_graphs.CudaGraphs(decoder, cache, -(-blocks * 32 // ctx), MOST)
    compiled, missing = keys(lambda: [step() for step in every_step(graphs)]), {}

    def look(what, call):
        for key, name in keys(call).items():
            if key not in compiled:
                missing.setdefault(name, set()).add(what)

    longest = min(ctx, MOST)
    lengths = [1, *range(2, 40, 3), 48, 64, 99, 127, 128, 129, 160, 255, 257, 300, 385, 512, 700, 1664, 1999, MOST]
    for rows in [length for length in lengths if length <= longest]:
        first = 32 if rows + 32 <= ctx else 0
        chunk = SequenceRows([0] * rows, first, tables(first + rows))
        look(("chunk", rows), lambda: decoder.forward(forward_batch("prefill", [chunk], META), cache.layers))
    for rows in lengths:
        for count in (2, 3, 7, 16, 33, 64):
            part, rest = rows // count, rows % count
            if 0 < part and part + rest <= longest:
                step = [part] * (count - 1) + [part + rest]
                look(("step", rows, count), lambda: graphs.run_prompts(step))
    for rows in PREFILL_ROWS:
        for count in PREFILL_SEQUENCES:
            if rows <= MOST:
                key = GraphKey("prefill", rows, count)
                look(("captured", rows, count), lambda: graphs.run_padding(key))
print(len(compiled), missing)
assert len(compiled) > 30 and not missing
"""


@pytest.mark.parametrize(
    ("preset", "ctx", "blocks", "arch", "fixed"),
    [
        ("mistral-7b-2l", 2176, 68, 90, 0),
        ("mistral-7b-2l", 288, 576, 90, 0),
        ("mistral-7b-2l", 4096, 256, 90, 1),
        ("mistral-7b-2l", 2176, 68, 80, 0),
        ("mistral-7b-2l", 4096, 256, 80, 0),
        ("qwen3.5-tiny", 4096, 256, 90, 0),
        ("qwen3.5-tiny", 4096, 256, 80, 1),
    ],
    ids=[
        "alone",
        "many, short",
        "many, fixed",
        "alone, sm_80",
        "many, sm_80",
        "states",
        "states, fixed, sm_80",
    ],
)
def test_no_prompt_waits_for_the_compiler(preset: str, ctx: int, blocks: int, arch: int, fixed: int) -> None:
    """On no device, in a process of its own: launches are recorded, which the interpreter's are not."""
    without_interpreter(CHECK, preset, ctx, blocks, arch, fixed)


DRAFTS = """
import torch
from unittest import mock
from quengine.block_pool import CachePool
from quengine.kernels.cuda.aot.aot_compile import record
from quengine.models.draft_layer import layer_config
from quengine.models.synthetic.presets import synthetic_preset
from quengine.models.synthetic.synthetic import tensor_type
from quengine.models.tensor_table import required_tensors
from quengine.runners import cuda_graphs, draft_graphs
from quengine.runners.compile_kernels import KernelPlan, LayerPlan, compile_stages
from quengine.runners.draft_graphs import DraftKey
from quengine.runners.graph_keys import GREEDY

for module in (cuda_graphs, draft_graphs):
    module.has_dependent_launch = lambda _: True
spec = synthetic_preset("qwen3.5-mtp-tiny")
config = spec.config()
def stored(config):
    return {name: (tensor_type(spec, name, shape), shape) for name, shape in required_tensors(config).items()}
layer = layer_config(config)
pools = [CachePool(16, is_state=group.is_state) for group in config.cache_groups]
plan = KernelPlan(config, stored(config), 128, pools, 64, "f16", 16, 64, True, False,
                  LayerPlan(layer, stored(layer), 8, 3, 16))
stages = compile_stages(plan)
record(stages[1])
kernels = {launch.key: launch.name for launch in record(stages[3])}
print(sorted(set(kernels.values())))
graphs = plan.graphs()
drafts = plan.drafts(graphs)
assert [drafts.most_drafted(n) for n in (1, 2, 3, 4, 8, 9)] == [3, 3, 3, 3, 1, 0]
for key in (DraftKey(1, 3, GREEDY), DraftKey(4, 2, GREEDY)):
    missing = {launch.name: launch.key for launch in record(lambda: drafts.run(key)) if launch.key not in kernels}
    assert not missing, missing
"""


EAGLE = """
import tempfile
from pathlib import Path
from quengine.block_pool import CachePool
from quengine.kernels.cuda.aot.aot_compile import record
from quengine.models.checkpoint import open_checkpoint
from quengine.models.eagle_checkpoint import open_eagle
from quengine.models.synthetic.synthetic import write_synthetic
from quengine.models.synthetic.synthetic_eagle import write_synthetic_eagle
from quengine.runners import cuda_graphs, draft_graphs
from quengine.runners.compile_kernels import KernelPlan, LayerPlan, compile_stages, stored_tensors
from quengine.runners.draft_graphs import DraftKey
from quengine.runners.graph_keys import GREEDY

for module in (cuda_graphs, draft_graphs):
    module.has_dependent_launch = lambda _: True
with tempfile.TemporaryDirectory() as folder:
    target = open_checkpoint(write_synthetic(Path(folder) / "tiny.gguf", "tiny"))
    draft = write_synthetic_eagle(Path(folder) / "draft.gguf", target.config, drafted=384)
    eagle = open_eagle(draft, target)
    fusion = stored_tensors(eagle.fusion.tensors)
    layer = LayerPlan(eagle.config, stored_tensors(eagle.tensors), 8, 3, 16, fusion, True)
    plan = KernelPlan(target.config, stored_tensors(target.tensors), 128, [CachePool(16)], 64, "f16", 16, 64, True,
                      False, layer)
    stages = compile_stages(plan)
    record(stages[1])
    kernels = {launch.key: launch.name for launch in record(stages[3])}
    print(sorted(set(kernels.values())))
    drafts = plan.drafts(plan.graphs())
    for key in (DraftKey(1, 3, GREEDY), DraftKey(4, 2, GREEDY)):
        missing = {launch.name: launch.key for launch in record(lambda: drafts.run(key)) if launch.key not in kernels}
        assert not missing, missing
"""


def test_no_draft_of_an_eagle_draft_model_waits_for_the_compiler() -> None:
    names = without_interpreter(EAGLE)
    for kernel in ("enter_kernel", "place_kernel", "accept_kernel", "join_kernel", "before_kernel"):
        assert kernel in names


def test_no_draft_waits_for_the_compiler() -> None:
    names = without_interpreter(DRAFTS)
    for kernel in (
        "enter_kernel",
        "place_kernel",
        "accept_kernel",
        "advance_kernel",
        "by_rows_kernel",
        "join_kernel",
    ):
        assert kernel in names


FIRST = """
import sys
import torch
from quengine.block_pool import CachePool
from quengine.kernels.cuda.launch.gpu import Gpu
from quengine.kernels.cuda.launch.record_kernels import record_kernels
from quengine.models.synthetic.presets import PRESETS
from quengine.models.synthetic.synthetic import tensor_type
from quengine.models.tensor_table import required_tensors
from quengine.runners.compile_kernels import OTHERS, KernelPlan, compile_stages

spec = PRESETS["mistral-7b-2l"]
config = spec.config()
tensors = {name: (tensor_type(spec, name, shape), shape) for name, shape in required_tensors(config).items()}
plan = KernelPlan(config, tensors, 4096, [CachePool(128)], 2048, "f16", 1, 2048)
gpu, stages, graphs = Gpu("", (9, 0)), compile_stages(plan), []
assert len(record_kernels(stages[:3], gpu)) > 12
record_kernels(stages[3:-OTHERS], gpu)
late = [name for name in ("torch._dynamo", "torch.fx.experimental.symbolic_shapes") if name in sys.modules]
assert not late, late
stages = compile_stages(plan)
before = record_kernels(stages[:-OTHERS], gpu)
record_kernels([lambda: graphs.extend(plan.graphs())], gpu)
for length in (2, 7, 11, 16, 17, 30, 45, 64, 77, 128):
    with torch.no_grad():
        of_prompt = record_kernels([lambda: graphs[0].run_prompts([length])], gpu)
    assert set(of_prompt) <= set(before), (length, [of_prompt[key].name for key in of_prompt.keys() - before.keys()])
"""


def test_the_kernels_of_a_first_request_are_known_first() -> None:
    """Those of a prompt of up to 128 tokens before those of all other steps, and before torch's compiler is imported,
    which takes as long as torch, in a process that has imported neither."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", FIRST], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
