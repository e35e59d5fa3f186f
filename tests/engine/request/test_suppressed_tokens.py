"""Tokens that a model's file says are never generated."""

from dataclasses import replace
from pathlib import Path

from quengine import LLM, SamplingParams
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny


def test_they_are_banned_whatever_a_request_says(tmp_path: Path) -> None:
    sizes = ModelSizes(embedding=64, feed_forward=128, context=128)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(write_tiny(tmp_path / "free.gguf", sizes=sizes), device="cpu") as llm:
        ids = llm.encode("the cat")
        (free,) = llm.generate([ids], params)
        logits = llm.logits(ids)[-1]
    banned = sorted(set(free.tokens))
    changes = {"tokenizer.ggml.suppress_tokens": [*banned, 1 << 20]}
    with LLM(write_tiny(tmp_path / "m.gguf", sizes=sizes, changes=changes), device="cpu") as llm:
        assert llm.tokenizer.suppressed_ids == set(banned)
        ends = [*llm.tokenizer.eos_ids]
        for bias in ({}, dict.fromkeys(banned, 100.0)):
            (got,) = llm.generate([ids], replace(params, logit_bias=bias))
            assert not set(got.tokens) & set(banned)
            logits[[*banned, *ends]] = -float("inf")
            assert got.tokens[0] == int(logits.argmax())
