"""The rows of a step that images give: on the device, with the positions that they are rotated by."""

from collections.abc import Sequence as Seq

import torch

from quengine.kernels.embedded_rows import EmbeddedRows, embedded_rows, sent
from quengine.models.decoder import Decoder
from quengine.step_plan import GivenRows, SequenceRows, angle_rows


def embeds_of(decoder: Decoder, given: GivenRows) -> EmbeddedRows | None:
    """The rows given as embeddings on the device, on all ranks that have a part of the embedding layer."""
    if not given.numbers:
        return None
    config, device = decoder.config, decoder.backend.device
    width, values = config.embedding_length, given.values
    if values is None:
        values = torch.empty(len(given.numbers), (1 + given.later) * width, device=device)
    embeds = embedded_rows(list(given.numbers), values, device, width, given.spans)
    if (
        config.stage is not None
    ):  # the first one alone has the embedding layer, and all layers that add to rows
        return embeds if config.stage.is_first else embeds._replace(later=None)
    decoder.backend.communicator.broadcast(embeds.values)
    if embeds.later is not None:
        decoder.backend.communicator.broadcast(embeds.later)
    return embeds


def angles_of_step(
    decoder: Decoder, ctx_size: int, rows: Seq[SequenceRows], given: GivenRows
) -> list[int] | None:
    """The `angle_rows` of a step. The angles of its image rows are put into the rotary tables before it runs."""
    if given.places:
        decoder.turn_images(sent(given.places, torch.int64, decoder.backend.device))
    return angle_rows(rows, ctx_size, given)
