"""Which launches are compiled where there is no time for all: few that together have each constant of each kernel.

Together they have

- each constant of a kernel, and each list of its arguments' types: on some GPU;
- each type of an argument, its alignment, each option of the compiler, being of decode or not: on each GPU;
- of a kernel's launches of decode the one with the largest constants, which takes the most registers: on each GPU;
- each name that is a constant, as of a block format: on each GPU, in some kernel. The format's other properties, by
  which kernels differ, are constants themselves.

Numbers above some are amounts, as columns are, and only their kind counts (`kind`). What is not compiled is other
combinations of these.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from math import log2
from typing import Any

import triton.language as tl

from benchmarks.checks.aot_cases import Variant
from quengine.kernels.cuda.aot.aot_compile import RecordedLaunch, source

Feature = tuple[Hashable, ...]

CHOICES, TILES = 4, 256
"""Numbers up to CHOICES count each, and powers of two, as the sizes of tiles are, up to TILES."""


def covering(work: Sequence[Variant]) -> list[Variant]:
    """Some of these that together have all features of all."""
    features, sizes = (
        [features_of(variant) for variant in work],
        [size_of(variant.launch) for variant in work],
    )
    largest: dict[Feature, int] = {}
    for at, variant in enumerate(work):
        for arch in variant.archs if variant.decode else ():
            of_arch = (variant.launch.kernel, arch, "largest")
            if sizes[at] > sizes[largest.setdefault(of_arch, at)]:
                largest[of_arch] = at
    for feature, at in largest.items():
        features[at].add(feature)
    return [work[at] for at in cover(features, sizes)]


def features_of(variant: Variant) -> set[Feature]:
    """What a variant has that one at least is compiled with, but for the largest constants."""
    launch, archs = variant.launch, variant.archs
    kernel, made = launch.kernel, source(launch)
    found: set[Feature] = {(kernel, "types", str(made.signature))}
    for path, value in constants(launch):
        found |= (
            {(arch, value) for arch in archs} if isinstance(value, str) else {(kernel, path, kind(value))}
        )
    for arch in archs:
        found |= {(kernel, arch, argument, str(given)) for argument, given in made.signature.items()}
        found |= {(kernel, arch, option, given) for option, given in launch.options.items()}
        found |= {(kernel, arch, "aligned", at) for at in made.attrs}
        found.add((kernel, arch, "decode", variant.decode))
    return found


def constants(launch: RecordedLaunch) -> Iterator[tuple[str, Any]]:
    """The values of the compile-time arguments by name, or by the path to a field of one."""
    for (index, *_), value in source(launch).constants.items():
        yield from _parts(launch.kernel.arg_names[index], value)


def _parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, tl.constexpr):
        value = value.value
    if is_dataclass(value):
        named = {field.name: getattr(value, field.name) for field in fields(value)}
    elif isinstance(value, tuple):
        named = dict(zip(getattr(value, "_fields", range(len(value))), value, strict=True))
    else:
        yield path, value
        return
    yield path, type(value)
    for name, part in named.items():
        yield from _parts(f"{path}.{name}", part)


def kind(value: Any) -> Hashable:
    """Of a number that is an amount, what code may differ by: a power of two, a multiple of 16, or neither."""
    if isinstance(value, float):
        return value if value in (0.0, 1.0) else "a float"
    if not isinstance(value, int) or isinstance(value, bool | Enum) or value <= CHOICES:
        return value if isinstance(value, Hashable) else str(value)
    if value & (value - 1):
        return "a multiple of 16" if value % 16 == 0 else "any number"
    return value if value <= TILES else "a power of two"


def size_of(launch: RecordedLaunch) -> float:
    """How large the constants of a launch are, to compare it with others of its kernel."""
    numbers = (value for _, value in constants(launch) if type(value) is int and value > 1)
    return sum(map(log2, numbers))


def cover(features: Sequence[Set[Feature]], sizes: Sequence[float]) -> list[int]:
    """The numbers, in order, of some of these sets that together have all features: those with the most new ones first,
    of these the smaller ones; then without the largest of those that the others make needless."""
    having: dict[Feature, list[int]] = {}
    for at, each in enumerate(features):
        for feature in each:
            having.setdefault(feature, []).append(at)
    new, left, chosen = [len(each) for each in features], set(having), set[int]()
    while left:
        best = max(range(len(features)), key=lambda at: (new[at], -sizes[at], -at))
        chosen.add(best)
        for feature in left & features[best]:
            left.remove(feature)
            for at in having[feature]:
                new[at] -= 1
    _drop_needless(chosen, features, sizes, having)
    return sorted(chosen)


def _drop_needless(
    chosen: set[int],
    features: Sequence[Set[Feature]],
    sizes: Sequence[float],
    having: Mapping[Feature, Sequence[int]],
) -> None:
    times = {feature: len(chosen.intersection(held)) for feature, held in having.items()}
    for at in sorted(chosen, key=lambda at: (-sizes[at], at)):
        if all(times[feature] > 1 for feature in features[at]):
            chosen.remove(at)
            for feature in features[at]:
                times[feature] -= 1
