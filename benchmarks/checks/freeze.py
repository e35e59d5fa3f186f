"""Writes down what a restructuring must not change, and compares two such records.

    python -m benchmarks.checks.freeze write FOLDER [--device cuda] [--part runs ptx cpu-code openapi answers errors]
    python -m benchmarks.checks.freeze compare BEFORE AFTER

Run from the repository root. A folder gets a JSON file for each part:

- `runs`: token ids and log-probabilities (as hexadecimal floats, so to the last bit) of a fixed set of requests:
  SmolLM2 where its package is installed, and a synthetic model of each architecture; alone, in batches, with drafts,
  blocks (preemption), with shared beginnings, q8_0, q4_0, deterministic.
- `ptx`: a digest of the PTX of every kernel variant compiled ahead of time, without symbol names and line numbers.
- `cpu-code`: a digest of the machine code of every CPU kernel that this processor can run: LLVM aborts on
  instructions that it lacks.
- `openapi`: the server's OpenAPI document.
- `answers`: what it answers to requests of every API (`server_answers.py`).
- `errors`: what damaged and wrong files, flags and requests are answered.

`compare` prints each entry that differs, and for log-probabilities by how much; exit status 1 if there is one.
"""

import argparse
import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

Record = dict[str, Any]
"""Entry names to what is compared."""

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Once upon a time there was a quantized model that",
    " ".join(f"{n} squared is {n * n}," for n in range(60)),
)
TOKENS = 24

SYNTHETIC = {
    "llama Q4_K_M": {},
    "llama Q8_0": {"quant": "Q8_0"},
    "llama IQ4_XS": {"quant": "IQ4_XS"},
    "llama Q3_K": {"quant": "Q3_K"},
    "qwen2 Q4_K_M": {"architecture": "qwen2"},
    "qwen3 Q4_K_M": {"architecture": "qwen3"},
    "mistral3 Q4_K_M": {"architecture": "mistral3"},
}


def runs(device: str, only: str = "") -> Record:
    """Ids and log-probabilities of every model whose name holds `only`, under every setting."""
    from quengine.errors import EngineError
    from quengine.models.hub.hub import resolve_model
    from quengine.models.synthetic.synthetic import PRESETS, write_synthetic

    record: Record = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, changes in SYNTHETIC.items():
            if only not in name:
                continue
            path = Path(folder) / f"{name.replace(' ', '-')}.gguf"
            write_synthetic(path, replace(PRESETS["tiny"], **changes))  # type: ignore[arg-type]
            record.update(_model_runs(name, str(path), device))
    try:
        resolve_model("smollm2-135m")
    except EngineError:
        print("freeze: smollm2-135m is not here and left out", file=sys.stderr)
        return record
    record.update(_model_runs("smollm2", "smollm2-135m", device))
    return record


def _model_runs(name: str, model: str, device: str) -> Record:
    from quengine import LLM, SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    scored = replace(greedy, logprobs=2)
    drawn = SamplingParams(temperature=0.9, seed=7, max_tokens=TOKENS, ignore_eos=True)
    settings: dict[str, tuple[dict[str, Any], list[Any]]] = {
        "alone": ({}, [greedy, scored, drawn]),
        "q8_0": ({"cache_type": "q8_0"}, [greedy, scored]),
        "q4_0": ({"cache_type": "q4_0"}, [greedy, scored]),
        "deterministic": ({"deterministic": True}, [greedy, scored]),
        "kept prefix": ({"reuse_prefix": True}, [greedy, greedy]),
        "batch of 4": ({"parallel": 4}, [greedy, scored, drawn]),
        "batch of 4, q8_0": ({"parallel": 4, "cache_type": "q8_0"}, [greedy]),
        "batch of 4, deterministic": ({"parallel": 4, "deterministic": True}, [greedy, scored]),
        "drafts": ({"draft_ngram": 3}, [greedy]),
        "short chunks": ({"chunk_size": 48}, [greedy, scored]),
    }
    record: Record = {}
    for setting, (options, kinds) in settings.items():
        with LLM(model, device=device, ctx_size=1024, **options) as llm:
            for number, params in enumerate(kinds):
                for index, made in enumerate(llm.generate(list(PROMPTS), params)):
                    record[f"{name} | {setting} | {number} | {index}"] = _completion(made)
    with LLM(model, device=device, ctx_size=512) as llm:
        ids = llm.encode(PROMPTS[0])
        for way in (False, True):
            logits = llm.logits(ids, decode=way)
            digest = hashlib.sha256(logits.contiguous().numpy().tobytes()).hexdigest()
            record[f"{name} | logits | {'decode' if way else 'prefill'}"] = digest
    return record


def _completion(made: Any) -> Record:
    entry: Record = {"tokens": list(made.tokens), "text": made.text, "finish": made.finish_reason}
    if made.logprobs is not None:
        entry["logprobs"] = [float(token.logprob).hex() for token in made.logprobs]
    return entry


def ptx(_device: str, _only: str) -> Record:
    """Digests of all kernels that are compiled ahead of time."""
    from benchmarks.checks.aot import in_forks, variants
    from quengine.kernels.cuda.aot.meta_backend import ARCHS

    record: Record = {}
    for name, digest in in_forks(_ptx_of, variants(ARCHS)):
        record.setdefault(name, []).append(digest)
    return {name: sorted(digests) for name, digests in record.items()}


def _ptx_of(variant: Any) -> tuple[str, str]:
    from quengine.kernels.cuda.aot.aot_compile import compile_launch

    text = compile_launch(variant.launch, variant.archs[0]).ptx
    name = f"{variant.case}, {variant.launch.name} | sm_{variant.archs[0]}"
    return name, hashlib.sha256(stripped_ptx(text).encode()).hexdigest()[:24]


def stripped_ptx(text: str) -> str:
    """PTX without what follows from names and places in the source: symbols, files, lines, debug sections."""
    text = re.split(r"^\s*\.section\b", text, maxsplit=1, flags=re.MULTILINE)[0]
    text = re.sub(r"^\s*(//|\.loc|\.file|\$L__(tmp|func)).*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"//.*", "", text)
    entry = re.search(r"\.entry (\w+)", text)
    return text if entry is None else text.replace(entry[1], "kernel")


def cpu_code(_device: str, _only: str) -> Record:
    """Digests of the object code of every CPU kernel."""
    target = import_module("quengine.kernels.cpu.runtime.target").host_target()
    lacking = {name for name, feature in _NEEDED.items() if feature not in target.features.split(",")}
    record: Record = {}
    for name, compiled, variant in _kernels():
        if name in lacking:
            continue
        try:
            digest = hashlib.sha256(_instructions(compiled())).hexdigest()[:24]
        except (AssertionError, KeyError, ValueError, NotImplementedError):
            continue  # a variant that this kernel is not made for
        record[" ".join([name, *map(str, variant)])] = digest
    return record


_NEEDED = {
    "amx_matmul_kernel": "+amx-bf16",
    "amx_scores_kernel": "+amx-bf16",
    "amx_sums_kernel": "+amx-bf16",
    "amx_bytes_matmul_kernel": "+amx-int8",
    "amx_matvec_kernel": "+amx-int8",
    "vnni_matmul_kernel": "+avx512vnni",
}
"""Kernels written in the instructions of a processor feature, as LLVM names it."""


def _instructions(code: bytes) -> bytes:
    """The instructions in an object file, without symbols, which name modules."""
    from llvmlite import binding

    sections = binding.ObjectFileRef.from_data(code).sections()
    return b"".join(section.data() for section in sections if section.is_text())


def _kernels() -> Iterator[tuple[str, Callable[[], bytes], tuple[str | bool, ...]]]:
    """Every kernel of the table, what compiles it, and its variant: its arguments but those that are the default."""
    from functools import partial
    from inspect import signature
    from itertools import product
    from typing import get_type_hints

    kernel_table = import_module("quengine.kernels.cpu.runtime.kernel_table")
    for found in vars(kernel_table).values():
        if isinstance(found, partial):
            module, name = found.args
            function = getattr(import_module(f"quengine.kernels.cpu.{module}"), name)
            parameters, hints = signature(function).parameters.values(), get_type_hints(function)
            for chosen in product(*(_values(hints[parameter.name]) for parameter in parameters)):
                given = zip(chosen, parameters, strict=True)
                variant = tuple(value for value, parameter in given if value != parameter.default)
                yield name, partial(function, *chosen), variant


def _values(hint: Any) -> list[str | bool]:
    """The values of a kernel's parameter, by its type; a plain string names a format."""
    from typing import get_args

    from quengine.kernels.block_formats import FORMATS

    if hint is bool:
        return [False, True]
    if hint is str:
        return list(FORMATS)
    return [
        value for each in get_args(hint) for value in ([each] if isinstance(each, str) else _values(each))
    ]


def openapi(_device: str, _only: str) -> Record:
    """The document by path and component."""
    from quengine.serve.routes.openapi import document
    from quengine.serve.settings import ServerSettings
    from tests.engine.serve.serving import TABLE

    made = document(TABLE, ServerSettings(model_names=("frozen",), parallel=4))
    flat = {f"path {path}": entry for path, entry in made["paths"].items()}
    return flat | {f"schema {name}": entry for name, entry in made["components"].get("schemas", {}).items()}


def answers(_device: str, _only: str) -> Record:
    """The server's answers by request."""
    from benchmarks.checks.server_answers import recorded

    return recorded()


def errors(_device: str, _only: str) -> Record:
    """Outcomes of damaged GGUF files and of wrong flags."""
    from typer.testing import CliRunner

    from quengine.cli.main import app, register_commands
    from quengine.errors import CannotRunError, EngineError
    from quengine.models.gguf import open_gguf
    from quengine.models.gguf.config_gguf import read_gguf_config
    from tests.gguf_mutations import Mutator

    record: Record = {}
    mutator = Mutator()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "case.gguf"
        for number in range(1500):
            path.write_bytes(mutator.case(number))
            try:
                with open_gguf(path) as file:
                    read_gguf_config(file)
                record[f"gguf {number}"] = "opens"
            except (EngineError, CannotRunError) as error:
                record[f"gguf {number}"] = str(error).replace(folder, "")
    register_commands([])
    for line in _WRONG:
        result = CliRunner().invoke(app, line.split())
        said = result.exception if isinstance(result.exception, EngineError) else result.output
        record[f"engine {line}"] = f"{result.exit_code} {said}"
    return record


_WRONG = (
    "generate",
    "generate -m no-such-model hello",
    "generate -m smollm2-135m -n -5 hello",
    "generate -m smollm2-135m -c 1 hello",
    "generate -m smollm2-135m -c 99999999 hello",
    "generate -m smollm2-135m --temp hot hello",
    "generate -m smollm2-135m --device tpu hello",
    "generate -m smollm2-135m --cache-type q3 hello",
    "generate -m smollm2-135m --grammar ( hello",
    "bench",
    "bench -m smollm2-135m -p x",
    "serve -m smollm2-135m --port 99999999",
    "show no-such-file.gguf",
    "tokenize -m no-such-file.gguf hello",
    "parity -m smollm2-135m --tokens 0",
    "pull no/such/thing:Q4",
)

PARTS: dict[str, Callable[[str, str], Record]] = {
    "runs": runs,
    "ptx": ptx,
    "cpu-code": cpu_code,
    "openapi": openapi,
    "answers": answers,
    "errors": errors,
}


def write(folder: Path, parts: list[str], device: str, only: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part in parts:
        path, record = folder / f"{part}.json", PARTS[part](device, only)
        if not record:
            raise SystemExit(f"freeze: {part} has no entries, so that nothing would be compared")
        path.write_text(json.dumps(record, indent=0, sort_keys=True))
        print(f"{path}: {len(record)} entries", flush=True)


def compare(before: Path, after: Path) -> int:
    """Print what differs, of the parts that both folders have; the number of entries that do."""
    count = 0
    for path in sorted(before.glob("*.json")):
        if not (after / path.name).is_file():
            continue
        old, new = (json.loads((folder / path.name).read_text()) for folder in (before, after))
        differing = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
        print(f"{path.stem}: {len(old)} entries, {len(differing)} differ")
        for name in differing:
            print(f"  {name}: {_difference(old.get(name), new.get(name))}")
        count += len(differing)
    return count


def _difference(old: Any, new: Any) -> str:
    if old is None or new is None:
        return "only after" if old is None else "only before"
    if isinstance(old, dict) and isinstance(new, dict) and "tokens" in old:
        same = old["tokens"] == new["tokens"]
        pairs = zip(old.get("logprobs") or (), new.get("logprobs") or (), strict=False)
        most = max((abs(float.fromhex(a) - float.fromhex(b)) for a, b in pairs), default=0.0)
        return f"tokens {'equal' if same else 'differ'}, log-probabilities up to {most:.2g} apart"
    return f"{str(old)[:100]!r} -> {str(new)[:100]!r}"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.checks.freeze", description=(__doc__ or "").split("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write")
    writing.add_argument("folder", type=Path)
    writing.add_argument("--device", default="cpu")
    writing.add_argument("--only", default="", help="of `runs`, the models whose name holds this text")
    writing.add_argument("--part", nargs="+", choices=list(PARTS), default=list(PARTS))
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "write":
        write(arguments.folder, arguments.part, arguments.device, arguments.only)
        return 0
    return 1 if compare(arguments.before, arguments.after) else 0


if __name__ == "__main__":
    sys.exit(main())
