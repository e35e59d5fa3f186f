"""Runs the steps of each device: eager, compiled lists on the CPU, captured CUDA graphs."""
