"""A model's weights on a device, and the runner of its steps."""

import logging
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quengine.block_pool import CachePool
from quengine.config import DEFAULT_CHUNK, EngineConfig
from quengine.kernels.backend import Backend, LayerState
from quengine.kernels.lora.adapted import Adapted
from quengine.kernels.lora.low_rank import Adapters, AdapterShapes
from quengine.kernels.moe.host_experts import FollowedExperts, PlacedExperts
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.ranks.communicator import ONE_RANK, Communicator
from quengine.kv_cache import KVCache
from quengine.loading.expert_uses import read_uses
from quengine.loading.open_adapters import NONE_OPEN, OpenAdapters
from quengine.loading.placement import of_rank
from quengine.memory import gib
from quengine.model_runner import ModelRunner
from quengine.models.architectures import layers_of
from quengine.models.assistant_decoder import AssistantDecoder
from quengine.models.blocks.block import SlotState
from quengine.models.blocks.gated_delta import GatedDelta
from quengine.models.checkpoint import Checkpoint
from quengine.models.config import ModelConfig
from quengine.models.decoder import Decoder
from quengine.models.draft_decoder import DraftDecoder
from quengine.models.eagle_checkpoint import EagleCheckpoint, Fusion
from quengine.models.eagle_decoder import EagleDecoder
from quengine.models.fused_rows import FusedRows
from quengine.models.tensor_split import SplitTensors
from quengine.platform import cuda_start
from quengine.platform.host_experts import ROW_TABLE, ExpertPlacement, split_tensors
from quengine.platform.numa import spread_memory
from quengine.platform.weight_loader import CudaTransfer, WeightLoader
from quengine.speculative.draft_assistant import AssistantDrafts
from quengine.speculative.draft_eagle import EagleDrafts
from quengine.speculative.draft_length import draft_rows, draft_tokens
from quengine.speculative.draft_model import MOST_ROWS, DraftModel, DraftSteps, HostDraftSteps
from quengine.speculative.draft_mtp import MtpDrafts

if TYPE_CHECKING:
    from quengine.runners.compile_kernels import LayerPlan
    from quengine.runners.draft_graphs import DraftGraphs

logger = logging.getLogger("quengine.load")

REFERENCE_BYTES_A_WEIGHT = 8


@dataclass(frozen=True)
class Machine:
    """The device that models are loaded onto, and how.

    free: bytes of its memory that are free. experts: where the model's experts lie. layer: the layer or assistant that
    drafts from the model's hidden rows; None: nothing does. takes_images: prompts may have rows of images. adapters:
    the model's LoRA adapters.
    """

    config: EngineConfig
    device: torch.device
    threads: int
    free: int
    progress: Callable[[str], None] | None
    experts: ExpertPlacement
    layer: Checkpoint | None = None
    takes_images: bool = False
    adapters: OpenAdapters = NONE_OPEN

    def runner(
        self,
        checkpoint: Checkpoint,
        ctx_size: int,
        pools: Sequence[CachePool],
        communicator: Communicator = ONE_RANK,
        drafts: bool = False,
    ) -> ModelRunner:
        """Loads the weights, allocates the cache and returns the runner. drafts: `checkpoint` is a draft model."""
        config, device = self.config, self.device
        adapters = NONE_OPEN if drafts else self.adapters
        if device.type == "cpu":
            spread_memory()
        backend = make_backend(config, checkpoint, device, self.threads, self.free, adapters.weights)
        backend.communicator = communicator
        logger.debug("backend made")
        eagle = self.layer if isinstance(self.layer, EagleCheckpoint) else None
        keeps = self.layer is not None and eagle is None
        cache = KVCache.allocate(checkpoint.config, ctx_size, device, config.cache_type, pools, keeps)
        chunk_size = min(config.chunk_size or DEFAULT_CHUNK[device.type], ctx_size)
        if checkpoint.config.encoder is not None:
            return self._encoder_runner(checkpoint, backend, cache)
        captures = drafts or not self.experts.layers or communicator.size == 1
        if backend.name == "cuda" and captures:
            if communicator.rank == 0:
                self._compile_ahead(checkpoint, ctx_size, pools, chunk_size, drafts)
            else:
                _await_kernels(communicator)
        logger.debug("kernels looked for")
        on_host = backend.name == "cpu" or (self.experts.layers > 0 and not drafts)
        if on_host and self.progress is not None and communicator.size == 1:
            from quengine.runners import cpu_kernels

            cpu_kernels.compile_ahead(checkpoint, self.progress, experts_alone=backend.name != "cpu")
        experts = ExpertPlacement() if drafts else self.experts
        with _weights(checkpoint, device, config.mmap, self.progress, experts.layers) as tensors:
            host = self._host_experts(experts, checkpoint, backend)
            with _loading(host):
                decoder = Decoder(checkpoint.config, tensors, backend, ctx_size, chunk_size, host)
        if isinstance(backend, Adapted):
            adapters.check_taken(backend.end_loading())
        if eagle is None:
            decoder.kept = cache.hidden
        else:
            cache.keep_hidden(eagle.config.embedding_length, torch.float32, device)
            decoder.fused = self._fused(eagle, cache, backend)
        logger.debug("weights loaded")
        if self.experts.layers and not isinstance(host, FollowedExperts):
            return ModelRunner(decoder, cache)  # a step waits for the host: nothing to capture
        return _make_runner(config, decoder, cache, drafts, self.takes_images and not drafts)

    def _host_experts(
        self, experts: ExpertPlacement, checkpoint: Checkpoint, backend: Backend[Any]
    ) -> PlacedExperts | None:
        """The operations of the experts in host memory, whose weights a decoder will load; None if there are none."""
        if not experts.layers:
            return None
        chunk = self.config.chunk_size or DEFAULT_CHUNK[self.device.type]
        # Eager steps may have more rows than captured ones.
        rows = max(chunk, self.config.parallel, _graph_rows(self.config, drafts=False))
        host = experts.operations(backend, self.threads, checkpoint.config, rows)
        if isinstance(host, FollowedExperts):
            uses = read_uses(checkpoint.path, experts.layers, experts.experts) if experts.held else None
            # Tensors of the file: the loader hands out each of its own only once.
            stored, _ = split_tensors(checkpoint.tensors, experts.layers)
            host.begin_loading((each for name, each in stored.items() if name != ROW_TABLE), uses)
        return host

    def _fused(self, eagle: EagleCheckpoint, cache: KVCache, backend: Backend[Any]) -> FusedRows:
        """The part of an EAGLE-3 draft model that its target's steps compute."""
        assert cache.hidden is not None
        with _weights(eagle.fusion, self.device, self.config.mmap, self.progress, 0) as tensors:
            return FusedRows.load(eagle.fusion.layers, tensors, cache.hidden, backend)

    def _encoder_runner(self, checkpoint: Checkpoint, backend: Backend[Any], cache: KVCache) -> ModelRunner:
        """The runner of a model that computes whole texts, one in each step, eagerly."""
        from quengine.models.encoder import Encoder

        sizes, separator = checkpoint.config.encoder, None
        if sizes is not None and sizes.classes and sizes.token_types > 1 and not sizes.one_segment:
            separator = checkpoint.tokenizer().end_of_text
        with _weights(checkpoint, self.device, self.config.mmap, self.progress, 0) as tensors:
            encoder: Any = Encoder(
                checkpoint.config, tensors, backend, cache.ctx_size, separator, checkpoint.adapters()
            )
        return ModelRunner(encoder, cache, packs_prompts=False)

    def ranks(self, path: Path, part: Checkpoint, ctx_size: int, pools: Sequence[CachePool]) -> ModelRunner:
        """Loads rank 0 of a group, while the other ranks load their parts."""
        from quengine.parallel.group import RankGroup
        from quengine.parallel.wire import RankPlan

        def plan(number: int, meeting: str) -> RankPlan:
            options = of_rank(replace(self.config, device=self.device.type), number).values()
            options["draft_model"] = None if self.config.draft_model is None else str(self.config.draft_model)
            options["mmproj"], options["no_mmproj"] = "of rank 0" if self.takes_images else None, False
            count = self.config.ranks
            bounds = () if part.config.stage is None else part.config.stage.bounds
            return RankPlan(str(path), options, number, count, ctx_size, pools, self.threads, meeting, bounds)

        group = RankGroup(self.config.ranks)
        try:
            communicator = group.load(plan, self.device, self.config.deterministic)
            runner = self.runner(part, ctx_size, pools, communicator)
            group.wait_until_loaded()
        except BaseException:
            group.close()
            raise
        runner.lead(group)
        return runner

    def drafts_beside(
        self, target: ModelRunner, checkpoint: Checkpoint | None, pools: Sequence[CachePool]
    ) -> tuple[DraftModel | None, list[str]]:
        """Loads the model that drafts for `target`, if any; returns it with notes for the user. On an error the ranks
        of `target` end."""
        if checkpoint is None:
            return None, []
        ctx_size = target.cache.ctx_size
        drafts_ctx = min(ctx_size, checkpoint.config.context_length)
        draft_pools = [CachePool(pools[0].num_blocks) for _ in checkpoint.config.cache_groups]
        try:
            if isinstance(checkpoint, EagleCheckpoint):
                return self._drafts_of_eagle(target, checkpoint, draft_pools)
            if checkpoint.config.is_draft_layer:
                return self._drafts_of_layer(target, checkpoint, draft_pools)
            if checkpoint.config.target_width:
                return self._drafts_of_assistant(target, checkpoint)
            runner = self.runner(checkpoint, drafts_ctx, draft_pools, drafts=True)
            model = DraftModel(runner, self.draft_steps(runner, target))
        except BaseException:
            if target.ranks is not None:
                target.ranks.close()
            raise
        return model, [_draft_note(checkpoint, runner.cache, ctx_size)]

    def _drafts_of_layer(
        self, target: ModelRunner, layer: Checkpoint, pools: Sequence[CachePool]
    ) -> tuple[DraftModel, list[str]]:
        """As `drafts_beside`, for a layer of `target` itself."""
        config, ctx_size = self.config, target.cache.ctx_size
        cache = KVCache.allocate(layer.config, ctx_size, self.device, config.cache_type, pools)
        with _weights(layer, self.device, config.mmap, self.progress, 0) as tensors:
            decoder = DraftDecoder(layer.config, tensors, target.decoder, ctx_size)
        runner = self._draft_runner(decoder, cache)
        assert target.cache.hidden is not None
        held = cache.nbytes + target.cache.hidden.nbytes
        vocab, every = layer.config.vocab_size, target.decoder.config.vocab_size
        among = "" if vocab == every else f" from the first {vocab} of the vocabulary"
        note = f"drafts of up to {config.draft_mtp} tokens{among} by the model's own layer: "
        note += f"weights {gib(layer.nbytes)}, "
        note += f"cache {gib(held)} with the hidden rows that it reads"
        most = config.draft_mtp or 0
        on_device = self._drafts_on_device(decoder, cache.layers, target, most)
        return MtpDrafts(runner, self.draft_steps(runner, target), most, on_device), [note]

    def _drafts_on_device(
        self, decoder: Decoder, cache: Sequence[LayerState], target: ModelRunner, most: int
    ) -> "DraftGraphs | None":
        """The steps in which a layer or an assistant drafts on the device.

        None where a state cannot wait for the drafts, image rows have three positions, or `may_draft_on_device` forbids
        it.
        """
        if target.device_decoder is None or self.experts.layers:
            return None
        shape = target.decoder.config
        # Text after images is rotated by less than its position.
        turned = self.takes_images and bool(shape.rope_axes)
        if turned or not may_draft_on_device(self.config) or not states_can_wait(shape):
            return None
        from quengine.runners.assistant_graphs import AssistantGraphs
        from quengine.runners.cuda_graphs import CudaGraphs
        from quengine.runners.draft_graphs import DraftGraphs

        assert isinstance(target.graphs, CudaGraphs)
        graphs, rows = target.graphs, draft_rows(self.config, "cuda")
        if isinstance(decoder, AssistantDecoder):
            made: DraftGraphs = AssistantGraphs(graphs, decoder, cache, most, rows)
        else:
            made = DraftGraphs(graphs, decoder, cache, most, rows)
        target.device_decoder.drafting = made
        return made

    def _drafts_of_assistant(
        self, target: ModelRunner, checkpoint: Checkpoint
    ) -> tuple[DraftModel, list[str]]:
        """As `drafts_beside`, for a model that attends to the keys and values of `target`."""
        with _weights(checkpoint, self.device, self.config.mmap, self.progress, 0) as tensors:
            decoder = AssistantDecoder(checkpoint.config, tensors, target.decoder, target.cache.ctx_size)
        assert target.cache.hidden is not None
        note = (
            f"drafts by {checkpoint.path.name} from the model's own cache: weights {gib(checkpoint.nbytes)}, "
        )
        most = draft_tokens(self.config, self.device.type)
        on_device = self._drafts_on_device(decoder, target.cache.layers, target, most)
        return AssistantDrafts(decoder, target, on_device), [
            f"{note}hidden rows {gib(target.cache.hidden.nbytes)}"
        ]

    def _drafts_of_eagle(
        self, target: ModelRunner, eagle: EagleCheckpoint, pools: Sequence[CachePool]
    ) -> tuple[DraftModel, list[str]]:
        """As `drafts_beside`, for an EAGLE-3 draft model."""
        config, ctx_size = self.config, min(target.cache.ctx_size, eagle.config.context_length)
        cache = KVCache.allocate(eagle.config, ctx_size, self.device, config.cache_type, pools)
        with _weights(eagle, self.device, config.mmap, self.progress, 0) as tensors:
            decoder = EagleDecoder(eagle.config, tensors, target.decoder, eagle.drafted, ctx_size)
        runner = self._draft_runner(decoder, cache)
        assert target.cache.hidden is not None and eagle.config.eagle is not None
        layers = ", ".join(map(str, eagle.fusion.layers))
        note = f"{_draft_note(eagle, cache, target.cache.ctx_size)}; EAGLE-3, of the inputs of layers {layers}, whose "
        note += f"rows take {gib(target.cache.hidden.nbytes)}; {eagle.config.eagle.drafted} tokens"
        most = draft_tokens(config, self.device.type)
        on_device = self._drafts_on_device(decoder, cache.layers, target, most)
        return EagleDrafts(runner, self.draft_steps(runner, target), most, on_device), [note]

    def _draft_runner(self, decoder: Decoder, cache: KVCache) -> ModelRunner:
        """The runner of a layer that drafts."""
        if self.experts.layers:
            return ModelRunner(decoder, cache)
        return _make_runner(self.config, decoder, cache, drafts=True, takes_images=False)

    def _compile_ahead(
        self, checkpoint: Checkpoint, ctx_size: int, pools: Sequence[CachePool], chunk_size: int, drafts: bool
    ) -> None:
        """Begins to compile the kernels that are not compiled yet. A launch waits for its kernel."""
        from quengine.kernels.cuda.launch.gpu import gpu_of
        from quengine.runners.compile_kernels import KernelPlan, compile_ahead, stored_tensors

        config, gpu, tensors = self.config, gpu_of(self.device), checkpoint.tensors
        assert gpu is not None
        plan = KernelPlan(
            checkpoint.config,
            tensors.stored() if isinstance(tensors, SplitTensors) else stored_tensors(tensors),
            ctx_size,
            pools,
            chunk_size,
            config.cache_type,
            _graph_rows(config, drafts),
            config.chunk_size or DEFAULT_CHUNK["cuda"],
            config.drafts_on_host,
            config.deterministic,
            self._layer_plan(checkpoint.config),
            None if drafts or self.adapters.weights is None else AdapterShapes.of(self.adapters.weights),
        )
        compile_ahead(plan, gpu, self.progress)

    def _layer_plan(self, target: ModelConfig) -> "LayerPlan | None":
        from quengine.runners.compile_kernels import LayerPlan, stored_tensors

        config = None if self.layer is None else self.layer.config
        if self.layer is None or config is None or not (config.is_draft_layer or config.target_width):
            return None
        tensors, slots = stored_tensors(self.layer.tensors), _graph_rows(self.config, True)
        waits = states_can_wait(target) and may_draft_on_device(self.config)
        rows = draft_rows(self.config, "cuda")
        if isinstance(self.layer, EagleCheckpoint):
            most = draft_tokens(self.config, "cuda") if waits else 0
            fusion = stored_tensors(self.layer.fusion.tensors)
            reduced = self.layer.drafted is not None
            return LayerPlan(self.layer.config, tensors, slots, most, rows, fusion, reduced)
        wanted = draft_tokens(self.config, "cuda") if config.target_width else self.config.draft_mtp or 0
        most = wanted if waits else 0
        return LayerPlan(self.layer.config, tensors, slots, most, rows)

    def draft_steps(self, runner: ModelRunner, target: ModelRunner) -> DraftSteps:
        """The decode steps of a model that drafts for `target`."""
        if self.device.type != "cuda" or self.experts.layers or runner.graphs is None:
            return HostDraftSteps(runner)
        from quengine.runners.cuda_graphs import CudaGraphs
        from quengine.speculative.device_drafts import DeviceDraftSteps

        assert isinstance(runner.graphs, CudaGraphs)
        if target.ranks is None and isinstance(target.graphs, CudaGraphs):
            return DeviceDraftSteps(runner.graphs, target.graphs)
        return DeviceDraftSteps(
            runner.graphs
        )  # other ranks, which have no model that drafts, get tokens of the host


def may_draft_on_device(config: EngineConfig) -> bool:
    """Whether steps may draft on the device: not with `deterministic`, since the kernel that advances states over
    accepted rows may differ from a plain step in the last bits; nor with LoRA adapters, which such steps leave out."""
    return not config.deterministic and not config.lora


def states_can_wait(config: ModelConfig) -> bool:
    """Whether all states of a model's layers can wait until it is known which drafted tokens are accepted
    (`ForwardBatch.pending`)."""
    kept = (block for block in layers_of(config) if isinstance(block.state, SlotState))
    return all(isinstance(block.mixer, GatedDelta) for block in kept)


def _draft_note(draft: Checkpoint, cache: KVCache, ctx_size: int) -> str:
    """A note for the user: the draft model's memory, and its context if that is shorter than the target's."""
    short = "" if cache.ctx_size == ctx_size else f", up to position {cache.ctx_size} only, its own context"
    return f"drafts by {draft.path.name}: weights {gib(draft.nbytes)}, cache {gib(cache.nbytes)}{short}"


@contextmanager
def _loading(host: PlacedExperts | None) -> Iterator[None]:
    """A block in which a decoder loads its weights; if that fails, the host memory of its experts is unlocked."""
    if not isinstance(host, FollowedExperts):
        yield
        return
    try:
        yield
        host.end_loading()
    except BaseException:
        host.close()
        raise


@contextmanager
def _weights(
    checkpoint: Checkpoint | Fusion,
    device: torch.device,
    mapped: bool,
    progress: Callable[[str], None] | None,
    host_layers: int,
) -> Iterator[Mapping[str, QuantTensor]]:
    """A block with the tensors that a decoder takes. On the CPU they are those of the mapped file, or copies. For a
    CUDA device they are read ahead, except the experts of the first `host_layers` layers and ROW_TABLE."""
    if device.type != "cuda":
        yield checkpoint.tensors if mapped else _copied(checkpoint, progress)
        return
    host: dict[str, QuantTensor] = {}
    rest = checkpoint.tensors
    if host_layers or ROW_TABLE in checkpoint.tensors:
        host, rest = split_tensors(checkpoint.tensors, host_layers)
    nbytes = checkpoint.nbytes - sum(tensor.nbytes for tensor in host.values())
    with WeightLoader(rest, CudaTransfer(device), nbytes, progress) as tensors:
        yield ChainMap(host, tensors) if host else tensors  # type: ignore[arg-type]  # it is not written to
    if progress is not None:
        progress("")  # the next output begins a line of its own
    # The memory of weights before they were repacked is not needed again.
    torch.cuda.empty_cache()


def _copied(
    checkpoint: Checkpoint | Fusion, progress: Callable[[str], None] | None
) -> Mapping[str, QuantTensor]:
    from quengine.platform.weight_loader import copy_weights

    try:
        return copy_weights(checkpoint.tensors, checkpoint.release_pages, progress)
    finally:
        if progress is not None:
            progress("")


def make_backend(
    config: EngineConfig,
    checkpoint: Checkpoint,
    device: torch.device,
    threads: int,
    free: int,
    adapters: Adapters | None = None,
) -> Backend[Any]:
    """The backend of a device. adapters: LoRA adapters of the weights that it is to load."""
    if config.backend == "reference":
        keep = REFERENCE_BYTES_A_WEIGHT * checkpoint.weights < free // 2
        if adapters is not None:
            from quengine.kernels.lora.reference import AdaptedReference

            return AdaptedReference(adapters, keep)
        from quengine.kernels.reference import ReferenceBackend

        return ReferenceBackend(keep)
    if device.type == "cuda":
        from quengine.platform.device import announce_compilation

        cuda_start.wait()
        announce_compilation(torch.cuda.get_device_name(device))
        if adapters is not None:
            from quengine.kernels.cuda.lora.backend import AdaptedCuda

            return AdaptedCuda(adapters, device, batch_invariant=config.deterministic)
        from quengine.kernels.cuda.backend import CudaBackend

        return CudaBackend(device, batch_invariant=config.deterministic)
    if adapters is not None:
        from quengine.kernels.cpu.lora import AdaptedCpu

        return AdaptedCpu(adapters, threads)
    from quengine.kernels.cpu.backend import CpuBackend

    return CpuBackend(threads)


def _await_kernels(communicator: Communicator) -> None:
    from quengine.parallel.communicator import CudaCommunicator

    if isinstance(communicator, CudaCommunicator):
        communicator.await_kernels()


def _make_runner(
    config: EngineConfig, decoder: Decoder, cache: KVCache, drafts: bool, takes_images: bool
) -> ModelRunner:
    device = decoder.backend.device
    if config.backend == "reference":
        return ModelRunner(decoder, cache)
    if device.type == "cuda":
        return _cuda_runner(config, decoder, cache, drafts, takes_images)
    from quengine.kernels.cpu.ops import sampling
    from quengine.runners.cpu_steps import CpuSteps

    shape = decoder.config
    if shape.ranks > 1 or shape.stage is not None:  # between kernels of a step it waits for other processes
        return ModelRunner(decoder, cache, choose=sampling.sample, packs_prompts=False)
    # A dozen rows of one prompt keep the processor as busy as those of many.
    return ModelRunner(
        decoder,
        cache,
        CpuSteps(decoder, cache, max(config.parallel, draft_rows(config, device.type))),
        choose=sampling.sample,
        packs_prompts=False,
    )


def _graph_rows(config: EngineConfig, drafts: bool) -> int:
    """The most rows of a captured decode step of the model or, with `drafts`, of its draft model."""
    from quengine.runners.graph_keys import DECODE_ROWS

    rows = draft_rows(config, "cuda")
    if drafts and config.draft_on_device:
        return 1  # only its prefill steps run by themselves; the others are part of the model's steps
    # There are at most as many draft jobs as sequences, and as rows that check drafts. A job's first step has up to
    # MOST_ROWS rows.
    rows = MOST_ROWS * min(config.parallel, rows) if drafts else max(config.parallel, rows)
    return min(DECODE_ROWS[-1], rows)


def _cuda_runner(
    config: EngineConfig, decoder: Decoder, cache: KVCache, drafts: bool, takes_images: bool
) -> ModelRunner:
    from quengine.kernels.cuda.launch.compile_ahead import finish_compiling
    from quengine.parallel.communicator import CudaCommunicator
    from quengine.runners.cuda_graphs import PENDING, CudaGraphs
    from quengine.runners.device_decode import DeviceDecoder
    from quengine.runners.graph_keys import UNMOVED_ROWS

    rows = _graph_rows(config, drafts)
    graphs = CudaGraphs(
        decoder,
        cache,
        rows if decoder.config.stage is None else min(rows, UNMOVED_ROWS),
        config.chunk_size or DEFAULT_CHUNK["cuda"],
        shares_sequences=config.drafts_on_host,
        pending=draft_tokens(config, "cuda") if drafts else PENDING,
        slots=rows if drafts else config.parallel,
        takes_embeds=takes_images,
        adapted=not drafts,  # a layer that drafts is on the backend of the model
    )
    communicator = decoder.backend.communicator
    if isinstance(communicator, CudaCommunicator):
        communicator.one_first(finish_compiling)
    return ModelRunner(decoder, cache, graphs, None if drafts else DeviceDecoder(graphs))
