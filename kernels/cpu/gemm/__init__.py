"""Matmuls of prefill, many activation rows: fp32 tiles, bytes and bf16 on AMX, int16."""
