"""The memory that a PDL consumer accesses before it waits for its producer, read from its PTX.

With programmatic dependent launch a kernel starts while its predecessor still runs; before `griddepcontrol.wait` it
may read what no kernel writes (weights), and write nothing. In a kernel with specialized warps one kind waits, and the
others start after a barrier with it. PTX: NVIDIA's "Parallel Thread Execution ISA", 9.7.13 (griddepcontrol) and 9.7.9
(loads and stores).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

WAIT = "griddepcontrol.wait"
_BARRIER = "barrier.sync"
"""A barrier of all warps if it names no number of threads; Triton writes `bar.sync` for the warps of one kind."""
_REGISTER = re.compile(r"%[a-z]+\d+")
_PARAMETER = re.compile(r"_param_(\d+)\b")
_LABEL = re.compile(r"^(\$?\w+):")
_TARGET = re.compile(r"\$\w+")
_INSTRUCTION = re.compile(r"^(?:@!?(%p\d+)\s+)?([a-z][\w.:]*)\s*(.*?);")
_WRITES = ("st.global", "red.global", "atom.global", "st.async", "cp.reduce")
_READS = ("ld.global", "cp.async", "prefetch")


@dataclass(frozen=True)
class Early:
    """The numbers of the pointer parameters through which a kernel reads and writes memory on some path from its start
    to its wait. waits: whether there is a wait at all.
    """

    waits: bool
    reads: frozenset[int]
    writes: frozenset[int]


@dataclass(frozen=True)
class _Instruction:
    name: str
    operands: str
    guarded: bool


def before_wait(ptx: str) -> Early:
    """The accesses of the kernel in `ptx` (one entry) before it waits."""
    body, labels = _body(ptx)
    origins = _origins(body)
    reads: set[int] = set()
    writes: set[int] = set()
    for at in _reachable(body, labels):
        found = body[at]
        if found.name.startswith((*_READS, *_WRITES)):
            through = _addressed(found, origins)
            (writes if found.name.startswith(_WRITES) else reads).update(through)
    waits = any(instruction.name == WAIT for instruction in body)
    return Early(waits, frozenset(reads), frozenset(writes))


def _body(ptx: str) -> tuple[list[_Instruction], dict[str, set[int]]]:
    """The instructions in order, and the index among them of each label, or the indices of a list of branch targets."""
    body: list[_Instruction] = []
    labels: dict[str, set[int]] = {}
    lists: dict[str, list[str]] = {}
    names: list[str] | None = None
    for line in ptx[ptx.index(".entry") :].splitlines():
        text = line.split("//")[0].strip()
        if names is not None:
            names += _TARGET.findall(text)
            names = None if text.endswith(";") else names
        elif label := _LABEL.match(text):
            labels[label[1]] = {len(body)}
            if ".branchtargets" in text:
                names = lists[label[1]] = []
        elif found := _INSTRUCTION.match(text):
            body.append(_Instruction(found[2], found[3], found[1] is not None))
    labels.update(
        {name: set().union(*(labels[target] for target in targets)) for name, targets in lists.items()}
    )
    return body, labels


def _reachable(body: list[_Instruction], labels: dict[str, set[int]]) -> Iterator[int]:
    """The instructions that can run before any wait."""
    barriers = {at for at, found in enumerate(body) if found.name == _BARRIER and "," not in found.operands}
    if any(body[at].name == WAIT for barrier in barriers for at in _from(barrier, body, labels, set())):
        barriers = set()  # warps that have not waited pass it
    for at in _from(0, body, labels, barriers):
        if body[at].name != WAIT:
            yield at


def _from(start: int, body: list[_Instruction], labels: dict[str, set[int]], ends: set[int]) -> Iterator[int]:
    """The instructions that can run from `start` on, up to and including a wait or any of `ends`."""
    seen: set[int] = set()
    waiting = [start]
    while waiting:
        at = waiting.pop()
        if at in seen or at >= len(body):
            continue
        seen.add(at)
        yield at
        instruction = body[at]
        if instruction.name == WAIT or at in ends:
            continue
        leaves = instruction.name.startswith(("bra", "brx", "ret", "exit", "trap"))
        if instruction.name.startswith(("bra", "brx")):
            waiting.extend(labels[instruction.operands.split(",")[-1].strip()])
        if not leaves or instruction.guarded:
            waiting.append(at + 1)


def _origins(body: list[_Instruction]) -> dict[str, set[int]]:
    """For each register, the parameters that its value is computed from, other than through memory."""
    origins: dict[str, set[int]] = {}
    changed = True
    while changed:
        changed = False
        for instruction in body:
            if instruction.name.startswith(("st.", "red.", "bra", "bar", "ld.global", "ld.shared", "atom.")):
                continue
            results, sources = _results(instruction.operands)
            found = _mentioned(sources, origins)
            for register in results:
                held = origins.setdefault(register, set())
                if not found <= held:
                    held |= found
                    changed = True
    return origins


def _results(operands: str) -> tuple[list[str], str]:
    """The registers that an instruction writes (its first operand), and the text of its other operands."""
    first = operands[: operands.index("}") + 1] if operands.startswith("{") else operands.split(",")[0]
    return _REGISTER.findall(first), operands[len(first) :]


def _mentioned(text: str, origins: dict[str, set[int]]) -> set[int]:
    found = {int(number) for number in _PARAMETER.findall(text)}
    for register in _REGISTER.findall(text):
        found |= origins.get(register, set())
    return found


def _addressed(instruction: _Instruction, origins: dict[str, set[int]]) -> set[int]:
    # cp.async has the shared address before the global one; the shared one derives from no parameter.
    return set().union(
        *(_mentioned(text, origins) for text in re.findall(r"\[([^]]*)]", instruction.operands))
    )
