"""Prompts of a whole chunk over two GPUs: captured, as one GPU computes them."""

from pathlib import Path

import pytest
import torch

from quengine.diagnostics.bench.bench_time import random_prompts
from quengine.llm import LLM
from quengine.request.sampling_params import SamplingParams
from quengine.runners.cuda_graphs import CudaGraphs
from quengine.runners.graph_keys import WHOLE_CAPTURED_AT, WHOLE_CHUNK, GraphKey
from tests.gguf_builder import ModelSizes
from tests.kernels.cuda.weights import nmse
from tests.tiny_models import write_tiny


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_compute_whole_chunks_as_one_does(tmp_path: Path) -> None:
    """Also shorter prompts, which are not captured."""
    sizes = ModelSizes(
        blocks=3, embedding=512, feed_forward=1024, heads=8, kv_heads=2, head_dim=64, context=4096
    )
    path = write_tiny(tmp_path / "m.gguf", kind="Q8_0", sizes=sizes)
    params, key = (
        SamplingParams(temperature=0, max_tokens=3, ignore_eos=True),
        GraphKey("prefill", WHOLE_CHUNK, 1),
    )
    lengths = [WHOLE_CHUNK] * WHOLE_CAPTURED_AT + [1999, 1301, 700, 3001]
    with LLM(path, "cuda") as one:
        prompts = [
            ids[:length] for ids, length in zip(random_prompts(one, len(lengths), 4000), lengths, strict=True)
        ]
        wanted = [each.tokens for each in one.generate(prompts, params)]
        logits = one.runner.logits(prompts[-4], 0, "prefill")[-9:].clone()
    with LLM(path, "cuda", tensor_parallel=2) as shared:
        graphs = shared.runner.graphs
        assert isinstance(graphs, CudaGraphs) and graphs.whole_chunks
        assert [each.tokens for each in shared.generate(prompts, params)] == wanted
        assert key in graphs.captured
        found = shared.runner.logits(prompts[-4], 0, "prefill")[-9:].clone()
        assert nmse(found, logits) < 1e-5
