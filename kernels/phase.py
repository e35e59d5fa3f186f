"""What a step computes, in a module that does not import torch."""

from typing import Literal

Phase = Literal["prefill", "decode"]
"""The chunks of prompts, or a row of each sequence."""
