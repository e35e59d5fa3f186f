"""The LoRA adapters of a loaded model, and how strongly a request applies each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from struct import pack
from typing import NamedTuple, TypeAlias

from quengine.errors import EngineError

Scales: TypeAlias = tuple[float, ...]
"""Of each adapter of a model, by its number."""

_SALT_BITS = 30


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
    _salts: dict[Scales, int] = field(default_factory=dict, compare=False)

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

    def salt(self, scales: Scales | None) -> int:
        """What tells the keys and values of these scales from those of others in the keys of blocks; 0: no adapter."""
        if scales is None or not any(scales):
            return 0
        if scales not in self._salts:
            digest = sha256(pack(f"<{len(scales)}d", *scales)).digest()
            self._salts[scales] = int.from_bytes(digest[:4], "little") >> (32 - _SALT_BITS) or 1
        return self._salts[scales]


NO_ADAPTERS = AdapterScales()


def salted(ids: list[int], salt: int) -> list[int]:
    """Ids that identify the contents of blocks, int64, told apart by `salt`."""
    return ids if not salt else [token ^ (salt << 32) for token in ids]


def is_salted(ids: list[int]) -> bool:
    """Whether ids are those of `salted`, of a text with tokens."""
    return any(token >> 32 for token in ids if token >= 0)
