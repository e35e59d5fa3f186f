"""Checks and measurements: parity, benchmarks, self-tests."""
