"""Adapters of PEFT folders, and of GGUF files that llama.cpp's converter makes of them, change a model's tensors into
those of the folder whose weights have the products added."""

import json
import math
import struct
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import quengine
from quengine.cli import main
from quengine.errors import EngineError
from quengine.kernels.block_formats import dequantize
from quengine.models.checkpoint import Checkpoint, open_checkpoint
from quengine.models.lora.adapter import parse_lora
from quengine.models.lora.deltas import Deltas
from quengine.models.lora.open_adapter import open_adapter
from quengine.models.lora.peft import CONFIG
from tests.each_case import each_case
from tests.gguf_builder import GGUFBuilder
from tests.llama_cpp_convert import VOCAB, write_tokenizer
from tests.models.architectures.both_files import write_case
from tests.models.convert.equal_files import check_equal
from tests.models.lora.lora_folders import ALPHA, RANK, convert_lora, write_adapter, write_merged
from tests.transformers_models import write_model

CASES = {
    "llama": ("", "", True),
    "phi3": ("test_phi3", "plain", True),
    "qwen2moe": ("test_qwen_moe", "qwen2", True),
    "qwen3next": ("test_qwen3_next", "three value heads for each key head", False),
    "deepseek2": ("test_deepseek", "v2", False),
    "granite": ("test_granite", "attention alone", False),
}
"""Name -> the module and name of its case, and whether llama.cpp's converter writes adapters of all its matrices."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("lora")


def written(root: Path, name: str) -> Path:
    """NAME, a folder, NAME.gguf, NAME-adapter, a folder of PEFT, and NAME-merged, a folder; once."""
    module, case, _ = CASES[name]
    folder = root / name
    if not folder.exists():
        if case:
            write_case(folder, import_module(f"tests.models.architectures.{module}").CASES[case])
        else:
            write_model(folder, "llama", vocab=VOCAB)
            write_tokenizer(folder)
        embedding = "model.embed_tokens.weight" if name == "llama" else ""
        adapter = write_adapter(root / f"{name}-adapter", folder, embedding=embedding)
        write_merged(root / f"{name}-merged", folder, adapter, ALPHA / RANK)
        for each in (folder, root / f"{name}-merged"):
            quengine.convert(each, each.with_suffix(".gguf"), "f32", threads=1)
    return folder


def values(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return {
        name: dequantize(tensor.format, tensor.data).view(tensor.shape)
        for name, tensor in checkpoint.tensors.items()
    }


def check_changes(base: Path, merged: Path, adapter: Path) -> None:
    """All tensors of `merged` are those of `base` with the adapter's changes, and some are changed."""
    checkpoint, expected = open_checkpoint(base), open_checkpoint(merged)
    deltas = Deltas(checkpoint.config, [(open_adapter(adapter, checkpoint.config), 1.0)])
    theirs, changed = values(expected), 0
    for name, value in values(checkpoint).items():
        if deltas.changes(name):
            changed += 1
            delta = deltas.of(name, value.device)
            rows = value.flatten(0, -2)
            halves = [delta.rows(0, 3), delta.rows(3, len(rows) - 3)]
            value = (rows + torch.cat(halves)).view(value.shape)
        torch.testing.assert_close(value, theirs[name], rtol=1e-5, atol=1e-5, msg=name)
    assert changed >= 4
    for each in (checkpoint, expected):
        each.close()


@pytest.mark.parametrize("name", CASES)
def test_adapters_change_the_tensors_of_folders_and_files(root: Path, name: str) -> None:
    folder, merged = written(root, name), root / f"{name}-merged"
    adapters = [root / f"{name}-adapter", root / f"{name}-adapter.gguf"]
    quengine.convert(adapters[0], adapters[1], base=folder, threads=1)
    if CASES[name][2]:
        convert_lora(adapters[0], folder, root / "theirs.gguf")
        check_equal(adapters[1], root / "theirs.gguf")
    for adapter in adapters:
        check_changes(folder, merged, adapter)
        check_changes(folder.with_suffix(".gguf"), merged.with_suffix(".gguf"), adapter)


def test_scales_are_those_of_peft(root: Path, tmp_path: Path) -> None:
    """alpha / r or alpha / sqrt(r), of a module those of the first pattern that its name ends in."""
    folder = written(root, "llama")
    patterns = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {r"layers.1.mlp.(up|down)_proj": 3.0}}

    def scale(module: str) -> float:
        alpha = 3.0 if module.startswith("model.layers.1.mlp.") and "gate" not in module else ALPHA
        return float(alpha / (2 if "q_proj" in module else RANK) ** 0.5)

    adapter = write_adapter(tmp_path / "adapter", folder, use_rslora=True, fan_in_fan_out=True, **patterns)
    merged = write_merged(tmp_path / "merged", folder, adapter, scale)
    check_changes(folder, merged, adapter)
    quengine.convert(adapter, tmp_path / "adapter.gguf", base=folder, threads=1)
    check_changes(folder, merged, tmp_path / "adapter.gguf")


def test_files_are_llama_cpps_in_other_types(root: Path, tmp_path: Path) -> None:
    folder = written(root, "llama")
    adapter = write_adapter(tmp_path / "some-adapter-v2", folder)
    (adapter / "README.md").write_text("---\nbase_model: someone/Base-7B\nlicense: mit\n---\n# x\n")
    convert_lora(adapter, folder, tmp_path / "theirs.gguf", "q8_0")
    main.register_commands([])
    words = ["convert", adapter, "--base", folder, "-o", tmp_path / "ours.gguf", "-t", "q8_0"]
    result = CliRunner().invoke(main.app, [str(word) for word in words])
    assert result.exit_code == 0 and "llama: 30 tensors" in result.stderr
    check_equal(tmp_path / "ours.gguf", tmp_path / "theirs.gguf")
    config = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps(config | {"base_model_name_or_path": str(folder)}))
    quengine.convert(adapter, tmp_path / "ours.gguf", "q8_0", threads=1)
    check_equal(tmp_path / "ours.gguf", tmp_path / "theirs.gguf")
    (adapter / CONFIG).write_text(json.dumps(config | {"base_model_name_or_path": "someone/else"}))
    with pytest.raises(EngineError, match=r"base model's folder is needed, --base FOLDER: .* 'someone/else'"):
        quengine.convert(adapter, tmp_path / "ours.gguf")
    with pytest.raises(
        EngineError, match=r"--base x: .* is a model's folder: there is no adapter_config.json"
    ):
        quengine.convert(folder, tmp_path / "ours.gguf", base="x")


def test_a_path_may_end_in_a_scale(tmp_path: Path) -> None:
    (tmp_path / "a:2").touch()
    assert parse_lora("a.gguf") == (Path("a.gguf"), 1.0)
    assert parse_lora("a.gguf:-0.5") == (Path("a.gguf"), -0.5)
    assert parse_lora(f"{tmp_path}/a:2") == (tmp_path / "a:2", 1.0)
    for wrong in ("a:b", "a:inf", "a:nan", "a:1e10", "a:", ":1", ""):
        with pytest.raises(EngineError, match=rf"--lora '{wrong}': must be FILE or FILE:SCALE, .* to 1e9"):
            parse_lora(wrong)


KEYS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "peft_type: 'IA3' is not implemented, only 'LORA' is"),
    ({"use_dora": True}, "use_dora: DoRA, not implemented"),
    ({"modules_to_save": ["lm_head"]}, r"modules_to_save: .*, not implemented \(\['lm_head'\]\)"),
    ({"bias": "lora_only"}, "bias: 'lora_only': trained biases are not implemented"),
    ({"lora_bias": True}, "lora_bias: trained biases"),
    ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens: activated LoRA, not implemented"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights: 'pissa_niter_4' changes the base model too"),
    ({"r": 8}, "rank 4, and adapter_config.json gives 8"),
    ({"lora_alpha": "large"}, "lora_alpha: 'large' is not a number"),
    ({"lora_alpha": 1e300}, r"lm_head: a scale \(alpha / r\) of 2.5e\+299 is not from -1e9 to 1e9"),
    ({"rank_pattern": ["q_proj"]}, r"rank_pattern: must be an object, not \['q_proj'\]"),
    ({"alpha_pattern": {"(": 3}}, r"alpha_pattern: '\(' is not a regular expression: missing \)"),
]


@each_case(("keys", "problem"), KEYS)
def test_configurations_that_are_not_computed_are_refused(
    root: Path, tmp_path_factory: pytest.TempPathFactory, keys: dict[str, Any], problem: str
) -> None:
    folder = written(root, "llama")
    adapter = write_adapter(tmp_path_factory.mktemp("keys"), folder)
    config = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps(config | keys))
    with closing(open_checkpoint(folder)) as checkpoint, pytest.raises(EngineError, match=problem):
        open_adapter(adapter, checkpoint.config)


Q = "base_model.model.model.layers.0.self_attn.q_proj"
A = f"{Q}.lora_A.weight"
TENSORS: list[tuple[dict[str, tuple[int, ...] | torch.Tensor | None], str]] = [
    (
        {A: torch.zeros(4, 64).to(torch.float8_e4m3fn)},
        "q_proj: torch.float8_e4m3fn and .* only F64, F32, F16",
    ),
    ({A: torch.full((4, 64), torch.nan)}, "q_proj: has weights that are not finite"),
    ({A: torch.full((4, 64), 1e300, dtype=torch.float64)}, "q_proj: has weights that are not finite"),
    ({A: torch.full((4, 64), 3e38)}, "q_proj: scale 1.5: its product with the weights overflows fp32"),
    ({A.replace("A.", "A.default."): (4, 64)}, "q_proj: has A twice, .* and under another name"),
    ({f"{Q}.lora_A.weight": None}, "layers.0.self_attn.q_proj: has B alone"),
    ({f"{Q}.lora_A.weight": (3, 64)}, r"q_proj: A and B are \[3, 64\] and \[64, 4\]"),
    (
        {f"{Q}.lora_A.weight": (4, 65)},
        r"blk.0.attn_q.weight: .* a matrix \[64, 65\], the model's is \[64, 64\]",
    ),
    ({f"{Q}.lora_magnitude_vector": (64,)}, "q_proj.lora_magnitude_vector' is no half of a change"),
    ({"base_model.model.lm_head.weight": (VOCAB, 64)}, "lm_head.weight' is no half of a change"),
    (
        {
            f"{Q.replace('q_', 'z_')}.lora_{half}.weight": shape
            for half, shape in (("A", (4, 64)), ("B", (64, 4)))
        },
        "the llama model has no such matrices: model.layers.0.self_attn.z_proj",
    ),
]


@each_case(("tensors", "problem"), TENSORS)
def test_tensors_that_are_not_computed_are_refused(
    root: Path,
    tmp_path_factory: pytest.TempPathFactory,
    tensors: dict[str, tuple[int, ...] | torch.Tensor | None],
    problem: str,
) -> None:
    folder = written(root, "llama")
    adapter = write_adapter(tmp_path_factory.mktemp("tensors"), folder)
    held = load_file(adapter / "adapter_model.safetensors")
    for name, shape in tensors.items():
        held.pop(name, None)
        if shape is not None:
            held[name] = shape if isinstance(shape, torch.Tensor) else torch.zeros(shape)
    save_file(held, adapter / "adapter_model.safetensors")
    with closing(open_checkpoint(folder)) as checkpoint, pytest.raises(EngineError, match=problem):
        open_adapter(adapter, checkpoint.config)


def test_scales_of_zero_and_of_no_number(root: Path, tmp_path: Path) -> None:
    """A file's alpha of 0 is a scale of 1, so that a folder's 0 is not written."""
    folder, q = written(root, "llama"), "layers.0.self_attn.q_proj"
    adapter = write_adapter(tmp_path / "zero", folder, lora_alpha=0)
    with pytest.raises(EngineError, match="zero: its scale is 0, so that it changes nothing"):
        quengine.convert(adapter, tmp_path / "zero.gguf", base=folder, threads=1)
    one = write_adapter(tmp_path / "one", folder, lora_alpha=0, alpha_pattern={q: ALPHA})
    quengine.convert(one, tmp_path / "one.gguf", base=folder, threads=1)
    merged = write_merged(tmp_path / "merged", folder, one, lambda m: ALPHA / RANK if m.endswith(q) else 0.0)
    check_changes(folder, merged, tmp_path / "one.gguf")
    raw = (tmp_path / "one.gguf").read_bytes()
    key = b"adapter.lora.alpha"
    place = raw.index(key) + len(key) + 4
    damaged = raw[:place] + struct.pack("<f", math.nan) + raw[place + 4 :]
    (tmp_path / "nan.gguf").write_bytes(damaged)
    with (
        closing(open_checkpoint(folder)) as checkpoint,
        pytest.raises(
            EngineError, match=r"nan.gguf: tensor .*lora_a .* a scale \(alpha / r\) of nan is not from"
        ),
    ):
        open_adapter(tmp_path / "nan.gguf", checkpoint.config)


def test_names_with_the_adapters_and_other_files_of_tensors(root: Path, tmp_path: Path) -> None:
    folder = written(root, "llama")
    adapter = write_adapter(tmp_path / "adapter", folder)
    path = adapter / "adapter_model.safetensors"
    named = {name.replace(".weight", ".default.weight"): half for name, half in load_file(path).items()}
    save_file(named, path)
    with closing(open_checkpoint(folder)) as checkpoint:
        assert len(open_adapter(adapter, checkpoint.config).changes) == 15
        path.rename(adapter / "adapter_model.bin")
        with pytest.raises(EngineError, match=r"has adapter_model.bin alone: save it as safetensors"):
            open_adapter(adapter, checkpoint.config)


FILE_KEYS: list[tuple[dict[str, Any], str]] = [
    ({"general.architecture": "phi3"}, "general.architecture.*: phi3, of a model that is llama"),
    ({"general.type": "model"}, "general.type.*: model, not adapter: this is no LoRA adapter"),
    ({"adapter.alora.invocation_tokens": [1]}, "invocation_tokens.*: activated LoRA is not implemented"),
]


@each_case(("keys", "problem"), FILE_KEYS)
def test_files_that_are_not_computed_are_refused(
    root: Path, tmp_path_factory: pytest.TempPathFactory, keys: dict[str, Any], problem: str
) -> None:
    path = tmp_path_factory.mktemp("file") / "adapter.gguf"
    builder = GGUFBuilder()
    own = {"general.architecture": "llama", "general.type": "adapter", "adapter.type": "lora"}
    for key, value in {**own, **keys}.items():
        builder.kv(key, value)
    builder.write(path)
    with (
        closing(open_checkpoint(written(root, "llama"))) as checkpoint,
        pytest.raises(EngineError, match=problem),
    ):
        open_adapter(path, checkpoint.config)
