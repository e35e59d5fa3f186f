"""The confinement of tool commands and of processes that decode hostile files.

It imports only the standard library, as `keeper` is a process of its own.
"""
