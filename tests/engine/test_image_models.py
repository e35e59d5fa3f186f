"""Models with images against `transformers`: logits of prompts of text and images, from folders and from GGUF files."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quengine import LLM, EngineError, SamplingParams
from quengine.request.prompt_images import ImagePrompt
from quengine.serve.processes.server_engine import ProcessEngine
from quengine.serve.processes.shared_engine import Failed, Finished, GenerationRequest
from tests.llama_cpp_convert import VOCAB, Conversion, convert, write_tokenizer
from tests.models.vision import test_gemma4uv as gemma4uv
from tests.models.vision import test_gemma4v as gemma4
from tests.models.vision.vision_models import VisionCase, nmse, picture, png, write_mmproj, write_vision

# The control tokens of `write_tokenizer` that nothing uses, with the names that the prompts of the model have.
TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>", "<row_1_col_1>", "<row_1_col_2>")
CASE = VisionCase(
    "idefics3",
    "Idefics3ImageProcessorPil",
    config={"image_token_id": VOCAB - 1, "scale_factor": 2},
    vision={
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 4,
    },
    text={"vocab_size": VOCAB, "max_position_embeddings": 512, "num_hidden_layers": 2, "hidden_size": 64},
    arguments={"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}},
    tokens=TOKENS,
)
PIXTRAL = VisionCase(
    "mistral3",
    "PixtralImageProcessorPil",
    config={"image_token_index": VOCAB - 1},
    vision={
        "model_type": "pixtral",
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 112,
        "patch_size": 7,
        "hidden_act": "silu",
    },
    text={**CASE.text, "model_type": "mistral", "rms_norm_eps": 1e-5, "head_dim": 32},
    arguments={"size": {"longest_edge": 112}, "patch_size": {"height": 7, "width": 7}},
)
GEMMA_VISION = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 4,
}
IMAGES = [png(picture(60, 25)), png(picture(20, 20, seed=1))]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' }}{% for part in m['content'] %}{% if part['type'] == 'text' %}"
    "{{ part['text'] }}{% elif part['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}{{ '<|endoftext|>' }}"
    "{% endfor %}{{ 'Assistant:' }}"
)


def name_tokens(folder: Path, names: tuple[str, ...]) -> None:
    """Name the last tokens of a folder, from the end on."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for token, entry in zip(names, reversed(tokenizer["added_tokens"]), strict=False):
        entry["content"] = token
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with the model of `transformers`, and a GGUF file with its projector beside."""
    path = tmp_path_factory.mktemp("smolvlm") / "hf"
    path.mkdir()
    model = write_vision(path, CASE)
    gguf = path.parent / "gguf"
    gguf.mkdir()
    write_mmproj(path, gguf / "mmproj-m-f32.gguf", CASE)
    write_tokenizer(path)
    name_tokens(path, TOKENS)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    text = path.parent / "text"
    shutil.copytree(path, text, ignore=shutil.ignore_patterns("*.safetensors", "*processor*"))
    part = transformers.LlamaForCausalLM(model.config.text_config)
    part.model.load_state_dict(model.model.text_model.state_dict())
    part.lm_head.load_state_dict(model.lm_head.state_dict())
    part.save_pretrained(text)
    convert([Conversion(text, gguf / "m-f32.gguf", "gpt-2")])
    return path, model


@pytest.fixture(scope="module", params=["folder", "GGUF"])
def llm(folder: tuple[Path, Any], request: pytest.FixtureRequest) -> Iterator[LLM]:
    path = folder[0] if request.param == "folder" else folder[0].parent / "gguf" / "m-f32.gguf"
    with LLM(path, device="cpu", ctx_size=512, reuse_prefix=True, threads=2) as opened:
        yield opened


def reference(model: Any, llm: LLM, prompt: ImagePrompt, images: list[bytes]) -> torch.Tensor:
    assert llm.loaded.vision is not None
    pixels = [llm.loaded.vision.prepare(image).pixels for image in images]
    with torch.inference_mode():
        given = torch.cat(pixels)[None].double()
        made = model(input_ids=torch.tensor([prompt.ids]), pixel_values=given)
    return made.logits[0]


@pytest.mark.parametrize(
    ("text", "images"),
    [
        ("the cat <image> sat on", [0]),
        ("<image> the cat sat on the mat", [0]),
        ("the cat sat on the mat <image>", [1]),
        ("the <image> cat <image> sat", [1, 0]),
    ],
)
def test_logits(llm: LLM, folder: tuple[Path, Any], text: str, images: list[int]) -> None:
    given = [IMAGES[number] for number in images]
    prompt = llm.with_images(text, given)
    assert isinstance(prompt, ImagePrompt)
    theirs = reference(folder[1], llm, prompt, given)
    assert nmse(llm.logits(prompt).double(), theirs) < 1e-5
    swapped = llm.with_images(text, [IMAGES[1 - number] for number in images])
    if len(images) == 1:
        assert isinstance(swapped, ImagePrompt) and nmse(llm.logits(swapped)[-1], theirs[-1]) > 1e-3


def test_a_second_turn_computes_what_is_new_alone(llm: LLM) -> None:
    assert llm.images is not None
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    parts = [{"type": "image", "image": IMAGES[0]}, {"type": "text", "text": "what is that"}]
    first = [{"role": "user", "content": parts}]
    answer = llm.chat(first, params)
    encoded = llm.images.counts.encoded
    more = [*first, {"role": "assistant", "content": answer.text}, {"role": "user", "content": "and the mat"}]
    second = llm.chat(more, params)
    assert llm.images.counts.encoded == encoded
    # All but the words in front of an answer, which the template writes otherwise where one follows.
    assert second.timings.cached_tokens >= (answer.prompt_tokens - len("Assistant:")) // 32 * 32 > 32
    # Computed anew it is the same.
    llm.scheduler.reset()
    assert llm.chat(more, params).tokens == second.tokens


def test_images_go_to_the_process_of_an_engine(folder: tuple[Path, Any]) -> None:
    """In the request; one that is no image fails alone."""
    path = folder[0].parent / "gguf" / "m-f32.gguf"
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, seed=1)
    engine = ProcessEngine(str(path), {"device": "cpu", "ctx_size": 512, "parallel": 2, "threads": 1})
    try:
        assert engine.model.marker == "<image>"
        ids = engine.model.encode("the <image> cat", bos=True, special=True)
        requests = [GenerationRequest(ids, params, images=(IMAGES[0],)) for _ in range(2)]
        wrong = GenerationRequest(ids, params, images=(b"no image",))
        for request in (*requests, wrong):
            engine.add(request)
        ends = dict[int, Finished | Failed]()
        while len(ends) < 3:
            ends |= {
                event.request_id: event for event in engine.step() if isinstance(event, Finished | Failed)
            }
        failed = ends.pop(wrong.id)
        assert isinstance(failed, Failed) and failed.fault == "request" and "image" in failed.message
        added = engine.model.image_tokens(IMAGES[0])
        for end in ends.values():
            assert isinstance(end, Finished) and end.timings.prompt_tokens == len(ids) + added
    finally:
        engine.close()


def test_a_projector_of_another_model_is_refused(folder: tuple[Path, Any], tmp_path: Path) -> None:
    other = VisionCase(**{**CASE.__dict__, "text": {**CASE.text, "hidden_size": 48}})
    write_vision(tmp_path, other)
    with pytest.raises(EngineError, match=r"48 values.*64: it is the projector of another model"):
        LLM(folder[0].parent / "gguf" / "m-f32.gguf", device="cpu", mmproj=tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["vision_config"]["patch_size"] == 4


def test_without_its_projector_a_model_reads_text(folder: tuple[Path, Any]) -> None:
    with LLM(folder[0].parent / "gguf" / "m-f32.gguf", device="cpu", ctx_size=64, no_mmproj=True) as blind:
        assert blind.images is None
        with pytest.raises(EngineError, match="no projector"):
            blind.with_images("<image>", IMAGES[:1])


MISTRAL_4 = {
    "model_type": "mistral4",
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
}


@pytest.mark.parametrize("text_part", [{}, MISTRAL_4], ids=["Mistral Small 3", "Mistral Small 4"])
def test_logits_of_pixtral(tmp_path: Path, text_part: dict[str, Any]) -> None:
    """Models whose images have rows of any number with a token after each."""
    model = write_vision(tmp_path, replace(PIXTRAL, text=PIXTRAL.text | text_part))
    if text_part:
        model.set_experts_implementation("eager")  # the other ones take no fp64
    write_tokenizer(tmp_path)
    name_tokens(tmp_path, ("[IMG]", "[IMG_BREAK]", "[IMG_END]"))
    images = [png(picture(100, 70)), png(picture(100, 70, seed=1))]
    with LLM(tmp_path, device="cpu", ctx_size=512, threads=2, chunk_size=64) as llm:
        assert llm.loaded.vision is not None and llm.images is not None
        for text, count in (("the cat [IMG] sat on", 1), ("[IMG] the cat [IMG]", 2)):
            prompt = llm.with_images(text, images[:count])
            assert isinstance(prompt, ImagePrompt) and llm.images.marker_ids == [VOCAB - 1]
            pixels = torch.cat([llm.loaded.vision.prepare(image).pixels for image in images[:count]])
            sizes = torch.tensor([pixels.shape[-2:]] * count)
            ids = torch.tensor([prompt.ids])
            with torch.inference_mode():
                theirs = model(input_ids=ids, pixel_values=pixels.double(), image_sizes=sizes).logits[0]
            assert nmse(llm.logits(prompt).double(), theirs) < 1e-5


def test_a_projector_that_cannot_be_read_is_why_a_model_reads_text(
    folder: tuple[Path, Any], tmp_path: Path
) -> None:
    (tmp_path / "m.gguf").symlink_to(folder[0].parent / "gguf" / "m-f32.gguf")
    (tmp_path / "mmproj-m.gguf").write_bytes(b"no projector")
    with LLM(tmp_path / "m.gguf", device="cpu", ctx_size=64) as blind:
        assert any(note.startswith("images are not read") for note in blind.loaded.notes)
        with pytest.raises(EngineError, match=r"images are not read: .*mmproj-m\.gguf"):
            blind.with_images("<image>", IMAGES[:1])


@pytest.mark.parametrize("chunk", [None, 20])
def test_logits_of_gemma_3(tmp_path: Path, chunk: int | None) -> None:
    """Rows of an image see one another both ways, also within windows, however a prompt is cut and what is cached."""
    case = VisionCase(
        "gemma3",
        "Gemma3ImageProcessorPil",
        config={"mm_tokens_per_image": 16, "image_token_index": VOCAB - 1},
        vision=GEMMA_VISION,
        text={**CASE.text, "num_hidden_layers": 2, "head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 32,
              "layer_types": ["sliding_attention", "full_attention"]},
        arguments={"size": {"height": 32, "width": 32}},
    )  # fmt: skip
    model = write_vision(tmp_path, case)
    write_tokenizer(tmp_path)
    name_tokens(tmp_path, ("<image_soft_token>", "<start_of_image>", "<end_of_image>"))
    images = [png(picture(40, 40)), png(picture(30, 40, seed=1))]
    with LLM(tmp_path, device="cpu", ctx_size=256, threads=2, chunk_size=chunk, reuse_prefix=True) as llm:
        vision = llm.loaded.vision
        assert vision is not None and llm.images is not None
        for text, given in (
            ("the cat <start_of_image> sat on the mat", images[:1]),
            ("<start_of_image> the cat sat <start_of_image>", images),
        ):
            prompt = llm.with_images(text, given)
            assert isinstance(prompt, ImagePrompt) and len(prompt.images.rows) == len(given)
            ids = torch.tensor([prompt.ids])
            for part in prompt.images.rows:
                ids[0, part.start : part.end] = VOCAB - 1
            pixels = torch.cat([vision.prepare(image).pixels for image in given]).double()
            with torch.inference_mode():
                made = model(input_ids=ids, pixel_values=pixels, token_type_ids=(ids == VOCAB - 1).long())
            theirs = made.logits[0]
            assert nmse(llm.logits(prompt).double(), theirs) < 1e-5
            # Scheduled, and again from the cache, whose last block ends within an image.
            params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
            llm.scheduler.reset()
            first = llm.stream(prompt, params).finish()
            again = llm.stream(prompt, params).finish()
            assert again.timings.cached_tokens > 0 and first.tokens == again.tokens
            assert first.tokens[0] == int(theirs[-1].argmax())


@pytest.mark.parametrize("kind", ["both ways", "per-layer inputs", "no encoder"])
def test_logits_of_gemma_4(tmp_path: Path, kind: str) -> None:
    """Rows of an image see one another both ways in layers with a window alone; E-models give them the inputs of the
    first token, and see back alone."""
    family = gemma4uv if kind == "no encoder" else gemma4
    text = {
        "vocab_size": VOCAB,
        "num_hidden_layers": 2,
        "sliding_window": 64,
        "global_head_dim": 32,
        "layer_types": ["sliding_attention", "full_attention"],
        "use_bidirectional_attention": None if kind == "per-layer inputs" else "vision",
    }
    if kind != "no encoder":
        length = 8 if kind == "per-layer inputs" else 0
        text |= {"hidden_size_per_layer_input": length, "vocab_size_per_layer_input": VOCAB}
    config = {"audio_config": None, "image_token_id": VOCAB - 1}
    case = replace(family.CASE, config=config, text={**family.CASE.text, **text})
    model = write_vision(tmp_path, case)
    write_tokenizer(tmp_path)
    name_tokens(tmp_path, ("<|image|>", "<|image>", "<image|>"))
    images = [png(picture(60, 40)), png(picture(60, 40, seed=1))]
    with LLM(tmp_path, device="cpu", ctx_size=256, threads=2, chunk_size=80, reuse_prefix=True) as llm:
        vision = llm.loaded.vision
        assert vision is not None and llm.images is not None
        mark = llm.images.marker
        for text, given in (
            (f"the cat {mark} sat on the mat", images[:1]),
            (f"{mark} the cat sat {mark}", images),
        ):
            prompt = llm.with_images(text, given)
            assert isinstance(prompt, ImagePrompt) and len(prompt.images.rows) == len(given)
            ids = torch.tensor([prompt.ids])
            made = [family.reference_inputs(vision.prepare(image)) for image in given]
            pixels, places = (torch.cat(parts) for parts in zip(*made, strict=True))
            seen = (ids == VOCAB - 1).long()
            # As it generates: by itself the model without an encoder would see both ways without a window as well.
            rows, mask = torch.zeros(*ids.shape, 48, dtype=torch.double), torch.ones_like(ids)
            masks = model.create_masks_for_generate(
                model.config, rows, mask, None, None, mm_token_type_ids=seen
            )
            with torch.inference_mode():
                theirs = model(
                    input_ids=ids,
                    attention_mask=masks if kind == "no encoder" else None,
                    pixel_values=pixels,
                    image_position_ids=places,
                    mm_token_type_ids=seen,
                ).logits[0]
            assert nmse(llm.logits(prompt).double(), theirs) < 1e-5
            params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
            llm.scheduler.reset()
            first = llm.stream(prompt, params).finish()
            assert first.tokens[0] == int(theirs[-1].argmax())
            assert llm.stream(prompt, params).finish().tokens == first.tokens
