"""A model on a device that is not CUDA's current one."""

import threading

import pytest
import torch

from quengine.llm import LLM
from quengine.models.synthetic.synthetic import write_synthetic
from quengine.request.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def test_the_second_gpu_gives_the_tokens_of_the_first_in_every_thread(tmp_path):
    model = write_synthetic(tmp_path / "tiny.gguf", "tiny")
    params = SamplingParams(max_tokens=16, temperature=0.0)
    with LLM(model, "cuda:0", ctx_size=256) as llm:
        wanted = llm.generate("one two", params)[0].tokens
    held = torch.cuda.memory_allocated(0)
    with LLM(model, "cuda:1", ctx_size=256) as llm:
        found = [llm.generate("one two", params)[0].tokens]
        thread = threading.Thread(target=lambda: found.append(llm.generate("one two", params)[0].tokens))
        thread.start()
        thread.join()
        assert torch.cuda.memory_allocated(0) <= held < torch.cuda.memory_allocated(1)
    assert found == [wanted, wanted] and torch.cuda.current_device() == 0
