"""How much work a benchmark's test is, counted from the model's shape: bytes read, floating-point operations."""

from quengine.llm import LLM
from quengine.models.architectures import layers_of
from quengine.models.blocks.attention import Attention
from quengine.models.config import ModelConfig
from quengine.models.experts import MixtureOfExperts
from quengine.models.layers import FeedForwardLayer


def bytes_per_token(llm: LLM, depth: int, generate: int, batch: int = 1) -> int:
    """Weights, and the cache on average, that one of `generate` tokens after `depth` tokens reads.

    `batch` sequences share a pass over the weights. Of a mixture of experts that pass reads those which so many rows
    are expected to choose.
    """
    # Token i of the test reads the rows before it and its own.
    context = depth + (generate + 1) // 2
    return llm.runner.decoder.step_bytes(batch) // batch + llm.cache_bytes(context)


def prompt_operations(llm: LLM, depth: int, prompt: int) -> int:
    """Floating-point operations, a multiply-add counting two, of a prompt after `depth` tokens.

    Matrices of the layers for every token (of experts, those that compute it), the scores and sums of causal attention
    within the window, and the output matrix and the last layer's matrices behind its attention once a chunk, as only a
    chunk's last token gets logits.
    """
    decoder = llm.runner.decoder
    config = decoder.config
    chunks = -(-prompt // decoder.chunk_size)
    matrices, positions = 0, range(depth, depth + prompt)
    for block in decoder.blk:
        entry, output = block.mixer.entry, block.mixer.output
        rows = chunks if block is decoder.blk[-1] else prompt
        matrices += 2 * entry.rows * entry.cols * prompt
        matrices += (2 * output.rows * output.cols + _feed_forward_operations(config, block.ffn)) * rows
    attention = 0
    for layer, mixer in enumerate(block.mixer for block in layers_of(config)):
        if isinstance(mixer, Attention) and layer in config.held_layers:
            visible = (min(position + 1, mixer.window or position + 1) for position in positions)
            attention += 4 * mixer.heads * mixer.head_dim * sum(visible)
    output = decoder.output  # None where another device has it
    logits = 0 if output is None else 2 * output.rows * output.cols * chunks
    return int(matrices + attention + logits)


def _feed_forward_operations(config: ModelConfig, ffn: FeedForwardLayer | MixtureOfExperts) -> int:
    """Of the matrices of one layer's feed-forward, for one row."""
    if isinstance(ffn, FeedForwardLayer):
        return int(sum(2 * weight.rows * weight.cols for weight in (ffn.ffn_gate_up, ffn.ffn_down)))
    experts = ffn.experts
    inner = experts.router.used * experts.feed_forward_length + experts.shared_feed_forward_length
    return 2 * config.embedding_length * (3 * inner + experts.count)
