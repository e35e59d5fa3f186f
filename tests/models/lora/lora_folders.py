"""Folders of PEFT with random adapters, and the model's folder with what they add."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.fork_server import fork_server
from tests.llama_cpp_source import llama_cpp_source

RANK, ALPHA = 4, 6.0


def is_linear(name: str, weight: Tensor) -> bool:
    """Whether a stored tensor is the weight of a linear module that adapters usually change."""
    without = ("norm", "embed", "conv", "gate.weight", "router")
    return name.endswith(".weight") and weight.dim() == 2 and not any(part in name for part in without)


def write_adapter(
    folder: Path,
    model: Path,
    picks: Callable[[str, Tensor], bool] = is_linear,
    seed: int = 0,
    embedding: str = "",
    **config: Any,
) -> Path:
    """Changes of the picked weights of a model's folder, and of the `embedding`, if it is named."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    found, weights = {}, load_file(model / "model.safetensors")
    for name, weight in weights.items():
        if name != embedding and not picks(name, weight):
            continue
        rank = config.get("rank_pattern", {}).get(name.split(".")[-2], config.get("r", RANK))
        rows, columns = weight.shape[::-1] if name == embedding else weight.shape
        a, b = (0.2 * torch.randn(shape, generator=generator) for shape in ((rank, columns), (rows, rank)))
        module = f"base_model.model.{name.removesuffix('.weight')}"
        ends = ("embedding_A", "embedding_B") if name == embedding else ("A.weight", "B.weight")
        found |= {f"{module}.lora_{end}": half for end, half in zip(ends, (a, b), strict=True)}
    assert found
    save_file(found, folder / "adapter_model.safetensors", {"format": "pt"})
    keys = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "use_dora": False}
    (folder / "adapter_config.json").write_text(json.dumps(keys | config))
    return folder


def write_merged(target: Path, model: Path, adapter: Path, scale: float | Callable[[str], float]) -> Path:
    """The model's folder with scale * B A added to each weight, computed in float64."""
    shutil.copytree(model, target)
    weights, halves = (
        load_file(target / "model.safetensors"),
        load_file(adapter / "adapter_model.safetensors"),
    )
    for name, a in halves.items():
        if ".lora_A" not in name and ".lora_embedding_A" not in name:
            continue
        b = halves[name.replace("_A", "_B")]
        module = name.removeprefix("base_model.model.").partition(".lora_")[0]
        factor = scale if isinstance(scale, float) else scale(module)
        delta = factor * (b.double() @ a.double())
        weight = weights[f"{module}.weight"]
        weights[f"{module}.weight"] = (weight.double() + (delta.T if "embedding" in name else delta)).to(
            weight.dtype
        )
    save_file(
        {name: weight.contiguous() for name, weight in weights.items()},
        target / "model.safetensors",
        {"format": "pt"},
    )
    return target


def convert_lora(adapter: Path, base: Path, output: Path, outtype: str = "f32") -> None:
    """Writes the GGUF adapter by llama.cpp's converter.

    Raises:
        AssertionError: the converter failed; with the end of what it printed.
    """
    server = fork_server(("convert_hf_to_gguf",), (str(llama_cpp_source()),))
    arguments = [str(adapter), "--base", str(base), "--outfile", str(output), "--outtype", outtype]
    server.run(_CONVERT, str(llama_cpp_source() / "convert_lora_to_gguf.py"), *arguments)


_CONVERT = """
import runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
