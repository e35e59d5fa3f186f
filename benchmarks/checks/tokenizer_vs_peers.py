"""Compares our token ids with llama.cpp's and mistral-common's on many strings, and the speed of all three.

    python -m benchmarks.checks.tokenizer_vs_peers [--count 100000] [--seed 0] [--characters] [--only smollm2 v1 ...]

From the repository's root, with the test dependencies. One table to standard error, one JSON line at the end;
exit status 1 if any id differs where none may. Tekken is held to mistral-common, whose pattern is the model's;
llama.cpp's pattern for it has no combining marks, so its differences are counted and not held against anybody.
Names are those of Mistral's tokenizers, of llama.cpp's vocabulary files, and `pre:NAME` for a pre-tokenizer; without
`--only`, all but the last are compared.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

from quengine.models.hub.hub import resolve_model
from quengine.models.tokenizer import Tokenizer
from quengine.models.tokenizer.pre_tokenizers import pre_tokenizer, pre_tokenizer_names
from tests.crossing_vocabulary import write_crossing_vocabulary
from tests.llama_cpp_source import llama_cpp_source
from tests.llama_cpp_vocab import LlamaCppVocab
from tests.mistral_vocab_files import SENTENCEPIECE, TEKKEN, data_file, write_vocabulary
from tests.text_samples import HAND_PICKED, marked_texts, random_texts

Encode = Callable[[str], list[int]]
# Texts that are special tokens somewhere.
MARKS = [
    "</s>",
    "<s>",
    "<unk>",
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|user|>",
    "<|end|>",
    "<eos>",
]
# Pre-tokenizers of which llama.cpp has an approximation.
NOT_HELD = ["tekken", "gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"]


@dataclass(frozen=True)
class Comparison:
    """`our_s` and `their_s` are the seconds that encoding alone took."""

    model: str
    peer: str
    strings: int
    different: int
    held: bool
    our_s: float
    their_s: float
    first: str = ""


def every_character() -> Iterator[str]:
    """Each character but surrogates, between letters and digits and by itself after a space."""
    for code in chain(range(0xD800), range(0xE000, 0x110000)):
        c = chr(code)
        yield f"a{c}{c} {c}'s1{c}{c}.{c}\n {c}"


def compare(
    model: str, peer: str, ours: Encode, theirs: Encode, texts: Iterable[str], held: bool = True
) -> Comparison:
    count = different = 0
    our_s = their_s = 0.0
    first = ""
    for text in texts:
        start = time.perf_counter()
        mine = ours(text)
        middle = time.perf_counter()
        other = theirs(text)
        our_s += middle - start
        their_s += time.perf_counter() - middle
        count += 1
        if mine != other:
            different += 1
            first = first or ascii(text)
    found = Comparison(model, peer, count, different, held, round(our_s, 2), round(their_s, 2), first)
    print(
        f"{model:14} {peer:34} {count:8} strings {different:5} differ  ours {our_s:6.1f} s, theirs {their_s:6.1f} s",
        file=sys.stderr,
    )
    return found


def mistral_encoder(name: str) -> Encode:
    from mistral_common.tokens.tokenizers.sentencepiece import SentencePieceTokenizer
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    path = data_file(name)
    peer = Tekkenizer.from_file(path) if name in TEKKEN else SentencePieceTokenizer(path)
    return lambda text: peer.encode(text, bos=True, eos=False)


def compare_file(name: str, path: Path, texts: Callable[[], Iterable[str]]) -> Iterator[Comparison]:
    """The vocabulary of one GGUF file against llama.cpp, with special tokens parsed and as text."""
    held = name.removeprefix("pre:") not in NOT_HELD
    ours = Tokenizer.from_gguf(path)
    with LlamaCppVocab(path) as peer:
        for special in (False, True):
            label = f"llama.cpp, special tokens {'parsed' if special else 'as text'}"
            yield compare(
                name,
                label,
                # llama.cpp puts BOS before one that the text has written.
                lambda text, special=special: ours.encode(text, bos=not special, special=special),
                lambda text, special=special: peer.encode(text, bos=not special, special=special),
                texts(),
                held,
            )


def compare_mistral(name: str, folder: Path, texts: Callable[[], Iterable[str]]) -> Iterator[Comparison]:
    path = write_vocabulary(name, folder / f"{name}.gguf")
    ours = Tokenizer.from_gguf(path)

    def encode(text: str) -> list[int]:
        return ours.encode(text, bos=True)

    yield compare(name, "mistral-common", encode, mistral_encoder(name), texts())
    with LlamaCppVocab(path) as peer:
        yield compare(
            name,
            "llama.cpp",
            encode,
            lambda text: peer.encode(text, bos=True),
            texts(),
            held=name not in TEKKEN,
        )


def main() -> int:
    files = {
        path.stem.removeprefix("ggml-vocab-"): path for path in (llama_cpp_source() / "models").glob("*.gguf")
    }
    for kind in ("bert-bge", "nomic-bert-moe"):  # follow `transformers`
        del files[kind]
    names = ("smollm2", *SENTENCEPIECE, *TEKKEN, *sorted(files))
    # llama.cpp has another name for mistral's, tekken.
    splits = [f"pre:{name}" for name in pre_tokenizer_names() if name != "mistral"]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100_000, help="random strings a comparison")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--characters", action="store_true", help="all 1.1 million characters in place of random strings"
    )
    parser.add_argument("--only", nargs="+", choices=(*names, *splits), metavar="NAME", default=names)
    options = parser.parse_args()

    def texts() -> Iterable[str]:
        if options.characters:
            return every_character()
        half = options.count // 2
        marked = marked_texts(options.seed, half, MARKS)
        return chain(HAND_PICKED, random_texts(options.seed, options.count - half), marked)

    found: list[Comparison] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only:
            if name in SENTENCEPIECE or name in TEKKEN:
                found += compare_mistral(name, Path(folder), texts)
                continue
            if name.startswith("pre:"):
                split = name.removeprefix("pre:")
                path = Path(folder) / "vocab.gguf"
                path = write_crossing_vocabulary(split, path, pre_tokenizer(split).byte_level)
            else:
                path = resolve_model("smollm2-135m") if name == "smollm2" else files[name]
            found += compare_file(name, path, texts)
    print(json.dumps({"comparisons": [asdict(each) for each in found]}, ensure_ascii=False))
    return int(any(each.different and each.held for each in found))


if __name__ == "__main__":
    sys.exit(main())
