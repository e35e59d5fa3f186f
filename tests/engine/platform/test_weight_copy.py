"""Weights copied out of the mapped file: the same bytes, in one piece of memory, and the same text."""

import re
from itertools import pairwise
from pathlib import Path

import torch

from quengine import LLM, SamplingParams
from quengine.models.checkpoint import open_checkpoint
from quengine.platform.weight_copy import HUGE_PAGE, copy_weights
from tests.tiny_models import write_tiny


def resident(path: Path) -> int:
    """KiB of a mapped file that this process has in memory, as Linux counts them."""
    mappings = re.split(
        r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE
    )
    ours = [mapping for mapping in mappings if mapping.partition("\n")[0].endswith(str(path))]
    return sum(int(re.search(r"^Rss: +(\d+)", mapping, re.MULTILINE)[1]) for mapping in ours)  # type: ignore[index]


def test_copies_are_the_same_bytes_in_one_piece_of_memory_and_the_files_pages_are_let_go(
    tmp_path: Path,
) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", kind="Q4_0")
    checkpoint = open_checkpoint(path)
    told: list[str] = []
    copies = copy_weights(checkpoint.tensors, checkpoint.release_pages, told.append)
    assert resident(path) == 0
    assert list(copies) == list(checkpoint.tensors) and told
    places = []
    for name, tensor in checkpoint.tensors.items():
        copy = copies[name]
        assert copy.data.dtype == tensor.data.dtype and torch.equal(copy.data, tensor.data)
        assert (copy.name, copy.format, copy.shape) == (tensor.name, tensor.format, tensor.shape)
        assert copy.data.data_ptr() != tensor.data.data_ptr() and copy.data.data_ptr() % 64 == 0
        places.append((copy.data.data_ptr(), copy.data.nbytes))
    assert places[0][0] % HUGE_PAGE == 0
    for (start, nbytes), (following, _) in pairwise(places):
        assert start + nbytes <= following < start + nbytes + 64
    assert resident(path) > 0  # comparing has read it again
    checkpoint.close()


def test_text_is_the_same_from_a_copy(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", kind="Q8_0")
    params = SamplingParams(seed=3, max_tokens=20, ignore_eos=True)
    texts = []
    for mmap in (True, False):
        with LLM(path, "cpu", threads=1, mmap=mmap) as llm:
            texts.append(llm.generate("a cat", params)[0].tokens)
    assert texts[0] == texts[1]
