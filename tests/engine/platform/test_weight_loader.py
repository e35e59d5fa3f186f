"""Reading ahead of the decoder: every byte arrives whatever the order, bounded, and failures are not lost.

Weights copied out of the mapped file: the same bytes, in one piece of memory, and the same text.
"""

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quengine import LLM, SamplingParams
from quengine.kernels.block_formats import FORMATS
from quengine.kernels.quant_tensor import QuantTensor
from quengine.models.checkpoint import open_checkpoint
from quengine.platform import weight_loader
from quengine.platform.weight_loader import HUGE_PAGE, CudaTransfer, WeightLoader, copy_weights, progress_text
from tests.tiny_models import write_tiny


class Done:
    def synchronize(self) -> None: ...


class HostTransfer:
    """Copies within the host's memory, and remembers what it made room for and handed over."""

    def __init__(self) -> None:
        self.rooms: list[Tensor] = []
        self.handed: list[tuple[Tensor, int]] = []
        self.trims: list[int] = []

    def room_for(self, data: Tensor) -> Tensor:
        self.rooms.append(torch.zeros_like(data))
        return self.rooms[-1]

    def sender(self) -> Callable[[Tensor, Tensor], Done]:
        def send(source: Tensor, target: Tensor) -> Done:
            target.copy_(source)
            return Done()

        return send

    def hand_over(self, data: Tensor, marks: list[weight_loader.Mark]) -> None:
        self.handed.append((data, len(marks)))

    def trim(self) -> None:
        self.trims.append(len(self.handed))


def tensors(count: int = 6, rows: int = 40) -> dict[str, QuantTensor]:
    """Q8_0 matrices of 40 x 64, 2720 bytes each, and a vector behind each."""
    numbers = torch.Generator().manual_seed(0)
    made = {}
    for i in range(count):
        data = torch.randint(0, 256, (rows, 68), dtype=torch.uint8, generator=numbers)
        made[f"m{i}"] = QuantTensor(f"m{i}", FORMATS["Q8_0"], (rows, 64), data)
        vector = torch.randint(0, 256, (1, 256), dtype=torch.uint8, generator=numbers)
        made[f"v{i}"] = QuantTensor(f"v{i}", FORMATS["F32"], (64,), vector)
    return made


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several pieces a tensor, and less than two tensors ahead."""
    monkeypatch.setattr(weight_loader, "PIECE", 1000)
    monkeypatch.setattr(weight_loader, "AHEAD", 4000)


@pytest.mark.parametrize("order", ["file", "reversed", "shuffled"])
def test_every_byte_arrives_in_whatever_order_the_tensors_are_asked_for(order: str) -> None:
    source, transfer = tensors(), HostTransfer()
    names = list(source)
    if order == "reversed":
        names.reverse()
    if order == "shuffled":
        names = [
            names[i] for i in torch.randperm(len(names), generator=torch.Generator().manual_seed(3)).tolist()
        ]
    with WeightLoader(source, transfer, 0, None) as loader:
        taken = {name: loader[name] for name in names}
    for name, tensor in source.items():
        assert torch.equal(taken[name].data, tensor.data)
        assert (taken[name].shape, taken[name].format, taken[name].name) == (
            tensor.shape,
            tensor.format,
            name,
        )
    assert sorted(marks for _, marks in transfer.handed) == [3] * 6
    assert {id(data) for data, _ in transfer.handed} == {id(room) for room in transfer.rooms}


def test_vectors_stay_where_they_are() -> None:
    source, transfer = tensors(), HostTransfer()
    with WeightLoader(source, transfer, 0, None) as loader:
        assert loader["v2"] is source["v2"]
        assert loader["m2"].data is not source["m2"].data


def test_no_more_is_fetched_ahead_than_the_bound_and_one_tensor() -> None:
    source, transfer = tensors(20), HostTransfer()
    with WeightLoader(source, transfer, 0, None) as loader:
        for taken in range(20):
            assert len(transfer.rooms) - taken <= 2
            loader[f"m{taken}"]


def test_unused_memory_is_given_back_as_bytes_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_loader, "TRIM_EVERY", 3 * 2720)
    source, transfer = tensors(9), HostTransfer()
    with WeightLoader(source, transfer, 0, None) as loader:
        for name in source:
            loader[name]
    assert transfer.trims == [2, 5, 8]


def test_it_answers_as_a_mapping_and_twice_for_one_name() -> None:
    source = tensors(2)
    with WeightLoader(source, HostTransfer(), 0, None) as loader:
        assert list(loader) == list(source)
        assert len(loader) == 4
        assert "m1" in loader
        assert "m9" not in loader
        first, again = loader["m0"], loader["m0"]
        assert torch.equal(first.data, again.data)
        with pytest.raises(KeyError):
            loader["m9"]


def test_leaving_early_stops_the_threads() -> None:
    with pytest.raises(ZeroDivisionError), WeightLoader(tensors(), HostTransfer(), 0, None) as loader:
        threads = loader._threads
        raise ZeroDivisionError
    assert not any(thread.is_alive() for thread in threads)


def test_what_goes_wrong_in_a_thread_reaches_whoever_waits() -> None:
    class Broken(HostTransfer):
        def room_for(self, data: Tensor) -> Tensor:
            raise torch.OutOfMemoryError(f"no room for {data.numel()} bytes")

    with (
        WeightLoader(tensors(), Broken(), 0, None) as loader,
        pytest.raises(torch.OutOfMemoryError, match="no room"),
    ):
        loader["m0"]


def test_progress_tells_bytes_and_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert progress_text(2**30, 4 * 2**30, 0.5) == "loading weights: 1.00 of 4.00 GiB, 2.1 GB/s"
    monkeypatch.setattr(weight_loader, "_REPORT_EVERY", 0.0)
    told: list[str] = []
    with WeightLoader(tensors(), HostTransfer(), 6 * 2720, told.append) as loader:
        for i in range(6):
            loader[f"m{i}"]
    assert len(told) == 6
    assert all(line.startswith("loading weights: ") for line in told)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_bytes_arrive_on_a_gpu_through_reused_pinned_memory() -> None:
    device, source = torch.device("cuda"), tensors(40, rows=400)
    with WeightLoader(source, CudaTransfer(device), 0, None) as loader:
        for name, tensor in source.items():
            taken = loader[name]
            assert taken.data.is_cuda == name.startswith("m")
            assert torch.equal(taken.data.cpu(), tensor.data)


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
