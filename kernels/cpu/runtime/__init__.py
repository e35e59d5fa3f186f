"""Threads, compiled code and its store, stages of a step."""
