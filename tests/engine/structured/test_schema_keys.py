"""The keys that a definition knows are those of all that it refers to, however many refer to each other."""

import random
from typing import Any

import pytest

from quengine.structured.constraint import ConstraintCompiler
from quengine.structured.constraint_spec import ConstraintSpec
from quengine.structured.schema_keys import KnownKeys


def reference(name: int) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


@pytest.mark.parametrize("seed", range(30))
def test_keys_are_those_of_all_definitions_that_are_reached(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randrange(1, 80)
    others = {n: rng.sample(range(count), min(count, rng.choice((0, 1, 1, 2, 3)))) for n in range(count)}
    given: dict[str, Any] = {
        str(n): {
            "properties": {f"k{n}": {}},
            rng.choice(("anyOf", "allOf")): [reference(o) for o in others[n]],
        }
        for n in range(count)
    }
    known = KnownKeys(given)
    for n in range(count):
        reached, waiting = {n}, [n]
        while waiting:
            new = [other for other in others[waiting.pop()] if other not in reached]
            reached.update(new)
            waiting += new
        assert set(known.of(reference(n)).names) == {f"k{each}" for each in reached}


def test_keys_come_in_the_order_of_the_schemas() -> None:
    part: dict[str, Any] = {"allOf": [reference(2), {"properties": {"c": {}}}], "properties": {"a": {}}}
    known = KnownKeys({"1": part, "2": {"properties": {"b": {}}}})
    assert known.of({"allOf": [reference(1)], "required": ["z"]}).names == ("z", "a", "b", "c")


def test_a_chain_of_alternatives_is_as_long_as_a_schema_may_be(compiler: ConstraintCompiler) -> None:
    chain = {str(n): {"anyOf": [reference(n + 1), {"type": "null"}]} for n in range(1200)}
    schema = {**reference(0), "$defs": {**chain, "1200": {"type": "array"}}}
    assert compiler.compile(ConstraintSpec.json_schema(schema)).allowed().any()
