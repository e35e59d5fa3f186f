"""GGUF files written by llama.cpp's own converter, `convert_hf_to_gguf.py`, from checkpoint folders.

The converter runs in processes of its own, over its own `gguf` package.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.fork_server import fork_server
from tests.llama_cpp_source import llama_cpp_source

VOCAB = 288
"""Tokens of `write_tokenizer`: bytes, a few merges, and control tokens."""

_USED_LATE = (
    "torch._dynamo",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
)
"""What the converter, and torch when it stacks experts, import in use: two seconds in every fork without them."""

_LOOKED_FOR = ("[gMASK]", "<|user|>", "<|observation|>")  # by the converter, in models of GLM


@dataclass(frozen=True)
class Conversion:
    """One call of the converter.

    pre: the pre-tokenizer it is to name for a byte-level tokenizer.json. It recognizes tokenizers by a hash of what
        they make of a text, and so only those of released models. "gemma4": the folder has that model's own kind.
    mistral: the folder is in Mistral's own format (params.json, consolidated.safetensors, tekken.json).
    gate_up, qkv: gate and up of all experts of a layer, query, key and value rows, in one tensor.
    drafts: the layers that draft tokens are written, too, which the folder then must have.
    outtype: the type of matrices.
    mmproj: the vision part is written, and not the text model.
    dense: so are matrices for the pooled vector, of sentence-transformers.
    target: the folder of the model that a draft model is for.
    """

    folder: Path
    output: Path
    pre: str
    mistral: bool = False
    gate_up: bool = False
    qkv: bool = False
    drafts: bool = True
    outtype: str = "f32"
    mmproj: bool = False
    dense: bool = False
    target: Path | None = None

    @property
    def arguments(self) -> list[str]:
        flags = ["--mistral-format"] if self.mistral else []
        flags += ["--fuse-gate-up-exps"] if self.gate_up else []
        flags += ["--fuse-qkv"] if self.qkv else []
        flags += [] if self.drafts else ["--no-mtp"]
        flags += ["--mmproj"] if self.mmproj else []
        flags += ["--sentence-transformers-dense-modules"] if self.dense else []
        flags += ["--target-model-dir", str(self.target)] if self.target is not None else []
        return [str(self.folder), "--outfile", str(self.output), "--outtype", self.outtype, *flags]


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
        AssertionError: the converter failed; with the end of what it said.
    """
    source = str(llama_cpp_source())
    # Its own folder alone: none of the checkout's must stand in for a package that the converter imports.
    server = fork_server(("convert_hf_to_gguf", *_USED_LATE), (source,))
    # Those without draft layers last: the converter's classes keep that option.
    jobs = sorted(conversions, key=lambda job: not job.drafts)
    server.run(_CONVERT, json.dumps([(job.pre, job.arguments) for job in jobs]))


_CONVERT = """
import json, sys
import convert_hf_to_gguf as converter
import gguf
from conversion.base import ModelBase, TextModel
from conversion.gemma import Gemma2Model, Gemma3NModel, Gemma4Model
from conversion.hunyuan import HunYuanMoEModel

Gemma2Model.set_vocab = TextModel._set_vocab_gpt2  # theirs want other tokenizers than the tests'
Gemma3NModel.set_vocab = TextModel._set_vocab_gpt2
of_gemma4 = Gemma4Model.set_vocab
HunYuanMoEModel.set_vocab = TextModel._set_vocab_gpt2  # its own wants the tokenizer's code
load_hparams = TextModel.load_hparams


def as_written(folder, is_mistral_format):
    # Letters of layers, of which transformers makes kinds that the converter takes for other ones.
    found = json.loads((folder / "config.json").read_text()) if not is_mistral_format else {}
    return found if "hybrid_override_pattern" in found else load_hparams(folder, is_mistral_format)


ModelBase.load_hparams = staticmethod(as_written)
for pre, arguments in json.loads(sys.argv[1]):
    TextModel.get_vocab_base_pre = lambda self, tokenizer, pre=pre: pre
    Gemma4Model.set_vocab = of_gemma4 if pre == "gemma4" else TextModel._set_vocab_gpt2
    if "--fuse-gate-up-exps" in arguments:  # of any model, but not where this table does not list the result
        for names in gguf.MODEL_TENSORS.values():
            names.append(gguf.MODEL_TENSOR.FFN_GATE_UP_EXP)
    sys.argv = ["convert_hf_to_gguf.py", *arguments]
    converter.main()
"""
