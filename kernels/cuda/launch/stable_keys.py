"""Names of kernels in Triton's cache that do not follow from what was launched before.

Triton's key of a function holds the constants of the functions that it calls, but only of those which have a key
already: the key depends on the order in which a process launches kernels, so that one process does not find what
another has compiled (triton.runtime.jit.DependenciesFinder._update_hash, Triton 3.6 and 3.7).
"""

from functools import cache
from typing import Any

from triton.runtime.jit import DependenciesFinder


@cache
def use_stable_keys() -> None:
    """Before the first kernel is compiled or recorded: give a called function its key before its constants are read."""
    merge = DependenciesFinder._update_hash

    def _update_hash(finder: Any, function: Any) -> None:
        _ = function.cache_key
        merge(finder, function)

    DependenciesFinder._update_hash = _update_hash
