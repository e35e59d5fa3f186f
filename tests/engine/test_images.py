"""Prompts with images: answers, shared beginnings, encoded images that are kept, preemption and context shift."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest
import torch

from quengine.context.prefix_file import PrefixFiles
from quengine.context.saved_prefix import restore_prefix, save_prefix
from quengine.errors import EngineError
from quengine.llm import LLM
from quengine.request.chat_session import ChatSession
from quengine.request.prompt_images import Features, ImageRows, PromptImages
from quengine.request.sampling_params import SamplingParams
from tests.engine.fake_vision import PARTS, FakeVision, as_tokens, seeing, write_model

PICTURE, OTHER = bytes(range(40, 90)), bytes(range(90, 140))
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("images") / "m.gguf")


@pytest.fixture(scope="module")
def opened(model: Path) -> Iterator[tuple[LLM, FakeVision]]:
    with seeing(model, reuse_prefix=True) as both:
        yield both


@pytest.fixture
def llm(opened: tuple[LLM, FakeVision]) -> LLM:
    opened[0].scheduler.reset()
    return opened[0]


@pytest.fixture
def vision(opened: tuple[LLM, FakeVision]) -> FakeVision:
    opened[1].encoded.clear()
    return opened[1]


def as_text(llm: LLM, prompt: str, *images: bytes) -> list[int]:
    """The prompt with tokens in place of images."""
    first, *others = prompt.split("<image>")
    ids = llm.encode(first, special=True)
    for image, text in zip(images, others, strict=True):
        ids += as_tokens(llm, image) + (llm.tokenizer.encode(text, special=True) if text else [])
    return ids


@pytest.mark.parametrize(
    ("prompt", "images"),
    [
        ("the <image> cat", [PICTURE]),
        ("<image> the cat", [PICTURE]),
        ("the cat and a long text before it <image>", [PICTURE]),
        ("<image> the <image> cat", [PICTURE, OTHER]),
        ("<image><image>", [OTHER, OTHER]),
    ],
)
def test_an_image_is_what_its_rows_are_wherever_it_stands(llm: LLM, prompt: str, images: list[bytes]) -> None:
    given = llm.stream(llm.with_images(prompt, images), GREEDY).finish()
    assert given.prompt_tokens == len(as_text(llm, prompt, *images))
    llm.scheduler.reset()
    assert given.tokens == llm.generate(as_text(llm, prompt, *images), GREEDY)[0].tokens


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"chunk_size": 40}], ids=str)
def test_an_image_is_what_its_rows_are_on_a_gpu(model: Path, options: dict[str, Any]) -> None:
    """Eagerly and captured: the steps of a size are captured when they come again."""
    with seeing(model, device="cuda", **options) as (gpu, _):
        for number in range(3):
            image = bytes([number]) + PICTURE
            given = gpu.stream(gpu.with_images("the <image> cat", [image]), GREEDY).finish()
            gpu.scheduler.reset()
            assert given.tokens == gpu.generate(as_text(gpu, "the <image> cat", image), GREEDY)[0].tokens
            gpu.scheduler.reset()


@pytest.mark.parametrize("architecture", ["lfm2", "gemma3"])
def test_layers_with_states_and_windows(tmp_path: Path, architecture: str) -> None:
    """And tokens that are scaled, which rows of images are not."""
    path = write_model(tmp_path / "m.gguf", architecture=architecture)
    with seeing(path, chunk_size=40, parallel=2) as (llm, vision):
        text = as_text(llm, "the <image> cat", PICTURE)
        for _ in range(2):  # the second time from the cache
            given = llm.stream(llm.with_images("the <image> cat", [PICTURE]), GREEDY).finish()
            assert given.tokens == llm.generate(text, GREEDY)[0].tokens
        assert given.timings.cached_tokens >= 32 and vision.encoded == [1]


@pytest.mark.parametrize("architecture", ["llama", "lfm2"])
def test_a_saved_prefix_with_an_image_goes_on_in_another_engine(tmp_path: Path, architecture: str) -> None:
    path = write_model(tmp_path / "m.gguf", architecture=architecture)
    with seeing(path, reuse_prefix=True) as (llm, _):
        first = llm.stream(llm.with_images("the <image> cat", [PICTURE]), GREEDY)
        expected, ids = first.finish(), first.sequence.key_ids
        saved = save_prefix(llm.scheduler, llm.model_config, ids[: expected.prompt_tokens])
        assert min(ids) < 0 and saved.reusable_tokens >= 32
        PrefixFiles(llm.loaded, "f16", False).write(tmp_path / "saved", saved)
    with seeing(path, reuse_prefix=True) as (llm, _):
        restored, _ = PrefixFiles(llm.loaded, "f16", False).read(tmp_path / "saved")
        restore_prefix(llm.scheduler, llm.model_config, restored)
        found = llm.stream(llm.with_images("the <image> cat", [PICTURE]), GREEDY).finish()
    assert found.tokens == expected.tokens and found.timings.cached_tokens >= 32
    with (
        seeing(path, no_mmproj=True) as (llm, _),
        pytest.raises(EngineError, match=r"^it holds images, and the model is loaded without a projector"),
    ):
        PrefixFiles(llm.loaded, "f16", False).read(tmp_path / "saved")


def test_chunks_end_within_images_and_steps_hold_several_prompts(model: Path) -> None:
    with seeing(model, chunk_size=7, parallel=2) as (cut, _):
        prompts = [cut.with_images(text, [PICTURE]) for text in ("the <image> cat", "a <image>")]
        found = [completion.tokens for completion in cut.generate(prompts, GREEDY)]
        texts = [as_text(cut, "the <image> cat", PICTURE), as_text(cut, "a <image>", PICTURE)]
        cut.scheduler.reset()
        assert found == [cut.generate(text, GREEDY)[0].tokens for text in texts]


def test_a_second_turn_encodes_nothing_and_finds_the_image_in_the_cache(llm: LLM, vision: FakeVision) -> None:
    image = b"\x07" + PICTURE
    first = llm.stream(llm.with_images("the <image> cat", [image]), GREEDY).finish()
    assert (first.timings.cached_tokens, vision.encoded) == (0, [1])
    longer = llm.stream(llm.with_images("the <image> cat and more", [image]), GREEDY).finish()
    assert vision.encoded == [1]
    assert longer.timings.cached_tokens == 60
    # Other pictures of the same size share nothing but the text before them; nor do the same tokens as text.
    for other in (b"\x08" + PICTURE, image[:-1] + b"\x09"):
        assert (
            llm.stream(llm.with_images("the <image> cat", [other]), GREEDY).finish().timings.cached_tokens
            == 0
        )
    assert llm.generate(as_text(llm, "the <image> cat", image), GREEDY)[0].timings.cached_tokens == 0


def test_what_is_kept_has_a_limit(model: Path) -> None:
    with seeing(model, image_cache=0) as (forgetful, vision):
        for _ in range(2):
            forgetful.with_images("<image>", [PICTURE])
        assert vision.encoded == [1, 1]
        assert forgetful.images is not None and forgetful.images.counts == (2, 2, 0, 0, 0, 0)


def test_what_is_kept_has_the_bits_of_what_is_encoded(model: Path) -> None:
    """An image that made room for others is encoded anew, and its prompt's answer is the same."""
    with seeing(model, image_cache=1) as (small, vision):
        assert small.images is not None
        one = 50 * vision.text_size * 4
        first = small.with_images("<image>", [PICTURE])
        for number in range((1 << 20) // one + 1):
            small.with_images("<image>", [bytes([number // 200, number % 200]) + PICTURE[2:]])
        counts = small.images.counts
        assert counts.kept == (1 << 20) // one and counts.kept_bytes == counts.kept * one
        again, kept = (small.with_images("<image>", [PICTURE]) for _ in range(2))
        assert small.images.counts.encoded == counts.encoded + 1 and small.images.counts.found == 1
        values = [each.images.images[0].values for each in (first, again, kept)]  # type: ignore[union-attr]
        assert torch.equal(values[0], values[1]) and values[1] is values[2]


def test_an_image_that_two_threads_ask_for_is_encoded_once(llm: LLM, vision: FakeVision) -> None:
    image, meet = b"\x03" + PICTURE, Barrier(2)

    def ask() -> None:
        meet.wait(60)
        llm.with_images("<image>", [image, image][:1])

    threads = [Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert vision.encoded == [1]


def test_a_file_that_is_no_image_is_an_error_of_its_request_alone(
    llm: LLM, vision: FakeVision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another request waits meanwhile for an image that both have."""
    assert llm.images is not None
    good, bad, prepare, images = b"\x06" + PICTURE, b"no image", vision.prepare, llm.images
    before, others = images.counts.found, list[Any]()

    def prepared(data: bytes) -> Any:
        if data == bad:
            others.append(threads.submit(llm.with_images, "<image>", [good]))
            while images.counts.found == before and not others[0].done():
                time.sleep(0.001)
        return prepare(data)

    monkeypatch.setattr(vision, "prepare", prepared)
    with ThreadPoolExecutor(1) as threads:
        with pytest.raises(EngineError, match="none that is read here"):
            llm.with_images("<image><image>", [bad, good])
        assert others[0].result(60).images.images[0].values.shape[0] == len(good)
    assert vision.encoded == [1]


def test_images_of_one_prompt_are_encoded_once_each(llm: LLM, vision: FakeVision) -> None:
    llm.with_images("<image><image><image>", [b"\x01" + PICTURE, b"\x02" + PICTURE, b"\x01" + PICTURE])
    assert vision.encoded == [1, 1]


def test_a_preempted_prompt_has_its_images_again(model: Path) -> None:
    with seeing(model) as (one, _):
        wanted = one.stream(one.with_images("the <image> cat", [PICTURE]), GREEDY).finish().tokens
        stream = one.stream(one.with_images("the <image> cat", [PICTURE]), GREEDY)
        pieces = iter(stream)
        next(pieces)
        one.scheduler._preempt(stream.sequence)
        assert stream.finish().tokens == wanted


def test_a_context_shift_discards_rows_of_images(model: Path) -> None:
    with seeing(model, ctx_size=64) as (small, _):
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, context_shift=True)
        shifted = small.stream(small.with_images("a <image>", [PICTURE]), params).finish()
        assert shifted.timings.shifts == 1 and len(shifted.tokens) == 40
        small.scheduler.reset()
        assert shifted.tokens == small.generate(as_text(small, "a <image>", PICTURE), params)[0].tokens


def test_discarded_positions_are_cut_out_of_every_run_of_rows() -> None:
    features = Features(b"", torch.zeros(20, 1))
    images = PromptImages(
        (features,), (ImageRows(2, 6, 0, 0), ImageRows(9, 4, 0, 6), ImageRows(20, 2, 0, 10))
    )
    left = images.without(range(4, 11))
    assert left.rows == (ImageRows(2, 2, 0, 0), ImageRows(4, 2, 0, 8), ImageRows(13, 2, 0, 10))
    assert images.without(range(3, 5)).rows[:2] == (ImageRows(2, 1, 0, 0), ImageRows(3, 3, 0, 3))
    assert images.without(range(30)).rows == ()


def test_a_conversation_with_image_parts(llm: LLM, tmp_path: Path) -> None:
    """Of a template that writes text alone: the projector's marker stands where the image does."""
    file = tmp_path / "picture"
    file.write_bytes(PICTURE)
    parts = [
        {"type": "text", "text": "the <image>"},
        {"type": "image", "image": file},
        {"type": "text", "text": "cat"},
    ]
    answer = llm.chat(
        [{"role": "system", "content": "Be <image>."}, {"role": "user", "content": parts}], GREEDY
    )
    spelled = llm.encode_chat(
        [{"role": "system", "content": "Be <image>."}, {"role": "user", "content": "the <image>@cat"}]
    )
    at = spelled.index(llm.encode("@")[0])
    llm.scheduler.reset()
    ids = spelled[:at] + as_tokens(llm, PICTURE) + spelled[at + 1 :]
    assert answer.tokens == llm.generate(ids, GREEDY)[0].tokens


def test_a_template_that_reads_parts_is_given_parts(tmp_path: Path) -> None:
    with seeing(write_model(tmp_path / "parts.gguf", PARTS)) as (llm, _):
        text = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the <image> cat"}]
        assert "system:Be brief.<|im_end|>" in llm.tokenizer.decode(llm.encode_chat(text), skip_special=False)
        image = {
            "role": "user",
            "content": [{"type": "image", "image": PICTURE}, {"type": "text", "text": "a"}],
        }
        ids = llm.encode_chat([*text, image])
        assert "<|im_start|>user:<image>a<|im_end|>" in llm.tokenizer.decode(ids, skip_special=False)
        assert llm.images is not None and ids.count(llm.images.marker_ids[0]) == 1
        assert llm.chat([*text, image], GREEDY).prompt_tokens == len(ids) - 1 + len(as_tokens(llm, PICTURE))


@pytest.mark.parametrize(
    ("prompt", "images", "message"),
    [
        ("the cat", [PICTURE], r"0 image markers \(<image>\) and there are 1 images"),
        ("<image> and <image>", [PICTURE], "2 image markers"),
        ("<image>", [b"no image at all"], "none that is read here"),
    ],
)
def test_what_cannot_be_read_is_refused(llm: LLM, prompt: str, images: list[bytes], message: str) -> None:
    for _ in range(2):  # an image that failed is not kept
        with pytest.raises(EngineError, match=message):
            llm.with_images(prompt, images)


def test_a_model_without_a_projector_says_what_to_add(model: Path) -> None:
    with LLM(model, device="cpu", ctx_size=64, no_mmproj=True) as blind:
        with pytest.raises(EngineError, match=r"no projector.*--mmproj"):
            blind.with_images("<image>", [PICTURE])
        with pytest.raises(EngineError, match="no projector"):
            blind.chat([{"role": "user", "content": [{"type": "image", "image": PICTURE}]}])


def test_embeddings_and_scores_of_images_are_refused(llm: LLM) -> None:
    with pytest.raises(EngineError, match="embeddings are those of text"):
        llm.embed(llm.with_images("<image>", [PICTURE]))


def test_a_session_sends_images_with_messages_and_keeps_them(
    llm: LLM, vision: FakeVision, tmp_path: Path
) -> None:
    picture, kept = tmp_path / "picture", tmp_path / "kept.json"
    picture.write_bytes(b"\x05" + PICTURE)
    session = ChatSession(llm, GREEDY)
    session.attach(picture)
    first = "".join(session.ask("see"))
    assert session.last is not None and session.last.prompt_tokens > len(PICTURE)
    list(session.retry())
    list(session.ask("and"))
    assert session.last.timings.cached_tokens >= 32 and vision.encoded == [1]
    session.save(kept)
    session.load(kept)
    assert session.messages[0]["content"][0] == {"type": "image", "image": str(picture)}
    assert session.undo() == "and" and session.undo() == "see" and not session.attached
    assert "".join(session.ask("see")) != first or session.last.prompt_tokens < len(PICTURE)
    with pytest.raises(EngineError, match="cannot read the image"):
        session.attach(tmp_path / "missing")
