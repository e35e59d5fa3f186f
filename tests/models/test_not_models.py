"""Files and folders that people take for models are refused in one line that says what they are."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from quengine.errors import EngineError
from quengine.models.checkpoint import open_checkpoint
from quengine.models.hub.hub import resolve_model

LLAMA = {"model_type": "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96}
LLAMA |= {"num_hidden_layers": 1, "num_attention_heads": 4}
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"


@pytest.mark.parametrize(
    ("architecture", "kind", "said"),
    [
        ("llama", gguf.GGUFType.ADAPTER, "a LoRA adapter, not a model"),
        ("clip", gguf.GGUFType.MMPROJ, "the vision or audio part of a model"),
        ("clip", None, "the vision or audio part of a model"),
        ("imatrix", gguf.GGUFType.IMATRIX, "an importance matrix"),
        ("controlvector", None, "a control vector, not a model"),
    ],
)
def test_gguf_files_beside_models(tmp_path: Path, architecture: str, kind: str | None, said: str) -> None:
    path = tmp_path / "file.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    if kind is not None:
        writer.add_type(kind)
    writer.add_tensor("any", np.zeros((4, 4), np.float32))
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(EngineError, match=rf"^(\S+file\.gguf:|architecture '\w+' is) {said}[^\n]*$"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (POINTER.encode(), "git lfs pull"),
        (b"tjgg" + bytes(64), "a file of ggml before GGUF"),
        (b"<!doctype html>", "this is not a GGUF file"),
    ],
)
def test_files_of_other_kinds(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(EngineError, match=rf"m\.gguf: magic \(byte 0\)[^\n]*{said}[^\n]*$"):
        open_checkpoint(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("files", "config", "said"),
    [
        (["pytorch_model.bin"], {}, r"save its pytorch_model\*\.bin as safetensors"),
        (["pytorch_model-00001-of-00002.bin"], {}, r"save its pytorch_model\*\.bin"),
        (
            ["model-00001-of-00002.safetensors"],
            {},
            "without the index its safetensors files may be incomplete",
        ),
        ([], {}, "holds neither model.safetensors nor"),
        (["model.safetensors"], {}, "a pointer of Git LFS, not the file"),
        ([], {"model_type": None}, r"config.json has no model_type"),
        ([], {"quantization_config": {"quant_method": "awq", "bits": 4}}, "awq: such folders are not read"),
        ([], {"quantization_config": {"group_size": 64, "bits": 4}}, "mlx: such folders are not read"),
        ([], {"quantization": {"group_size": 64, "bits": 4}}, "mlx: such folders are not read"),
    ],
)
def test_folders_whose_weights_are_not_read(
    tmp_path: Path, files: list[str], config: dict[str, Any], said: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | config))
    for file in files:
        (tmp_path / file).write_text(POINTER)
    with pytest.raises(EngineError, match=rf"^[^\n]*{said}[^\n]*$"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("adapter_config.json", "a LoRA adapter, not a model"),
        ("params.json", "in Mistral's own format"),
        ("model_index.json", "a diffusion model"),
        ("m-Q4_K_M.gguf", "it has m-Q4_K_M.gguf: name that file"),
    ],
)
def test_folders_without_a_configuration(tmp_path: Path, file: str, said: str) -> None:
    (tmp_path / file).write_text("{}")
    with pytest.raises(EngineError, match=rf"^[^\n]*{said}[^\n]*$"):
        resolve_model(str(tmp_path))
