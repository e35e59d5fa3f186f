"""What a decode step does on a GPU, counted by the profiler over steps within one block of the cache."""

from collections.abc import Iterator

import pytest
import torch

from quengine import LLM
from quengine.diagnostics.bench.profile import Profile, profile_decode, profile_prompt
from quengine.models.synthetic.synthetic import write_synthetic

STEPS = 16
LAUNCHES_A_LAYER = 6
LAUNCHES_BESIDE_LAYERS = 6
"""The rows' inputs, embedding, the last norm, the output matrix, and two of sampling."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),  # a first run compiles the kernels
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = write_synthetic(tmp_path_factory.mktemp("decode") / "tiny.gguf", "tiny")
    with LLM(path, "cuda", 256, reuse_prefix=True) as llm:
        yield llm


@pytest.fixture(scope="module")
def decode(llm: LLM) -> Profile:
    profile, _ = profile_decode(llm, [[1, 2, 3, 4, 5]], STEPS)
    return profile


def test_a_step_is_one_launch_of_a_graph(decode: Profile) -> None:
    assert decode.graph_launches == STEPS


def test_nothing_is_copied_to_the_device_or_back(decode: Profile) -> None:
    assert decode.copies == {}  # a step's last launch writes its token to the host's memory


def test_every_step_runs_the_kernels_of_the_graph_and_no_more_than_documented(
    llm: LLM, decode: Profile
) -> None:
    kernels = llm.runner.kernels_per_step
    assert kernels is not None
    assert decode.launches == STEPS * kernels
    assert kernels <= LAUNCHES_A_LAYER * llm.model_config.block_count + LAUNCHES_BESIDE_LAYERS


def test_no_step_makes_a_mask_or_runs_a_kernel_of_torch(decode: Profile) -> None:
    names = [row.name for row in decode.kernels if row.grid]
    assert names
    foreign = (
        "mask",
        "elementwise",
        "fill",
        "copy",
        "arange",
        "index",
        "where",
        "gather",
        "cub",
        "gemm",
        "::",
    )
    assert [name for name in names if any(word in name.lower() for word in foreign)] == []


def test_a_step_costs_the_same_launches_at_any_position(llm: LLM, decode: Profile) -> None:
    later, _ = profile_decode(llm, [list(range(1, 130))], 10)
    assert later.launches * STEPS == decode.launches * 10


def test_a_prompt_is_profiled_to_its_first_token(llm: LLM) -> None:
    profile, trace = profile_prompt(llm, list(range(1, 65)), 0)
    assert profile.launches > 0
    assert profile.graph_launches == 0
    assert any(event.get("cat") == "kernel" for event in trace["traceEvents"])
