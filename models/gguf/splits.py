"""Finds the files of a split model: `NAME-00001-of-00003.gguf`, any of which names all.

Which file is which comes from the `split.no` (from 0), `split.count` and `split.tensors.count` keys; the
names only say where the others lie. It does not look into tensors or other metadata beyond comparing them.
"""

import re
from pathlib import Path

from quengine.models.gguf.errors import GGUFError, shown
from quengine.models.gguf.header import Entry, Shard, read_shard

SPLIT_NO, SPLIT_COUNT, SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"
_SHARD_NAME = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def read_shards(path: Path) -> tuple[Shard, ...]:
    """The file at `path`, or all files of the split it belongs to, in order. Raises GGUFError."""
    named = read_shard(path)
    count = _split_value(named, SPLIT_COUNT, default=1)
    if count <= 1:
        return (named,)
    number = _split_value(named, SPLIT_NO)
    if number >= count:
        raise _split_error(named, SPLIT_NO, f"{number}, of a split into {count}")
    match = _SHARD_NAME.fullmatch(path.name)
    expected = f"-{number + 1:05d}-of-{count:05d}.gguf"
    if match is None or not path.name.endswith(expected):
        problem = f"part {number + 1} of {count}: its name must end in {expected} to find the rest"
        raise _split_error(named, SPLIT_COUNT, problem)
    shards = []
    for index in range(count):
        sibling = path.with_name(f"{match['prefix']}-{index + 1:05d}-of-{count:05d}.gguf")
        if not sibling.exists():
            raise GGUFError(
                sibling, "file", f"missing: part {index + 1} of the {count} that make up this model"
            )
        shards.append(named if index == number else read_shard(sibling))
    _check_siblings(shards)
    return tuple(shards)


def _split_error(shard: Shard, key: str, problem: str) -> GGUFError:
    entry = shard.entries.get(key)
    return GGUFError(shard.path, key, problem, None if entry is None else entry.offset)


def _split_value(shard: Shard, key: str, default: int | None = None) -> int:
    entry = shard.entries.get(key)
    if entry is None:
        if default is None:
            raise _split_error(shard, key, "missing, but the file says that it is part of a split")
        return default
    if not isinstance(entry.value, int) or isinstance(entry.value, bool) or entry.value < 0:
        raise _split_error(shard, key, f"must be a non-negative integer, is {_value_text(entry)}")
    return entry.value


def _value_text(entry: Entry) -> str:
    return (
        f"{entry.type_name} {entry.value}" if isinstance(entry.value, int | float) else f"a {entry.type_name}"
    )


def _check_siblings(shards: list[Shard]) -> None:
    """Raises GGUFError unless each shard is the one its name says, and together they hold as many tensors as the first
    declares."""
    first = shards[0]
    declared = _split_value(first, SPLIT_TENSORS)
    names: dict[str, Shard] = {}
    for index, shard in enumerate(shards):
        count, number = _split_value(shard, SPLIT_COUNT, default=1), _split_value(shard, SPLIT_NO, default=0)
        if count != len(shards) or number != index:
            problem = f"says part {number + 1} of {count}, its name says part {index + 1} of {len(shards)}"
            raise _split_error(shard, SPLIT_NO, problem)
        if _split_value(shard, SPLIT_TENSORS) != declared:
            total = _split_value(shard, SPLIT_TENSORS)
            problem = f"{total}, but {first.path.name} says {declared}: not of one model"
            raise _split_error(shard, SPLIT_TENSORS, problem)
        _check_same_model(first, shard)
        for name, tensor in shard.tensors.items():
            if name in names:
                problem = f"is in {names[name].path.name} too: the files are not of one split"
                raise GGUFError(shard.path, f"tensor {shown(name)}", problem, tensor.info_offset)
            names[name] = shard
    if len(names) != declared:
        problem = f"{declared} tensors announced, the {len(shards)} files hold {len(names)}"
        raise _split_error(first, SPLIT_TENSORS, problem)


def _check_same_model(first: Shard, shard: Shard) -> None:
    """Raises GGUFError if metadata that a later shard repeats differ from the first one's."""
    for key, entry in shard.entries.items():
        known = first.entries.get(key)
        if key == SPLIT_NO or known is None or not isinstance(entry.value, int | float | str):
            continue
        if known.value != entry.value:
            problem = f"differs from that in {first.path.name}: the files are not of one model"
            raise GGUFError(shard.path, shown(key), problem, entry.offset)
