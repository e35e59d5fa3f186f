"""When Python's garbage collector runs in a process: rarely while it starts, never again through what it has loaded.

What a start makes (torch, a vocabulary, a model) lasts to the end; each collection would walk through all of it.
"""

import gc

from quengine.kernels.collection_pause import paused

__all__ = ["AT_START", "AT_WORK", "ending", "paused", "starting", "working"]

AT_START = 1_000_000
"""Objects made between two collections; a start with torch makes fewer."""
AT_WORK = 20_000


def starting() -> None:
    """Makes collections rare from now on."""
    gc.set_threshold(AT_START)


def working() -> None:
    """Exempts all present objects from collection; those made from now on are collected while they are few."""
    gc.freeze()
    gc.set_threshold(AT_WORK)


def ending() -> None:
    """Spares the interpreter the collection with which it ends."""
    gc.freeze()
