"""What is compiled ahead for a rank: the kernels of its part of the model, and those that exchange sums and logits."""

from pathlib import Path

from quengine.models.checkpoint import open_checkpoint
from quengine.models.split_checkpoint import SplitCheckpoint
from quengine.models.tensor_split import Rank
from tests.fork_server import without_interpreter
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny

RECORDED = """
import sys, torch
from pathlib import Path
from quengine.block_pool import CachePool
from quengine.kernels.cuda.launch.gpu import Gpu, assuming
from quengine.kernels.cuda.launch.triton_changes import launches_handed_to
from quengine.models.checkpoint import open_checkpoint
from quengine.models.split_checkpoint import SplitCheckpoint
from quengine.models.tensor_split import Rank
from quengine.runners.compile_kernels import KernelPlan, compile_stages
part = SplitCheckpoint(open_checkpoint(Path(sys.argv[1])), Rank(1, 2))
plan = KernelPlan(part.config, part.tensors.stored(), 128, [CachePool(4)], 64, "f16", 1, 64)
note = lambda kernel, grid, args, named: print(kernel.__name__) if named.get("RANKS") else None
with assuming(Gpu("NVIDIA H200", (9, 0))), launches_handed_to(note):
    for stage in compile_stages(plan)[:3]:  # what a first short request runs
        stage()
"""


def test_sums_and_logits_are_among_the_kernels_of_a_rank(tmp_path: Path) -> None:
    """In a process without Triton's interpreter, which runs what it is to record."""
    sizes = ModelSizes(
        "qwen2moe", embedding=256, expert_feed_forward=512, shared_feed_forward=512, head_dim=64
    )
    path = write_tiny(tmp_path / "m.gguf", kind="Q8_0", sizes=sizes)
    layers, names = 2, without_interpreter(RECORDED, path).split()
    assert names.count("_all_gather_kernel") == 2  # a decode step, and a prompt
    # Behind the attention of a decode step, and of the prompt's one row that goes on in the last layer.
    assert names.count("_norm_kernel") == layers + 1
    # Several rows: behind the attention and the experts of the prompt's layer ahead of the last.
    assert names.count("_all_reduce_kernel") == 2
    # One row, or with scales of rows: behind the shared expert and the experts.
    assert names.count("_post_norm_add_kernel") == layers * 5 - 3 and len(names) == 2 + layers * 6


def test_the_shapes_of_a_part_are_known_before_it_is_read(tmp_path: Path) -> None:
    whole = open_checkpoint(write_tiny(tmp_path / "m.gguf", kind="Q8_0", sizes=ModelSizes("phi3"), tied=True))
    part = SplitCheckpoint(whole, Rank(1, 2))
    stored = part.tensors.stored()
    assert "output.weight" in stored and len(stored) == len(part.tensors)
    for name, (kind, shape) in stored.items():
        assert (kind, shape) == (part.tensors[name].format.name, part.tensors[name].shape)
