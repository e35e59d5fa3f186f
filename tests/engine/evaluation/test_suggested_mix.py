"""Suggested types: the best ones within a size, what `quantize` makes of them, and the divergence that they have."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quengine import EngineError, compare, compare_tensors, quantize, suggest_types
from quengine.evaluation import suggested_mix
from quengine.evaluation.by_tensor import TensorCosts
from quengine.evaluation.suggested_mix import Option, SuggestedMix, choose, hull
from quengine.models.gguf import open_gguf
from quengine.models.quantize.imatrix import ImatrixSums, Sums, write_sums
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny

TEXT = "Nine wolves watched, and a tenth one slept. " * 12
SIZES = ModelSizes(embedding=256, feed_forward=256, heads=4, kv_heads=2, head_dim=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mix")


@pytest.fixture(scope="module")
def files(folder: Path) -> tuple[Path, Path]:
    """A model whose first layer counts most, and the same in Q4_K_M."""
    a = write_tiny(folder / "a.gguf", kind="F16", sizes=SIZES, tied=True)
    quantize(a, folder / "b.gguf", "Q4_K_M", threads=1)
    return a, folder / "b.gguf"


@pytest.fixture(scope="module")
def costs(files: tuple[Path, Path]) -> TensorCosts:
    return compare_tensors(*files, TEXT, 64, chunks=1, alone=True, device="cpu")


@pytest.fixture(autouse=True)
def _few_rows_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suggested_mix, "_SAMPLE", 1 << 12)


def bits(path: Path) -> float:
    with open_gguf(path) as file:
        tensors = file.tensors.values()
        return 8 * sum(t.nbytes for t in tensors) / sum(int(np.prod(t.shape)) for t in tensors)


def test_a_mix_has_its_size_and_beats_the_usual_one(
    files: tuple[Path, Path], costs: TensorCosts, folder: Path
) -> None:
    a, b = files
    size = bits(b)
    mix = suggest_types(costs, a, b, size)
    out = folder / "mix.gguf"
    quantize(a, out, "Q4_K_M", tensor_types=mix.tensor_types, threads=1)
    with open_gguf(out) as file:
        assert {name: file.tensors[name].type_name for name in mix.types} == mix.types
    assert bits(out) == pytest.approx(mix.bits_per_weight) and 0.95 * size < mix.bits_per_weight <= size
    assert len(set(mix.types.values())) > 1 and mix.kl < mix.kl_before
    usual, own = (compare(a, each, TEXT, 64, device="cpu").kl for each in (b, out))
    assert own.value < usual.value
    assert mix.kl == pytest.approx(own.value, rel=0.7)  # costs add up as far as they are small


def test_more_bits_cost_less(files: tuple[Path, Path], costs: TensorCosts) -> None:
    mixes = [suggest_types(costs, *files, size) for size in (3.5, 6.5)]
    assert mixes[0].kl > mixes[1].kl > 0
    assert all(mix.bits_per_weight <= size for mix, size in zip(mixes, (3.5, 6.5), strict=True))
    whole = suggest_types(costs, *files, 17)
    assert set(whole.types.values()) == {"F16"} and whole.kl == 0
    with pytest.raises(EngineError, match=r"a size of 1\.5 bits a weight: the smallest types take 2"):
        suggest_types(costs, *files, 1.5)
    with pytest.raises(EngineError, match="costs must be those of each tensor alone"):
        suggest_types(replace(costs, alone=False), *files, 5.0)


def test_importances_weigh_errors(
    files: tuple[Path, Path], costs: TensorCosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a tensor of which no column is read much, fewer bits are worth it than of the others."""
    monkeypatch.setattr(suggested_mix, "CANDIDATES", ("Q2_K", "Q4_K", "Q8_0"))
    monkeypatch.setattr(suggested_mix, "WITH_IMPORTANCE", ("IQ2_XXS",))
    rng = np.random.default_rng(0)
    with open_gguf(files[0]) as file:
        sums = {
            name: Sums(rng.random((1, tensor.shape[-1])) ** 8, np.array([1]))
            for name, tensor in file.tensors.items()
            if len(tensor.shape) > 1
        }
    write_sums(tmp_path / "imatrix", ImatrixSums(sums, ("text",), 1, 1))
    weighed = suggest_types(costs, *files, 5.0, tmp_path / "imatrix")
    small = suggest_types(
        costs, *files, 2.4, tmp_path / "imatrix"
    )  # below what is written without importances
    assert small.bits_per_weight <= 2.4 and "IQ2_XXS" in small.types.values()
    made = quantize(files[0], None, "Q4_K_M", imatrix=tmp_path / "imatrix", tensor_types=small.tensor_types)
    assert not made.needing_imatrix
    assert weighed.bits_per_weight <= 5.0 and weighed.kl != suggest_types(costs, *files, 5.0).kl


def test_patterns_name_the_tensors_alone() -> None:
    types = {
        "blk.0.attn_q.weight": "Q4_K",
        "blk.10.attn_q.weight": "Q4_K",
        "blk.1.attn_q.weight": "Q6_K",
        "output.weight": "Q8_0",
    }
    assert SuggestedMix(types, 4.0, 0.0, 0.0).tensor_types == [
        r"^blk\.(0|10)\.attn_q\.weight$=q4_k",
        r"^blk\.1\.attn_q\.weight$=q6_k",
        r"^output\.weight$=q8_0",
    ]


def test_the_choice_is_the_best_one_of_its_size() -> None:
    """Against all choices: no other of at most its bytes has a lower cost."""
    rng = np.random.default_rng(1)
    for _ in range(20):
        options = [
            [
                Option(str(n), int(size), float(cost))
                for n, (size, cost) in enumerate(zip(rng.integers(10, 99, 4), rng.random(4), strict=True))
            ]
            for _ in range(4)
        ]
        least = sum(min(option.nbytes for option in each) for each in options)
        for budget in (least, least + 60, least + 1000):
            chosen = choose(options, budget)
            size, cost = sum(o.nbytes for o in chosen), sum(o.cost for o in chosen)
            assert size <= budget
            every = [
                sum(o.cost for o in each)
                for each in itertools.product(*options)
                if sum(o.nbytes for o in each) <= size
            ]
            # Between two points of the hull there may be one that fills the size better.
            assert cost <= min(every) + max(max(o.cost for o in each) for each in options)
            if budget == least + 1000:
                assert cost == pytest.approx(min(every))


def test_a_hull_has_no_option_above_it() -> None:
    points = [Option(n, size, cost) for n, size, cost in (("a", 1, 9.0), ("b", 2, 8.0), ("c", 3, 2.0))]
    more = [Option("d", 3, 5.0), Option("e", 5, 1.0), Option("f", 6, 3.0)]
    assert [option.type_name for option in hull([*more, *points])] == ["a", "c", "e"]
