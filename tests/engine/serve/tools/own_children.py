"""Processes that this one has started. A worker of pytest has some of earlier tests: compare with those before."""

import psutil


def children() -> set[psutil.Process]:
    """Those that run."""
    return {each for each in psutil.Process().children() if runs(each)}


def runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
