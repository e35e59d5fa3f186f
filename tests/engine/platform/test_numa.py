"""Pages are spread over NUMA nodes, by a policy of the system."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from quengine.platform import numa

SPREAD = """
import mmap
from quengine.platform import numa
assert numa.policy() == 0 and numa.interleave((0,)) and numa.policy() == 3
memory = mmap.mmap(-1, 1 << 22)
memory.write(bytes(1 << 22))
print("interleave" in open("/proc/self/numa_maps").read())
"""


@pytest.mark.skipif(
    numa.policy() is None or not Path("/proc/self/numa_maps").exists(), reason="no policies of memory here"
)
def test_pages_come_from_the_nodes_in_turn() -> None:
    done = subprocess.run([sys.executable, "-c", SPREAD], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


@pytest.mark.parametrize(
    ("nodes", "before", "refused", "said"),
    [
        ((0,), 0, False, None),
        ((), None, False, None),
        ((0, 1), 2, False, None),
        ((0, 1), None, False, "memory is not spread (refused by the system) over NUMA nodes 0, 1"),
        ((0, 1), 0, False, "memory is spread over NUMA nodes 0, 1"),
        ((0, 2), 0, True, "memory is not spread (refused by the system) over NUMA nodes 0, 2"),
    ],
)
def test_memory_is_spread_once_over_several_nodes(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    nodes: tuple[int, ...],
    before: int | None,
    refused: bool,
    said: str | None,
) -> None:
    asked = list[tuple[int, ...]]()
    monkeypatch.setattr(numa, "memory_nodes", lambda: nodes)
    monkeypatch.setattr(numa, "policy", lambda: before)
    monkeypatch.setattr(numa, "interleave", lambda given: asked.append(given) or not refused)
    with caplog.at_level(logging.INFO, "quengine"):
        numa.spread_memory()
    assert caplog.messages == ([] if said is None else [said])
    assert asked == ([] if said is None or before is None else [nodes])
