"""The two runs that parity compares: how they are named, loaded and computed."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from quengine.config import EngineConfig, Split
from quengine.diagnostics.harness import greedy, in_parts, loaded
from quengine.errors import EngineError
from quengine.kernels.backend import SlotLayer
from quengine.kernels.phase import Phase
from quengine.llm import LLM
from quengine.parallel.cached_rows import read_cached, write_cached
from quengine.parallel.wire import ChooseExperts
from quengine.platform.device import choose_device
from quengine.request.prompt_images import PromptImages
from quengine.step_plan import SequenceRows, given_rows

REFERENCE, _MOE = "reference", "cuda:moe"
_SHARED = re.compile(r"(\w+):(tp|layer)(\d+)")


@dataclass(frozen=True)
class SideSpec:
    """A side as it is requested.

    name: for the report. device: `reference`, `cpu`, `cuda` or `cuda:N`. ranks: devices that share the model. split:
    how they share it (`EngineConfig.split`). cpu_moe: experts are in host memory."""

    name: str
    model: str | Path
    device: str
    ranks: int = 1
    split: Split = "tensor"
    cpu_moe: bool = False


class LLMSide:
    """A loaded model as one of the two sides.

    name: for the report. device: as in `SideSpec`. has_experts: the model is a mixture of experts. encoder: the encoder
    of images; None: it reads text alone. images: the images whose rows its prefill steps have.

    The reference has one definition for both phases, so it computes chunks in decode too, which is quicker; but not
    where states are handed from one side to the other.
    """

    def __init__(self, name: str, llm: LLM, device: str | None = None) -> None:
        self.name = name
        self.device = device or name
        self.llm = llm
        self.decoder = llm.runner.decoder
        self.has_experts = llm.model_config.experts is not None
        self.images: PromptImages | None = None
        self.encoder = llm.images

    @property
    def watchable(self) -> bool:
        """Whether the operations of the whole model can be watched. With several ranks, or experts in host memory, no
        process or device has all values."""
        whole = self.decoder.config.ranks == 1 and self.decoder.config.stage is None
        return whole and self.decoder.host_experts is None

    def step(self, phase: Phase) -> int:
        """Tokens that the side computes at once in a phase: in decode one, except for the reference without states."""
        alone = self.device != REFERENCE or any(self.are_states)
        return 1 if phase == "decode" and alone else self.decoder.chunk_size

    @property
    def are_states(self) -> list[bool]:
        """For each tensor of `cached`, whether it is a state, which has no positions."""
        layers = self.llm.runner.cache.layers
        return [isinstance(layer, SlotLayer) for layer in layers for _ in layer.tensors]

    def forward(self, ids: list[int], start: int) -> Tensor:
        """Logits [T, vocab] of `ids` at positions start .. start + T - 1, over what is cached before them."""
        return self.llm.runner.logits(ids, start, _phase(ids), self.images)

    def eager(self, ids: list[int], start: int) -> Tensor:
        """As `forward`, one operation of the backend after the other: no captured step."""
        angles = None if self.images is None else self.images.angles(start, start + len(ids))
        runner = self.llm.runner
        rows = [SequenceRows(ids, start, runner.cache.whole_tables, angles, runner.adapters)]
        given = given_rows(self.images, ids, start)
        return self.llm.runner.forward(_phase(ids), rows, all_logits=True, eager=True, given=given).cpu()

    def choose_experts(self, experts: Mapping[int, Tensor]) -> None:
        """Send the other ranks, if any, the experts [T, k] of the rows of the next step, by layer."""
        with self.llm.runner.together(ChooseExperts({layer: of.tolist() for layer, of in experts.items()})):
            pass

    def cached(self, start: int, end: int) -> list[Tensor]:
        """A copy of what every layer stores of positions start .. end - 1: keys and values, or their codes and scales;
        or of its state as it is now.
        """
        return read_cached(self.llm.runner, start, end, self.llm.model_config)

    def set_cached(self, start: int, end: int, rows: list[Tensor]) -> None:
        """Store what another side's `cached` gave."""
        write_cached(self.llm.runner, start, end, rows)

    def states_before(self, start: int) -> list[Tensor] | None:
        """What `go_back` needs to compute positions `start`, ... once more: copies of the states; None where the side
        keeps none, or begins there."""
        return LLMSide.cached(self, start - 1, start) if start and any(self.are_states) else None

    def go_back(self, start: int, states: list[Tensor] | None) -> None:
        """Restore the states that `states_before` gave for this position."""
        if states is not None:
            LLMSide.set_cached(self, start - 1, start, states)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """At most `count` tokens that a user gets at temperature 0, and the end token if one came sooner."""
        completion = self.llm.stream(prompt, greedy(count, ignore_eos=False)).finish()
        if completion.finish_reason != "stop":
            return completion.tokens
        # The end token is a choice like any other, which a completion does not show.
        *_, last = self.continuation(prompt, [*completion.tokens, 0])
        ended_by = max(sorted(self.llm.tokenizer.eos_ids), key=lambda token: float(last[-1, token]))
        return [*completion.tokens, ended_by]

    def continuation(self, prompt: list[int], tokens: list[int]) -> Iterator[Tensor]:
        """The logits, in blocks [t, vocab], that each of `tokens` follows from after `prompt`."""
        for part in in_parts(prompt, 0, self.decoder.chunk_size):
            last = self.forward(*part)
        yield last[-1:]
        for part in in_parts(tokens[:-1], len(prompt), self.step("decode")):
            yield self.forward(*part)


def _phase(ids: list[int]) -> Phase:
    """The phase that computes these tokens: a single token is a decode step."""
    return "decode" if len(ids) == 1 else "prefill"


class SidePair(NamedTuple):
    """Two loaded sides, of one model or of two."""

    a: LLMSide
    b: LLMSide


@contextmanager
def loaded_sides(a: SideSpec, b: SideSpec, config: EngineConfig) -> Iterator[SidePair]:
    """A block with both sides, which are closed at its end.

    Raises:
        EngineError: a model is wrong.
        CannotRunError: a side cannot run on this machine.
    """
    with _load(a, config) as first, _load(b, config) as second:
        yield SidePair(LLMSide(a.name, first, a.device), LLMSide(b.name, second, b.device))


def default_device() -> str:
    """The default device of a model: the GPU where there is a usable one, else the CPU."""
    device, _ = choose_device(EngineConfig())
    return "cuda" if device.type == "cuda" else "cpu"


def parse_sides(a: str | None, b: str | None, model: str | None) -> tuple[SideSpec, SideSpec]:
    """The two sides of a command line; each is DEVICE (of `model`), FILE, FILE@DEVICE, or None for the default.

    A side that is the name of a device is `model` on it; the text after the last @ is a device only if it has such a
    name. A file without a device runs on the default device. If b is left out, it is `model` on the default device. If
    a is left out, it is `model` on b's device where b names a file; else on the CPU if the default is a GPU, or by the
    definition.

    Raises:
        EngineError: a side has no file, or both have one and `model` is given as well.
    """
    device = default_device()
    other = "cpu" if device == "cuda" else REFERENCE
    spec_b = _parse("--b", b, model, device)
    if a is None and b is not None and not is_device(b):
        other = spec_b.name.rpartition("@")[2]  # with its ranks
    spec_a = _parse("--a", a, model, other)
    if model is not None and not any(side is None or is_device(side) for side in (a, b)):
        raise EngineError(f"--model {model}: both sides name a file, and it is none of them; leave it out")
    return spec_a, spec_b


def is_device(text: str) -> bool:
    """Whether the text names a device ("cpu:tp2": two ranks); whether this machine has it is checked when the model is
    loaded."""
    kind, _, index = text.partition(":")
    if (shared := _SHARED.fullmatch(text)) is not None:  # cuda:tp2, cuda:layer2
        return shared[1] in (REFERENCE, "cpu", "cuda")
    return text in (REFERENCE, "cpu", "cuda", _MOE) or (kind == "cuda" and index.isdecimal())


def _on(name: str, model: str | Path, device: str) -> SideSpec:
    """A side on a device as it is written: "cuda:tp2" is two devices, "cuda:moe" one with experts in host memory."""
    if device == _MOE:
        return SideSpec(name, model, "cuda", cpu_moe=True)
    if (shared := _SHARED.fullmatch(device)) is None:
        return SideSpec(name, model, device)
    return SideSpec(name, model, shared[1], int(shared[3]), "tensor" if shared[2] == "tp" else "layer")


def _parse(flag: str, text: str | None, model: str | None, default: str) -> SideSpec:
    if text is None or is_device(text):
        device = text or default
        if model is None:
            raise EngineError(f"{flag} {device}: which model? Give --model, or the side as FILE@{device}")
        return _on(device, model, device)
    file, at, device = text.rpartition("@")
    if not at or not is_device(device):
        file, device = text, default_device()
    if not file:
        raise EngineError(
            f"{flag} {text}: no file stands before the @; write FILE@{device}, or {device} alone"
        )
    return _on(f"{file}@{device}", file, device)


def _load(side: SideSpec, config: EngineConfig) -> LLM:
    shared = {"tensor_parallel": side.ranks, "split": side.split}
    if side.device == REFERENCE:
        return loaded(side.model, config, device="cpu", backend=REFERENCE, **shared)
    return loaded(side.model, config, device=side.device, cpu_moe=side.cpu_moe, **shared)
