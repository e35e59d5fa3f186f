"""Rotary frequencies of models whose image rows have three positions: which frequency rotates by which position.

A row has a position in time, one down and one across its image; for text the three are equal. Sources: Wang et al.
2024, "Qwen2-VL" (M-RoPE, consecutive sections); Qwen3-VL, whose sections are interleaved.
"""

from collections.abc import Callable, Mapping, Sequence

from quengine.models.architectures.architecture import Keys
from quengine.models.config import ModelConfig
from quengine.models.gguf import GGUFFile

SECTIONS = "rope.dimension_sections"
"""Key of GGUF, without the architecture's prefix."""

Axes = tuple[int, ...]
"""For each frequency 0, 1 or 2: it turns by the position in time, down or across. Empty: not known."""


def consecutive_axes(sections: Sequence[int], frequencies: int) -> Axes:
    """The first sections[0] frequencies turn by time, and so on; empty if `sections` do not add up to `frequencies`."""
    axes = tuple(axis for axis, count in enumerate(sections[:3]) for _ in range(count))
    return axes if len(axes) == frequencies else ()


def interleaved_axes(sections: Sequence[int], frequencies: int) -> Axes:
    """Frequencies take turns, as long as sections[1] and sections[2] last; all others turn by time."""
    return tuple(
        j % 3 if j % 3 and j < 3 * sections[j % 3] else 0
        for j in range(frequencies if len(sections) > 2 else 0)
    )


def even_sections(frequencies: int) -> list[int]:
    """Interleaved sections of a synthetic model, as equal as possible."""
    first, second = -(-frequencies // 3), (frequencies + 1) // 3
    return [first, second, frequencies - first - second]


def sections_of(keys: Keys, default: Sequence[int]) -> list[int]:
    """`mrope_section` of a configuration with complete `rope_parameters`."""
    given = keys.get("rope_parameters")
    found = given.get("mrope_section") if isinstance(given, Mapping) else None
    if isinstance(found, list) and len(found) >= 3 and all(type(n) is int and n >= 0 for n in found):
        return found
    return list(default)


def gguf_axes(
    file: GGUFFile, config: ModelConfig, of_sections: Callable[[Sequence[int], int], Axes] = consecutive_axes
) -> Axes:
    """The axes by a file's sections, () without any. A fourth section, whose position is 0 in texts, must be empty.
    Interleaved ones may add up to more than a head's frequencies, as in converted Qwen3.5. Raises GGUFError."""
    key = f"{config.architecture}.{SECTIONS}"
    sections = file.get_ints(key)
    if sections is None:
        return ()
    values = sections.tolist()
    if len(values) not in (3, 4) or min(values) < 0 or any(values[3:]):
        raise file.error(key, f"{values} is not implemented, only three sections of frequencies")
    frequencies = config.rope_dim // 2
    axes = of_sections(values, frequencies)
    if len(axes) != frequencies or sum(values) < frequencies:
        raise file.error(key, f"{values} are not the {frequencies} frequencies of a head")
    return axes
