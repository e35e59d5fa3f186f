"""Rows of a step that are given as embeddings, such as an image's, instead of by their tokens."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class EmbeddedRows(NamedTuple):
    """The rows of a step that are given as embeddings.

    Attributes:
        rows: int64 [n], their numbers in the step, each at most once; in a captured step -1 stands for no row.
        values: fp32 [n, embedding length], on the same device.
        later: fp32 [layers, n, embedding length], what is added to these rows after each of the first layers
            (Qwen3-VL's deepstack); None: nothing is.
        spans: runs of rows that attend to one another both ways (kernels/image_attention.py), on the host: the first
        row in the step, the row after the last, and how many earlier rows of the run the cache has.
    """

    rows: Tensor
    values: Tensor
    spans: Sequence[tuple[int, int, int]] = ()
    later: Tensor | None = None

    @property
    def of_later_layers(self) -> Sequence[Tensor]:
        """`later`, empty if it is None."""
        return () if self.later is None else self.later.unbind(0)


def place_embeddings(x: Tensor, given: EmbeddedRows | None) -> Tensor:
    """x [T, K] with the given rows written over it, without the embedding's scale: the torch definition."""
    if given is not None:
        known = given.rows >= 0
        x.index_copy_(0, given.rows[known], given.values[known].to(x.dtype))
    return x


def sent(
    values: Sequence[int] | Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The values on a device, without waiting for the device's work."""
    made = torch.tensor(values, dtype=dtype)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The features [n, width] of several images, one after the other, on a CUDA device if some of them are on it. Call
    it as the step is launched: from then on the owners of the parts may give up their memory."""
    on_device = [part for part in parts if part.is_cuda]
    for part in on_device:
        part.record_stream(torch.cuda.current_stream(part.device))
    if on_device and len(on_device) < len(parts):
        device = on_device[0].device
        parts = [part.to(device, non_blocking=True) for part in parts]
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def embedded_rows(
    numbers: list[int],
    values: Tensor,
    device: torch.device,
    width: int,
    spans: Sequence[tuple[int, int, int]] = (),
) -> EmbeddedRows:
    """The rows with these numbers in a step, on its device. values: [n, width] or, with `later`, [n, (1 + layers) *
    width]."""
    rows = sent(numbers, torch.int64, device)
    values = values.to(device, torch.float32, non_blocking=True)
    parts = values.view(len(values), -1, width).transpose(0, 1).contiguous()
    return EmbeddedRows(rows, parts[0], spans, parts[1:] if len(parts) > 1 else None)
