"""The context of a CUDA device is begun for the device that will be used, and nowhere else."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from quengine.platform import cuda_start


def fake_driver(devices: int, retained: list[int]) -> Any:
    """The calls of a driver with so many devices, of compute capability 9.0, which notes whose context is retained."""

    def device_get(device: Any, index: int) -> int:
        device._obj.value = index
        return 0 if index < devices else 101

    def retain(_: Any, device: ctypes.c_int) -> int:
        retained.append(device.value)
        return 0

    def attribute(value: Any, number: int, _: ctypes.c_int) -> int:
        value._obj.value = {75: 9, 76: 0}[number]
        return 0

    return SimpleNamespace(
        cuInit=lambda _: 0 if devices else 100,
        cuDeviceGet=device_get,
        cuDevicePrimaryCtxRetain=retain,
        cuDeviceGetAttribute=attribute,
    )


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What was retained, and for which capabilities Triton was read, after `begin` on a machine of so many devices."""

    def run(device: str, devices: int = 1) -> tuple[list[int], list[int]]:
        retained, read = list[int](), list[int]()
        monkeypatch.setattr(cuda_start, "_driver", lambda: fake_driver(devices, retained))
        monkeypatch.setattr(cuda_start, "_read_triton", read.append)
        cuda_start.begin(device)
        cuda_start.wait()
        return retained, read

    return run


@pytest.mark.parametrize(("device", "index"), [("auto", 0), ("cuda", 0), ("cuda:1", 1)])
def test_the_context_is_that_of_the_named_device(started: Any, device: str, index: int) -> None:
    assert started(device, devices=2) == ([index], [90])


@pytest.mark.parametrize("device", ["cpu", "cuda:x", "gpu", "cuda:1"])
def test_nothing_is_begun_for_another_device(started: Any, device: str) -> None:
    assert started(device) == ([], [])


def test_without_a_device_triton_is_not_imported(started: Any) -> None:
    assert started("auto", devices=0) == ([], [])


def test_what_fails_in_the_thread_is_left_for_later(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(index: int) -> int:
        raise OSError(index)

    monkeypatch.setattr(cuda_start, "_make_context", broken)
    assert started("cuda") == ([], [])


def test_the_key_of_triton_s_cache_is_there_afterwards() -> None:
    from triton.runtime.cache import triton_key

    cuda_start._read_triton(90)
    hits = triton_key.cache_info().hits
    triton_key()
    assert triton_key.cache_info().hits == hits + 1
