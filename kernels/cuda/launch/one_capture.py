"""Threads capture CUDA graphs in turns: decoding steps in the engine's, encoders of images in another."""

import threading

CAPTURING = threading.Lock()
"""Held during a capture, in which Python's collector is off, as it may destroy CUDA objects: the end of another one
turns it on."""
