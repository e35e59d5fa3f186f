"""Experts in host memory, some of them on the device too: logits are the definition's, wherever experts are."""

import time
from collections.abc import Callable
from threading import Event

import pytest
import torch

from quengine.kernels.cpu.backend import CpuBackend
from quengine.kernels.cpu.moe.exchange import await_rows_launch, sums_ready_launch
from quengine.kernels.cpu.runtime.threads import Launch, Program
from quengine.kernels.cuda import backend as cuda_backend
from quengine.kernels.cuda.backend import CudaBackend
from quengine.kernels.cuda.moe.exchange import add_sums
from quengine.kernels.cuda.weights.packed import PackedPart
from quengine.kernels.forward_batch import decode_batch
from quengine.kernels.moe.expert_counts import ExpertCounts
from quengine.kernels.moe.held_experts import Replacement
from quengine.kernels.offload import matrices, split_experts
from quengine.kernels.offload.follower import FOLLOWER, Work
from quengine.kernels.offload.matrices import ExpertPlaces, Matrices
from quengine.kernels.offload.split_experts import SplitExperts
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.reference import ReferenceBackend
from quengine.kv_cache import KVCache
from quengine.models.decoder import Decoder
from tests.forward import forward
from tests.kernels.cuda.moe.test_moe_decoder import IDS, model
from tests.kernels.cuda.weights import nmse

ROWS = 8
DECODED = ([5, 17], [0, 0], [[[1]], [[2]]])
"""Tokens, positions and block tables of a step of decode."""


@pytest.fixture(autouse=True)
def without_dependent_launch(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cpu":
        monkeypatch.setattr(cuda_backend, "has_dependent_launch", lambda _device: False)


class Split:
    """A decoder on the device with experts in host memory, `held` of each layer on the device."""

    def __init__(
        self,
        name: str,
        kind: str,
        device: torch.device,
        held: int,
        tensors: dict[str, QuantTensor] | None = None,
        streams: bool = False,
        uses: list[list[int]] | None = None,
    ) -> None:
        self.config, made = model(name, kind)
        self.tensors = tensors or made
        assert self.config.experts is not None
        backend, width = CudaBackend(device), self.config.embedding_length
        layers, used = self.config.block_count, self.config.experts.router.used
        count = self.config.experts.count
        self.experts = SplitExperts(backend, CpuBackend(2), layers, ROWS, width, used, count, held, streams)
        if device.type == "cpu" or uses is not None:
            self.experts.begin_loading([], uses)
        self.decoder = Decoder(self.config, self.tensors, backend, 32, 32, self.experts)
        self.experts.end_loading()

    def logits(self, chunks: list[int]) -> torch.Tensor:
        return logits(self.decoder, chunks)

    def exact(self, chunks: list[int]) -> torch.Tensor:
        return logits(Decoder(self.config, self.tensors, ReferenceBackend(keep=True), 32, 32), chunks)

    def replace(self, changes: list[Replacement]) -> None:
        """In all layers."""
        for layer in self.experts.on_device.values():
            layer.begin(changes)
            layer.copy(changes)
            layer.end(changes)


def logits(decoder: Decoder, chunks: list[int]) -> torch.Tensor:
    cache = KVCache.allocate(decoder.config, 32, decoder.backend.device)
    parts, start = [], 0
    for length in chunks:
        parts.append(forward(decoder, IDS[start : start + length], cache.layers, start, all_logits=True))
        start += length
    return torch.cat(parts).cpu()


@pytest.mark.parametrize(
    ("name", "kind", "chunks", "held"),
    [
        ("dense layer first", "Q8_0", [1, 1], 0),
        ("dense layer first", "Q8_0", [3, 1], 2),
        ("dense layer first", "Q8_0", [3, 1], 1),
        ("biases, clamped", "F16", [3, 1], 2),
        ("biases, clamped", "Q8_0", [1, 1], 3),
        ("weighed inputs", "Q8_0", [3, 1], 1),
        ("a shared expert", "Q8_0", [3, 1], 4),
    ],
)
def test_a_decoder_is_the_reference(
    name: str, kind: str, chunks: list[int], held: int, device: torch.device
) -> None:
    split = Split(name, kind, device, held)
    assert nmse(split.logits(chunks), split.exact(chunks)) < (1e-6 if chunks[0] == 1 else 5e-5)


def test_replaced_experts_are_those_of_the_file(device: torch.device) -> None:
    split = Split("dense layer first", "Q8_0", device, 2)
    before = split.logits([1, 1])
    split.replace([Replacement(0, 0, 3), Replacement(1, 1, 2)])
    held = list(split.experts.on_device.values())
    assert held and all(each.experts == [3, 2] for each in held)
    assert [each.held.places.tolist() for each in held] == [[2, 2, 1, 0]] * len(held)
    after = split.logits([1, 1])
    assert nmse(after, split.exact([1, 1])) < 1e-6 and nmse(after, before) < 1e-6
    assert not torch.equal(after, before)


def followed_step(
    split: Split, results: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> tuple[Callable[[], None], torch.Tensor]:
    """A call of a step that the CPU follows, whose logits it appends to `results`; and what they are. In place of a
    captured step it is the step itself, which waits for the sums of the list's thread."""
    cache = KVCache.allocate(split.config, 96, split.experts.device.device).layers
    batch = decode_batch(*DECODED, split.experts.device.device)
    expected = split.decoder.forward(batch, cache).cpu().clone()
    exchange, launches = split.experts.exchange, list[Launch]()

    def step() -> torch.Tensor:
        with split.experts.recording() as made:
            logits = split.decoder.forward(batch, cache)
        launches[:] = made
        return logits

    with monkeypatch.context() as without_sums:
        without_sums.setattr(split_experts, "add_sums", lambda total, *_: total)
        step()
    for counts in (exchange.counts, exchange.launches):
        counts.zero_()
    return split.experts.followed(lambda: results.append(step().cpu().clone()), list(launches)), expected


def test_the_cpus_list_follows_a_captured_step(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    results = list[torch.Tensor]()
    run, expected = followed_step(Split("dense layer first", "Q8_0", device, 2), results, monkeypatch)
    for _ in range(3):
        run()
    assert len(results) == 3 and all(torch.equal(each, expected) for each in results)


def test_steps_go_on_after_one_whose_sums_came_too_late(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a process that was stopped for a minute."""
    monkeypatch.setattr(split_experts, "add_sums", lambda *given: add_sums(*given, polls=100))
    split, goes_on, results = Split("dense layer first", "Q8_0", device, 2), Event(), list[torch.Tensor]()
    run, expected = followed_step(split, results, monkeypatch)
    with monkeypatch.context() as stopped:
        compute = Program.run

        def late(program: Program) -> None:
            goes_on.wait()
            compute(program)

        stopped.setattr(Program, "run", late)
        run()
        goes_on.set()
        FOLLOWER.finish()
    assert results[0].isnan().all() and split.experts.exchange.given_up.item() == 1
    monkeypatch.setattr(split_experts, "add_sums", add_sums)
    run()
    assert torch.equal(results[1], expected) and split.experts.exchange.given_up.item() == 0


def test_held_experts_are_loaded_some_at_a_time(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, at_once = Split("dense layer first", "Q8_0", device, 3).logits([1]), list[int]()
    load = ExpertPlaces._load

    def counted(places: ExpertPlaces, of_file: Matrices, experts: list[int], at: list[int]) -> None:
        at_once.append(len(experts))
        load(places, of_file, experts, at)

    monkeypatch.setattr(ExpertPlaces, "_load", counted)
    monkeypatch.setattr(matrices, "_BYTES_AT_A_TIME", 1)
    assert torch.equal(Split("dense layer first", "Q8_0", device, 3).logits([1]), expected)
    assert at_once == [1] * 6


def test_steps_go_on_after_one_that_ended_early(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one for which the device has no memory, after its rows were sent, and one that it does not replay."""
    split = Split("dense layer first", "Q8_0", device, 2)
    if device.type == "cpu":
        monkeypatch.setattr(split_experts, "add_sums", lambda *given: add_sums(*given, polls=100))
    expected = split.logits([1, 3])

    def fails(*_given: object, **_named: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    for chunks in ([1], [3]):
        with monkeypatch.context() as full, pytest.raises(torch.OutOfMemoryError):
            full.setattr(split.experts.device, "experts_add", fails)
            split.logits(chunks)
        assert torch.equal(split.logits([1, 3]), expected)
    launches = [await_rows_launch(split.experts.exchange), sums_ready_launch(split.experts.exchange)]
    with pytest.raises(torch.OutOfMemoryError):
        split.experts.followed(fails, launches)()
    assert torch.equal(split.logits([1, 3]), expected)


def test_an_interrupt_before_a_step_begins_leaves_the_one_before_alone(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is withdrawn, while the thread is still at the step before."""
    split, ends, done = Split("dense layer first", "Q8_0", device, 2), Event(), list[int]()
    exchange = split.experts.exchange
    FOLLOWER.start(Work(lambda: (ends.wait(), done.append(int(exchange.stopped)))))

    def interrupted(work: Work) -> None:
        FOLLOWER._put(work)
        raise KeyboardInterrupt

    with monkeypatch.context() as pressed, pytest.raises(KeyboardInterrupt):
        pressed.setattr(FOLLOWER, "start", interrupted)
        split.experts.followed(lambda: None, [await_rows_launch(exchange)])()
    ends.set()
    FOLLOWER.finish()
    assert done == [0] and int(exchange.taken) == 0


def test_the_device_does_not_wait_for_a_step_that_failed(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = Split("dense layer first", "Q8_0", device, 2)
    expected, exchange = split.logits([1, 3]), split.experts.exchange
    monkeypatch.setattr(split_experts.Program, "run", lambda _program: 1 // 0)
    split.experts.followed(FOLLOWER.finish, [await_rows_launch(exchange)])()
    assert int(exchange.summed) > 2**62 and bool(exchange.sums.isnan().all())
    monkeypatch.undo()
    assert torch.equal(split.logits([1, 3]), expected)


def test_nothing_reads_the_file_once_experts_are_closed(device: torch.device) -> None:
    split, ended = Split("dense layer first", "Q8_0", device, 2), list[bool]()

    def reads() -> None:
        while not int(split.experts.exchange.stopped):
            time.sleep(0.001)
        time.sleep(0.05)
        ended.append(True)

    FOLLOWER.start(Work(reads))
    split.experts.close()
    assert ended == [True]


def test_the_thread_outlives_work_that_fails() -> None:
    FOLLOWER.start(Work(lambda: 1 // 0))
    assert FOLLOWER.call(lambda: 2) == 2


def test_uses_raise_the_share_of_experts_on_the_device(device: torch.device) -> None:
    """A router that prefers the last experts, where the device has the first at the start."""
    split = Split("dense layer first", "Q8_0", device, 2)
    experts, layers = split.experts, sorted(split.experts.on_device)
    assert layers == [1]
    (held,) = experts.on_device.values()
    bias = torch.tensor([0.0, 0.0, 9.0, 9.0], device=device)
    router = split.decoder.blk[1].ffn.router
    object.__setattr__(router, "bias", bias)
    seen = list[ExpertCounts]()
    for _ in range(12):
        split.logits([1, 1, 1, 1])
        experts.between_steps(512)
        seen.append(experts.counts)
        first, last = next((counts for counts in seen if counts.host_uses), None), seen[-1]
        if first and last.replaced == 2 and last.device_uses > last.host_uses - first.host_uses:
            break
    else:
        pytest.fail(f"after {seen} experts are where they were")
    assert first.hits == 0.0 and first[:2] == (2, 2) and sorted(held.experts) == [2, 3]
    assert held.held.places.tolist()[:2] == [2, 2]
    before = split.logits([1, 1])
    assert nmse(before, split.logits([2])) < 1e-5
    uses = experts.last_uses
    assert uses is not None and uses[0] == [0] * 4
    again = Split("dense layer first", "Q8_0", device, 2, uses=uses)
    assert [sorted(layer.experts) for layer in again.experts.on_device.values()] == [[2, 3]]


def test_a_layers_scale_covers_experts_that_are_not_there_yet(device: torch.device) -> None:
    split = Split("dense layer first", "Q8_0", device, 2)
    data = split.tensors["blk.1.ffn_up_exps.weight"].matrices()[3].data
    blocks = data.view(len(data), -1, 34)
    blocks[:, :, :2] = (blocks[:, :, :2].contiguous().view(torch.float16) * 64).view(torch.uint8)
    again = Split("dense layer first", "Q8_0", device, 2, split.tensors)
    (before,), (after,) = (list(each.experts.on_device.values()) for each in (split, again))
    (part,), (scaled,) = before.gate_up.parts, after.gate_up.parts
    assert isinstance(part, PackedPart) and isinstance(scaled, PackedPart)
    assert scaled.weight_scale < part.weight_scale and scaled.norm > part.norm
    again.replace([Replacement(0, 0, 3)])
    assert nmse(again.logits([1, 1]), again.exact([1, 1])) < 1e-6


@pytest.mark.parametrize(("name", "kind"), [("dense layer first", "Q8_0"), ("biases, clamped", "Q8_0")])
def test_experts_of_long_prompts_pass_through_the_device(
    name: str, kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bits of a model that is on the device as a whole; a short prompt's rows go to the CPU."""
    monkeypatch.setattr(split_experts, "STREAMED_ROWS", 3)
    split = Split(name, kind, device, 2, streams=True)
    assert split.experts.prompts is not None
    whole = Decoder(split.config, split.tensors, CudaBackend(device), 32, 32)
    sent = split.experts.exchange.sent
    for _ in range(2):
        before = int(sent)
        assert torch.equal(split.logits([4])[:3], logits(whole, [4])[:3])
        assert int(sent) == before
    assert nmse(split.logits([2, 2]), split.exact([2, 2])) < 5e-5 and int(sent) > before
    uses = sum(int(layer.held.uses.sum()) for layer in split.experts.on_device.values())
    assert uses > 0
    split.experts.close()
