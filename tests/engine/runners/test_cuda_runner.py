"""Which captured graph serves which sampling settings, and when kernels are compiled ahead."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quengine.block_manager import CachePool
from quengine.kernels.cuda.launch.compile_ahead import marker
from quengine.request.sampling_params import SamplingParams
from quengine.runners.cuda_runner import CudaRunner, GraphKey
from quengine.structured.constraint_spec import ConstraintSpec


@pytest.mark.parametrize(
    ("params", "key"),
    [
        (SamplingParams(temperature=0), GraphKey(1, False, False)),
        (SamplingParams(), GraphKey(64, False, False)),
        (SamplingParams(top_k=100, presence_penalty=0.5), GraphKey(128, False, True)),
        (SamplingParams(temperature=0, logit_bias={3: 1.0}), GraphKey(1, True, False)),
        (SamplingParams(top_k=0), GraphKey(0, False, False)),
        (SamplingParams(top_k=500, repeat_penalty=1.1), GraphKey(0, False, True)),
        (SamplingParams(temperature=0, logprobs=1), None),
    ],
)
def test_a_graph_is_chosen_by_what_sampling_needs_room_for(
    params: SamplingParams, key: GraphKey | None
) -> None:
    assert GraphKey.of(params) == key


def test_kernels_are_not_looked_for_again_where_the_marker_says_they_were_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Shape:
        """What the marker is made of; computing anything would fail."""

        config, bytes_per_token, chunk_size = "model", 10, 8
        backend = SimpleNamespace(device=torch.device("cuda"))

        def forward(self, *_: object) -> None:
            raise AssertionError("computed")

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU X")
    cache = SimpleNamespace(ctx_size=4, layers=[], pools=(CachePool(1),))
    marker("GPU X", "model", 10, 1, [], 1, 0).touch()
    CudaRunner(Shape(), cache).compile_kernels()  # type: ignore[arg-type]


def test_a_constraint_is_sampled_on_the_host() -> None:
    free = SamplingParams(temperature=0)
    assert GraphKey.of(free) is not None
    assert GraphKey.of(replace(free, constraint=ConstraintSpec.regex("a"))) is None
