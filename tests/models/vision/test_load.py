"""Which projector file is found, which are refused, and what a prepared image is known by."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quengine.errors import EngineError
from quengine.models.images import limited_decoder
from quengine.models.vision import ImageError, find_vision, load_processor, load_vision
from quengine.models.vision.files import Weights
from quengine.models.vision.load import _opened
from quengine.models.vision.matrix import Q8Matrix
from tests.gguf_builder import GGUFBuilder
from tests.models.vision.test_idefics3 import CASE
from tests.models.vision.vision_models import nmse, picture, png, write_mmproj, write_vision


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vision")
    write_vision(path, CASE)
    return path


def changed(folder: Path, copy: Path, file: str, part: str | None = None, **changes: Any) -> Path:
    """A copy of the folder with other values in one of its JSON files, or in an object within it."""
    shutil.copytree(folder, copy)
    values = json.loads((copy / file).read_text())
    (values if part is None else values[part]).update(changes)
    (copy / file).write_text(json.dumps(values))
    return copy


def test_the_projector_beside_a_model(tmp_path: Path, folder: Path) -> None:
    """The one with the model's name, F16 before other types; a folder is its own, if it sees."""
    model = tmp_path / "gemma-3-4b-it-Q4_K_M.gguf"
    model.write_bytes(b"")
    assert find_vision(model) is None and find_vision(tmp_path / "none" / "model.gguf") is None
    for name in ("mmproj-F32.gguf", "mmproj-BF16.gguf", "mmproj-F16.gguf", "mmproj-notes.txt"):
        (tmp_path / name).write_bytes(b"")
    assert find_vision(model) == tmp_path / "mmproj-F16.gguf"
    (tmp_path / "mmproj-gemma-3-4b-it-f32.gguf").write_bytes(b"")
    (tmp_path / "mmproj-other-f16.gguf").write_bytes(b"")
    assert find_vision(model) == tmp_path / "mmproj-gemma-3-4b-it-f32.gguf"
    for name in (
        "mmproj-gemma-3-4b-it-q8_0.gguf",
        "mmproj-gemma-3-4b-it-f16.gguf",
    ):  # its q is not the model's
        (tmp_path / name).write_bytes(b"")
    assert find_vision(model) == tmp_path / "mmproj-gemma-3-4b-it-f16.gguf"
    assert find_vision(folder) == folder and find_vision(tmp_path) is None


def test_images_are_decoded_in_a_limited_process(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = png(picture(40, 30))
    processor = load_processor(folder)
    before = processor.prepare(image)
    worker = tmp_path / "worker.py"
    worker.write_text("import os; os.abort()")
    monkeypatch.setattr(limited_decoder, "_WORKER", worker)
    monkeypatch.setattr(limited_decoder, "_decoders", limited_decoder.LimitedDecoders())
    with pytest.raises(ImageError, match="ended with SIGABRT"):
        processor.prepare(image)
    monkeypatch.undo()
    assert torch.equal(torch.as_tensor(before.pixels), torch.as_tensor(processor.prepare(image).pixels))


def test_a_folder_without_a_vision_part(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert find_vision(tmp_path) is None
    with pytest.raises(EngineError, match="the vision part of model_type 'llama' is not supported"):
        load_vision(tmp_path, "cpu")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"general.architecture": "llama"}, "'llama': no vision part of a model"),
        ({"clip.has_audio_encoder": True}, "the projector is for audio, which is not supported"),
        ({"clip.has_vision_encoder": True}, "clip.projector_type: missing"),
        (
            {"clip.has_vision_encoder": True, "clip.projector_type": "kimivl"},
            "projector 'kimivl' is not supported; supported are .*idefics3",
        ),
        (
            {"clip.has_vision_encoder": True, "clip.projector_type": "idefics3"},
            "clip.vision.image_size: missing from the metadata",
        ),
    ],
)
def test_refused_files(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    builder = GGUFBuilder()
    for key, value in ({"general.architecture": "clip"} | keys).items():
        builder = builder.kv(key, value)
    path = tmp_path / "mmproj.gguf"
    path.write_bytes(builder.build())
    with pytest.raises(EngineError, match=message):
        load_vision(path, "cpu")


@pytest.mark.parametrize(
    ("file", "part", "changes", "message"),
    [
        ("config.json", "vision_config", {"hidden_act": "mish"}, "hidden_act: 'mish' is not implemented"),
        ("config.json", "vision_config", {"num_attention_heads": 5}, "5 does not divide the width 32"),
        ("config.json", "vision_config", {"patch_size": "4"}, "patch_size: '4' is no integer from 1"),
        ("preprocessor_config.json", None, {"do_rescale": False}, "do_rescale: False is not implemented"),
        ("preprocessor_config.json", None, {"image_mean": [1.0]}, "image_mean: .* is no list of three"),
        (
            "preprocessor_config.json",
            None,
            {"max_image_size": {"longest_edge": 30}},
            "30 pixels are no whole",
        ),
    ],
)
def test_refused_folders(
    folder: Path, tmp_path: Path, file: str, part: str | None, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        load_vision(changed(folder, tmp_path / "copy", file, part, **changes), "cpu")


def test_tensors_are_checked(folder: Path, tmp_path: Path) -> None:
    """One that is missing, of another shape, or that nothing applies is named."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    name = next(each for each in tensors if each.endswith("post_layernorm.weight"))
    for change, message in (
        ({name: torch.ones(31)}, r"'v.post_ln.weight' has shape \[31\], must be \[32\]"),
        ({name: None}, "'v.post_ln.weight' is missing"),
        ({name.replace("weight", "gain"): torch.ones(3)}, "1 tensors that this projector does not apply"),
    ):
        changed_tensors = {k: v for k, v in (tensors | change).items() if v is not None}
        save_file(changed_tensors, copy / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(EngineError, match=message):
            load_vision(copy, "cpu")


def test_stored_types(folder: Path, tmp_path: Path) -> None:
    """Matrices in F16 and Q8_0, rounded as the converter does, give features near the model's own."""
    model = load_vision(folder, "cpu")
    image = model.prepare(png(picture(40, 30)))
    expected = model.encode([image])[0]
    for outtype, limit in (
        ("f16", 1e-10),
        ("bf16", 1e-3),
        ("q8_0", 1e-2),
    ):  # the model's own weights are halves
        file = write_mmproj(folder, tmp_path / f"mmproj-{outtype}.gguf", CASE, outtype)
        stored = load_vision(file, "cpu")
        made, of_block = stored.encode([image])[0], stored._encoder.blocks[0]  # type: ignore[attr-defined]
        error = nmse(made, expected)
        assert error < limit and (outtype == "f16" or error > 1e-7)
        # They stay as they are stored, and are expanded to the bits that fp32 matrices have.
        assert torch.equal(made, load_vision(file, "cpu", dtype=torch.float32).encode([image])[0])
        for each in (of_block.attention.qkv, of_block.attention.out, of_block.mlp.up, of_block.mlp.down):
            in_blocks = outtype == "q8_0" and each.weight.shape[1] % 32 == 0
            assert 8 * each.matrix.nbytes == each.weight.numel() * (8.5 if in_blocks else 16)
        assert (outtype == "q8_0") == isinstance(of_block.mlp.up.matrix, Q8Matrix)
    half = load_vision(folder, "cpu", dtype=torch.float16)
    assert 0 < nmse(half.encode([image])[0], expected) < 1e-5


def test_feed_forwards_named_the_other_way(folder: Path) -> None:
    """Older files of SigLIP call the first matrix of a feed-forward `ffn_down`, and the second one `ffn_up`."""

    class Swapped:
        def __init__(self, source: Any) -> None:
            self.source = source

        def shape(self, name: str) -> Any:
            return self.source.shape(self.swapped(name))

        def tensor(self, name: str) -> Any:
            return self.source.tensor(self.swapped(name))

        def swapped(self, name: str) -> str:
            names = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
            return ".".join(names.get(part, part) for part in name.split("."))

    projector, settings, source = _opened(folder)
    model = load_vision(folder, "cpu")
    image = model.prepare(png(picture(40, 30)))
    expected = model.encode([image])[0]
    weights = Weights(Swapped(source), torch.device("cpu"), torch.float32)  # type: ignore[arg-type]
    model._encoder = projector.encoder(weights, settings)
    assert torch.equal(model.encode([image])[0], expected)


def test_digests(folder: Path, tmp_path: Path) -> None:
    """They are of the bytes, the preprocessing and the projector; weights are not needed for them."""
    first, second = png(picture(40, 30)), png(picture(40, 30, seed=1))
    digest = load_processor(folder).prepare(first).digest
    assert len(digest) == 32 and digest == load_vision(folder, "cpu").prepare(first).digest
    others = [load_processor(folder).prepare(second).digest]
    copy = changed(folder, tmp_path / "copy", "preprocessor_config.json", image_mean=[0.4, 0.5, 0.5])
    others.append(load_processor(copy).prepare(first).digest)
    shutil.copytree(folder, tmp_path / "weights")
    tensors = load_file(folder / "model.safetensors")
    name = next(each for each in tensors if each.endswith("post_layernorm.weight"))
    tensors[name] = tensors[name] + 1
    save_file(tensors, tmp_path / "weights" / "model.safetensors", metadata={"format": "pt"})
    others.append(load_processor(tmp_path / "weights").prepare(first).digest)
    assert len({digest, *others}) == 4


def test_prepare_refuses_what_is_no_image(folder: Path) -> None:
    with pytest.raises(ImageError, match="SVG"):
        load_processor(folder).prepare(b"<svg/>")


def test_batches_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Units of several images are encoded together, as many as the limit has, and rows are each image's own."""
    model = load_vision(folder, "cpu", dtype=torch.float64)
    images = [model.prepare(png(picture(90, 60, seed))) for seed in range(3)]
    alone = [model.encode([image])[0] for image in images]
    sizes: list[int] = []
    layers = type(model._encoder).layers

    def noted(encoder: Any, pixels: torch.Tensor, grid: Any) -> Any:
        sizes.append(len(pixels))
        return layers(encoder, pixels, grid)

    monkeypatch.setattr(type(model._encoder), "layers", noted)
    monkeypatch.setattr("quengine.models.vision.vision_model.MAX_PATCHES", 64 * 10)
    together = model.encode(images)
    assert sizes == [10, 10, 10, 9] and sum(sizes) == sum(len(image.pixels) for image in images)
    assert all(nmse(ours, theirs) < 1e-20 for ours, theirs in zip(together, alone, strict=True))
