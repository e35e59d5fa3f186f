"""The expert operations of layers whose experts are in host memory, for a decoder on a CUDA device.

A launch sends a layer's rows and their routing to the host. The device then computes the experts that it holds, those
used most, while the CPU computes the others, on the weights as stored; another launch waits for the CPU's sums and adds
them. Rows, not weights, cross the bus: 8 bytes per column and token. Where the device holds no experts, the CPU
computes all. Long prompts use all experts: for them the weights cross the bus instead (prompt_experts.py).

The kernels of a captured step are a CUDA graph on the device and one list on the CPU (`recording`). In other steps each
layer's kernels are launched when the decoder comes to the layer. A row's sum adds its experts on the device, in
ascending order, then the residual, then the sum of its other experts, in ascending order. Its last bits therefore
depend on where its experts are; in decode by about 1e-8, to which the CPU and the device agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quengine.kernels.backend import Hidden
from quengine.kernels.cpu.backend import CpuBackend
from quengine.kernels.cpu.moe.experts import CpuExperts
from quengine.kernels.cpu.runtime.threads import Launch, Program
from quengine.kernels.cpu.step_inputs import RunInputs
from quengine.kernels.cpu.step_recorder import Buffers, StepRecorder
from quengine.kernels.cuda.backend import CudaBackend, stream_of
from quengine.kernels.cuda.moe.exchange import add_sums, send_rows
from quengine.kernels.cuda.moe.expert_weights import ExpertWeights
from quengine.kernels.cuda.moe.experts import GatedRows
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.glu import Activation
from quengine.kernels.layer_norm import Norm
from quengine.kernels.moe.exchange import Exchange
from quengine.kernels.moe.expert_counts import ExpertCounts
from quengine.kernels.moe.held_experts import most_used
from quengine.kernels.moe.router import Routing
from quengine.kernels.offload.device_experts import DeviceExperts
from quengine.kernels.offload.follower import FOLLOWER, Work
from quengine.kernels.offload.matrices import LayerMatrices, Matrices
from quengine.kernels.offload.pinned import PinnedMemory
from quengine.kernels.offload.prompt_experts import STREAMED_ROWS, PromptExperts
from quengine.kernels.offload.replacing import Replacing
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.rms_norm import RMSNorm


@dataclass(frozen=True)
class SentRows:
    """Rows that the host computes: `tokens` of them, for `gate_up` and its activation. gated, routing: results and
    places of the experts on the device; None: it holds none."""

    tokens: int
    gate_up: CpuExperts
    activation: Activation
    gated: GatedRows | None
    routing: Routing | None


@dataclass(frozen=True)
class StreamedRows:
    """Rows of a prompt for which the device computes all experts. gated: what `down` multiplies."""

    gated: GatedRows
    down: ExpertWeights


class SplitExperts:
    """The experts of a decoder's first `layers` layers, between `device` and `host`.

    Args:
        rows: most rows of a step.
        width: of the residual stream.
        used: experts of a row.
        count: experts of a layer.
        held: how many experts of each layer the device holds; 0: none.
        streams: whether the experts of long prompts pass through the device.
    """

    def __init__(
        self,
        device: CudaBackend,
        host: CpuBackend,
        layers: int,
        rows: int,
        width: int,
        used: int,
        count: int,
        held: int = 0,
        streams: bool = False,
    ) -> None:
        self.device, self.host, self.layers, self.held = device, host, layers, min(held, count)
        self.streams = streams
        self.exchange = Exchange.allocate(rows, width, used, device.device)
        self.uses = torch.zeros(layers, count, dtype=torch.int32, device=device.device)
        self.on_device: dict[int, DeviceExperts] = {}
        self.of_file: dict[int, LayerMatrices] = {}
        self.prompts: PromptExperts | None = None
        self._pinned: PinnedMemory | None = None
        self.replacing = Replacing(self.on_device, self.uses)
        self._buffers: Buffers = {("branch", width): self.exchange.sums}
        self._recorded: list[Launch] | None = None
        self._unanswered = False

    def of_layer(self, layer: int) -> LayerExperts:
        """The operations of a layer, which also load its experts."""
        return LayerExperts(self, layer)

    def between_steps(self, rows: int) -> None:
        """See `Replacing.between_steps`."""
        if self.held:
            self.replacing.between_steps(rows)

    @property
    def last_uses(self) -> list[list[int]] | None:
        """Uses of each layer's experts, as of the last look; None before it, or if the device holds no experts."""
        return self.replacing.last_uses

    def begin_loading(
        self, stored: Iterable[QuantTensor], uses: Sequence[Sequence[int]] | None = None
    ) -> None:
        """Page-locks the experts in host memory, `stored`, if they are to be copied to a CUDA device. uses: `last_uses`
        of an earlier run; the device begins with the experts used most."""
        if uses is not None:
            self.replacing.begin_with(torch.tensor(uses, dtype=torch.int32))
        if (self.held or self.streams) and self.device.device.type == "cuda":
            self._pinned = PinnedMemory(each.data for each in stored)
            self.streams &= self._pinned.whole

    def end_loading(self) -> None:
        """Reserves device memory for the experts of long prompts, if these pass through the device."""
        tables = (
            matrices.tables(self.device.device)
            for layer in self.of_file.values()
            for matrices, _ in layer.parts
        )
        if self.streams and self.of_file and all(table is not None for table in tables):
            self.prompts = PromptExperts(self.of_file, self.device.device)

    @property
    def counts(self) -> ExpertCounts:
        """See `Replacing.counts`."""
        return self.replacing.counts

    @contextmanager
    def recording(self) -> Iterator[list[Launch]]:
        """Within this context the CPU's kernels of decode steps are listed, not run. The caller that launches the
        device's kernels runs them (`followed`)."""
        launches = list[Launch]()
        self._recorded = launches
        try:
            yield launches
        finally:
            self._recorded = None

    def followed(self, replay: Callable[[], None], launches: Sequence[Launch]) -> Callable[[], None]:
        """A call that replays a captured step on the device and runs its `launches` on the CPU, without waiting."""
        program = Program(launches)

        def follow() -> None:
            try:
                program.run()
            except BaseException:
                self._give_up()
                raise

        def run() -> None:
            self._settle()
            work = Work(follow)
            try:
                with FOLLOWER.launching:
                    FOLLOWER.start(work)
                    replay()
            except BaseException:  # an interrupt, too, which comes mostly while the step before is computed
                if not work.withdraw():
                    self.exchange.stopped.fill_(1)  # until `_settle`
                self._unanswered = True
                raise

        return run

    def begin_exchange(self) -> None:
        """Called before rows are sent: until their sums are computed, the counts of the two sides may differ."""
        if self._recorded is None:
            self._settle()
            self._unanswered = True

    def _settle(self) -> None:
        """Makes the counts of both sides equal after a step that ended early (for lack of device memory, say) or whose
        sums came too late. A caller that wants the step's tokens computes it again."""
        if not self._unanswered and not self.exchange.given_up.item():
            return
        FOLLOWER.finish()
        if self.device.device.type == "cuda":
            torch.cuda.synchronize(self.device.device)
        for count in (self.exchange.taken, self.exchange.summed):
            count.copy_(self.exchange.sent)
        self.exchange.stopped.fill_(0)
        self.exchange.given_up.fill_(0)
        self._unanswered = False

    def _give_up(self) -> None:
        """Lets the device find NaN at once, instead of waiting for each layer's sums."""
        self._unanswered = True
        self.exchange.sums.fill_(float("nan"))
        self.exchange.summed.fill_(torch.iinfo(torch.int64).max)

    def compute(self, sent: SentRows, down: CpuExperts, phase: str) -> None:
        """Has the CPU write the sums of `sent` rows; within `recording`, lists a decode step's kernels instead."""
        if phase == "prefill":
            FOLLOWER.call(lambda: self._compute_prompt(sent, down))
            self._unanswered = False
            return
        launches = self._decode_launches(sent, down)
        if self._recorded is None:
            FOLLOWER.call(Program(launches).run)
            self._unanswered = False
        else:
            self._recorded += launches

    def _decode_launches(self, sent: SentRows, down: CpuExperts) -> list[Launch]:
        step = StepRecorder(sent.tokens, RunInputs(sent.tokens, 1, 1), self._buffers)
        rows, routing = self._received(sent.tokens)
        step.await_rows(self.exchange)
        gated = step.experts_glu(rows, None, routing, sent.gate_up, sent.activation)
        sums = step.experts_add(gated, routing, down, None)
        assert sums.data_ptr() == self.exchange.sums.data_ptr()
        step.sums_ready(self.exchange)
        return [launch for stage in step.stages for launch in stage.launches()]

    def _compute_prompt(self, sent: SentRows, down: CpuExperts) -> None:
        """Computes the sums of a prompt's rows in the calling thread."""
        rows, routing = self._received(sent.tokens)
        batch = ForwardBatch("prefill", routing.experts[:, 0], routing.experts[:, 0], routing.experts[None])
        waiting = StepRecorder(1, RunInputs(1, 1, 1))
        waiting.await_rows(self.exchange)
        waiting.run()
        gated = self.host.experts_glu(batch, rows, None, routing, sent.gate_up, sent.activation)
        self.exchange.sums[: sent.tokens] = self.host.experts_add(batch, gated, routing, down, None)
        done = StepRecorder(1, RunInputs(1, 1, 1))
        done.sums_ready(self.exchange)
        done.run()

    def _received(self, tokens: int) -> tuple[Tensor, Routing]:
        """The rows that the host gets, and their routing: new tensor objects, since the values are new."""
        exchange = self.exchange
        return exchange.rows[:tokens], Routing(exchange.experts[:tokens], exchange.weights[:tokens])

    def close(self) -> None:
        """Ends the CPU's wait for rows, since the device sends no more; from then on nothing reads the file."""
        self.exchange.stopped.fill_(1)
        FOLLOWER.finish()
        try:
            if self.device.device.type == "cuda":
                torch.cuda.synchronize(self.device.device)
        finally:
            self.prompts = None
            if self._pinned is not None:
                self._pinned.release()


class LayerExperts:
    """The expert operations of kernels.backend.Backend for layer number `layer` of `experts`."""

    def __init__(self, experts: SplitExperts, layer: int) -> None:
        self.experts, self.layer = experts, layer
        self.on_device: DeviceExperts | None = None
        self._gate_up: Matrices | None = None

    def gate_up_experts(
        self, gate: Sequence[QuantTensor] | None, up: Sequence[QuantTensor], bias: Tensor | None = None
    ) -> CpuExperts:
        self._gate_up = Matrices(gate, up, _on_host(bias))
        return self.experts.host.gate_up_experts(gate, up, _on_host(bias))

    def down_experts(self, down: Sequence[QuantTensor], bias: Tensor | None = None) -> CpuExperts:
        assert self._gate_up is not None
        experts = self.experts
        if experts.held or experts.streams:
            matrices = Matrices(None, down, _on_host(bias))
            made = LayerMatrices.of(self._gate_up, matrices, experts.device.device)
            experts.of_file[self.layer] = made
        if experts.held:
            uses = experts.uses[self.layer]
            self.on_device = DeviceExperts(made, most_used(uses.tolist(), experts.held), uses)
            experts.on_device[self.layer] = self.on_device
        return self.experts.host.down_experts(down, _on_host(bias))

    def experts_glu(
        self,
        batch: ForwardBatch,
        x: Hidden,
        norm: RMSNorm | None,
        routing: Routing,
        gate_up: CpuExperts,
        activation: Activation = "silu",
    ) -> SentRows | StreamedRows:
        device, held = self.experts.device, self.on_device
        prompts = self.experts.prompts
        if prompts is not None and batch.phase == "prefill" and len(routing.experts) >= STREAMED_ROWS:
            self._count(routing)
            weights, down = prompts.weights(self.layer)
            return StreamedRows(device.experts_glu(batch, x, norm, routing, weights, activation), down)
        rows = stream_of(x) if norm is None else device.normed(x, norm)
        own = None if held is None else held.held
        self.experts.begin_exchange()
        places = send_rows(rows, routing, batch.positions, own, self.experts.exchange, device.pdl)
        if held is None or places is None:
            return SentRows(len(rows), gate_up, activation, None, None)
        there = replace(routing, experts=places)
        gated = device.experts_glu(batch, x, norm, there, held.gate_up, activation)
        return SentRows(len(rows), gate_up, activation, gated, there)

    def experts_add(
        self,
        batch: ForwardBatch,
        gated: SentRows | StreamedRows,
        routing: Routing,
        down: CpuExperts,
        residual: Hidden | None,
        next_norm: Norm | None = None,
        *,
        partial: bool = False,
    ) -> Hidden:
        assert not partial, "ranks exchange rows with their hosts by copies"
        experts, device, held = self.experts, self.experts.device, self.on_device
        if isinstance(gated, StreamedRows):
            return device.experts_add(batch, gated.gated, routing, gated.down, residual, next_norm)
        if held is not None:
            assert gated.gated is not None and gated.routing is not None
            total = stream_of(
                device.experts_add(batch, gated.gated, gated.routing, held.down, residual, None)
            )
        elif residual is None:
            total = torch.zeros_like(experts.exchange.sums[: gated.tokens], device=device.device)
        else:
            total = stream_of(residual).contiguous()
        experts.compute(gated, down, batch.phase)
        return add_sums(total, experts.exchange, device.pdl)

    def _count(self, routing: Routing) -> None:
        """Counts uses, as `send_rows` does."""
        if self.on_device is not None:
            uses = self.on_device.held.uses
            experts = (
                routing.experts.flatten()
            )  # added without the copy to the host that torch.bincount makes
            uses.index_add_(0, experts, torch.ones_like(experts))


def _on_host(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.to("cpu", torch.float32)
