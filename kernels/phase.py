"""What a step computes, in a module that does not import torch."""

from typing import Literal

Phase = Literal["prefill", "decode"]
"""Either "prefill", chunks of prompts, or "decode", a row of each sequence (several to verify a draft)."""
