"""The public API on a tiny model with random weights: what a user can rely on, whatever the text is."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quengine import LLM, EngineError, SamplingParams
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = ModelSizes(embedding=64, feed_forward=128, context=128)
    return write_tiny(tmp_path_factory.mktemp("llm") / "tiny.gguf", kind="Q8_0", sizes=sizes)


@pytest.fixture(scope="module", params=["auto", "reference"])
def llm(model: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(model, device="cpu", backend=request.param) as loaded:
        yield loaded


def test_streamed_text_equals_the_whole_text(llm: LLM) -> None:
    whole = llm.generate("the cat", GREEDY)[0]
    stream = llm.stream("the cat", GREEDY)
    assert "".join(stream) == whole.text == stream.completion.text
    assert stream.completion.tokens == whole.tokens


def test_generation_stops_at_max_tokens_and_says_length(llm: LLM) -> None:
    completion = llm.generate("the", GREEDY)[0]
    assert (len(completion.tokens), completion.finish_reason) == (12, "length")


@pytest.mark.parametrize("draft_ngram", [0, 2])
def test_without_tokens_to_generate_the_prompt_alone_is_computed(model: Path, draft_ngram: int) -> None:
    nothing = SamplingParams(temperature=0, max_tokens=0, logprobs=1)
    with LLM(model, device="cpu", parallel=2, draft_ngram=draft_ngram) as llm:
        ids = [(7 * i) % 200 for i in range(llm.ctx_size - 1)]
        expected = llm.generate([ids[:70], ids[:1]], GREEDY)
        for prompt in (ids[:70], ids[:1], ids):
            (completion,) = llm.generate([prompt], nothing)
            assert (completion.text, completion.tokens, completion.logprobs) == ("", [], [])
            assert completion.finish_reason == "length" and completion.timings.generated_tokens == 0
            assert llm.scheduler.cache_used == 0
        assert [each.tokens for each in llm.generate([ids[:70], ids[:1]], GREEDY)] == [
            each.tokens for each in expected
        ]
    with LLM(model, device="cpu", reuse_prefix=True) as llm:
        assert llm.generate([ids[:70]], nothing)[0].timings.prompt_s > 0
        assert llm.generate([ids[:70]], GREEDY)[0].timings.cached_tokens == 64


def test_the_same_seed_gives_the_same_text_and_another_seed_another(llm: LLM) -> None:
    def text(seed: int) -> list[int]:
        params = SamplingParams(temperature=1.5, top_k=0, top_p=1, min_p=0, max_tokens=16, seed=seed)
        return llm.generate("the", params)[0].tokens

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_an_unseeded_run_reports_the_seed_that_repeats_it(llm: LLM) -> None:
    first = llm.generate("the", SamplingParams(temperature=1.5, max_tokens=8))[0]
    again = llm.generate("the", SamplingParams(temperature=1.5, max_tokens=8, seed=first.seed))[0]
    assert first.tokens == again.tokens


def test_several_completions_of_one_prompt_share_the_seed_and_differ(llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, top_k=0, top_p=1, min_p=0, max_tokens=16, seed=5, n=3)
    completions = llm.generate("the", params)
    assert {c.seed for c in completions} == {5}
    assert len({tuple(c.tokens) for c in completions}) == 3


def test_prompts_are_completed_in_order(llm: LLM) -> None:
    together = llm.generate(["the", "a b c", "zz"], GREEDY)
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in ("the", "a b c", "zz")]
    assert [c.tokens for c in together] == [c.tokens for c in alone]


def test_token_ids_are_a_prompt_too(llm: LLM) -> None:
    ids = llm.encode("the cat")
    assert llm.generate(ids, GREEDY)[0].tokens == llm.generate("the cat", GREEDY)[0].tokens


def test_the_end_token_stops_and_is_not_shown(llm: LLM) -> None:
    end = next(iter(llm.tokenizer.eos_ids))
    params = SamplingParams(temperature=0, max_tokens=9, logit_bias={end: 1e6})
    completion = llm.generate("the", params)[0]
    assert (completion.text, completion.tokens, completion.finish_reason) == ("", [], "stop")


def test_ignore_eos_never_chooses_an_end_token(llm: LLM) -> None:
    end = next(iter(llm.tokenizer.eos_ids))
    params = SamplingParams(temperature=0, max_tokens=5, logit_bias={end: 1e6}, ignore_eos=True)
    assert end not in llm.generate("the", params)[0].tokens


def test_a_stop_token_id_ends_the_text(llm: LLM) -> None:
    third = llm.generate("the", GREEDY)[0].tokens[2]
    stopped = llm.generate("the", SamplingParams(temperature=0, max_tokens=12, stop_token_ids=(third,)))[0]
    assert stopped.finish_reason == "stop"
    assert third not in stopped.tokens


def test_a_stop_string_ends_the_text_and_is_not_shown(llm: LLM) -> None:
    forced = llm.encode("c")[0]
    params = SamplingParams(temperature=0, max_tokens=20, logit_bias={forced: 1e6}, stop=("ccc",))
    completion = llm.generate("a", params)[0]
    assert (completion.text, completion.finish_reason) == ("", "stop")


def test_a_full_context_ends_with_length(model: Path) -> None:
    with LLM(model, device="cpu", ctx_size=16) as small:
        ids = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
        completion = small.generate(ids, SamplingParams(temperature=0, ignore_eos=True))[0]
    assert completion.finish_reason == "length"
    assert len(ids) + len(completion.tokens) == 16


def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(model: Path) -> None:
    with (
        LLM(model, device="cpu", ctx_size=16) as small,
        pytest.raises(EngineError, match=r"16 tokens.*holds 16"),
    ):
        small.generate([list(range(16))])


def test_an_empty_prompt_is_refused(llm: LLM) -> None:
    with pytest.raises(EngineError, match="empty"):
        llm.generate("")


def test_a_token_id_outside_the_vocabulary_is_refused(llm: LLM) -> None:
    with pytest.raises(EngineError, match="token id 99999 at position 1"):
        llm.generate([[1, 99999]])


def test_logits_are_those_of_every_position_in_both_phases(llm: LLM) -> None:
    ids = llm.encode("the cat the cat")
    prefill, decode = llm.logits(ids), llm.logits(ids, decode=True)
    assert prefill.shape == (len(ids), llm.model_config.vocab_size)
    assert prefill.dtype == decode.dtype == torch.float32
    # Random weights of this size are far harsher than a trained model: one rounding can grow a thousandfold.
    assert (prefill - decode).square().sum() / prefill.square().sum() < 1e-5


def test_greedy_tokens_are_the_largest_logits(llm: LLM) -> None:
    ids = llm.encode("the cat")
    tokens = llm.generate("the cat", GREEDY)[0].tokens
    banned = list(llm.tokenizer.eos_ids)
    logits = llm.logits(ids + tokens[:-1])[len(ids) - 1 :]
    logits[:, banned] = -torch.inf
    assert logits.argmax(1).tolist() == tokens


def test_logprobs_are_given_for_every_token(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, ignore_eos=True)
    completion = llm.generate("the", params)[0]
    assert completion.logprobs is not None
    assert [entry.token for entry in completion.logprobs] == completion.tokens
    assert all(len(entry.top) == 3 and entry.logprob <= 0 for entry in completion.logprobs)


def test_chat_goes_through_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "the"}]
    ids = llm.encode_chat(messages)
    assert (
        llm.tokenizer.decode(ids, skip_special=False)
        == "<|im_start|>user\nthe<|im_end|>\n<|im_start|>assistant\n"
    )
    assert llm.chat(messages, GREEDY).tokens == llm.generate(ids, GREEDY)[0].tokens


def test_logits_of_a_step_are_not_held_beyond_its_tokens(llm: LLM) -> None:
    llm.generate("the", GREEDY)
    step = llm.scheduler.current
    assert step is not None and step.sampled == [0] and not step.logits


def test_leaving_a_stream_early_leaves_the_engine_usable(llm: LLM) -> None:
    stream = llm.stream("the", GREEDY)
    next(iter(stream))
    stream.close()
    assert stream.completion.finish_reason == "abort"
    assert llm.generate("the", GREEDY)[0].finish_reason == "length"


def test_a_reused_prefix_changes_no_token(model: Path) -> None:
    with LLM(model, device="cpu", reuse_prefix=True) as chatty, LLM(model, device="cpu") as plain:
        prompt = plain.encode("the cat the cat the") * 8
        first = chatty.generate(prompt, GREEDY)[0]
        longer = prompt + first.tokens + plain.encode("the")
        again = chatty.generate(longer, GREEDY)[0]
        known = len(prompt) + len(first.tokens) - 1
        assert again.timings.cached_tokens == known // BLOCK_SIZE * BLOCK_SIZE > 0
        assert again.tokens == plain.generate(longer, GREEDY)[0].tokens


def test_damaged_weights_fail_with_the_token_they_spoil(tmp_path: Path) -> None:
    from quengine.models.gguf import open_gguf

    path = write_tiny(tmp_path / "nan.gguf")
    with open_gguf(path) as file:
        offset = file.tensors["output_norm.weight"].offset
    data = bytearray(path.read_bytes())
    data[offset : offset + 4] = b"\xff\xff\xff\xff"
    path.write_bytes(data)
    with LLM(path, device="cpu") as broken, pytest.raises(EngineError, match=r"token 3: .*not finite"):
        broken.generate([[1, 2, 3]], GREEDY)
