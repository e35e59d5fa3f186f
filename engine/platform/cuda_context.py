"""A CUDA device's context, made in a thread while torch is imported: a third of a second that would follow the import.

The context is the device's primary one, which the CUDA runtime, and so torch, uses as well.
"""

import ctypes
import os
import threading

_DRIVERS = ("libcuda.so.1", "nvcuda.dll")


def begin_context(device: str) -> None:
    """Begin to make the context of the device that `EngineConfig.device` names; of "auto" the first.

    What cannot be done here, for want of a driver or a device, is found and said where the device is chosen.
    """
    kind, _, index = device.partition(":")
    if kind not in ("auto", "cuda") or not (index or "0").isdecimal():
        return
    # As torch sets it, which the driver reads when it is initialized: kernels are loaded when they are first launched.
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    threading.Thread(target=_retain, args=(int(index or 0),), name="quengine-context", daemon=True).start()


def _retain(index: int) -> None:
    """Initialize the driver and retain a device's primary context, to the end of the process (CUDA driver API)."""
    driver = _driver()
    if driver is None or driver.cuInit(0):
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuDeviceGet(ctypes.byref(device), index) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def _driver() -> ctypes.CDLL | None:
    for name in _DRIVERS:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None
