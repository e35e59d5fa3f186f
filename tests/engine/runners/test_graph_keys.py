"""Which captured graph serves which sampling settings, and when kernels are compiled ahead."""

from dataclasses import replace
from pathlib import Path

import pytest

from quengine.block_pool import CachePool
from quengine.kernels.cuda.launch.gpu import Gpu
from quengine.kernels.cuda.sampling.sampling import MAX_CAPACITY
from quengine.models.synthetic.presets import PRESETS
from quengine.request.sampling_params import SamplingParams
from quengine.runners import compile_kernels
from quengine.runners.compile_kernels import KernelPlan, compile_ahead
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
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    pools: list[object] = []
    monkeypatch.setattr(compile_kernels, "CompilePool", lambda *_, marker, **__: pools.append(marker))
    plan = KernelPlan(PRESETS["tiny"].config(), {}, 64, [CachePool(2)], 64, "f16", 1, 64)
    gpu = Gpu("GPU X", (9, 0))
    compile_ahead(plan, gpu)
    (done,) = pools
    assert isinstance(done, Path) and done.parent == tmp_path
    done.touch()
    assert compile_ahead(plan, gpu) is None and len(pools) == 1
    others = [replace(plan, slots=2), replace(plan, cache_type="q8_0"), replace(plan, batch_invariant=True)]
    for number, other in enumerate(others, 2):
        compile_ahead(other, gpu)
        assert len(set(pools)) == number
    compile_ahead(plan, Gpu("GPU Y", (9, 0)))
    assert len(set(pools)) == 5


def test_a_constraint_is_sampled_on_the_host() -> None:
    free = SamplingParams(temperature=0)
    assert SamplingKind.of(free) is not None
    assert SamplingKind.of(replace(free, constraint=ConstraintSpec.regex("a"))) is None
