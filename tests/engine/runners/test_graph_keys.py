"""Which captured graph serves which sampling settings, and when kernels are compiled ahead."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quengine.kernels.cuda.launch.compile_ahead import marker
from quengine.kernels.cuda.sampling.sampling import MAX_CAPACITY
from quengine.request.sampling_params import SamplingParams
from quengine.runners.compile_kernels import compile_kernels
from quengine.runners.graph_keys import CANDIDATES, SamplingKind
from quengine.structured.constraint_spec import ConstraintSpec


@pytest.mark.parametrize(
    ("params", "key"),
    [
        (SamplingParams(temperature=0), SamplingKind(1, False, False)),
        (SamplingParams(), SamplingKind(64, False, False)),
        (SamplingParams(top_k=100, presence_penalty=0.5), SamplingKind(128, False, True)),
        (SamplingParams(temperature=0, logit_bias={3: 1.0}), SamplingKind(1, True, False)),
        (SamplingParams(top_k=0), SamplingKind(0, False, False)),
        (SamplingParams(top_k=500, repeat_penalty=1.1), SamplingKind(0, False, True)),
        (SamplingParams(temperature=0, logprobs=1), None),
    ],
)
def test_a_graph_is_chosen_by_what_sampling_needs_buffers_for(
    params: SamplingParams, key: SamplingKind | None
) -> None:
    assert SamplingKind.of(params) == key
    assert CANDIDATES[-1] == MAX_CAPACITY


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
    graphs = SimpleNamespace(
        decoder=Shape(), cache=SimpleNamespace(layers=[]), prefill_tokens=8, slots=1, shares_sequences=False
    )
    marker("GPU X", "model", 10, 1, [], 1, False).touch()
    compile_kernels(graphs)  # type: ignore[arg-type]


def test_a_constraint_is_sampled_on_the_host() -> None:
    free = SamplingParams(temperature=0)
    assert SamplingKind.of(free) is not None
    assert SamplingKind.of(replace(free, constraint=ConstraintSpec.regex("a"))) is None
