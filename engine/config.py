"""The options of a run: one frozen dataclass, validated when it is made."""

import re
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from quengine.errors import EngineError
from quengine.kernels.kv.cache_types import CACHE_TYPES, CacheType
from quengine.options import Flag, Range, check_ranges
from quengine.wrong_names import hinted, hinted_options

DEFAULT_CHUNK = {"cpu": 512, "cuda": 2048}
"""Maximum number of prompt tokens per step, by kind of device. A GPU dequantizes the weights for each chunk."""

MIXED_CHUNK = {"cpu": 256, "cuda": 512}
"""Maximum number of prompt tokens per step while other sequences wait for their next token, by kind of device."""

BACKLOG_CHUNK = {"cpu": 256, "cuda": 1024}
"""The same while more than DEFAULT_CHUNK prompt tokens wait: longer pauses in the streams, but a shorter queue."""

MIXED_SECONDS = {"cpu": 0.2, "cuda": None}
"""Time limit in seconds of a MIXED_CHUNK step, judged by the previous one; None: no limit. On a GPU a varying
length would change the bits, and 512 tokens take only as long as a few decode steps.
"""

MOST_DRAFT_NGRAM = 16
"""The longest n-gram of look-up drafts; each length up to it has a table of its own."""

MOST_RANKS = 64
"""Maximum number of devices that share a model."""

MOST_DRAFT_TOKENS = 31
"""Maximum length of a draft: with the newest token, a step has 32 rows per sequence."""


Split = Literal["tensor", "layer"]
"""How devices share a model: each has a part of every layer ("tensor"), or some of the layers ("layer")."""
_SHARE = re.compile(r"\d{1,9}(\.\d{1,9})?")

RUN_PANEL, DRAFT_PANEL = "How it runs", "Drafts (the text stays the same)"


@hinted_options
@dataclass(frozen=True)
class EngineConfig:
    """The options of `LLM`; most are flags of every command that runs a model.

    Attributes:
        device: "auto", "cpu", "cuda" or "cuda:N".
        ctx_size: positions per sequence in the KV cache; None: the model's own context, cut to what fits in memory.
        threads: CPU threads; None: the number of physical cores.
        backend: "auto" (the packed kernels of the device) or "reference" (the float64 definition).
        chunk_size: maximum number of prompt tokens per step; None: what suits the device.
        reuse_prefix: keep the blocks of finished requests for prompts with the same beginning (prefix cache). Always on
            if `parallel` is more than 1.
        cache_type: data type of the KV cache, "f16", "q8_0" (17/32 of the memory, rounded to 8 bits) or
            "q4_0" (9/32, rounded to 4 bits after a Hadamard transform).
        deterministic: the logits of a sequence are bit-identical, however its prompt was split into chunks and whatever
            was computed before or beside it. The cost: generated tokens are not reused as a prefix of later prompts,
            nor recomputed in chunks after a sequence was preempted. The CPU always computes like this; a GPU then
            uses the same kernels for every number of rows, which slows down prompts and single sequences
            (docs/performance.md).
        parallel: maximum number of running sequences. They share a KV cache of `parallel * ctx_size` positions, or of
            as many as fit in memory.
        draft_model: a small model with the same vocabulary, or an EAGLE-3 file or folder for this one, that drafts
            tokens, several of which this model verifies in one step (docs/speculative.md); None: no draft model.
        draft_ngram: length of the longest n-gram looked up in the sequence itself; what followed it there is the draft.
            Shorter ones, down to half that length, are looked up too; 0: no look-up. Look-up comes before the draft
            model if there are both.
        draft_mtp: maximum number of tokens drafted by the layer that the model's own files have for it (multi-token
            prediction); 0: none. Look-up comes before it. None: 3 where steps of a CUDA device can make, verify and
            accept the drafts by themselves and memory has room for them, else none; see `draft_on_device`.
        draft_vocab: number of tokens, the first of the vocabulary, that this layer drafts from; 0: all; None: 65,536.
            They are the most frequent ones where the vocabulary was made by merges. The text is the same; fewer rows of
            the output matrix are read, and fewer drafts are right in languages whose tokens come late.
        draft_tokens: maximum number of drafted tokens; None: what suits the device.
        draft_on_device: tokens are drafted only in steps that the device makes by itself. Steps are plain where the
            host samples a sequence (a grammar, log-probabilities) or there are penalties, and no copies of states are
            kept for drafts. `draft_mtp` None implies it.
        mmap: on the CPU, compute from the pages of the mapped file; otherwise from a copy of the weights in huge pages,
            which is a few percent faster but takes time at the start.
        cpu_moe: on a CUDA device, the experts of all layers stay in host memory and are computed by the CPU, for a
            mixture of experts that does not fit the GPU.
        n_cpu_moe: the same for the experts of the first N layers.
        gpu_experts: number of experts, the most used, that a CUDA device also holds of each layer whose experts are in
            host memory; None: as many as fit, or none with `deterministic` or several devices.
        tensor_parallel: how many devices share the model, each a process with its part of every layer
            (docs/tensor-parallel.md). On the CPU the processes share its threads. None: the fewest CUDA devices that
            hold it, or as many as `devices` names; on the CPU one.
        expert_parallel: each of these devices holds some experts of a mixture whole, not a part of every expert.
        devices: the numbers of the CUDA devices that share the model, "0,1"; None: the first ones.
        split: what each device holds: a part of every layer ("tensor"), or some whole layers ("layer"), which suits
            devices of unequal size or without fast links.
        tensor_split: the devices' shares of the layers, "3,1", device by device; None: in proportion to free memory.
        state_checkpoints: the number of copies of states that are kept for prompts with the same beginning, for a model
            whose layers keep a state (a convolution, a gated delta net); None: by free memory. `engine show` gives the
            size of one.
        host_checkpoints: host memory in MiB for the least recently used of these copies, once a CUDA device has no room
            for them; 0: none; None: an eighth of the free memory, up to 8 GiB.
        mmproj: the file (mmproj*.gguf) or folder with the encoder of images and the projector that makes them rows of
            the prompt; None: one beside the model, where there is one.
        no_mmproj: the model reads text alone.
        image_cache: host memory in MiB for images that are kept encoded for later prompts, beside a 64th of a CUDA
            device's free memory, which they take first; 0: none are kept.
        lora: LoRA adapters of the model, GGUF files or PEFT folders, as "FILE" or "FILE:SCALE"; they are applied beside
            the weights, and a request may have scales of its own (`SamplingParams.lora`).
        chat_template: in place of the model's own: its text, or a name.
        progress: called with a line of text as weights are loaded onto a GPU, or copied.
        make_room: called before anything is allocated, with the bytes that the run needs, the bytes that are free, and
            the device. If it returns true, it may have freed memory, and it is called again.

    Raises:
        EngineError: a value is outside its range.
    """

    device: Annotated[str, Flag("--device", "auto, cpu, cuda or cuda:N.", RUN_PANEL, completes="device")] = (
        "auto"
    )
    ctx_size: Annotated[
        int | None,
        Range(1),
        Flag("-c --ctx-size", "Context in tokens; 0: the model's, cut to fit.", RUN_PANEL, none=0),
    ] = None
    threads: Annotated[
        int | None, Range(1), Flag("-t --threads", "CPU threads. (default: physical cores)", RUN_PANEL)
    ] = None
    backend: Annotated[
        str,
        Flag("--backend", "auto, or reference (float64, slow).", RUN_PANEL, completes="auto reference"),
    ] = "auto"
    _: KW_ONLY
    chunk_size: Annotated[
        int | None,
        Range(1),
        Flag(
            "-ub --ubatch-size",
            "Prompt tokens computed at once, at most. (default: what suits the device)",
            RUN_PANEL,
        ),
    ] = None
    reuse_prefix: bool = False
    cache_type: Annotated[
        CacheType,
        Flag(
            "--cache-type", "Keys and values as f16, q8_0 (half the memory) or q4_0 (a quarter).", RUN_PANEL
        ),
    ] = "f16"
    deterministic: Annotated[
        bool, Flag("--deterministic", "The same bits for every chunk size, history and batch.", RUN_PANEL)
    ] = False
    parallel: Annotated[int, Range(1)] = 1
    draft_model: Annotated[
        str | Path | None,
        Flag(
            "--draft-model --model-draft -md",
            "A small model of the same vocabulary, or an EAGLE-3 file, that drafts tokens.",
            DRAFT_PANEL,
            "MODEL",
            completes="model",
        ),
    ] = None
    draft_ngram: Annotated[
        int,
        Range(0, MOST_DRAFT_NGRAM, text=f"0 (no look-up) to {MOST_DRAFT_NGRAM} tokens"),
        Flag(
            "--draft-ngram",
            "Look runs of up to N tokens up in the text itself, for what followed; 0: off.",
            DRAFT_PANEL,
            "N",
        ),
    ] = 0
    draft_mtp: Annotated[
        int | None,
        Range(0, MOST_DRAFT_TOKENS, text=f"0 (off) to {MOST_DRAFT_TOKENS} tokens"),
        Flag(
            "--draft-mtp",
            "Draft up to N tokens by the model's own layer for it (MTP); 0: off. (default: CUDA: 3, where it pays)",
            DRAFT_PANEL,
            "N",
        ),
    ] = None
    draft_vocab: Annotated[
        int | None,
        Range(0),
        Flag(
            "--draft-vocab",
            "Tokens that --draft-mtp drafts from, the vocabulary's first; 0: all. (default: 65536)",
            DRAFT_PANEL,
            "N",
        ),
    ] = None
    draft_tokens: Annotated[
        int | None,
        Range(1, MOST_DRAFT_TOKENS),
        Flag(
            "--draft-tokens --draft-max --draft",
            "Tokens of a draft at most. (default: 4; CUDA: 7)",
            DRAFT_PANEL,
            "K",
        ),
    ] = None
    draft_on_device: bool = False
    mmap: Annotated[
        bool,
        Flag(
            "--mmap/--no-mmap",
            "On the CPU: use the weights where the file is mapped, or copy them first (slower start, faster tokens).",
            RUN_PANEL,
        ),
    ] = True
    cpu_moe: Annotated[
        bool,
        Flag(
            "--cpu-moe -cmoe",
            "All experts in host memory, computed by the CPU; the rest on the GPU.",
            RUN_PANEL,
        ),
    ] = False
    n_cpu_moe: Annotated[
        int,
        Range(0),
        Flag("--n-cpu-moe -ncmoe", "As --cpu-moe, for the experts of the first N layers.", RUN_PANEL, "N"),
    ] = 0
    gpu_experts: Annotated[
        int | None,
        Range(0),
        Flag(
            "--gpu-experts",
            "The GPU holds a copy of the N most used experts of each layer whose experts are in host memory. "
            "(default: as many as fit)",
            RUN_PANEL,
            "N",
        ),
    ] = None
    tensor_parallel: Annotated[
        int | None,
        Range(1, MOST_RANKS),
        Flag(
            "--tensor-parallel -tp",
            "Devices that share the model (on the CPU: processes). (default: the fewest GPUs that hold it)",
            RUN_PANEL,
            "N",
        ),
    ] = None
    expert_parallel: Annotated[
        bool,
        Flag(
            "--expert-parallel", "Each device has some experts whole, not a part of every expert.", RUN_PANEL
        ),
    ] = False
    devices: Annotated[
        str | None,
        Flag(
            "--devices",
            "The CUDA devices that share the model, such as 0,1. (default: the first N)",
            RUN_PANEL,
            "LIST",
        ),
    ] = None
    split: Annotated[
        Split,
        Flag(
            "--split --split-mode -sm",
            "What a device has: a part of every layer (tensor), or whole layers (layer).",
            RUN_PANEL,
        ),
    ] = "tensor"
    tensor_split: Annotated[
        str | None,
        Flag(
            "--tensor-split -ts",
            "With --split layer: the devices' shares of the layers, such as 3,1. (default: by free memory)",
            RUN_PANEL,
            "LIST",
        ),
    ] = None
    state_checkpoints: Annotated[
        int | None,
        Range(0),
        Flag(
            "--state-checkpoints --ctx-checkpoints -ctxcp",
            "Copies of the state of a model that keeps one, for prompts that begin alike. (default: by memory)",
            RUN_PANEL,
            "N",
        ),
    ] = None
    host_checkpoints: Annotated[
        int | None,
        Range(0),
        Flag(
            "--host-checkpoints",
            "MiB of host memory for checkpoints without room on the GPU; 0: none. (default: an eighth, up to 8192)",
            RUN_PANEL,
            "MIB",
        ),
    ] = None
    mmproj: Annotated[
        str | Path | None,
        Flag(
            "--mmproj -mm",
            "The projector for images. (default: mmproj*.gguf beside the model)",
            RUN_PANEL,
            "FILE",
        ),
    ] = None
    no_mmproj: Annotated[
        bool, Flag("--no-mmproj", "No images: a projector beside the model is not loaded.", RUN_PANEL)
    ] = False
    image_cache: Annotated[
        int,
        Range(0),
        Flag("--image-cache", "MiB of host memory for images that are kept encoded.", RUN_PANEL, "MIB"),
    ] = 512
    lora: Annotated[
        tuple[str, ...],
        Flag(
            "--lora",
            "A LoRA adapter (GGUF file or PEFT folder), and its scale; repeatable.",
            RUN_PANEL,
            "FILE[:SCALE]",
        ),
    ] = ()
    chat_template: str | None = None
    progress: Callable[[str], None] | None = field(default=None, compare=False, repr=False)
    make_room: Callable[[int, int, str], bool] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        kind, _, index = self.device.partition(":")
        if kind not in ("auto", "cpu", "cuda") or (index and (kind != "cuda" or not index.isdecimal())):
            raise EngineError(f"device {self.device!r}: must be auto, cpu, cuda or cuda:N")
        if self.backend not in ("auto", "reference"):
            raise EngineError(f"backend {self.backend!r}: must be auto or reference")
        if self.cache_type not in CACHE_TYPES:
            raise EngineError(f"cache type {self.cache_type!r}: must be one of {', '.join(CACHE_TYPES)}")
        check_ranges(self, "{name} {value}")
        given = (self.lora,) if isinstance(self.lora, str | Path) else self.lora
        if not isinstance(given, list | tuple) or not all(isinstance(each, str | Path) for each in given):
            raise EngineError(f"lora {given!r}: must be files or folders, each as 'FILE' or 'FILE:SCALE'")
        object.__setattr__(self, "lora", tuple(map(str, given)))
        if self.no_mmproj and self.mmproj is not None:
            raise EngineError(f"mmproj {self.mmproj}: no_mmproj leaves images out; give one of them")
        self._check_shares()
        self._check_devices()
        self._check_gpu_experts()
        if self.draft_tokens is not None and not self.speculates:
            raise EngineError(
                f"draft_tokens {self.draft_tokens}: nothing drafts; ask for a draft model (--draft-model), look-up "
                f"(--draft-ngram) or the model's own layer for it (--draft-mtp)"
            )
        if self.draft_vocab is not None and self.draft_mtp == 0:
            raise EngineError(
                f"draft_vocab {self.draft_vocab}: the model's own layer drafts from these; request its drafts "
                "(--draft-mtp)"
            )
        if self.draft_mtp and self.draft_model is not None:
            raise EngineError(
                f"draft_mtp {self.draft_mtp}: the draft model {self.draft_model} drafts; leave out one of --draft-mtp "
                "and --draft-model"
            )

    def _check_shares(self) -> None:
        """Checks `split` and `tensor_split`; the number of shares sets `tensor_parallel` if that is not given."""
        if self.split not in get_args(Split):
            raise EngineError(f"split {self.split!r}: must be {' or '.join(get_args(Split))}")
        if self.split == "layer" and self.expert_parallel:
            raise EngineError(
                "expert_parallel parts the experts of a layer: it does not go with --split layer"
            )
        if self.tensor_split is None:
            return
        if self.split != "layer":
            raise EngineError(
                f"tensor_split {self.tensor_split} shares out whole layers: it goes with --split layer"
            )
        texts = self.tensor_split.split(",")
        if not all(_SHARE.fullmatch(text.strip()) and float(text) > 0 for text in texts):
            raise EngineError(f"tensor_split {self.tensor_split!r}: must be numbers above 0, such as 3,1")
        if self.tensor_parallel in (None, 1):
            object.__setattr__(self, "tensor_parallel", len(texts))
        if self.tensor_parallel != len(texts):
            raise EngineError(
                f"tensor_split {self.tensor_split}: {len(texts)} shares, and tensor_parallel is {self.tensor_parallel}"
            )

    @property
    def shares(self) -> tuple[float, ...] | None:
        """The shares of `tensor_split`, as numbers."""
        return None if self.tensor_split is None else tuple(map(float, self.tensor_split.split(",")))

    def _check_gpu_experts(self) -> None:
        if not self.gpu_experts:
            return
        problem = None
        if not self.places_experts:
            problem = (
                "no experts are in host memory, so the GPU has all; request it with --cpu-moe or --n-cpu-moe"
            )
        elif self.deterministic:
            problem = "with --deterministic a row's bits may not follow from where experts are; leave one out"
        elif self.ranks > 1:
            problem = f"{self.ranks} devices share the model, of which none holds experts twice; leave it out"
        if problem is not None:
            raise EngineError(f"gpu_experts {self.gpu_experts}: {problem}")

    def _check_devices(self) -> None:
        if self.devices is None:
            if self.ranks > 1 and self.device.startswith("cuda:"):
                raise EngineError(
                    f"device {self.device} is one device, and tensor_parallel {self.tensor_parallel} takes more; name "
                    f"them with --devices"
                )
            return
        numbers = self.devices.split(",")
        if not all(number.isdecimal() for number in numbers) or len(set(map(int, numbers))) < len(numbers):
            raise EngineError(f"devices {self.devices!r}: must be different numbers, such as 0,1")
        if len(numbers) != self.ranks or self.device == "cpu":
            ways = f"--tensor-parallel {len(numbers)} and a CUDA device"
            raise EngineError(
                f"devices {self.devices}: tensor_parallel is {self.ranks}, device {self.device}; they go with {ways}"
            )

    def device_of(self, rank: int) -> str:
        """The name of a rank's device, if the ranks are CUDA devices."""
        return f"cuda:{rank if self.devices is None else int(self.devices.split(',')[rank])}"

    @property
    def ranks(self) -> int:
        """Number of devices that share the model according to `tensor_parallel` or `devices`; 1 if neither is given."""
        return self.tensor_parallel or (1 if self.devices is None else len(self.devices.split(",")))

    @property
    def speculates(self) -> bool:
        """Whether drafts are made: by a draft model, by the model's own layer for it, or by look-up."""
        return self.draft_model is not None or self.draft_ngram > 0 or bool(self.draft_mtp)

    @property
    def drafts_on_host(self) -> bool:
        """Whether the host has drafts made where a step does not make its own."""
        return self.speculates and not self.draft_on_device

    @property
    def places_experts(self) -> bool:
        """Whether some experts are to stay in host memory."""
        return self.cpu_moe or self.n_cpu_moe > 0

    def values(self) -> dict[str, Any]:
        """The fields by name, to be sent to another process: all but the callbacks."""
        called = ("progress", "make_room")
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in called}


class Configured:
    """A class that is made of a model and the fields of `EngineConfig`, which are its arguments."""

    @hinted
    def __init__(
        self,
        model: str | Path,
        device: str = "auto",
        ctx_size: int | None = None,
        threads: int | None = None,
        backend: str = "auto",
        *,
        chunk_size: int | None = None,
        reuse_prefix: bool = False,
        cache_type: CacheType = "f16",
        deterministic: bool = False,
        parallel: int = 1,
        draft_model: str | Path | None = None,
        draft_ngram: int = 0,
        draft_mtp: int | None = None,
        draft_vocab: int | None = None,
        draft_tokens: int | None = None,
        draft_on_device: bool = False,
        mmap: bool = True,
        cpu_moe: bool = False,
        n_cpu_moe: int = 0,
        gpu_experts: int | None = None,
        tensor_parallel: int | None = None,
        expert_parallel: bool = False,
        devices: str | None = None,
        split: Split = "tensor",
        tensor_split: str | None = None,
        state_checkpoints: int | None = None,
        host_checkpoints: int | None = None,
        mmproj: str | Path | None = None,
        no_mmproj: bool = False,
        image_cache: int = 512,
        lora: tuple[str, ...] = (),
        chat_template: str | None = None,
        progress: Callable[[str], None] | None = None,
        make_room: Callable[[int, int, str], bool] | None = None,
    ) -> None:
        options = {name: value for name, value in locals().items() if name not in ("self", "model")}
        self._open(model, EngineConfig(**options))

    def _open(self, model: str | Path, config: EngineConfig) -> None:
        """Loads the model."""
        raise NotImplementedError

    __init__.__doc__ = f"""Loads the model.

    Args:
        model: an alias, `hf:user/repo:QUANT`, a GGUF file or a Hugging Face checkpoint folder.
{(EngineConfig.__doc__ or "").partition("Attributes:")[2].strip(chr(10)).rstrip()}
    """
