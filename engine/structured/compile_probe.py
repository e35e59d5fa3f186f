"""Whether a grammar can be compiled at all, found out in a process that can be ended.

llguidance bounds most of the work, but not that for regexes which are joined by "and": a few patterns under `allOf`
keep a thread busy for hours, and no thread can be stopped. Such a grammar is compiled by a process of its own first,
over a vocabulary of bytes, with limits of time and memory; what does not end there is refused.
"""

import re
import subprocess
import sys

from quengine.errors import EngineError
from quengine.structured.schema_formats import FORMAT_PATTERNS

SECONDS = 5.0
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
resource.setrlimit(resource.RLIMIT_CPU, ({int(SECONDS)}, {int(SECONDS)}))
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
    """Whether compiling may have no end: several regexes that can be joined, or a Lark grammar that can join them.

    own: the grammar is made of schemas and regexes, and no user's.
    """
    if not own and _LARK_OPERATOR.search(lark) is not None:
        return True
    if "%json" in lark:
        regexes = [each for each in _REGEX.findall(lark) if each not in _KNOWN]
        joined = _JOINED.search(lark) is not None or len(_PATTERN_KEYS.findall(lark)) > 0
        return (len(regexes) > 1 and joined) or any(len(each) > _SHORT for each in regexes)
    return False


def probe(kind: str, lark: str) -> None:
    """Compile a grammar in a process of its own. Errors in it are not told: its compiler does.

    Raises:
        EngineError: it does not end within SECONDS, or needs more than 1 GiB.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            input=lark.encode(errors="replace"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise EngineError(f"{kind}: not compiled within {SECONDS:g} s; make it simpler") from None
    except OSError:
        return  # no process can be started; the deadline of the thread remains
    if done.returncode != 0:
        raise EngineError(f"{kind}: it needs too much memory or time to be compiled; make it simpler")
