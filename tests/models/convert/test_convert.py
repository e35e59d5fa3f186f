"""Folders converted here and by llama.cpp's converter: the same tensors bit for bit, the same metadata key by key."""

import importlib
import json
import pkgutil
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import quengine
from quengine.errors import EngineError
from quengine.models.config import Ranker
from quengine.models.convert.fields import check_converted
from quengine.models.convert.sentencepiece_file import read_spaces
from quengine.models.convert.vocabulary import pre_tokenizer_name
from quengine.models.hf.hf_checkpoint import HFCheckpoint
from quengine.models.tokenizer.pre_tokenizers import pre_tokenizer, pre_tokenizer_names
from tests.llama_cpp_convert import VOCAB, Conversion, convert, write_sentencepiece, write_tokenizer
from tests.models.architectures.both_files import Case, write_case
from tests.models.architectures.test_bert import write_pooling
from tests.models.convert.equal_files import check_equal, contents
from tests.transformers_models import write_model

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 5e5,
}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-linear": ("llama", {"rope_parameters": LINEAR}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"rope_parameters": YARN}),
    "ministral3": (
        "ministral3",
        {"rope_parameters": YARN | {"mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}},
    ),
}
MORE = (
    "draft layer",
    "a draft layer",
    "packed",
    "long factors",
    "alpha",
    "experts",
    "glm",
    "mistral",
    "v3",
    "layered",
)
TYPES = ("f16", "bf16", "q8_0")
NAMES = (*CASES, "sentencepiece", "described", "pooled")


def write_described(folder: Path) -> None:
    """A model of bf16 with a model card, a chat template, added tokens of each kind, and ids that no token has."""
    write_model(folder, "qwen2", vocab=VOCAB + 5, hidden_size=64, intermediate_size=96)
    write_tokenizer(folder)
    parts = json.loads((folder / "tokenizer.json").read_text())
    for i, text in enumerate(("<|tool|>", "plain word", "<unused99>")):
        token = {"id": VOCAB + i, "content": text, "special": False, "normalized": False}
        parts["added_tokens"].append(token | {"single_word": False, "lstrip": False, "rstrip": False})
    (folder / "tokenizer.json").write_text(json.dumps(parts))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"chat_template": "{{ messages[0]['content'] }}", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    card = "---\nlicense: apache-2.0\nlanguage:\n- en\n- de\ntags:\n- chat\nbase_model: someone/Base-7B\n---\n# Words\n"
    (folder / "README.md").write_text(card)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """NAME, a folder, and NAME.gguf, llama.cpp's file of it; of "described" also NAME-TYPE.gguf."""
    root = tmp_path_factory.mktemp("convert")
    torch.set_num_threads(1)
    for name, (model_type, config) in CASES.items():
        write_model(root / name, model_type, vocab=VOCAB, **config)
        write_tokenizer(root / name)
    write_model(root / "sentencepiece", "mistral", vocab=32768)
    write_sentencepiece(root / "sentencepiece")
    write_described(root / "described")
    write_model(root / "pooled", "qwen3", vocab=VOCAB)
    write_tokenizer(root / "pooled")
    write_pooling(root / "pooled", "lasttoken")
    jobs = [Conversion(root / name, root / f"{name}.gguf", "gpt-2") for name in NAMES]
    described = root / "described"
    jobs += [Conversion(described, root / f"described-{kind}.gguf", "gpt-2", outtype=kind) for kind in TYPES]
    convert(jobs)
    return root


@pytest.mark.parametrize("name", NAMES)
def test_the_file_is_llama_cpps(root: Path, tmp_path: Path, name: str) -> None:
    result = quengine.convert(root / name, tmp_path / "ours.gguf", "f32", threads=1)
    check_equal(tmp_path / "ours.gguf", root / f"{name}.gguf")
    assert result.paths == (tmp_path / "ours.gguf",)
    assert result.nbytes == (tmp_path / "ours.gguf").stat().st_size


def models_of(module: str) -> dict[str, Case]:
    """Of an architecture's tests the first two models that llama.cpp's converter writes, and those in `MORE`."""
    cases = getattr(importlib.import_module(f"tests.models.architectures.{module}"), "CASES", {})
    every = cases.items() if isinstance(cases, dict) else ()
    found = {name: case for name, case in every if isinstance(case, Case) and case.converts}
    return {name: case for i, (name, case) in enumerate(found.items()) if i < 2 or name in MORE}


ARCHITECTURES = Path(__file__).parents[1] / "architectures"
REFUSED = "test_openelm"
MODULES = [
    name for _, name, _ in pkgutil.iter_modules([str(ARCHITECTURES)]) if name != REFUSED and models_of(name)
]


@pytest.mark.parametrize("module", MODULES)
def test_files_of_other_architectures_are_llama_cpps(tmp_path: Path, module: str) -> None:
    jobs = []
    for name, case in models_of(module).items():
        write_case(tmp_path / name, case)
        jobs.append(Conversion(tmp_path / name, tmp_path / f"{name}.gguf", "gpt-2", drafts=case.drafts))
    convert(jobs)
    for job in jobs:
        quengine.convert(job.folder, tmp_path / "ours.gguf", "f32", threads=1)
        check_equal(tmp_path / "ours.gguf", job.output)


def write_gemma4_tokenizer(folder: Path) -> None:
    """Merges of characters with bytes as a fallback, and tokens of channels and calls, VOCAB in all."""
    words = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3}
    words |= {f"<0x{byte:02X}>": 4 + byte for byte in range(256)}
    for text in ("▁", "a", "t", "h", "e", "th", "the", "▁the", "at", "<|channel>", "\n"):
        words[text] = len(words)
    added = ['<|"|>', "<tool_call|>", "<|think|>"]
    words |= {f"w{i}": i for i in range(len(words), VOCAB - len(added))}
    merges = [["t", "h"], ["th", "e"], ["▁", "the"], ["a", "t"]]
    tokens = [
        {"id": words.get(text, len(words) + i), "content": text, "special": True, "normalized": False}
        | {"single_word": False, "lstrip": False, "rstrip": False}
        for i, text in enumerate([*added, "<bos>", "<eos>", "<pad>", "<unk>", "<|channel>"])
    ]
    model = {"type": "BPE", "vocab": words, "merges": merges, "byte_fallback": True, "unk_token": "<unk>"}
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    decoder = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
    parts = {
        "version": "1.0",
        "added_tokens": tokens,
        "normalizer": space,
        "decoder": decoder,
        "model": model,
    }
    (folder / "tokenizer.json").write_text(json.dumps(parts))
    roles = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "additional_special_tokens": ["<|think|>", '<|"|>'],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config | roles))


def test_gemma4_s_own_tokenizer_is_llama_cpps(tmp_path: Path) -> None:
    case = next(iter(models_of("test_gemma4").values()))
    write_case(tmp_path / "folder", case)
    write_gemma4_tokenizer(tmp_path / "folder")
    convert([Conversion(tmp_path / "folder", tmp_path / "theirs.gguf", "gemma4")])
    quengine.convert(tmp_path / "folder", tmp_path / "ours.gguf", "f32", threads=1)
    check_equal(tmp_path / "ours.gguf", tmp_path / "theirs.gguf")
    edited("tokenizer.json", lambda parts: parts["added_tokens"].pop(2))(tmp_path / "folder")
    with pytest.raises(
        EngineError, match=f"{VOCAB - 1} tokens up to {VOCAB - 2}, of a model with {VOCAB} rows"
    ):
        quengine.convert(tmp_path / "folder", tmp_path / "ours.gguf")


@pytest.mark.parametrize("kind", TYPES)
def test_so_it_is_in_every_type(root: Path, tmp_path: Path, kind: str) -> None:
    quengine.convert(root / "described", tmp_path / "ours.gguf", kind, threads=1)
    check_equal(tmp_path / "ours.gguf", root / f"described-{kind}.gguf")


def test_a_split_is_the_same_model(root: Path, tmp_path: Path) -> None:
    result = quengine.convert(root / "qwen3", tmp_path / "part.gguf", "f32", split_max_size=100_000)
    assert len(result.paths) > 2
    assert sorted(tmp_path.iterdir()) == list(result.paths)
    assert result.paths[0].name == f"part-00001-of-{len(result.paths):05d}.gguf"
    metadata, tensors = contents(result.paths[-1])
    expected, expected_tensors = contents(root / "qwen3.gguf")
    assert tensors == expected_tensors
    assert {key: value for key, value in metadata.items() if not key.startswith("split.")} == expected
    for path in result.paths:
        assert path.stat().st_size < 110_000


def test_a_large_enough_file_is_not_split(root: Path, tmp_path: Path) -> None:
    result = quengine.convert(root / "qwen3", tmp_path / "one.gguf", split_max_size=1 << 30)
    assert result.paths == (tmp_path / "one.gguf",)


def test_spaces_are_as_sentencepiece_s_own_file_has_them(tmp_path: Path) -> None:
    path = tmp_path / "sentencepiece.bpe.model"
    for normalizer, spaces in (
        (b"", (True, True)),
        (b"\x18\x00", (False, True)),
        (b"\x20\x00", (True, False)),
    ):
        path.write_bytes(b"\x1a" + bytes([len(normalizer)]) + normalizer)
        assert read_spaces(path) == spaces
    path.write_bytes(b"\x1a\x7f")
    with pytest.raises(EngineError, match="not SentencePiece's file, or cut short"):
        read_spaces(path)


BYTE_LEVEL = {
    (splits.patterns, splits.ignore_merges): name
    for name in pre_tokenizer_names()
    if (splits := pre_tokenizer(name)).byte_level and splits.digit_groups is None
}


@pytest.mark.parametrize("name", BYTE_LEVEL.values())
def test_pre_tokenizers_are_found_by_what_they_do(tmp_path: Path, name: str) -> None:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    expected = pre_tokenizer(name)
    engine = Tokenizer(models.BPE(ignore_merges=expected.ignore_merges))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in expected.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    engine.save(str(tmp_path / "tokenizer.json"))
    parts = json.loads((tmp_path / "tokenizer.json").read_text())
    found = pre_tokenizer(pre_tokenizer_name(tmp_path / "tokenizer.json", parts))
    assert found.ignore_merges == expected.ignore_merges
    same = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in found.patterns]
    )
    for text in random_texts():
        pieces = [span for _, span in pre_tokenizers.Sequence(splits).pre_tokenize_str(text)]
        assert [span for _, span in same.pre_tokenize_str(text)] == pieces


def random_texts() -> list[str]:
    """Of characters and words that pre-tokenizers treat unlike."""
    parts = [
        *"aZ é1 23  \n\n\r\t'.,/!-(~^`$",
        "'s",
        "'LL",
        "Abc",
        "日本",
        "नमस्ते",
        "한국",
        "…",
        "🦙",
        "\u0301",
        "  ",
    ]
    rng = np.random.default_rng(11)
    return ["".join(rng.choice(parts, 40)) for _ in range(30)]


def copied(root: Path, tmp_path: Path, name: str = "qwen2") -> Path:
    return Path(shutil.copytree(root / name, tmp_path / "folder"))


def edited(file: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        parts = json.loads((folder / file).read_text())
        change(parts)
        (folder / file).write_text(json.dumps(parts))

    return edit


MISTAKES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no tokenizer": (
        lambda folder: (folder / "tokenizer.json").unlink(),
        "neither tokenizer.json nor tokenizer.model",
    ),
    "another model": (
        edited("tokenizer.json", lambda parts: parts["model"].update(type="WordPiece")),
        "its model is WordPiece, not byte-level BPE",
    ),
    "a normalizer": (
        edited("tokenizer.json", lambda parts: parts.update(normalizer={"type": "Lowercase"})),
        "its normalizer is Lowercase",
    ),
    "unknown splits": (
        edited(
            "tokenizer.json",
            lambda parts: parts.update(
                pre_tokenizer={
                    "type": "Split",
                    "pattern": {"String": "e"},
                    "behavior": "Isolated",
                    "invert": False,
                }
            ),
        ),
        "no pre-tokenizer that a GGUF file can name",
    ),
    "too many tokens": (
        edited("tokenizer.json", lambda parts: parts["added_tokens"][0].update(id=VOCAB)),
        f"token {VOCAB}, of a model with {VOCAB} rows",
    ),
    "a cut tokenizer.model": (
        lambda folder: (folder / "tokenizer.model").write_bytes(b"\x0a\x7fshort"),
        "not SentencePiece's file, or cut short",
    ),
    "a unigram model": (
        lambda folder: (folder / "tokenizer.model").write_bytes(b"\x0a\x03\x0a\x01a\x12\x02\x18\x01"),
        r"is of model type 1, and BPE \(2\) alone is converted",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_not_converted_is_an_error_and_leaves_nothing(
    root: Path, tmp_path: Path, mistake: str
) -> None:
    edit, message = MISTAKES[mistake]
    folder = copied(root, tmp_path)
    edit(folder)
    with pytest.raises(EngineError, match=message):
        quengine.convert(folder, tmp_path / "out.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_architectures_whose_metadata_are_unknown_are_refused_by_name(root: Path) -> None:
    checkpoint = HFCheckpoint(root / "qwen2")
    config = replace(checkpoint.config, architecture="openelm")
    checkpoint.close()
    with pytest.raises(EngineError, match=r"architecture openelm is not converted yet; llama, "):
        check_converted(config)
    with pytest.raises(EngineError, match=r"sentence-transformers of architecture llama is not converted"):
        check_converted(replace(config, architecture="llama", pooling="mean"))
    with pytest.raises(EngineError, match=r"a classifier of architecture qwen3 is not converted"):
        check_converted(replace(config, architecture="qwen3", ranker=Ranker(1, False, "")))


def test_other_types_are_what_quantize_is_for(root: Path, tmp_path: Path) -> None:
    with pytest.raises(
        EngineError, match=r"no type q4_k: f32, f16, bf16, q8_0; for others .*engine quantize"
    ):
        quengine.convert(root / "qwen2", tmp_path / "out.gguf", "q4_k")


def test_arguments_for_other_files_and_the_folders_own_are_refused(root: Path, tmp_path: Path) -> None:
    folder, out = root / "qwen3", tmp_path / "out.gguf"
    given: list[tuple[dict[str, Any], str]] = [
        ({"mmproj": True, "base": "x"}, "--mmproj and --base: give one of them"),
        ({"target_folder": "x", "base": "x"}, "--target and --base: give one of them"),
        ({"mmproj": True, "split_max_size": 1}, "--split-max-size: projectors, .* are one file"),
    ]
    for arguments, problem in given:
        with pytest.raises(EngineError, match=problem):
            quengine.convert(folder, out, **arguments)
    for path, problem in (
        (tmp_path / "none", "no such folder"),
        (folder / "config.json", "a folder with config.json"),
    ):
        with pytest.raises(EngineError, match=f"{path}: .*{problem}"):
            quengine.convert(path, out)
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(EngineError, match=r"model.safetensors: a file of the folder itself"):
        quengine.convert(folder, folder / "model.safetensors", threads=1)
    assert (folder / "model.safetensors").read_bytes() == before and not out.exists()


def test_ctrl_c_leaves_no_part_of_a_split(root: Path, tmp_path: Path) -> None:
    def interrupt(_tensor: object, place: int, _count: int) -> None:
        if place == 15:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quengine.convert(root / "qwen3", tmp_path / "o.gguf", split_max_size=60_000, progress=interrupt)
    assert not list(tmp_path.iterdir())


def test_the_command_writes_a_file_that_gives_the_folders_logits(root: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from quengine.cli import main

    main.register_commands([])
    out = tmp_path / "out.gguf"
    result = CliRunner().invoke(main.app, ["convert", str(root / "llama-3"), "-o", str(out), "--type", "f32"])
    assert result.exit_code == 0 and f"wrote {out}" in result.stderr and "llama: " in result.stderr
    with (
        quengine.LLM(str(out), device="cpu", ctx_size=64) as file,
        quengine.LLM(str(root / "llama-3"), device="cpu", ctx_size=64) as folder,
    ):
        assert torch.equal(torch.as_tensor(file.logits([1, 5, 9])), torch.as_tensor(folder.logits([1, 5, 9])))
