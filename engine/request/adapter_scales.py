"""The LoRA adapters of a loaded model, and how strongly a request applies each."""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from struct import pack
from typing import NamedTuple, TypeAlias

from quengine.errors import EngineError

Scales: TypeAlias = tuple[float, ...]
"""A scale for each adapter of a model, by the adapter's number."""

_SIGN = -(1 << 63)


class LoadedAdapter(NamedTuple):
    """An adapter of a loaded model. id: its number in requests. scale: that of requests which name no adapters."""

    id: int
    name: str
    path: str
    scale: float


@dataclass(frozen=True)
class AdapterScales:
    """The adapters of a model, from which a request's scales follow.

    always: rows with scales of 0 are computed as the others are, so that no row's bits depend on other rows
    (`EngineConfig.deterministic`).
    """

    adapters: tuple[LoadedAdapter, ...] = ()
    always: bool = False

    def of(self, lora: Mapping[int, float] | None) -> Scales | None:
        """The scales of a request; None where its rows need no adapter.

        lora: scales by adapter number, 0 where missing; None: the scales that the model was loaded with.
        Raises EngineError for a number that no adapter has.
        """
        scales = self.scales(lora)
        return scales if any(scales) or (self.always and scales) else None

    def scales(self, lora: Mapping[int, float] | None) -> Scales:
        """As `of`, but with a scale for each adapter even if no row needs one."""
        if lora is None:
            return tuple(adapter.scale for adapter in self.adapters)
        for number in lora:
            if not 0 <= number < len(self.adapters):
                raise EngineError(f"lora: no adapter {number}; {self._known()}")
        return tuple(float(lora.get(adapter.id, 0.0)) for adapter in self.adapters)

    def _known(self) -> str:
        if not self.adapters:
            return "the model was loaded without any (--lora)"
        return "there are " + ", ".join(f"{adapter.id} ({adapter.name})" for adapter in self.adapters)


NO_ADAPTERS = AdapterScales()


def keyed(ids: list[int], scales: Scales | None) -> list[int]:
    """The int64 ids that identify the contents of blocks, for a request with these scales.

    The first id becomes a negative one, of 63 bits of the SHA-256 of itself and the scales. That keeps all blocks of
    different scales apart, since a block's key depends on the blocks before it. With scales of 0 or None the ids stay.
    """
    if scales is None or not any(scales) or not ids:
        return ids
    digest = sha256(pack(f"<{len(scales)}dq", *scales, ids[0])).digest()
    return [int.from_bytes(digest[:8], "little", signed=True) | _SIGN, *ids[1:]]
