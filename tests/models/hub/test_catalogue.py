"""The catalogue's data file says what it must, and near misses find the right names."""

from pathlib import Path

import pytest

from quengine.models.architectures import ARCHITECTURES
from quengine.models.hub.hub import catalogue, closest_aliases, hub_name
from quengine.models.hub.hub_name import quant_of
from tests.each_case import each_case

ENTRIES = list(catalogue().values())


@each_case("entry", ENTRIES)
def test_every_entry_names_a_repository_a_gguf_file_and_where_they_were_looked_up(entry):
    user, _, repo = entry.repo.partition("/")
    assert user and repo and "/" not in repo
    assert entry.file.endswith(".gguf")
    assert entry.about
    assert entry.verified
    assert 0.05 < entry.gigabytes < 200
    assert (entry.package is None) == (entry.package_file is None)
    assert hub_name(entry.alias).file == entry.file


def test_the_page_of_models_has_every_architecture_and_alias_with_its_size():
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    assert [name for name in ARCHITECTURES if f"`{name}`" not in page] == []
    rows = [f"| `{entry.alias}` | {entry.about} | {entry.gigabytes:.2f} GB |" for entry in ENTRIES]
    assert [row for row in rows if row not in page] == []


def test_the_two_names_the_documentation_uses_are_there():
    assert {"mistral-7b-q4k", "smollm2-135m"} <= set(catalogue())


def test_an_alias_that_says_4_bits_names_a_4_bit_file_and_one_that_says_8_an_8_bit_file():
    families = {"q4k": "Q4_K_M", "q8": "Q8_0"}
    told = {entry.alias: families[entry.alias.rsplit("-", 1)[1]] for entry in ENTRIES if "-q" in entry.alias}
    assert told == {alias: _bits(catalogue()[alias].file) for alias in told}
    assert len(told) > 10


def _bits(file: str) -> str:
    """The mix of a file; `UD-Q4_K_M` is another one of 4 bits."""
    return quant_of(file).upper().removeprefix("UD-")


FAMILIES = {
    "llama": "llama-3.1-8b-q4k",
    "mistral3": "ministral-3-8b-q4k",
    "qwen2": "qwen2.5-7b-q4k",
    "qwen3": "qwen3-8b-q4k",
    "lfm2": "lfm2-1.2b-q4k",
    "exaone4": "exaone-4-1.2b-q4k",
    "smollm3": "smollm3-3b-q4k",
    "arcee": "afm-4.5b-q4k",
    "cohere2": "command-r7b-q4k",
    "llama4": "llama-4-scout-q4k",
    "bert": "bge-base-en-v1.5-q8",
    "nomic-bert": "nomic-embed-text-v1.5-q8",
    "modern-bert": "gte-modernbert-base-q8",
    "gemma-embedding": "embeddinggemma-300m-q8",
    "jina-bert-v3": "jina-embeddings-v3-q8",
    "openelm": "openelm-3b-q4k",
    "glm4": "glm-4-9b-q4k",
    "ernie4_5": "ernie-4.5-0.3b-q4k",
    "ernie4_5-moe": "ernie-4.5-21b-a3b-q4k",
    "dots1": "dots1-142b-q4k",
    "bailingmoe2": "ling-mini-2.0-q4k",
    "minimax-m2": "minimax-m2-q4k",
    "qwen2vl": "qwen2.5-vl-7b-q4k",
    "qwen3vl": "qwen3-vl-8b-q4k",
    "qwen3vlmoe": "qwen3-vl-30b-a3b-q4k",
    "hunyuan-dense": "hunyuan-7b-q4k",
    "hunyuan-moe": "hunyuan-a13b-q4k",
    "seed_oss": "seed-oss-36b-q4k",
    "olmo2": "olmo-2-7b-q4k",
    "gemma2": "gemma-2-9b-q4k",
    "gemma3": "gemma-3-4b-q4k",
    "gemma3n": "gemma-3n-e4b-q4k",
    "gemma4": "gemma-4-26b-a4b",
    "phi3": "phi-4-q4k",
    "granite": "granite-3.3-8b-q4k",
    "qwen2moe": "qwen1.5-moe-a2.7b-q4k",
    "qwen3moe": "qwen3-30b-a3b-q4k",
    "olmoe": "olmoe-7b-a1b-q4k",
    "granitemoe": "granite-3.1-3b-a800m-q4k",
    "glm4moe": "glm-4.5-air-q4k",
    "deepseek2": "glm-4.7-flash-q4k",
    "mistral4": "mistral-small-4-q4k",
    "gpt-oss": "gpt-oss-20b",
    "lfm2moe": "lfm2-8b-a1b-q4k",
    "granitehybrid": "granite-4.0-h-tiny-q4k",
    "nemotron_h": "nemotron-nano-9b-q4k",
    "nemotron_h_moe": "nemotron-3-nano-q4k",
    "qwen35": "qwen3.5-9b-q4k",
    "qwen35moe": "qwen3.6-35b-a3b-q4k",
    "qwen3next": "qwen3-next-80b-a3b-q4k",
}


def test_every_architecture_has_an_alias():
    assert set(FAMILIES) == set(ARCHITECTURES)
    assert set(FAMILIES.values()) <= set(catalogue())


def test_no_file_is_listed_twice():
    assert len({(entry.repo, entry.file) for entry in ENTRIES}) == len(ENTRIES)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("mistral-7b", "mistral-7b-q4k"),
        ("mistral-7b-q4", "mistral-7b-q4k"),
        ("Mistral_7B_Q4K", "mistral-7b-q4k"),
        ("qwen3:8b", "qwen3-8b-q4k"),
        ("smollm2", "smollm2-135m"),
        ("llama-3.2-1b", "llama-3.2-1b-q4k"),
        ("ministral", "ministral-8b-q4k"),
    ],
)
def test_a_near_miss_suggests_the_alias_that_was_meant(typed, meant):
    assert meant in closest_aliases(typed)


def test_a_name_like_nothing_suggests_nothing():
    assert closest_aliases("zzzzzz") == []
    assert closest_aliases("") == []
