"""Prepares what a process with a CUDA device needs beside torch, in a thread while torch is imported.

This is the device's primary context, which the CUDA runtime and so torch use as well; Triton; and the key of its cache,
for which Triton hashes its compiler library of some 400 MB.
"""

import ctypes
import logging
import os
import threading

logger = logging.getLogger("quengine.start")

_DRIVER = "libcuda.so.1"
_MAJOR, _MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR."""

_threads: list[threading.Thread] = []


def begin(device: str) -> None:
    """Begin, for the device that `EngineConfig.device` names; "auto" is the first.

    A missing driver or device is no error here: it is reported where the device is chosen.
    """
    kind, _, index = device.partition(":")
    if kind not in ("auto", "cuda") or not (index or "0").isdecimal():
        return
    # As torch sets it, which the driver reads when it is initialized: kernels are loaded when they are first launched.
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    thread = threading.Thread(target=_run, args=(int(index or 0),), name="quengine-start", daemon=True)
    thread.start()
    _threads.append(thread)


def wait() -> None:
    """Until what was begun is there: a launch of a kernel before that would make the same once more."""
    while _threads:
        _threads.pop().join()


def _run(index: int) -> None:
    try:
        capability = _make_context(index)
        if capability is not None:
            _read_triton(capability)
    except Exception as error:  # it is tried again where it is needed
        logger.debug("the start of the CUDA device is left for later: %s", error)


def _make_context(index: int) -> int | None:
    """Initialize the driver, and retain a device's primary context to the end of the process (CUDA driver API).

    The device's compute capability, as 90 for 9.0; None where there is no such device.
    """
    driver = _driver()
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver is None or driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), index):
        return None
    if driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
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
