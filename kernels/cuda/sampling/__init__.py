"""Tokens chosen on the device."""
