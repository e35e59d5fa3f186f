"""Prepares what a process with a CUDA device needs beside torch, in a thread while torch is imported.

This is the device's primary context, which the CUDA runtime and so torch use as well; Triton; the key of its cache,
for which Triton hashes its compiler library of some 400 MB; and, of a model that is new here, the process that compiles
kernels.
"""

import ctypes
import logging
import os
import threading

from quengine.platform import early_compiler

logger = logging.getLogger("quengine.start")

_DRIVER = "libcuda.so.1"
_MAJOR, _MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR."""

_threads: list[threading.Thread] = []


def begin(device: str, model: str | None = None) -> None:
    """Begins to prepare the device that `EngineConfig.device` names; "auto" is the first. model: as `LLM` takes it; its
    kernels may have to be compiled.

    A missing driver or device is no error here: it is reported where the device is chosen.
    """
    kind, _, index = device.partition(":")
    if kind not in ("auto", "cuda") or not (index or "0").isdecimal():
        return
    # As torch sets it, which the driver reads when it is initialized: kernels are loaded when they are first launched.
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    given = int(index or 0), model
    thread = threading.Thread(target=_run, args=given, name="quengine-start", daemon=True)
    thread.start()
    _threads.append(thread)


def wait() -> None:
    """Waits until what was begun is done: a kernel launch before that would do the same work once more."""
    while _threads:
        _threads.pop().join()


def _run(index: int, model: str | None) -> None:
    try:
        device = _find_device(index)
        if device is not None and model is not None:
            early_compiler.begin(model)
        capability = None if device is None else _make_context(device)
        if capability is not None:
            _read_triton(capability)
    except Exception as error:  # it is tried again where it is needed
        logger.debug("the start of the CUDA device is left for later: %s", error)


def _find_device(index: int) -> ctypes.c_int | None:
    """Initialize the driver (CUDA driver API), and find a device; None where there is no such device."""
    driver, device = _driver(), ctypes.c_int()
    if driver is None or driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), index):
        return None
    return device


def _make_context(device: ctypes.c_int) -> int | None:
    """Retain a device's primary context to the end of the process.

    The device's compute capability, as 90 for 9.0; None where it has no room for a context.
    """
    driver, context = _driver(), ctypes.c_void_p()
    if driver is None or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
        return None
    major, minor = ctypes.c_int(), ctypes.c_int()
    driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
    driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
    return 10 * major.value + minor.value


def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(_DRIVER)
    except OSError:
        return None


def _read_triton(capability: int) -> None:
    """Import Triton, and have it remember what the keys of its cache are made of."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.cache import triton_key

    make_backend(GPUTarget("cuda", capability, 32)).hash()  # asks ptxas for its version
    triton_key()
