"""Whole decoders with experts on the CPU: compiled steps have the eager path's bits, and all are near the reference."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quengine.kernels import cpu
from quengine.kernels.cpu.backend import CpuBackend
from quengine.kernels.cpu.step import CompiledStep
from quengine.kernels.forward_batch import decode_batch
from quengine.kernels.reference import ReferenceBackend
from quengine.kv_cache import KVCache
from quengine.models.decoder import Decoder
from quengine.models.gguf.gguf_checkpoint import GGUFCheckpoint
from quengine.models.synthetic.presets import PRESETS
from quengine.models.synthetic.synthetic import write_synthetic
from tests.forward import forward
from tests.kernels.weights import nmse

CONTEXT, PROMPT = 96, [(17 * i) % 509 for i in range(45)]
LENGTHS = [3, 31, 45]  # of sequences in a batch, which are prefixes of the prompt
MODELS = ["qwen3moe-tiny", "qwen2moe-tiny", "mixtral-tiny", "olmoe-tiny", "gpt-oss-tiny", "glm4moe-tiny"]
KINDS = {"qwen2moe-tiny": "Q8_0", "mixtral-tiny": "BF16"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GGUFCheckpoint]:
    folder, files = tmp_path_factory.mktemp("models"), dict[str, GGUFCheckpoint]()
    for name in MODELS:
        model = PRESETS[name]
        kind = KINDS.get(name, model.quant)
        sizes = {
            "vocab_size": 512,
            "embedding_length": 256,
            "head_count": 4,
            "experts": 2 * model.experts_used,
        }
        path: Path = write_synthetic(folder / name, replace(model, quant=kind, **sizes))
        files[name] = GGUFCheckpoint(path)
    return files


class Run:
    """A decoder with a cache in which the sequences of a batch lie."""

    def __init__(self, checkpoint: GGUFCheckpoint, backend: Any) -> None:
        self.decoder = Decoder(checkpoint.config, checkpoint.tensors, backend, CONTEXT, CONTEXT)
        self.groups = len(checkpoint.config.cache_groups)
        self.cache = KVCache.allocate(checkpoint.config, 4 * CONTEXT, torch.device("cpu"))
        self.tables = [[[3 * i + 1, 3 * i + 2, 3 * i + 3]] * self.groups for i in range(len(LENGTHS))]

    @torch.no_grad()
    def prefill(self, chunk: int) -> Tensor:
        """The logits of the prompt in chunks, in the last sequence's blocks; the others have their prefixes."""
        for length, (table, *_) in zip(LENGTHS, self.tables, strict=True):
            made = [
                forward(
                    self.decoder,
                    PROMPT[start : min(start + chunk, length)],
                    *(self.cache.layers, start),
                    table=table,
                    phase="prefill",
                    all_logits=True,
                )
                for start in range(0, length, chunk)
            ]
        return torch.cat(made)

    @torch.no_grad()
    def decode(self) -> Tensor:
        batch = decode_batch([7, 8, 9], LENGTHS, self.tables, torch.device("cpu"))
        return self.decoder.forward(batch, self.cache.layers)


@pytest.mark.parametrize("name", MODELS)
def test_a_decoder_is_near_the_reference(name: str, checkpoints: dict[str, GGUFCheckpoint]) -> None:
    ours, reference = (
        Run(checkpoints[name], CpuBackend(2)),
        Run(checkpoints[name], ReferenceBackend(keep=True)),
    )
    expected = reference.prefill(CONTEXT)
    rows = torch.tensor([nmse(a, b) for a, b in zip(ours.prefill(CONTEXT), expected, strict=True)])
    assert rows.median() < 2e-6
    rows = torch.tensor([nmse(a, b) for a, b in zip(ours.decode(), reference.decode(), strict=True)])
    assert rows.median() < 2e-6  # behind a prompt that has been rounded


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_steps_have_the_bits_of_the_eager_path_on_any_number_of_threads(
    name: str, checkpoints: dict[str, GGUFCheckpoint]
) -> None:
    every = []
    for threads in {1, cpu.max_threads()}:
        run = Run(checkpoints[name], CpuBackend(threads))
        prompt = run.prefill(CONTEXT)
        assert torch.equal(run.prefill(7), prompt)
        eager, buffers = run.decode(), dict[tuple[str, int], Tensor]()
        every.append(torch.cat([prompt, eager]))
        for rows in ([0, 1, 2], [1], [2, 0]):
            step = CompiledStep(
                lambda batch, run=run: run.decoder.forward(batch, run.cache.layers),
                *(len(rows), CONTEXT // 32, buffers, run.groups),
            )
            for _ in range(2):
                tables = [run.tables[row] for row in rows]
                logits = step.run([7 + row for row in rows], [LENGTHS[row] for row in rows], tables)
                assert torch.equal(logits, eager[rows])
    assert all(torch.equal(made, every[0]) for made in every)
