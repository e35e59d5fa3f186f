"""The self-test of latent attention passes right kernels, and sees rows that are not kept or wrongly rotated."""

from dataclasses import replace

import pytest
import torch

from quengine.diagnostics.selftest.self_test_latent import LATENTS, check_latent
from quengine.kernels.backend import Hidden, KVLayer
from quengine.kernels.cpu.backend import CpuBackend
from quengine.kernels.cuda import backend as cuda_backend
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.latent_spec import LatentSpec


class Forgetful(CpuBackend):
    """Keeps nothing of a prompt."""

    def latent_attention(
        self, batch: ForwardBatch, q: Hidden, latent: Hidden, spec: LatentSpec, layer: KVLayer
    ) -> Hidden:
        if batch.phase == "prefill":
            k = layer.k.clone()
            scale = None if layer.k_scale is None else layer.k_scale.clone()
            layer = KVLayer(k, k, scale, scale)
        return super().latent_attention(batch, q, latent, spec, layer)


class Unturned(CpuBackend):
    """Rotates by no angle."""

    def latent_attention(
        self, batch: ForwardBatch, q: Hidden, latent: Hidden, spec: LatentSpec, layer: KVLayer
    ) -> Hidden:
        still = replace(spec, cos=torch.ones_like(spec.cos), sin=torch.zeros_like(spec.sin))
        return super().latent_attention(batch, q, latent, still, layer)


@pytest.mark.parametrize("name", LATENTS)
def test_the_cpus_kernels_pass(name: str) -> None:
    checks = list(check_latent(CpuBackend(1), name))
    assert [check.test for check in checks] == ["prompt", "1 token", "batch"]
    assert all(check.passed for check in checks), checks


@pytest.mark.parametrize(("backend", "wrong"), [(Forgetful, {"1 token", "batch"}), (Unturned, {"prompt"})])
def test_a_wrong_one_is_seen(backend: type[CpuBackend], wrong: set[str]) -> None:
    assert {check.test for check in check_latent(backend(1), LATENTS[0]) if not check.passed} >= wrong


@pytest.mark.gpu
@pytest.mark.parametrize("name", LATENTS)
def test_cudas_kernels_pass(name: str) -> None:
    checks = list(check_latent(cuda_backend.CudaBackend(torch.device("cuda")), name))
    assert len(checks) == 3 and all(check.passed for check in checks), checks
