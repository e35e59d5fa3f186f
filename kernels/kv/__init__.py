"""Storage of the KV cache: types, blocks, rows."""
