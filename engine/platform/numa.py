"""Memory of several NUMA nodes: pages that threads of all nodes read are spread over all of them.

A page lies on the node whose thread touches it first. Few threads touch weights first, so without spreading they would
lie on few nodes, and all threads would read the memory of these nodes alone.
"""

import ctypes
import logging
import platform
import sys
from collections.abc import Callable

from quengine.platform.machine import memory_nodes

_log = logging.getLogger("quengine.load")
_SYSCALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}  # set_mempolicy, get_mempolicy
_DEFAULT, _INTERLEAVE = 0, 3
_MOST_NODES = 1024


def spread_memory() -> None:
    """Spreads pages that this thread, or threads that it starts from now on, touch first over the nodes of this
    process, if these are several. A policy that is set already, as by `numactl`, stays."""
    nodes, before = memory_nodes(), policy()
    if len(nodes) > 1 and before in (_DEFAULT, None):
        done = before is not None and interleave(nodes)
        text = ", ".join(map(str, nodes))
        _log.info(
            "memory is %s over NUMA nodes %s",
            "spread" if done else "not spread (refused by the system)",
            text,
        )


def policy() -> int | None:
    """Linux's number of this thread's policy; None where it is refused, as in containers, or there is none."""
    call = _system_call(1)
    mode = ctypes.c_int()
    if call is None or call(ctypes.byref(mode), None, 0, None, 0) != 0:
        return None
    return mode.value


def interleave(nodes: tuple[int, ...]) -> bool:
    """Sets this thread's policy to take pages from the nodes in turn; False where it is refused, as in containers."""
    words = (ctypes.c_ulong * (_MOST_NODES // 64))()
    for node in nodes:
        words[node // 64] |= 1 << node % 64
    call = _system_call(0)
    return call is not None and call(_INTERLEAVE, words, _MOST_NODES) == 0


def _system_call(which: int) -> Callable[..., int] | None:
    """Linux's set_mempolicy (0) or get_mempolicy (1), which the C library has no functions for."""
    numbers = _SYSCALLS.get(platform.machine())
    if sys.platform != "linux" or numbers is None:
        return None
    function = ctypes.CDLL(None).syscall
    return lambda *arguments: int(function(numbers[which], *arguments))
