"""How much work a benchmark's test is, counted from the model's shape: bytes read, floating-point operations.

Does not know: how long it took.
"""

from quengine.llm import LLM


def bytes_per_token(llm: LLM, depth: int, generate: int, batch: int = 1) -> int:
    """Weights, and the cache on average, that one of `generate` tokens after `depth` tokens reads.

    `batch` sequences share a pass over the weights.
    """
    # Token i of the test reads the rows before it and its own.
    context = depth + (generate + 1) // 2
    return llm.runner.decoder.bytes_per_token // batch + llm.cache_bytes(context)


def prompt_operations(llm: LLM, depth: int, prompt: int) -> int:
    """Floating-point operations, a multiply-add counting two, of a prompt after `depth` tokens.

    Matrices of the layers for every token, the scores and sums of causal attention within the window, and the output
    matrix once a chunk, as only a chunk's last token gets logits.
    """
    config, decoder = llm.model_config, llm.runner.decoder
    weights = [
        weight
        for block in decoder.blk
        for weight in (
            block.attention.attn_qkv,
            block.attention.attn_output,
            block.ffn.ffn_gate_up,
            block.ffn.ffn_down,
        )
    ]
    window = config.sliding_window or depth + prompt
    seen = sum(min(position + 1, window) for position in range(depth, depth + prompt))
    attention = 4 * config.head_count * config.head_dim * seen * len(decoder.blk)
    chunks = -(-prompt // decoder.chunk_size)
    logits = 2 * decoder.output.rows * decoder.output.cols * chunks
    return int(sum(2 * w.rows * w.cols for w in weights) * prompt + attention + logits)
