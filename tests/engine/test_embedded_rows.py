"""Rows given as embeddings, on the CPU: those of tokens come to what the tokens do, however a prompt is cut."""

from pathlib import Path

import pytest
import torch

from quengine.kernels.cpu.backend import CpuBackend
from quengine.kernels.reference import ReferenceBackend
from quengine.kv_cache import KVCache
from quengine.model_runner import ModelRunner
from quengine.models.decoder import Decoder
from quengine.models.gguf.gguf_checkpoint import GGUFCheckpoint
from quengine.step_plan import GivenRows, SequenceRows, forward_batch
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny

CPU = torch.device("cpu")
IDS = [(37 * i + 11) % 250 for i in range(12)]


def runner_of(path: Path, backend: str) -> ModelRunner:
    checkpoint = GGUFCheckpoint(path)
    made = CpuBackend(1) if backend == "cpu" else ReferenceBackend(CPU)
    decoder = Decoder(checkpoint.config, checkpoint.tensors, made, 64, 64)
    return ModelRunner(decoder, KVCache.allocate(checkpoint.config, 64, CPU))


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_embeddings_of_tokens_give_the_bits_of_the_tokens(
    tmp_path: Path, backend: str, architecture: str
) -> None:
    """Given rows are not scaled: Gemma's tokens are."""
    sizes = ModelSizes(
        architecture, blocks=1, embedding=32, feed_forward=32, heads=2, kv_heads=1, head_dim=32
    )
    runner = runner_of(write_tiny(tmp_path / "m.gguf", architecture, "Q8_0", sizes=sizes), backend)
    tables, decoder = runner.cache.whole_tables, runner.decoder
    batch = forward_batch("prefill", [SequenceRows(IDS, 0, tables)], CPU)
    values = torch.as_tensor(
        decoder.backend.embed(batch, decoder.token_embd, decoder.config.embedding_scale)
    ).clone()
    expected = runner.forward("prefill", [SequenceRows(IDS, 0, tables)], all_logits=True).clone()
    hidden = [0 if 2 <= n < 9 else token for n, token in enumerate(IDS)]
    assert not torch.equal(
        runner.forward("prefill", [SequenceRows(hidden, 0, tables)], all_logits=True), expected
    )
    given = GivenRows(range(2, 9), values[2:9])
    ours = runner.forward("prefill", [SequenceRows(hidden, 0, tables)], all_logits=True, given=given)
    exact = 0 if backend == "cpu" else 1e-6  # given rows are fp32, and the reference computes in fp64
    torch.testing.assert_close(ours, expected, rtol=exact, atol=exact)
    # Cut among them, and as the rows that `hidden` and `logits_of_parts` are of.
    first = runner.forward(
        "prefill",
        [SequenceRows(hidden[:5], 0, tables)],
        all_logits=True,
        given=GivenRows([2, 3, 4], values[2:5]),
    ).clone()
    rest = [SequenceRows(hidden[5:], 5, tables)]
    (second,) = runner.logits_of_parts(rest, [range(7)], GivenRows(range(4), values[5:9]))
    torch.testing.assert_close(torch.cat([first, second]), expected, rtol=exact, atol=exact)
    whole = runner.hidden([SequenceRows(IDS, 0, tables)]).clone()
    again = runner.hidden([SequenceRows(hidden, 0, tables)], given)
    torch.testing.assert_close(again, whole, rtol=exact, atol=exact)
