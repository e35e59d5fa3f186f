"""Images of a model that processes share: rank 0 encodes them, and every rank has the rows that it needs."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quengine import LLM, EngineError, SamplingParams
from quengine.models.synthetic.presets import synthetic_preset
from quengine.models.synthetic.projector_presets import PROJECTORS_OF
from quengine.models.synthetic.synthetic import write_synthetic
from quengine.models.synthetic.synthetic_projector import write_synthetic_projector
from quengine.request.prompt_images import ImagePrompt
from tests.models.vision.vision_models import nmse, picture, png

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
IMAGES = [png(picture(60, 40)), png(picture(30, 60, seed=1))]
VISION = {"width": 64, "heads": 4, "layers": 3, "feed_forward": 96, "patch": 8, "image_size": 64}
# Rows with positions in three axes, and with vectors that the text model's first layers add to them.
AXES = replace(
    PROJECTORS_OF["qwen3.5"], **VISION, min_pixels=256, max_pixels=4096, features={"deepstack": (0, 2)}
)
PLAIN = replace(PROJECTORS_OF["mistral-small"], **VISION, longest_edge=64)
MODELS = {"three axes, deepstack": ("qwen3.5-tiny", AXES), "consecutive": ("tiny", PLAIN)}


@pytest.fixture(scope="module", params=MODELS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    preset, vision = MODELS[request.param]
    model = synthetic_preset(preset)
    assert model is not None
    folder = tmp_path_factory.mktemp("ranks")
    write_synthetic_projector(folder / "mmproj-m.gguf", vision, model.embedding_length)
    return write_synthetic(folder / f"{preset}.gguf", replace(model, quant="Q8_0"))


def answers(llm: LLM) -> tuple[list[list[int]], torch.Tensor]:
    """Tokens after prompts with images, in one batch, and logits of the last of them."""
    assert llm.images is not None
    ends = llm.encode("the cat"), llm.encode("sat")
    ids = [ends[0] + llm.images.marker_ids * count + ends[1] for count in (1, 2)]
    prompts = [llm.with_images(each, IMAGES[: n + 1]) for n, each in enumerate(ids)]
    found = [completion.tokens for completion in llm.generate(prompts, GREEDY)]
    last = prompts[-1]
    assert isinstance(last, ImagePrompt)
    return found, llm.logits(last)


@pytest.fixture(scope="module")
def alone(path: Path) -> Iterator[Any]:
    with LLM(path, "cpu", 512, 1, parallel=2) as llm:
        yield answers(llm)


@pytest.mark.parametrize(
    "options", [{"tensor_parallel": 2}, {"tensor_parallel": 2, "split": "layer"}], ids=str
)
def test_ranks_give_the_answers_of_one_process(path: Path, alone: Any, options: dict[str, Any]) -> None:
    with LLM(path, "cpu", 512, 2, parallel=2, **options) as llm:
        tokens, logits = answers(llm)
    assert tokens == alone[0]
    if "split" in options:
        assert torch.equal(logits, alone[1])
    assert nmse(logits, alone[1]) < 1e-9


def test_a_first_device_without_the_layers_that_add_to_rows_is_refused(path: Path) -> None:
    if path.stem == "tiny":
        pytest.skip("its rows are not added to")
    with pytest.raises(EngineError, match="in the first 2 layers, and the first device has 1"):
        LLM(path, "cpu", 512, 2, split="layer", tensor_split="1,3")
