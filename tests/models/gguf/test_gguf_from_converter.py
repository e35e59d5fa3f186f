"""Files that llama.cpp's converter writes, from both formats it reads, load and give the logits of `transformers`."""

import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from quengine.errors import EngineError
from quengine.models.gguf import open_gguf
from quengine.models.gguf.gguf_checkpoint import GGUFCheckpoint
from quengine.models.template.chat_template import encode_chat
from tests.llama_cpp_convert import VOCAB, Conversion, convert, write_tokenizer
from tests.mistral_format import write_mistral_format
from tests.text_samples import HAND_PICKED
from tests.transformers_models import nmse, our_logits, transformers_logits, write_model

TOLERANCE = 1e-9  # theirs rounds norms and angles to float32: up to 2e-11 at a position
TEKKEN_VOCAB = 1300  # 1000 control tokens, bytes and 44 merges
SENTENCEPIECE_VOCAB = 32768

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
ROPE_KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5e4},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "yarn": YARN,
    "yarn with its own magnitude": {**YARN, "attention_factor": 1.3},
    "yarn with betas": {**YARN, "beta_fast": 8.0, "beta_slow": 2.0},
}
LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MINISTRAL = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
LONGROPE = {**YARN, "rope_type": "longrope", "short_factor": [1.5] * 8, "long_factor": [2.0] * 8}

GLM = {
    "attention_bias": True,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "num_nextn_predict_layers": 0,
}


@dataclass(frozen=True)
class Case:
    """A model for `write_model`; `native` names the tokenizer where Mistral's own format is converted, `qkv` asks for
    query, key and value rows in one tensor."""

    model_type: str
    config: dict[str, Any]
    vision: bool = False
    native: str = ""
    params: Any = ()
    vocab: int = VOCAB
    qkv: bool = False


def _from_folders() -> dict[str, Case]:
    """Of Hugging Face folders: every architecture with every rotary kind that the converter writes for it.

    It writes no sliding window, no `mscale` but Ministral 3's, and `llama3` for the llama family alone.
    """
    cases = {}
    for model_type in ("llama", "mistral", "qwen2", "qwen3"):
        for kind, rope in ROPE_KINDS.items():
            cases[f"{model_type}, {kind}"] = Case(model_type, {"rope_parameters": rope})
        cases[f"{model_type}, tied"] = Case(model_type, {"tie_word_embeddings": True})
    for model_type, sizes in {"llama": {}, "qwen2": {}, "qwen3": {}, "olmo2": {}, "glm4_moe": GLM}.items():
        cases[f"{model_type}, joined rows"] = Case(model_type, sizes, qkv=True)
    for model_type in ("llama", "mistral"):
        cases[f"{model_type}, llama3"] = Case(model_type, {"rope_parameters": LLAMA3})
    for tied in (False, True):
        end = ", tied" if tied else ""
        config = {"tie_word_embeddings": tied}
        cases["ministral3" + end] = Case("ministral3", {**config, "rope_parameters": MINISTRAL})
        cases["mistral3 of mistral" + end] = Case("mistral", config, vision=True)
        cases["mistral3 of ministral3" + end] = Case(
            "ministral3", {**config, "rope_parameters": MINISTRAL}, vision=True
        )
    cases["mistral3 of mistral, yarn"] = Case("mistral", {"rope_parameters": YARN}, vision=True)
    return cases


def _from_mistral_format() -> dict[str, Case]:
    def native(
        model_type: str, rope: dict[str, Any], tokenizer: str = "tekken-240911", **params: Any
    ) -> Case:
        vocab = TEKKEN_VOCAB if tokenizer.startswith("tekken") else SENTENCEPIECE_VOCAB
        return Case(model_type, {"rope_parameters": rope}, native=tokenizer, params=params, vocab=vocab)

    def yarn(scale: bool) -> dict[str, Any]:
        return {
            "beta": 32.0,
            "alpha": 1.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "apply_scale": scale,
        }

    default = ROPE_KINDS["default"]
    warmed = {"llama_4_scaling": {"beta": 0.3, "original_max_position_embeddings": 32}}
    own_magnitude = {key: value for key, value in MINISTRAL.items() if not key.startswith("mscale")}
    tied = native("mistral", default)
    return {
        "Mistral's format, tekken": native("mistral", default),
        "Mistral's format, an older tekken": native("mistral", default, "tekken-240718"),
        "Mistral's format, sentencepiece": native("mistral", default, "v3"),
        "Mistral's format, tied": Case(
            **{**vars(tied), "config": {**tied.config, "tie_word_embeddings": True}}
        ),
        "Mistral's format, yarn": native(
            "mistral", {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, yarn=yarn(False)
        ),
        "Mistral's format, Ministral 3": native("ministral3", MINISTRAL, yarn=yarn(False), **warmed),
        "Mistral's format, Ministral 3 with YaRN's magnitude": native(
            "ministral3", own_magnitude, yarn=yarn(True), **warmed
        ),
    }


CASES = _from_folders() | _from_mistral_format()
REFUSED = {
    "'longrope'": Case("llama", {"rope_parameters": LONGROPE}),
    "blk.0.attn_output.bias": Case("qwen3", {"attention_bias": True}),
    "blk.0.ffn_down.bias": Case("llama", {"mlp_bias": True}),
}


def _write_all(root: Path) -> None:
    """NAME.gguf and NAME.pt, the logits of `transformers`, for every case."""
    jobs = []
    for number, (name, case) in enumerate((CASES | REFUSED).items()):
        folder = write_model(
            root / f"model{number}", case.model_type, case.vision, vocab=case.vocab, **case.config
        )
        torch.save(transformers_logits(folder, case.vocab), root / f"{name}.pt")
        if case.native:
            folder = write_mistral_format(folder, root / f"native{number}", case.native, **dict(case.params))
        else:
            write_tokenizer(folder)
        pre = "qwen2" if case.model_type.startswith("qwen") else "llama-bpe"
        jobs.append(Conversion(folder, root / f"{name}.gguf", pre, bool(case.native), qkv=case.qkv))
        (root / f"{name}.folder").symlink_to(folder)
    convert(jobs)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `_write_all`, which one of the processes that share a run of the tests fills."""
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "converted"
    root.mkdir(exist_ok=True)
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (root / "done").exists():
            _write_all(root)
            (root / "done").touch()
    return root


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Matrices this small take longer on several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", CASES)
def test_a_converted_model_gives_the_logits_of_transformers(converted: Path, name: str) -> None:
    checkpoint = GGUFCheckpoint(converted / f"{name}.gguf")
    ours = our_logits(checkpoint, CASES[name].vocab)
    assert nmse(ours, torch.load(converted / f"{name}.pt")) < TOLERANCE


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.qkv])
def test_joined_rows_are_in_one_tensor(converted: Path, name: str) -> None:
    tensors = open_gguf(converted / f"{name}.gguf").tensors
    assert "blk.0.attn_qkv.weight" in tensors and "blk.0.attn_q.weight" not in tensors
    biased = CASES[name].model_type in ("qwen2", "glm4_moe")
    assert ("blk.0.attn_qkv.bias" in tensors) is biased


@pytest.mark.parametrize("name", CASES)
def test_a_converted_models_tokenizer_loads(converted: Path, name: str) -> None:
    tokenizer = GGUFCheckpoint(converted / f"{name}.gguf").tokenizer()
    assert tokenizer.vocab_size == CASES[name].vocab
    for text in HAND_PICKED[:20]:
        assert tokenizer.decode(tokenizer.encode(text, bos=False)) == text


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.native.startswith("tekken")])
def test_ids_of_a_tekken_from_mistrals_format_are_mistral_commons(converted: Path, name: str) -> None:
    """The converter writes scores of int32 beside the merges; llama.cpp reads neither their type nor them."""
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    path = converted / f"{name}.gguf"
    assert open_gguf(path).entries["tokenizer.ggml.scores"].type_name == "array of int32"
    ours = GGUFCheckpoint(path).tokenizer()
    theirs = Tekkenizer.from_file(converted / f"{name}.folder" / "tekken.json")
    for text in HAND_PICKED:
        assert ours.encode(text, bos=True) == theirs.encode(text, bos=True, eos=False), text


@pytest.mark.parametrize("name", ["Mistral's format, tekken", "Mistral's format, an older tekken"])
def test_a_conversation_becomes_mistral_commons_ids(converted: Path, name: str) -> None:
    """The converter writes the name of a template that llama.cpp has built in."""
    from mistral_common.protocol.instruct.messages import AssistantMessage, UserMessage
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    checkpoint = GGUFCheckpoint(converted / f"{name}.gguf")
    template = checkpoint.chat_template()
    assert template is not None
    texts = ["Hello there", "and you?", "fine"]
    messages = [{"role": r, "content": t} for r, t in zip(["user", "assistant", "user"], texts, strict=True)]
    turns = [UserMessage(content=texts[0]), AssistantMessage(content=texts[1]), UserMessage(content=texts[2])]
    theirs = MistralTokenizer.from_file(str(converted / f"{name}.folder" / "tekken.json"))
    expected = theirs.encode_chat_completion(ChatCompletionRequest(messages=turns)).tokens
    assert encode_chat(checkpoint.tokenizer(), template, messages) == expected


@pytest.mark.parametrize("named", REFUSED)
def test_a_converted_model_that_the_decoder_cannot_run_is_refused_by_name(
    converted: Path, named: str
) -> None:
    with pytest.raises(EngineError) as caught:
        GGUFCheckpoint(converted / f"{named}.gguf")
    assert named in str(caught.value) and "\n" not in str(caught.value)
