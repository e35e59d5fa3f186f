"""Sampling on the device gives the token of the CPU definition, step after step, without a host in between."""

import math

import pytest
import torch
import triton
import triton.language as tl

from quengine.errors import EngineError
from quengine.kernels import sampling as definition
from quengine.kernels.cuda.sampling.sampling import (
    NO_TOKEN,
    DecodeState,
    SamplingBuffers,
    SamplingSettings,
    sample_step,
)
from quengine.kernels.cuda.sampling.sampling_parts import mass
from tests.fork_server import without_interpreter
from tests.kernels.cuda.sampling.sampling_runs import run


def test_greedy_takes_the_first_of_ties(device: torch.device) -> None:
    run(device, [SamplingSettings(temperature=0.0)], 3, ties=True)


def test_defaults_and_other_seeds_and_streams(device: torch.device) -> None:
    run(
        device,
        [SamplingSettings(seed=1), SamplingSettings(seed=2**64 - 1), SamplingSettings(seed=1, stream=7)],
        1,
    )


def test_tied_candidates(device: torch.device) -> None:
    run(device, [SamplingSettings(seed=3, top_k=5, top_p=1.0, min_p=0.0)], 2, ties=True)


@pytest.mark.parametrize(
    "settings",
    [
        SamplingSettings(seed=4, top_p=0.3, min_p=0.0),
        SamplingSettings(seed=5, top_p=1.0, min_p=0.4, temperature=2.0),
        SamplingSettings(seed=6, typical_p=0.5, top_p=0.9),
        SamplingSettings(seed=7, top_k=100, top_p=1.0, min_p=0.0, temperature=1.5),
        SamplingSettings(seed=8, top_k=1),
        SamplingSettings(seed=9, temperature=1e-4),
    ],
)
def test_each_sampler(settings: SamplingSettings, device: torch.device) -> None:
    run(device, [settings], 1)


@pytest.mark.parametrize("window", [-1, 0, 2, 64])
def test_penalties_follow_the_window(window: int, device: torch.device) -> None:
    settings = SamplingSettings(
        seed=10, repeat=1.3, presence=0.4, frequency=0.6, repeat_last_n=window, temperature=0.0
    )
    run(device, [settings], 4, vocab=1024)


def test_bias_moves_and_bans(device: torch.device) -> None:
    run(device, [SamplingSettings(seed=11, temperature=0.0)], 1, bias={17: 100.0})
    run(device, [SamplingSettings(seed=11)], 1, bias={17: 4.0, 18: -math.inf, 19: 1e300})


@pytest.mark.parametrize("top_k", [1, 40])
@pytest.mark.parametrize("logit", [-math.inf, math.nan])
def test_no_token_where_there_is_none(top_k: int, logit: float, device: torch.device) -> None:
    logits = torch.full((1, 70), -math.inf)
    logits[0, 9] = logit
    state = DecodeState.allocate(1, 8, device)
    buffers = SamplingBuffers.allocate(1, 70, top_k, device, False, False)
    buffers.set(0, SamplingSettings(top_k=top_k), state.history[0, :0], {})
    assert sample_step(logits.to(device), state, buffers).tolist() == [NO_TOKEN]


@triton.jit
def _mass_kernel(gap_ptr, out_ptr, sharp_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, mass(tl.load(gap_ptr + at), tl.load(sharp_ptr)))


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1e-300, 1e300])
def test_masses_are_the_definitions_to_the_last_bit(temperature: float, device: torch.device) -> None:
    gaps = torch.rand(8192, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 40
    gaps[:4] = torch.tensor([0.0, 1e-320, 6.8e38, math.log(2) * 20.5])
    sharp = definition.sharpness(temperature)
    out = torch.zeros(8192, dtype=torch.int64, device=device)
    at = torch.tensor([sharp], dtype=torch.float64, device=device)
    _mass_kernel[(1,)](gaps.to(device), out, at, SIZE=8192, enable_fp_fusion=False)
    assert out.tolist() == definition.masses(gaps.numpy(), sharp).tolist()


COMPILE = """
from benchmarks.checks import aot
from quengine.kernels.cuda.aot.aot_compile import compile_launch
for v in aot.variants([90], "mistral-7b, all steps"):
    if v.launch.name == "tally_kernel":
        ptx = compile_launch(v.launch, 90).ptx
        print(ptx.count("mul.rn.f64"), ptx.count("fma.rn.f64"))
"""


def test_compiled_for_a_gpu_no_product_of_a_mass_is_fused_with_its_sum() -> None:
    """In a process of its own: these tests may run in Triton's interpreter, which compiles nothing."""
    products, fused = (int(count) for count in without_interpreter(COMPILE).split())
    assert products > 12 and fused == 0


def test_greedy_rows_ignore_what_other_rows_sample_with(device: torch.device) -> None:
    run(
        device,
        [SamplingSettings(temperature=0.0, typical_p=0.2, top_k=0), SamplingSettings(seed=2)],
        1,
        vocab=300,
    )


def test_settings_beyond_the_buffers_are_refused(device: torch.device) -> None:
    buffers = SamplingBuffers.allocate(1, 70, 40, device, False, False)
    nothing = torch.empty(0, dtype=torch.int32, device=device)
    with pytest.raises(EngineError, match="top-k 0"):
        buffers.set(0, SamplingSettings(top_k=0), nothing, {})
    with pytest.raises(EngineError, match="penalties"):
        buffers.set(0, SamplingSettings(repeat=1.1), nothing, {})
    with pytest.raises(EngineError, match="bias"):
        buffers.set(0, SamplingSettings(), nothing, {3: 1.0})
