"""The LoRA adapters of a loaded model, and how strongly a request applies each."""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from struct import pack
from typing import NamedTuple, TypeAlias

from quengine.errors import EngineError

Scales: TypeAlias = tuple[float, ...]
"""Of each adapter of a model, by its number."""

_SIGN = -(1 << 63)


class LoadedAdapter(NamedTuple):
    """An adapter of a loaded model. id: what requests name it by. scale: of requests that say nothing of adapters."""

    id: int
    name: str
    path: str
    scale: float


@dataclass(frozen=True)
class AdapterScales:
    """See the module docstring.

    always: rows without adapters are computed as those with them are, so that no row's bits depend on others'
    (`EngineConfig.deterministic`).
    """

    adapters: tuple[LoadedAdapter, ...] = ()
    always: bool = False

    def of(self, lora: Mapping[int, float] | None) -> Scales | None:
        """The scales of a request: None where its rows need no adapter.

        lora: scales by number, of which those that are missing are 0; None: those that the model was loaded with.
        Raises EngineError for a number that no adapter has.
        """
        scales = self.scales(lora)
        return scales if any(scales) or (self.always and scales) else None

    def scales(self, lora: Mapping[int, float] | None) -> Scales:
        """The scales of a request, of each adapter, as `of` has them."""
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
    """Ids that identify the contents of blocks, int64, with an id below 0 in place of the first: 63 bits of the SHA-256
    of it and the scales. A block's key has that of all blocks before it, so the first id tells every block apart. Where
    the scales are 0 or None the ids stay."""
    if scales is None or not any(scales) or not ids:
        return ids
    digest = sha256(pack(f"<{len(scales)}dq", *scales, ids[0])).digest()
    return [int.from_bytes(digest[:8], "little", signed=True) | _SIGN, *ids[1:]]
