"""A task's memory on the stack, vectors of 16 lanes by name, and its blocks' places in results."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from llvmlite import ir

from quengine.kernels.block_formats import BlockFormat
from quengine.kernels.cpu.ir.vector_ir import I16, I64, Emitter, vec
from quengine.kernels.cpu.quantize.lanes import LANE_BYTES, LANES, Lanes, load, load_ints
from quengine.kernels.cpu.runtime.arguments import Arguments, fields_of


class Places:
    """Where vectors lie, given how many there are of each name."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._starts, count = dict[str, int](), 0
        for name, size in sizes.items():
            self._starts[name] = count
            count += size
        self.floats = count * LANES

    def __getitem__(self, name: str) -> int:
        """The offset of the first vector of a name, in bytes."""
        return self._starts[name] * LANE_BYTES


class Memory:
    """The vectors at an address, laid out by `places`."""

    def __init__(self, e: Emitter, places: Places, address: ir.Value) -> None:
        self.e, self._places, self._address = e, places, address

    def at(self, name: str, index: int | ir.Value = 0) -> ir.Value:
        """The address of vector `index` of a name."""
        start = self.e.at(self._address, self._places[name])
        if isinstance(index, int):
            return self.e.at(start, index * LANE_BYTES)
        return self.e.at(start, self.e.b.mul(index, self.e.i64(LANE_BYTES)))

    def load(self, name: str, index: int | ir.Value = 0) -> Lanes:
        return load(self.e, self.at(name, index))

    def load_ints(self, name: str, index: int | ir.Value = 0) -> Lanes:
        return load_ints(self.e, self.at(name, index))

    def loads(self, name: str, count: int, start: ir.Value | None = None) -> list[Lanes]:
        """`count` vectors of a name, from vector `start` or the first on."""
        address = self.at(name, 0 if start is None else start)
        return [load(self.e, address, i * LANE_BYTES) for i in range(count)]


class BlockMemory(Memory):
    """Memory that has `x` and `weights` of the blocks of a format, and vectors of each of their groups."""

    def __init__(self, e: Emitter, places: Places, address: ir.Value, fmt: BlockFormat) -> None:
        super().__init__(e, places, address)
        self.fmt, self.groups = fmt, fmt.block // fmt.group

    def group(self, group: ir.Value) -> tuple[list[Lanes], list[Lanes]]:
        """x and weights of a group."""
        start = self.e.b.mul(group, self.e.i64(self.fmt.group))
        return self.loads("x", self.fmt.group, start), self.loads("weights", self.fmt.group, start)

    def of_groups(self, name: str) -> list[Lanes]:
        return self.loads(name, self.groups)

    def each_group(self, body: Callable[[ir.Value], None]) -> None:
        self.e.each(self.e.i64(0), self.e.i64(self.groups), 1, body)


def field(e: Emitter, arguments: type, args: ir.Value, name: str) -> ir.Value:
    """An integer field of the arguments at an address."""
    return e.load(I64, args, fields_of(arguments)[name].offset)


class TaskBlocks:
    """A task's blocks in the tensors of `arguments`, whose field `blocks` is the tensors' last dimension."""

    def __init__(
        self, e: Emitter, arguments: type[Arguments], args: ir.Value, task: ir.Value, groups: int
    ) -> None:
        self.e, self._arguments, self._args, self._groups = e, arguments, args, groups
        self._blocks = field(e, arguments, args, "blocks")
        self._lanes = e.b.mul(task, e.i64(LANES))

    def at(self, name: str, item_bytes: int, group: ir.Value, place: int | ir.Value = 0) -> ir.Value:
        """The address of the task's elements of a group in a tensor [places, groups, blocks]."""
        e = self.e
        whole = place if isinstance(place, ir.Value) else e.i64(place)
        row = e.b.add(e.b.mul(whole, e.i64(self._groups)), group)
        element = e.b.add(e.b.mul(row, self._blocks), self._lanes)
        return e.b.add(field(e, self._arguments, self._args, name), e.b.mul(element, e.i64(item_bytes)))

    def store(self, name: str, lane: ir.IntType, values: Lanes, group: ir.Value, place: int = 0) -> None:
        """The low bits of integers as a tensor's elements of a group."""
        cut = self.e.b.trunc(values.value, vec(lane, LANES))
        self.e.store(cut, self.at(name, lane.width // 8, group, place))

    def store_unit(self, name: str, half: Lanes) -> None:
        """Bits of fp16 to a tensor [blocks]."""
        base = field(self.e, self._arguments, self._args, name)
        address = self.e.b.add(base, self.e.b.mul(self._lanes, self.e.i64(2)))
        self.e.store(self.e.b.trunc(half.value, vec(I16, LANES)), address)
