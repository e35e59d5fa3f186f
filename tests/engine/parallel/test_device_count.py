"""How many GPUs share a model where nobody says, on devices with any amount of memory."""

from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quengine.config import EngineConfig
from quengine.errors import CannotRunError
from quengine.kernels.block_formats import FORMATS
from quengine.kernels.quant_tensor import QuantTensor
from quengine.loading import placement
from quengine.models.synthetic.presets import PRESETS
from quengine.models.synthetic.synthetic import tensor_type
from quengine.models.tensor_table import required_tensors
from quengine.parallel.device_count import fewest_devices

GIB = 2**30


def needs_40_gib(count: int, usable: bool) -> int | None:
    """Of weights that 3 devices cannot share, and 2 GiB for a usable context; the least takes nothing."""
    return None if count == 3 else 40 * GIB // count + 2 * GIB * usable


@pytest.mark.parametrize(
    ("free", "count"),
    [
        ([80], 1),
        ([80, 80, 80, 80], 1),
        ([42, 80], 1),
        ([41, 80], 2),  # no usable context on one
        ([24, 24, 24, 24], 2),
        ([24, 15, 24, 24], 4),  # the first two are as small as the smaller
        ([21.5, 21.5], 2),  # nowhere a usable context: one that is cut
        ([40, 20, 20], 1),
        ([13, 13, 13, 13], 4),
    ],
)
def test_the_fewest_devices_that_hold_the_model(free: list[float], count: int) -> None:
    assert fewest_devices([int(each * GIB) for each in free], needs_40_gib) == count


def test_what_all_devices_together_do_not_hold_is_an_error_with_numbers() -> None:
    with pytest.raises(CannotRunError) as raised:
        fewest_devices([8 * GIB, 8 * GIB, 8 * GIB, 6 * GIB], needs_40_gib)
    assert str(raised.value) == (
        "not enough memory on 4 CUDA devices: the model needs 40.00 GiB on one, 20.00 GiB on each of 2, "
        "10.00 GiB on each of 4; free are 8.00 GiB, 8.00 GiB, 8.00 GiB, 6.00 GiB; use a smaller model or a smaller "
        "quantization"
    )


@pytest.fixture(scope="module")
def checkpoint() -> Any:
    """Llama-70B in Q4_K_M: shapes without contents."""
    spec = PRESETS["llama-3-70b"]
    config = spec.config()
    tensors = {}
    for name, shape in required_tensors(config).items():
        fmt = FORMATS[tensor_type(spec, name, shape)]
        data = torch.empty(prod(shape[:-1]), fmt.row_bytes(shape[-1]), dtype=torch.uint8, device="meta")
        tensors[name] = QuantTensor(name, fmt, shape, data)
    nbytes = sum(tensor.data.numel() for tensor in tensors.values())
    return SimpleNamespace(path=Path("70b"), config=config, tensors=tensors, nbytes=nbytes)


def count_on(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Any, gib: list[float], **options: Any
) -> tuple[int, list[int]]:
    """How many of devices with so much free memory, of 141 GiB in all, and which were looked at."""
    asked = []

    def info(device: torch.device | int) -> tuple[int, int]:
        asked.append(device if isinstance(device, int) else device.index or 0)
        return int(gib[asked[-1]] * GIB), 141 * GIB

    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gib))
    monkeypatch.setattr(torch.cuda, "mem_get_info", info)
    config = EngineConfig(**options)
    return placement.rank_count(config, checkpoint, None, torch.device("cuda", 0)), asked


@pytest.mark.parametrize(
    ("gib", "options", "count"),
    [
        ([80, 80, 80, 80], {}, 1),
        ([47, 47, 47, 47], {}, 1),  # weights of 39.6 GiB, and 8192 tokens of 0.3 MiB each
        ([44, 44, 44, 44], {}, 2),
        ([23, 23, 23, 23], {}, 4),
        ([23, 23], {}, 2),  # 1.25 GiB of cache each are cut to what fits
        ([47, 47, 47, 47], {"ctx_size": 100_000}, 2),
        ([80, 80], {"tensor_parallel": 2}, 2),
        ([20, 20], {"tensor_parallel": 1}, 1),
        ([20, 20, 20], {"devices": "0,2"}, 2),
        ([20, 80], {"device": "cuda:0"}, 1),
        ([20, 20], {"make_room": lambda *_: False}, 1),
        ([20], {}, 1),  # the choice of a context says what is missing
    ],
)
def test_a_70b_model_takes_the_fewest_gpus(
    gib: list[float], options: dict[str, Any], count: int, checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, asked = count_on(monkeypatch, checkpoint, gib, **options)
    assert found == count
    if count == 1:
        assert set(asked) <= {0}  # asking another makes a context there


def test_a_70b_model_that_no_gpus_hold_names_what_each_would_need(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        CannotRunError, match=r"4[0-9]\.\d\d GiB on one, 2\d\.\d\d GiB on each of 2; free are 16.00 GiB, 8"
    ):
        count_on(monkeypatch, checkpoint, [16, 8])
