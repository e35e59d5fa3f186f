"""Threads capture CUDA graphs in turns: decoding steps in the engine's, encoders of images in another."""

import threading

CAPTURING = threading.Lock()
"""Held during a capture. Python's collector is then off, as it may destroy CUDA objects, and the end of another
capture would turn it on."""
