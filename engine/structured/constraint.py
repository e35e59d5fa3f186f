"""Constrained decoding: which tokens may come next so that a text is what its ConstraintSpec asks for.

    constraint = ConstraintCompiler(tokenizer, vocab_size).compile(spec)     once for a request
    constraint.allowed()       bool [vocab_size]: the mask of the next token, which the sampler applies before all else
    constraint.advance(token)  the token that was chosen
    constraint.finished        nothing can follow: the text is over, without an end token

The parsing is llguidance's (Earley over lexemes that are derived regexes). A token is allowed exactly if its bytes can
go on; how the tokenizer itself would have cut the text does not matter. End tokens are allowed where the text may end.

llguidance bounds most of the work of compiling, but not the work for regexes that are joined by "and": a few patterns
under `allOf` keep a thread busy for hours, and no thread can be stopped. Such a grammar is first compiled by a process
of its own, over a vocabulary of bytes, with limits of time and memory; if it exceeds them, the grammar is refused.

llguidance compiles by recursion: each rule or schema definition in a chain of references takes stack, and a full stack
ends the process. So a grammar is compiled on a thread whose stack grows with the grammar's length.
"""

import logging
import re
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from quengine.errors import EngineError
from quengine.structured.constraint_spec import ConstraintSpec
from quengine.structured.schema_check import FORMAT_PATTERNS
from quengine.structured.schema_fallback import simpler_grammars
from quengine.structured.schema_rules import plain_grammar
from quengine.structured.token_mask import BudgetConstraint, Mask

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from quengine.models.tokenizer import Tokenizer

PROBE_SECONDS = 5.0
_BYTES = 1 << 30

_JOINED = re.compile(r'"(?:allOf|anyOf|\$ref)"')
_REGEX = re.compile(r'"(?:pattern|multipleOf)": ("(?:[^"\\]|\\.)*"|[^,}\]]*)')
_PATTERN_KEYS = re.compile(r'"patternProperties": \{')
_LARK_OPERATOR = re.compile(r"[&~]|%json|%regex|multiple_of")
_SHORT = 200
_KNOWN = frozenset('"' + pattern.replace("\\", "\\\\") + '"' for pattern in FORMAT_PATTERNS.values())

_PROGRAM = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({_BYTES}, {_BYTES}))
resource.setrlimit(resource.RLIMIT_CPU, ({int(PROBE_SECONDS)}, {int(PROBE_SECONDS)}))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
class Bytes:
    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = 256
    tokens = [bytes([n]) for n in range(256)] + [b""]
    special_token_ids = [256]
    def __call__(self, text):
        return list(text.encode())
grammar = LLMatcher.grammar_from_lark(sys.stdin.read())
matcher = LLMatcher(LLTokenizer(Bytes()), grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
if not matcher.is_error():
    matcher.compute_bitmask()
"""


def needs_probe(lark: str, own: bool) -> bool:
    """Whether compiling may not end: several regexes may be joined, one is long, or a user's Lark grammar joins some.

    own: the grammar is made here of schemas and regexes; it is not the user's.
    """
    if not own and _LARK_OPERATOR.search(lark) is not None:
        return True
    if "%json" in lark:
        regexes = [each for each in _REGEX.findall(lark) if each not in _KNOWN]
        joined = _JOINED.search(lark) is not None or len(_PATTERN_KEYS.findall(lark)) > 0
        return (len(regexes) > 1 and joined) or any(len(each) > _SHORT for each in regexes)
    return False


def probe(kind: str, lark: str) -> None:
    """Compiles a grammar in a process of its own. Errors in the grammar are not reported here: the compiler does that.

    Raises:
        EngineError: it does not end within PROBE_SECONDS, or needs more than 1 GiB.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            input=lark.encode(errors="replace"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise EngineError(f"{kind}: not compiled within {PROBE_SECONDS:g} s; make it simpler") from None
    except OSError:
        return  # no process can be started; the deadline of the thread remains
    if done.returncode != 0:
        raise EngineError(f"{kind}: it needs too much memory or time to be compiled; make it simpler")


logger = logging.getLogger(__name__)

COMPILE_SECONDS = 10.0
_COMPILING_AT_ONCE = 4  # also those whose requests were cancelled
_KEPT_CONSTRAINTS = 32
_EXCERPT = re.compile(
    r"\s*(\d+ \|.*|\^*)$"
)  # a numbered line of the grammar, the mark under one, an empty line
_NO_TEXT = re.compile(r"^NoExtension|Unsatisfiable schema")
_LEXER_STATES = 50_000  # 1 to 2 KB each
_STACK_BYTES = 4 << 20
_STACK_A_CHARACTER = 2 << 10  # chains of the shortest rules take a quarter of it
_starting = threading.Lock()  # the stack's size is that of all threads that start
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'  # any cutting into tokens is as good as the canonical one


class ConstraintError(EngineError):
    """A request cannot go on, and its constraint is to blame."""


class Constraint:
    """Where one text is within its grammar. Made by ConstraintCompiler; for one thread at a time.

    It cannot be rewound. A sequence that is computed anew keeps its constraint, because its tokens stay the same.
    """

    def __init__(
        self, matcher: "LLMatcher", vocab_size: int, kind: str, stop_token_ids: tuple[int, ...]
    ) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._kind = kind
        self._stop_token_ids = list(stop_token_ids)
        self._mask: Mask | None = None

    @property
    def accepting(self) -> bool:
        """Whether the text so far may be all of it."""
        return self._matcher.is_accepting()

    @property
    def finished(self) -> bool:
        """Whether nothing can follow what has been generated."""
        return self._matcher.is_stopped()

    def allowed(self) -> Mask:
        """The mask [vocab_size] of the next token, computed once a token; the caller leaves it as it is.

        Raises:
            ConstraintError: the grammar needs more work for this token than is allowed for one.
        """
        if self._mask is None:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            self._check()
            self._mask = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
            if self._stop_token_ids and self.accepting:
                self._mask[self._stop_token_ids] = True
        return self._mask

    def advance(self, token: int) -> None:
        """Go on by an allowed token.

        Raises:
            ConstraintError: the token is not allowed, or the grammar needs more work than is allowed.
        """
        self._mask = None
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConstraintError(f"{self._kind}: {_one_line(self._matcher.get_error())}")


class ConstraintCompiler:
    """Compiles specifications for one vocabulary, and keeps the latest ones. Safe to use from several threads.

    Args:
        tokenizer: whose tokens they are.
        vocab_size: entries of the logits; a model may have more than the tokenizer has tokens.
    """

    def __init__(self, tokenizer: "Tokenizer", vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._vocabulary: LLTokenizer | None = None
        self._kept: OrderedDict[ConstraintSpec, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(_COMPILING_AT_ONCE)

    def compile(
        self, spec: ConstraintSpec, stop_token_ids: tuple[int, ...] = (), seconds: float = COMPILE_SECONDS
    ) -> Constraint | BudgetConstraint:
        """A constraint at its beginning. A server calls this off its loop; the same one again takes no time.

        `stop_token_ids` are allowed where the text may end, as the model's end tokens are.
        The first call for a model prepares its vocabulary (about 10 µs a token), which is not counted in `seconds`.

        Raises:
            EngineError: the schema, regex or grammar is wrong, cannot be enforced, or is not ready in `seconds`.
        """
        budget = spec.budget
        if budget is None:
            return self._of_grammar(spec, stop_token_ids, seconds)
        grammar = replace(spec, budget=None) if spec.lark else None
        inner = None if grammar is None else self._of_grammar(grammar, stop_token_ids, seconds)
        closing, token_bytes = (
            self._tokenizer.encode(budget.closing, special=True),
            self._tokenizer.token_bytes,
        )
        return BudgetConstraint(budget, closing, token_bytes, self._vocab_size, inner)

    def _of_grammar(
        self, spec: ConstraintSpec, stop_token_ids: tuple[int, ...], seconds: float
    ) -> Constraint:
        vocabulary = self._prepared()
        with self._lock:
            matcher = self._kept.get(spec)
            if matcher is not None:
                self._kept.move_to_end(spec)
        if matcher is None:
            matcher = self._compiled(vocabulary, spec, seconds)
            with self._lock:
                self._kept[spec] = matcher
                while len(self._kept) > _KEPT_CONSTRAINTS:
                    self._kept.popitem(last=False)
        return Constraint(matcher.deep_copy(), self._vocab_size, spec.kind, stop_token_ids)

    def _prepared(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        with self._lock:
            if self._vocabulary is None:
                tokens = _Tokens(self._tokenizer, self._vocab_size)
                self._vocabulary = LLTokenizer(tokens, eos_token=tokens.end_ids)  # type: ignore[arg-type]
            return self._vocabulary

    def _compiled(self, vocabulary: "LLTokenizer", spec: ConstraintSpec, seconds: float) -> "LLMatcher":
        """Compiles on a thread of its own. After the deadline the thread is left behind: llguidance's limits end it."""
        made: list[LLMatcher] = []
        failed: list[BaseException] = []

        def work() -> None:
            try:
                made.append(_nearest_matcher(vocabulary, spec))
            except BaseException as error:  # a panic of Rust's is no Exception
                failed.append(error)
            finally:
                self._slots.release()

        if not self._slots.acquire(timeout=seconds):
            raise EngineError(f"{spec.kind}: {_COMPILING_AT_ONCE} others are being compiled; try again later")
        thread = threading.Thread(target=work, name="compile constraint", daemon=True)
        try:
            _start(thread, _STACK_BYTES + _STACK_A_CHARACTER * len(spec.lark))
        except RuntimeError:
            self._slots.release()
            raise EngineError(f"{spec.kind}: too little memory for a thread that compiles it") from None
        thread.join(seconds)
        if failed:
            known = isinstance(failed[0], EngineError)
            raise EngineError(
                str(failed[0]) if known else f"{spec.kind}: {_one_line(str(failed[0]))}"
            ) from None
        if not made:
            raise EngineError(f"{spec.kind}: not compiled within {seconds:g} s; make it simpler")
        return made[0]


def _start(thread: threading.Thread, stack: int) -> None:
    """Starts a thread with a stack of `stack` bytes, of which only the part in use takes memory.

    Raises:
        RuntimeError: it cannot be started.
    """
    with _starting:
        before = threading.stack_size(stack)
        try:
            thread.start()
        finally:
            threading.stack_size(before)


class _Tokens:
    """A tokenizer in the form that llguidance wants (its TokenizerWrapper): bytes by id, and which ids are no text."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: "Tokenizer", vocab_size: int) -> None:
        known = range(min(tokenizer.vocab_size, vocab_size))
        # One entry more than there are logits: a model without an end token gets one that it can never choose.
        self.tokens = [tokenizer.token_bytes(i) for i in known] + [b""] * (vocab_size + 1 - len(known))
        self.special_token_ids = [i for i in known if tokenizer.is_control(i)] + [vocab_size]
        self.end_ids = sorted(i for i in tokenizer.eos_ids if i < vocab_size) or [vocab_size]
        self.eos_token_id = self.end_ids[0]

    def __call__(self, text: str) -> Iterable[int]:
        """The tokens of a text. Only called for forced tokens, which _OPTIONS turns off."""
        raise NotImplementedError(f"{text!r}: tokens are never forced")


def _nearest_matcher(vocabulary: "LLTokenizer", spec: ConstraintSpec) -> "LLMatcher":
    """A matcher of the grammar; if its schemas cannot be compiled, of the nearest grammar with simpler ones.

    Raises:
        EngineError: the grammar is wrong, no text can be what it asks for, or it is too large.
    """
    left_out = [f"{', '.join(spec.dropped)}"] if spec.dropped else []
    try:
        matcher = _matcher(vocabulary, spec, spec.lark)
    except _NoTextError:
        if not spec.from_schemas or (plain := plain_grammar(spec.lark)) == spec.lark:
            raise
        return _nearest_matcher(
            vocabulary, replace(spec, lark=plain, dropped=(*spec.dropped, "large numbers"))
        )
    except EngineError as error:
        for lark, missing in simpler_grammars(spec.lark) if spec.from_schemas else ():
            try:
                matcher = _matcher(vocabulary, spec, lark)
            except EngineError:
                continue
            left_out.append(f"{missing} ({error})")
            break
        else:
            raise
    if left_out:
        logger.warning("%s: not enforced, but checked: %s", spec.kind, "; ".join(left_out))
    return matcher


def _matcher(vocabulary: "LLTokenizer", spec: ConstraintSpec, lark: str) -> "LLMatcher":
    from llguidance import LLMatcher, LLParserLimits

    if needs_probe(lark, own=spec.from_schemas or spec.kind == "regex"):
        probe(spec.kind, lark)
    limits = LLParserLimits(verbose_errors=False, max_lexer_states=_LEXER_STATES)
    matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_lark(lark + _OPTIONS), log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # the first mask derives the lexer's first states
    if matcher.is_error():
        error = matcher.get_error()
        kind_of_error = _NoTextError if _NO_TEXT.search(error) else EngineError
        raise kind_of_error(f"{spec.kind}: {_one_line(error)}")
    return matcher


class _NoTextError(EngineError):
    """No text can be what a grammar asks for."""


def _one_line(error: str) -> str:
    """llguidance's message without the excerpt of a grammar that follows it, which the user may never have written."""
    message = error.partition("failed to compile JSON schema: ")[2] or error
    if _NO_TEXT.search(message):
        return "no text can be what it asks for"
    kept = [line.strip() for line in message.splitlines() if not _EXCERPT.match(line)]
    return " ".join(kept)[:300]
