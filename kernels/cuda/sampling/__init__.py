"""Sampling on the device."""
