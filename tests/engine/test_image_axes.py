"""Models whose image rows have positions in three axes, against `transformers`: logits and texts, on the CPU."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quengine import LLM, SamplingParams
from quengine.request.prompt_images import Features, ImagePrompt, ImageRows, PromptImages
from tests.engine.test_image_models import name_tokens
from tests.llama_cpp_convert import VOCAB, Conversion, convert, write_tokenizer
from tests.models.vision import test_glm4v as glm_tests
from tests.models.vision import test_qwen_vl as vision_tests
from tests.models.vision.vision_models import nmse, picture, png, write_mmproj, write_vision

TOKENS = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
GLM_TOKENS = ("<|image|>", "<|begin_of_image|>", "<|end_of_image|>")
GLM_IDS = {"image_token_id": VOCAB - 1, "image_start_token_id": VOCAB - 2, "image_end_token_id": VOCAB - 3}
IDS = {"image_token_id": VOCAB - 1, "vision_start_token_id": VOCAB - 2, "vision_end_token_id": VOCAB - 3}
TEXT = {"vocab_size": VOCAB, "max_position_embeddings": 512, "num_hidden_layers": 2, "hidden_size": 64,
        "head_dim": 32}  # fmt: skip
VISION = {"out_hidden_size": 64}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
         "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4}  # fmt: skip


def changed(name: str, text: dict[str, Any]) -> Any:
    case = vision_tests.CASES[name]
    return replace(case, config=IDS, vision={**case.vision, **VISION}, text={**TEXT, **text})


CASES = {
    "qwen3_vl": changed("qwen3_vl", {"rope_parameters": {**ROPE, "mrope_section": [6, 5, 5]}}),
    "qwen2_5_vl": changed("qwen2_5_vl", {"rope_parameters": {**ROPE, "mrope_section": [6, 5, 5]}}),
    "qwen3_5": changed(
        "qwen3_5",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5, "mrope_section": [3, 3, 2]},
            **DELTA,
        },
    ),
}
HALF = {**ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3]}


def glm(model_type: str, text: dict[str, Any]) -> Any:
    vision = {**glm_tests.CASE.vision, "out_hidden_size": 64}
    text = {**TEXT, "rope_parameters": HALF, **text}
    return replace(glm_tests.CASE, model_type=model_type, config=GLM_IDS, vision=vision, text=text)


CASES["glm4v"] = glm("glm4v", {})
CASES["glm4v_moe"] = glm(
    "glm4v_moe", {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64}
)
SIZES = [(60, 24), (24, 24), (16, 90)]
IMAGES = [png(picture(*size, seed=n)) for n, size in enumerate(SIZES)]
MARK = "#"
"""The model's own marker of an image, in prompts."""
PROMPTS = {
    "at the end": (f"the cat sat on the mat {MARK}", [0]),
    "at the beginning": (f"{MARK} the cat sat on the mat", [0]),
    "three": (f"the {MARK} cat {MARK}{MARK} sat", [1, 2, 0]),
}


@pytest.fixture(scope="module", params=CASES)
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LLM, Any]]:
    path = tmp_path_factory.mktemp(request.param)
    model = with_experts(write_vision(path, CASES[request.param]))
    write_tokenizer(path)
    name_tokens(path, GLM_TOKENS if request.param.startswith("glm") else TOKENS)
    with LLM(
        path, device="cpu", ctx_size=512, threads=2, chunk_size=24, parallel=3, reuse_prefix=True
    ) as llm:
        yield llm, model


def with_experts(model: Any) -> Any:
    """Its experts computed one by one: the grouped product takes no float64."""
    if hasattr(model.config.get_text_config(), "moe_intermediate_size"):
        model.set_experts_implementation("eager")
    return model


def given(llm: LLM, text: str, images: list[int]) -> tuple[ImagePrompt, dict[str, torch.Tensor]]:
    """The prompt, and what `transformers` takes for it."""
    vision, files = llm.loaded.vision, [IMAGES[number] for number in images]
    assert vision is not None
    prompt = llm.with_images(text.replace(MARK, vision.marker), files)
    assert isinstance(prompt, ImagePrompt)
    pixels = [vision.prepare(file).pixels for file in files]
    grid = torch.tensor([[1, each.shape[-2] // 4, each.shape[-1] // 4] for each in pixels])
    ids = torch.tensor([prompt.ids])
    for part in prompt.images.rows:  # where another token of the marker stands for them
        ids[0, part.start : part.end] = VOCAB - 1
    values = torch.cat([vision_tests.flat(each) for each in pixels]).double()
    kinds = (ids == VOCAB - 1).int()
    return prompt, {
        "input_ids": ids,
        "pixel_values": values,
        "image_grid_thw": grid,
        "mm_token_type_ids": kinds,
    }


def greedy(model: Any, given: dict[str, torch.Tensor], count: int, ends: frozenset[int]) -> list[int]:
    """The text of the model without its end tokens, computed anew for each token."""
    for _ in range(count):
        with torch.inference_mode():
            logits = model(**given).logits[0, -1:]
            logits[:, list(ends)] = -torch.inf
        newest = logits.argmax(-1, keepdim=True).clone()
        longer = {"input_ids": newest, "mm_token_type_ids": newest.new_zeros(1, 1, dtype=torch.int32)}
        given = {**given, **{name: torch.cat([given[name], value], 1) for name, value in longer.items()}}
    return given["input_ids"][0, -count:].tolist()


@pytest.mark.parametrize("name", PROMPTS)
def test_logits_and_text(both: tuple[LLM, Any], name: str) -> None:
    """All rows in one step, then in chunks that end within images, token by token after them, and from the cache."""
    llm, model = both
    prompt, theirs = given(llm, *PROMPTS[name])
    with torch.inference_mode():
        logits = model(**theirs).logits[0]
    assert nmse(llm.logits(prompt).double(), logits) < 1e-5
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    llm.scheduler.reset()
    first = llm.stream(prompt, params).finish()
    assert first.tokens == greedy(model, theirs, 5, llm.tokenizer.eos_ids)
    assert prompt.ids == theirs["input_ids"][0].tolist()  # a prompt can be given again
    again = llm.stream(prompt, params).finish()
    assert again.tokens == first.tokens and again.timings.cached_tokens >= 32


@pytest.mark.parametrize("name", ["glm4v", "glm4v_moe"])
def test_files_of_the_converter(tmp_path: Path, name: str) -> None:
    """Rows of query and key of GLM-4V are in halves there, and neighbours rotate together in its folder."""
    folder, case = tmp_path / "hf", replace(CASES[name], tokens=GLM_TOKENS)
    folder.mkdir()
    model = with_experts(write_vision(folder, case))
    write_mmproj(folder, tmp_path / "mmproj-f32.gguf", case)
    convert([Conversion(folder, tmp_path / "model.gguf", "gpt-2", outtype="f32")])
    with LLM(tmp_path / "model.gguf", device="cpu", ctx_size=512, threads=2) as llm:
        prompt, theirs = given(llm, *PROMPTS["three"])
        with torch.inference_mode():
            logits = model(**theirs).logits[0]
        assert nmse(llm.logits(prompt).double(), logits) < 1e-5


def test_a_batch_has_the_texts_of_its_prompts(both: tuple[LLM, Any]) -> None:
    """Beside a prompt of text alone; of one that is preempted too."""
    llm, _ = both
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [given(llm, *PROMPTS[name])[0] for name in ("at the end", "three")]
    prompts = [*prompts, llm.encode("the cat sat")]
    llm.scheduler.reset()
    alone = [llm.stream(each, params).finish().tokens for each in prompts]
    llm.scheduler.reset()
    assert [each.tokens for each in llm.generate(prompts, params)] == alone
    llm.scheduler.reset()
    stream = llm.stream(prompts[1], params)
    next(iter(stream))
    llm.scheduler._preempt(stream.sequence)
    assert stream.finish().tokens == alone[1]


@pytest.mark.gpu
def test_texts_on_a_gpu_are_those_of_the_cpu(both: tuple[LLM, Any]) -> None:
    """Eagerly and captured, each alone and in a batch: steps of a size are captured when they come again."""
    llm, _ = both
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [given(llm, *PROMPTS[name])[0] for name in PROMPTS]
    llm.scheduler.reset()
    wanted = [each.tokens for each in llm.generate(prompts, params)]
    logits = llm.logits(prompts[2]).double()
    with LLM(llm.loaded.path, device="cuda", ctx_size=512, parallel=3) as gpu:
        here = [given(gpu, *prompt)[0] for prompt in PROMPTS.values()]
        assert nmse(gpu.logits(here[2]).double().cpu(), logits) < 1e-4
        for _ in range(3):
            gpu.scheduler.reset()
            assert [gpu.stream(each, params).finish().tokens for each in here] == wanted
            gpu.scheduler.reset()
            assert [each.tokens for each in gpu.generate(here, params)] == wanted


def test_rows_have_places_and_the_text_after_them_goes_on() -> None:
    image = Features(b"", torch.zeros(6, 1), grid=(1, 2, 3))
    images = PromptImages((image, image), (ImageRows(2, 6, 0, 0), ImageRows(9, 6, 1, 0)))
    text = [0, 1, *[None] * 6, 5, *[None] * 6, 9, 10]
    found = images.angles(0, 17)
    assert found is not None and [a for a, want in zip(found, text, strict=True) if want is not None] == [
        0,
        1,
        5,
        9,
        10,
    ]
    assert images.angles(8, 9) == [5] and images.angles(16, 18) == [10, 11] and images.lag == 6
    first = [(2, 2, 2), (2, 2, 3), (2, 2, 4), (2, 3, 2), (2, 3, 3), (2, 3, 4)]
    assert images.places(0, 9) == first and images.places(4, 7) == first[2:5]
    assert images.places(9, 10) == [(6, 6, 6)]
    assert PromptImages((Features(b"", torch.zeros(6, 1)),), (ImageRows(2, 6, 0, 0),)).angles(0, 9) is None
