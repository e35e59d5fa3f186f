"""Attention over the paged KV cache, rotary embedding and KV store."""
