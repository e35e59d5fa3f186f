"""Tests every kernel on this machine against the float64 definition."""
