"""How much work a benchmark's test is, counted from the model's shape: bytes read, floating-point operations."""

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
    matrix and the last layer's matrices behind its attention once a chunk, as only a chunk's last token gets logits.
    """
    config, decoder = llm.model_config, llm.runner.decoder
    chunks = -(-prompt // decoder.chunk_size)
    matrices = 0
    for block in decoder.blk:
        behind = block.attention.attn_output, block.ffn.ffn_gate_up, block.ffn.ffn_down
        rows = chunks if block is decoder.blk[-1] else prompt
        matrices += 2 * block.attention.attn_qkv.rows * block.attention.attn_qkv.cols * prompt
        matrices += sum(2 * weight.rows * weight.cols for weight in behind) * rows
    seen = sum(
        len(group.layers) * min(position + 1, group.window or position + 1)
        for group in config.cache_groups
        for position in range(depth, depth + prompt)
    )
    attention = 4 * config.head_count * config.head_dim * seen
    logits = 2 * decoder.output.rows * decoder.output.cols * chunks
    return int(matrices + attention + logits)
