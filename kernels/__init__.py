"""The operations of a decoder: torch definitions (the oracle), CPU kernels, packed weights.

Nothing here knows of models, files or requests.
"""
