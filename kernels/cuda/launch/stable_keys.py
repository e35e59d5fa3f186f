"""Kernel names in Triton's cache that do not depend on earlier launches.

Triton's key of a function includes the constants of the functions that it calls, but only of those that have a key
already: the key depends on the order in which a process launches kernels, so one process may not find what another has
compiled (triton.runtime.jit.DependenciesFinder._update_hash, Triton 3.6 and 3.7).
"""

from functools import cache
from typing import Any

from triton.runtime.jit import DependenciesFinder


@cache
def use_stable_keys() -> None:
    """Gives a called function its key before its constants are read; call before any kernel is compiled or recorded."""
    merge = DependenciesFinder._update_hash

    def _update_hash(finder: Any, function: Any) -> None:
        _ = function.cache_key
        merge(finder, function)

    DependenciesFinder._update_hash = _update_hash
