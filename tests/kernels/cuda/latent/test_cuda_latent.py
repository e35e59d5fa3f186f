"""Latent attention on CUDA against the definition in fp64: results, and the rows that are cached."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quengine.errors import CannotRunError
from quengine.kernels.backend import KVLayer
from quengine.kernels.cuda.backend import CudaBackend
from quengine.kernels.cuda.latent.shapes import check_latent
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.kv.cache_types import CacheType
from tests.kernels.latent_steps import STEPS, Case, prompt, tokens
from tests.kernels.weights import nmse

DECODE, PROMPT = 2e-7, 5e-6
"""NMSE of a row by q-dot, and of rows that are rounded to fp16."""


def on(batch: ForwardBatch, device: torch.device) -> ForwardBatch:
    return replace(
        batch,
        token_ids=batch.token_ids.to(device),
        positions=batch.positions.to(device),
        block_tables=batch.block_tables.to(device),
    )


def result(case: Case, device: torch.device, batch_invariant: bool = False) -> tuple[Tensor, KVLayer]:
    backend, layer = CudaBackend(device, batch_invariant), case.held(device)
    spec = case.spec(backend)
    backend.check_latent(spec)
    q, latent = case.q.to(device), case.latent.to(device)
    return backend.latent_attention(on(case.batch, device), q, latent, spec, layer).cpu(), layer


def difference(case: Case, device: torch.device) -> float:
    y, layer = result(case, device)
    wanted, after = case.expected()
    for ours, theirs in zip(layer.tensors, after.tensors, strict=True):
        last_place = 1.0 if ours.dtype == torch.int8 else 1e-3
        torch.testing.assert_close(ours.cpu().float(), theirs.float(), rtol=1e-3, atol=last_place)
    return nmse(y, wanted)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("cache_type", ["f16", "q8_0"])
def test_steps_are_those_of_the_definition(step: str, cache_type: CacheType, device: torch.device) -> None:
    batch = STEPS[step]
    assert difference(Case(batch, cache_type), device) < (DECODE if len(batch) == 1 else PROMPT)


@pytest.mark.parametrize("step", ["a token", "tokens"])
def test_plain_matrices_halves_that_turn_together_and_scaled_queries(step: str, device: torch.device) -> None:
    case = Case(STEPS[step], form="F16", heads=17, rotated=16, halves=True, hot=True)
    assert difference(case, device) < (DECODE if len(case.batch) == 1 else PROMPT)


def test_a_small_latent_with_wide_rows_takes_the_tiles_of_its_step(device: torch.device) -> None:
    """Mistral Small 4's: rows of more than 256 elements are cut into 32 a tile on GPUs before Hopper."""
    case = Case(prompt([40], [0]), heads=1, rank=256, rotated=64, plain=32)
    assert difference(case, device) < PROMPT


def test_a_row_has_the_same_bits_in_every_chunk_and_batch(device: torch.device) -> None:
    whole, cut = Case(prompt([12], [13])), Case(prompt([7], [13]))
    cut.q, cut.latent = whole.q[:7], whole.latent[:7]
    alone, both = Case(tokens([40], [0])), Case(tokens([40, 9], [0, 1]))
    both.q[:1], both.latent[:1] = alone.q, alone.latent
    for longer, shorter in ((whole, cut), (both, alone)):
        ours, theirs = (result(case, device, batch_invariant=True)[0] for case in (longer, shorter))
        assert torch.equal(ours[: len(theirs)], theirs)


def test_sizes_that_the_kernels_do_not_take_are_refused(device: torch.device) -> None:
    case, backend = Case(STEPS["a token"]), CudaBackend(device)
    spec = case.spec(backend)
    for change, message in (
        ({"rank": 96}, "a latent of 96 and 32 rotated elements are not supported on CUDA"),
        ({"plain": 40}, "queries of 40 elements are not supported on CUDA, only multiples of 32"),
    ):
        with pytest.raises(CannotRunError, match=message):
            check_latent(replace(spec, **change))
