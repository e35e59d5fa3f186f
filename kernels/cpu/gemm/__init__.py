"""Matmuls of prefill, many activation rows: fp32 tiles, AMX bf16, VNNI int16."""
