"""Norms, rotary embedding and KV store, gated linear units, short convolution, residuals, sampling."""
