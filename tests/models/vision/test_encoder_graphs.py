"""Which units an encoder is captured for, without a device: those that come a second time, while there is memory."""

from collections.abc import Generator
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from quengine.models.vision import encoder_graphs
from quengine.models.vision.blocks import UnitGrid
from quengine.models.vision.encoder_graphs import EncoderGraphs, in_slices

GRID = UnitGrid(1, 1)


class Encoder:
    """Three layers, each of which adds one."""

    def layers(self, pixels: Tensor, _grid: UnitGrid) -> Generator[None, None, Tensor]:
        for _ in range(3):
            pixels = pixels + 1
            yield
        return pixels


@pytest.mark.parametrize(("count", "turns"), [(1, 4), (2, 2), (3, 2), (4, 1)])
def test_slices_have_so_many_layers_and_the_last_one_what_is_after_them(count: int, turns: int) -> None:
    taken = []

    def turn() -> nullcontext[None]:
        taken.append(1)
        return nullcontext()

    assert in_slices(Encoder().layers(torch.zeros(2), GRID), count, turn).tolist() == [3, 3]
    assert len(taken) == turns


def test_without_memory_nothing_is_captured_any_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    captures = []

    def capture(_graphs: EncoderGraphs, shape: tuple[int, ...], *_: Any) -> Any:
        captures.append(shape)
        if shape[0] > 1:
            raise torch.OutOfMemoryError("no memory")
        return "graphs"

    monkeypatch.setattr(EncoderGraphs, "_is_default_stream", False)
    monkeypatch.setattr(EncoderGraphs, "_capture", capture)
    monkeypatch.setattr(EncoderGraphs, "_replayed", lambda _, captured, *__: captured)
    graphs = EncoderGraphs(cast(Any, Encoder()), torch.device("cpu"))

    def rows(count: int) -> Any:
        made = graphs.rows([torch.zeros(1)] * count, GRID, 2, nullcontext)
        return made if isinstance(made, str) else made.flatten().tolist()

    assert [rows(1), rows(1), rows(2), rows(2), rows(2)] == [[3], "graphs", [3, 3], [3, 3], [3, 3]]
    assert [rows(3), rows(3), rows(1)] == [[3] * 3, [3] * 3, "graphs"] and captures == [(1, 1), (2, 1)]
    (record,) = (each for each in caplog.records if each.name == encoder_graphs.logger.name)
    assert record.levelname == "WARNING" and "no device memory left" in record.message
