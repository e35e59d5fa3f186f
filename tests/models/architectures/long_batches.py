"""Tests of models with states on long texts: batches in chunks, token by token, and the engine with any chunks."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from quengine import LLM
from quengine.kernels.backend import KVLayer, LayerState, SlotLayer
from quengine.kernels.forward_batch import decode_batch, prefill_batch
from quengine.kernels.reference import ReferenceBackend
from quengine.models.architectures import layers_of
from quengine.models.blocks.block import SlotState
from quengine.models.config import ModelConfig
from quengine.models.decoder import Decoder
from tests.models.architectures.both_files import KINDS, opened, path_of
from tests.transformers_models import nmse, transformers_model


def paged_cache(config: ModelConfig, blocks: int) -> list[LayerState]:
    """Four slots, and so many blocks of 32 positions for each, in fp32."""
    return [
        SlotLayer(tuple(torch.full((4, *shape), 7.0) for shape in block.state.shapes))
        if isinstance(block.state, SlotState)
        else KVLayer(*torch.zeros(2, 4 * 32 * blocks, block.state.kv_heads, block.state.head_dim))
        for block in layers_of(config)
    ]


class SameLongLogits:
    """The logits of a module's case "plain" for three texts. A module derives its test class.

    lengths: of the texts; borders of the positions that `transformers` computes at once lie in the last. chunks: tokens
    of each text in each step.
    """

    lengths: ClassVar[Sequence[int]]
    chunks: ClassVar[Sequence[Sequence[int]]]

    @pytest.fixture(scope="class")
    def texts(self, request: pytest.FixtureRequest) -> list[Tensor]:
        vocab, random = request.module.CASES["plain"].vocab, torch.Generator().manual_seed(8)
        return [torch.randint(0, vocab, (length,), generator=random) for length in self.lengths]

    @pytest.fixture(scope="class")
    def long_logits(self, root: Path, texts: list[Tensor]) -> list[Tensor]:
        """Of each text by itself, of `transformers`."""
        model, _ = transformers_model(root / "plain")
        with torch.no_grad():
            return [model(text[None]).logits[0] for text in texts]

    @pytest.mark.parametrize("kind", KINDS)
    def test_sequences_of_a_batch_have_the_logits_of_each_alone(
        self, root: Path, kind: str, texts: list[Tensor], long_logits: list[Tensor]
    ) -> None:
        """Prompts of unequal lengths in chunks, and token by token from the last chunk on."""
        checkpoint, blocks = opened(root, "plain", kind), -(-self.lengths[2] // 32)
        config, context = checkpoint.config, 32 * blocks
        decoder = Decoder(config, checkpoint.tensors, ReferenceBackend(keep=True), context, context)
        cache, device, done = paged_cache(config, blocks), torch.device("cpu"), [0, 0, 0]
        tables = [[list(range(blocks * slot, blocks * slot + blocks)), [slot]] for slot in (1, 2, 3)]
        found: list[list[Tensor]] = [[], [], []]
        for step in self.chunks[:-1]:
            rows = [i for i, count in enumerate(step) if count]
            chunks = [texts[i][done[i] : done[i] + step[i]].tolist() for i in rows]
            starts, owned = [done[i] for i in rows], [tables[i] for i in rows]
            batch = prefill_batch(chunks, starts, owned, device, all_logits=True)
            parts = decoder.forward(batch, cache).split([step[i] for i in rows])
            for i, logits in zip(rows, parts, strict=True):
                found[i].append(logits.clone())
                done[i] += step[i]
        for position in range(done[2], self.lengths[2]):
            one = decode_batch([int(texts[2][position])], [position], [tables[2]], device)
            found[2].append(decoder.forward(one, cache).clone())
        for ours, theirs in zip(found, long_logits, strict=True):
            assert nmse(torch.cat(ours), theirs) < 1e-9

    def test_the_engine_has_the_same_logits_for_any_chunks(
        self, root: Path, texts: list[Tensor], long_logits: list[Tensor]
    ) -> None:
        """And they are those of `transformers` but for the cache in fp16 and what the kernels round."""
        path, context, found = path_of(root, "plain", "gguf"), -(-self.lengths[2] // 32) * 32, []
        for chunk_size in (16, 100, 512):
            with LLM(path, "cpu", ctx_size=context, chunk_size=chunk_size) as llm:
                found.append(llm.logits(texts[2].tolist()))
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
        assert nmse(found[0].double(), long_logits[2]) < 1e-3
