"""Hostile regexes, grammars and schemas through the real constraint code: none may crash, hang or take a gigabyte.

    python -m benchmarks.checks.hostile_grammars --count 400 --seed 0

Each is compiled and walked in a process of its own, over a real vocabulary where `--model` names a GGUF file, else over
bytes. An EngineError of one line is right, as is a text; printed is everything else, and the slowest and largest.
"""

import argparse
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.checks.random_json_schemas import byte_tokenizer
from quengine.errors import EngineError
from quengine.models.tokenizer import Tokenizer
from quengine.structured.constraint import ConstraintCompiler
from quengine.structured.constraint_spec import ConstraintSpec

SECONDS = 60
"""For one; compiling gives up after 10 s, and the walk is of 50 tokens."""
BYTES = 1 << 30
_ATOMS = ("a", ".", "[a-z]", "\\w", "\\d", "(a|b)", "(a|ab)", "x?", "(.*a)", "[^\\n]", "é", "\\p{L}")
_KEYWORDS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "multipleOf")


def regex(rng: random.Random, depth: int = 4) -> str:
    if depth == 0:
        return rng.choice(_ATOMS)
    inner = "".join(regex(rng, depth - 1) for _ in range(rng.randrange(1, 3)))
    least = rng.choice((0, 1, 5, 200, 10**5))
    return rng.choice(
        (f"({inner})*", f"({inner})+", f"({inner}){{{least},{least + 200}}}", f"({inner}|{inner}b)")
    )


def gbnf(rng: random.Random) -> str:
    names = ["root", "a", "b", "c"]
    parts = [
        '""',
        '"x"',
        "[a-z]",
        "root",
        "a",
        "b",
        "c",
        ".",
        '"y"*',
        "(a b)*",
        "(a | root)+",
        '"z"{1,90000}',
    ]
    return "\n".join(
        f"{name} ::= " + " | ".join(" ".join(rng.choices(parts, k=3)) for _ in range(rng.randrange(1, 4)))
        for name in names
    )


def lark(rng: random.Random) -> str:
    terms = " & ".join(f"/{regex(rng, 2)}/" for _ in range(rng.randrange(1, 8)))
    include = rng.choice(("", '%import "/etc/passwd"', "%import common.WORD", "%ignore /a*/"))
    return (
        f"start: A | start start | b\nb: b* | A\nA: {'~' if rng.random() < 0.3 else ''}({terms})\n{include}"
    )


def chain(rng: random.Random) -> tuple[str, str]:
    """Rules or definitions that lead to each other, up to as many as a specification may have."""
    count, kind = rng.choice((100, 1000, 1700)), rng.choice(("gbnf", "lark", "terminals", "schema"))
    if kind == "schema":
        keyword = rng.choice(("items", "anyOf", "allOf", "additionalProperties", "if", "prefixItems"))
        last = rng.choice(({"type": "null"}, {"$ref": "#/$defs/0"}, {"const": 2**64}))

        def link(n: int) -> Any:
            other: Any = {"$ref": f"#/$defs/{n + 1}"}
            return {keyword: [other] if keyword in ("anyOf", "allOf", "prefixItems") else other}

        links = {str(n): link(n) for n in range(count)} | {str(count): last}
        return kind, json.dumps({"$ref": "#/$defs/0", "$defs": links})
    name, sign = {"gbnf": ("r", "::="), "lark": ("r", ":"), "terminals": ("R", ":")}[kind]
    end = rng.choice((f"{name}0", '"b"'))
    rules = [f'{name}{n} {sign} "a" {name}{n + 1}' for n in range(4 * count - 1)]
    start = f"{'root' if kind == 'gbnf' else 'start'} {sign} {name}0"
    return kind, "\n".join([start, *rules, f"{name}{4 * count - 1} {sign} {end}"])


def schema(rng: random.Random, depth: int = 4) -> Any:
    how = rng.randrange(10)
    if depth == 0 or how == 0:
        return {"type": "string", "pattern": regex(rng, 3)}
    if how == 1:
        return {keyword: rng.choice((1, 10**9, 10**18, 99991, 1e300)) for keyword in rng.sample(_KEYWORDS, 3)}
    if how == 2:
        return {"allOf": [schema(rng, depth - 1) for _ in range(rng.randrange(2, 12))]}
    if how == 3:
        return {
            "anyOf": [schema(rng, depth - 1) for _ in range(rng.randrange(2, 12))],
            "allOf": [{"$ref": "#"}],
        }
    if how == 4:
        return {"patternProperties": {regex(rng, 2): schema(rng, depth - 1) for _ in range(4)}}
    if how == 5:
        return {"enum": [f"v{n}" * rng.randrange(1, 4) for n in range(rng.choice((3, 3000, 20000)))]}
    if how == 6:
        made: Any = {"$ref": "#"}
        for _ in range(rng.choice((10, 90, 300))):
            made = {"items": made}
        return made
    if how == 9:
        number = rng.choice((-(2**63), 2**63, 2**64, 10**30, 1e300, -1e-300, 2**53 + 1))
        keyword = rng.choice(("const", "minimum", "exclusiveMaximum", "multipleOf"))
        part = {keyword: abs(number) if keyword == "multipleOf" else number}
        return {"if": {"properties": {"k": part}}, "then": part, "properties": {"k": {"enum": [1, number]}}}
    if how == 7:
        return {"properties": {f"k{n}": schema(rng, depth - 1) for n in range(6)}, "minProperties": 3}
    return {"if": schema(rng, depth - 1), "then": schema(rng, depth - 1), "not": schema(rng, depth - 1)}


def hostile(rng: random.Random) -> tuple[str, str]:
    kind = rng.choice(("regex", "gbnf", "lark", "schema", "schema", "chain"))
    if kind == "chain":
        return chain(rng)
    if kind == "schema":
        return kind, json.dumps(schema(rng))
    return kind, {"regex": regex, "gbnf": gbnf, "lark": lark}[kind](rng)


def walk(compiler: ConstraintCompiler, kind: str, text: str, rng: random.Random) -> None:
    """Compile and go on at random. Raises EngineError where it is refused."""
    make = {"regex": ConstraintSpec.regex, "schema": ConstraintSpec.json_schema}.get(
        kind, ConstraintSpec.grammar
    )
    constraint = compiler.compile(make(text))
    for _ in range(50):
        if constraint.finished:
            return
        allowed = constraint.allowed().nonzero()[0].tolist()
        if not allowed:
            return
        constraint.advance(rng.choice(allowed))


def child(compiler: ConstraintCompiler, seed: int) -> int:
    """The exit status of one: 0 where it was answered or refused in one line."""
    rng = random.Random(seed)
    kind, text = hostile(rng)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    signal.alarm(SECONDS)
    status, told = 0, "answered"
    try:
        walk(compiler, kind, text, rng)
    except EngineError as error:
        told = str(error)
        status = int("\n" in told)
    except BaseException as error:
        told, status = f"{type(error).__name__}: {error}", 1
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    seconds = time.monotonic() - began
    if status or grown > BYTES or seconds > 15:
        print(
            f"seed {seed}, {kind}, {seconds:.1f} s, {grown >> 20} MiB: {told[:200]}: {text[:200]}", flush=True
        )
    return int(status or grown > BYTES)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Tokenizer.from_gguf(given.model) if given.model else byte_tokenizer(Path(folder))
    compiler = ConstraintCompiler(tokenizer, tokenizer.vocab_size)
    compiler.compile(ConstraintSpec.regex("a"))
    wrong = 0
    for seed in range(given.seed, given.seed + given.count):
        pid = os.fork()
        if pid == 0:
            os._exit(child(compiler, seed))
        status = os.waitpid(pid, 0)[1]
        if os.WIFSIGNALED(status):
            print(f"seed {seed}: ended by signal {os.WTERMSIG(status)}", flush=True)
        wrong += status != 0
    print(f"{given.count} hostile constraints, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
