"""GGUF files written by llama.cpp's own converter, `convert_hf_to_gguf.py`, from checkpoint folders.

The converter runs in a process of its own, over its own `gguf` package; one process serves all tests of this one,
because starting it takes seconds.
"""

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from tests.llama_cpp_source import llama_cpp_source

VOCAB = 288
"""Tokens of `write_tokenizer`: bytes, a few merges, and control tokens."""

GATE_UP = "--fuse-gate-up-exps"

_LOOKED_FOR = ("[gMASK]", "<|user|>", "<|observation|>")  # by the converter, in models of GLM


@dataclass(frozen=True)
class Conversion:
    """One call of the converter.

    pre: the pre-tokenizer it is to name for a byte-level tokenizer.json. It recognizes tokenizers by a hash of what
        they make of a text, and so only those of released models.
    mistral: the folder is in Mistral's own format (params.json, consolidated.safetensors, tekken.json).
    gate_up: gate and up of all experts of a layer in one tensor.
    """

    folder: Path
    output: Path
    pre: str
    mistral: bool = False
    gate_up: bool = False

    @property
    def arguments(self) -> list[str]:
        flags = ["--mistral-format"] if self.mistral else []
        flags += [GATE_UP] if self.gate_up else []
        return [str(self.folder), "--outfile", str(self.output), "--outtype", "f32", *flags]


def write_tokenizer(folder: Path, tokenizer_class: str = "PreTrainedTokenizerFast") -> None:
    """A byte-level tokenizer.json of VOCAB tokens, the control tokens last."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
    from tokenizers.models import BPE

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    engine = Tokenizer(BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB - 16, initial_alphabet=alphabet, show_progress=False)
    engine.train_from_iterator(["the cat sat on the mat, and that is that"] * 4, trainer)
    controls = ["<s>", "</s>", "<|endoftext|>", *_LOOKED_FOR]
    engine.add_special_tokens(controls)
    engine.add_special_tokens([f"<unused{i}>" for i in range(VOCAB - engine.get_vocab_size())])
    engine.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": tokenizer_class, "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_sentencepiece(folder: Path) -> int:
    """Mistral's v3 vocabulary as tokenizer.model; returns its number of tokens."""
    from importlib.resources import files

    data = files("mistral_common") / "data" / "mistral_instruct_tokenizer_240323.model.v3"
    (folder / "tokenizer.model").write_bytes(data.read_bytes())
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    return 32768


def convert(conversions: Sequence[Conversion]) -> None:
    """Writes every `output`.

    Raises:
        RuntimeError: the converter failed; with the end of what it said.
    """
    jobs = [(job.pre, job.arguments) for job in conversions]
    process = _converter()
    assert process.stdin is not None and process.stdout is not None
    print(json.dumps(jobs), file=process.stdin, flush=True)
    said = process.stdout.readline()
    if not said:
        _converter.cache_clear()
        raise RuntimeError(f"llama.cpp's converter ended with status {process.wait()}")
    if failure := json.loads(said):
        raise RuntimeError(f"llama.cpp's converter failed: {failure}")


@cache
def _converter() -> subprocess.Popen[str]:
    """The converter's process: it ends when its input does, that is with this process."""
    command = [sys.executable, "-m", "tests.llama_cpp_convert", str(llama_cpp_source())]
    pipe, root = subprocess.PIPE, Path(__file__).parent.parent
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=root, text=True)


def _serve(source: str) -> None:
    """In the converter's process: a line of conversions in, a line with what went wrong, or "", out.

    Each line's are done in a fork, because the converter keeps state and is altered for each.
    """
    sys.path.insert(0, source)
    import convert_hf_to_gguf as converter

    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as output:
            child = os.fork()
            if not child:
                _run_in_fork(converter, json.loads(line), output.fileno())
            failed = os.waitpid(child, 0)[1] != 0
            output.seek(0)
            print(json.dumps(output.read()[-2000:] or "it said nothing" if failed else ""), flush=True)


def _run_in_fork(converter: Any, jobs: list[tuple[str, list[str]]], output: int) -> NoReturn:
    for stream in (1, 2):
        os.dup2(output, stream)
    status = 1
    try:
        _run(converter, jobs)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def _run(converter: Any, jobs: list[tuple[str, list[str]]]) -> None:
    import gguf
    from conversion.base import TextModel

    for pre, arguments in jobs:

        def name_of(self: Any, tokenizer: Any, pre: str = pre) -> str:  # noqa: ARG001
            return pre

        TextModel.get_vocab_base_pre = name_of
        if (
            GATE_UP in arguments
        ):  # it fuses in any model, but refuses where this table does not list the result
            for names in gguf.MODEL_TENSORS.values():
                names.append(gguf.MODEL_TENSOR.FFN_GATE_UP_EXP)
        sys.argv = ["convert_hf_to_gguf.py", *arguments]
        converter.main()


if __name__ == "__main__":
    sys.path.pop(
        0
    )  # the checkout: none of its folders must stand in for a package that the converter imports
    _serve(sys.argv[1])
