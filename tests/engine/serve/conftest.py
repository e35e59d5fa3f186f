"""The client of the server that a file of tests has as its fixture `served`."""

from collections.abc import Iterator

import openai
import pytest

from tests.engine.serve.serving import Served


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with served.openai() as made:
        yield made
