"""Importances: llama-imatrix's files of the same models and text, sums added and resumed, and what is refused.

dense.imatrix, experts.imatrix and experts.imatrix.dat are files of llama-imatrix (llama_cpp_python 0.3.36) of the
models and the text below, with -c 32 -b 32 --chunks 4.
"""

import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from quengine import LLM, EngineError, imatrix, quantize
from quengine.evaluation.activations import Collector
from quengine.evaluation.imatrix import _untouched, collect
from quengine.models.gguf import open_gguf
from quengine.models.quantize.imatrix import ImatrixSums, Sums, read_imatrix, read_sums, write_sums
from quengine.scoring.perplexity import text_chunks
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny

HERE = Path(__file__).parent
TEXT = "Nine wolves watched, and a tenth one slept. " * 5
SIZES = {
    name: ModelSizes(architecture=kind, embedding=32, feed_forward=64, heads=2, kv_heads=1, head_dim=16)
    for name, kind in (("dense", "llama"), ("experts", "qwen2moe"))
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("imatrix")


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, Path]:
    return {
        name: write_tiny(folder / f"{name}.gguf", kind="F32", sizes=sizes) for name, sizes in SIZES.items()
    }


@pytest.fixture(scope="module")
def dense(models: dict[str, Path]) -> Iterator[LLM]:
    with LLM(str(models["dense"]), device="cpu", ctx_size=32) as llm:
        yield llm


@pytest.mark.parametrize("name", SIZES)
def test_values_are_llama_imatrixs(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    lines = []
    found = imatrix(
        *(models[name], TEXT, tmp_path / "out.gguf", 32),
        dataset="text.txt",
        chunks=4,
        device="cpu",
        progress=lines.append,
    )
    assert found == lines[-1] and found.chunks == found.total_chunks == 4 and found.untouched == 0
    ours, theirs = read_sums(tmp_path / "out.gguf"), read_sums(HERE / f"{name}.imatrix")
    assert ours.sums.keys() == theirs.sums.keys() and found.tensors == len(theirs.sums)
    assert (ours.chunks, ours.chunk_size, len(ours.datasets)) == (4, 32, len(theirs.datasets))
    for tensor, sums in theirs.sums.items():
        own = ours.sums[tensor]
        assert own.squares.shape == sums.squares.shape
        # A token between two experts may be routed to the other one.
        assert abs(own.counts - sums.counts).max() <= (1 if "_exps" in tensor else 0), tensor
        distance = np.linalg.norm(own.squares - sums.squares) / np.linalg.norm(sums.squares)
        assert distance < (0.03 if name == "experts" else 2e-3), tensor


def test_both_formats_have_the_same_means() -> None:
    gguf, dat = read_imatrix(HERE / "experts.imatrix"), read_imatrix(HERE / "experts.imatrix.dat")
    assert gguf.values.keys() == dat.values.keys() and gguf.chunks == dat.chunks == 4
    for name, values in gguf.values.items():
        assert dat.values[name].ravel() == pytest.approx(values.ravel(), rel=1e-5)


def test_quantize_takes_it(models: dict[str, Path], folder: Path, dense: LLM) -> None:
    imatrix(dense, TEXT, folder / "dense.imatrix", 32, chunks=4)
    files = list[dict[str, bytes]]()
    for number, importance in enumerate((HERE / "dense.imatrix", folder / "dense.imatrix")):
        found = quantize(models["dense"], folder / f"{number}.gguf", "Q4_0", imatrix=importance, threads=1)
        assert found.without_imatrix == ("token_embd.weight",)
        with open_gguf(folder / f"{number}.gguf") as file:
            files.append({name: tensor.data.tobytes() for name, tensor in file.tensors.items()})
    for name, theirs in files[0].items():
        ours = np.frombuffer(files[1][name], np.uint8)
        assert (ours != np.frombuffer(theirs, np.uint8)).mean() < 0.01  # where two scales are as good


def test_a_written_file_is_read_again(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sums = {
        "b.weight": Sums(rng.random((3, 32)), np.array([5, 0, 7])),
        "a.weight": Sums(rng.random((1, 64)), np.array([12])),
    }
    write_sums(tmp_path / "out.gguf", ImatrixSums(sums, ("one", "two"), 3, 16))
    found = read_sums(tmp_path / "out.gguf")
    assert (found.datasets, found.chunks, found.chunk_size) == (("one", "two"), 3, 16)
    for name, each in sums.items():
        assert np.allclose(found.sums[name].squares, each.squares)
        assert found.sums[name].counts.tolist() == each.counts.tolist()
    means = read_imatrix(tmp_path / "out.gguf").values["b.weight"]
    assert (means[1] == 1).all() and np.allclose(means[2], sums["b.weight"].squares[2] / 7)
    import gguf

    names = [tensor.name for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors]
    assert names == ["a.weight.in_sum2", "a.weight.counts", "b.weight.in_sum2", "b.weight.counts"]


def same(a: Path, b: Path) -> None:
    one, two = read_sums(a), read_sums(b)
    assert (one.datasets, one.chunks) == (two.datasets, two.chunks)
    for name, sums in one.sums.items():
        assert np.allclose(sums.squares, two.sums[name].squares, rtol=1e-6)
        assert sums.counts.tolist() == two.sums[name].counts.tolist()


def test_an_interrupted_run_is_resumed(dense: LLM, tmp_path: Path) -> None:
    chunks, whole, cut = text_chunks(dense, TEXT, 32), tmp_path / "whole.gguf", tmp_path / "cut.gguf"
    *_, found = collect(dense, chunks[:4], whole, 32, "text")
    runs = collect(dense, chunks[:4], cut, 32, "text", save_every=2)
    for run in runs:
        assert cut.exists() == (run.chunks >= 2)
        if run.chunks == 3:
            runs.close()
    assert read_sums(cut).chunks == 2
    runs = list(collect(dense, chunks[:4], cut, 32, "text", resume=True))
    assert [run.chunks for run in runs] == [3, 4] and runs[0].begun == 2
    assert runs[0].tokens_per_second > 0 and runs[-1].seconds_left == 0 and found.begun == 0
    same(whole, cut)
    with pytest.raises(EngineError, match="has 4 chunks already, of 4 to compute"):
        list(collect(dense, chunks[:4], cut, 32, "text", resume=True))
    with pytest.raises(EngineError, match="is of text in chunks of 32, not of other in chunks of 32"):
        list(collect(dense, chunks, cut, 32, "other", resume=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.gguf", "whole.gguf"]


def test_a_run_is_resumed_from_the_chunk_that_it_began_with(dense: LLM, tmp_path: Path) -> None:
    chunks, whole, cut = text_chunks(dense, TEXT, 32), tmp_path / "whole.gguf", tmp_path / "cut.gguf"
    list(collect(dense, chunks[1:4], whole, 32, "text", first=1))
    runs = collect(dense, chunks[1:4], cut, 32, "text", first=1, save_every=1)
    next(runs)
    runs.close()
    with pytest.raises(
        EngineError, match="leaves out 1 chunks of the text, not 0: resume with --from-chunk 1"
    ):
        list(collect(dense, chunks[:3], cut, 32, "text", resume=True))
    list(collect(dense, chunks[1:4], cut, 32, "text", first=1, resume=True))
    same(whole, cut)
    assert read_sums(cut).first == read_sums(whole).first == 1


def test_a_run_with_other_files_added_is_not_resumed(dense: LLM, tmp_path: Path) -> None:
    chunks, out = text_chunks(dense, TEXT, 32), tmp_path / "out.gguf"
    list(collect(dense, chunks[:1], out, 32, "text"))
    theirs = read_sums(HERE / "dense.imatrix")
    wanted = rf"is of text in chunks of 32, not of {theirs.datasets[0]}, text in chunks"
    with pytest.raises(EngineError, match=wanted):
        list(collect(dense, chunks, out, 32, "text", before=[theirs], resume=True))
    cut = replace(read_sums(out), datasets=(*theirs.datasets, "text"))
    write_sums(out, cut)
    with pytest.raises(
        EngineError, match="has 0 chunks of added files, not 4: resume with the same --in-file"
    ):
        list(collect(dense, chunks, out, 32, "text", before=[theirs], resume=True))


def test_a_run_that_adds_files_is_resumed(dense: LLM, tmp_path: Path) -> None:
    """With the same files; and without them never, though its text and first chunk are the same."""
    chunks, part = text_chunks(dense, TEXT, 32), tmp_path / "part.gguf"
    whole, cut = tmp_path / "whole.gguf", tmp_path / "cut.gguf"
    list(collect(dense, chunks[:2], part, 32, "text"))
    given = {"first": 2, "before": [read_sums(part)]}
    list(collect(dense, chunks[2:5], whole, 32, "text", **given))
    runs = collect(dense, chunks[2:5], cut, 32, "text", save_every=1, **given)
    next(runs)
    runs.close()
    with pytest.raises(
        EngineError, match="has 2 chunks of added files, not 0: resume with the same --in-file"
    ):
        list(collect(dense, chunks[2:], cut, 32, "text", first=2, resume=True))
    assert [run.begun for run in collect(dense, chunks[2:5], cut, 32, "text", resume=True, **given)] == [1, 1]
    same(whole, cut)


def test_added_files_keep_which_chunks_they_are_of(dense: LLM, tmp_path: Path) -> None:
    """A run goes on where consecutive parts end, and with no others: it would leave out chunks, or count them twice."""
    chunks, sums = text_chunks(dense, TEXT, 32), tmp_path / "sums.gguf"
    parts = [tmp_path / f"{number}.gguf" for number in range(4)]
    for number, part in enumerate(parts):
        list(collect(dense, chunks[number : number + 1], part, 32, "text", first=number))
    whole = tmp_path / "whole.gguf"
    list(collect(dense, chunks[1:4], whole, 32, "text", first=1))
    for one in ([1], [1, 2]):
        imatrix(None, "", sums, in_files=[parts[number] for number in one])
        found = read_sums(sums)
        assert (found.first, found.added, found.chunks) == (1, 0, len(one))
        list(collect(dense, chunks[1:4], sums, 32, "text", first=1, resume=True))
        same(whole, sums)
    for gap in ([0, 2], [1, 1], [2, 1]):
        imatrix(None, "", sums, in_files=[parts[number] for number in gap])
        with pytest.raises(EngineError, match="has 2 chunks of added files, not 0"):
            list(collect(dense, chunks, sums, 32, "text", resume=True))


def test_a_text_that_was_added_before_is_the_last_one_again(dense: LLM, tmp_path: Path) -> None:
    """Else a file would go on with chunks of another text."""
    chunks, parts = text_chunks(dense, TEXT, 32), [tmp_path / name for name in ("text", "other", "both")]
    list(collect(dense, chunks[:1], parts[0], 32, "text"))
    list(collect(dense, chunks[:1], parts[1], 32, "other", first=1))
    before = [read_sums(part) for part in parts[:2]]
    given = {"first": 1, "before": before}
    runs = collect(dense, chunks[1:3], parts[2], 32, "text", save_every=1, **given)
    next(runs)
    runs.close()
    list(collect(dense, chunks[1:3], parts[2], 32, "text", resume=True, **given))
    found = read_sums(parts[2])
    assert (found.datasets, found.first, found.added, found.chunks) == (("other", "text"), 1, 2, 4)
    assert found.goes_on_in(replace(before[0], first=3)) and not found.goes_on_in(replace(before[1], first=3))


def test_a_file_with_more_added_chunks_than_chunks_is_named(dense: LLM, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    list(collect(dense, text_chunks(dense, TEXT, 32)[:1], out, 32, "text"))
    write_sums(out, replace(read_sums(out), added=2))
    with pytest.raises(EngineError, match=r"out\.gguf: imatrix\.added_chunks.*: 2 of 1 chunks"):
        read_sums(out)


def test_chunks_of_several_sizes_count_as_tokens(tmp_path: Path) -> None:
    tensors = {"a.weight": Sums(np.ones((1, 32)), np.array([64]))}
    for size in (64, 16):
        write_sums(tmp_path / str(size), ImatrixSums(tensors, (), 64 // size, size))
    assert imatrix(None, "", tmp_path / "sums", in_files=[tmp_path / "64", tmp_path / "16"]).chunks == 2


def test_tensors_of_the_older_format_weigh_what_they_count(tmp_path: Path) -> None:
    """The first of these files end without a number of chunks, and tensors may have fewer calls than the text."""
    entries = {b"a.weight": (6, np.full(4, 6, "<f4")), b"b.weight": (2, np.full(4, 6, "<f4"))}
    data = struct.pack("<i", len(entries))
    for name, (calls, values) in entries.items():
        data += (
            struct.pack("<i", len(name)) + name + struct.pack("<ii", calls, len(values)) + values.tobytes()
        )
    for ending in (b"", struct.pack("<ii", 6, 4) + b"text"):
        (tmp_path / "old.dat").write_bytes(data + ending)
        found = read_sums(tmp_path / "old.dat")
        assert found.chunks == 6 and found.datasets == (("text",) if ending else ())
        counts = {name: each.counts.tolist() for name, each in found.in_chunks_of(32).items()}
        assert counts == {"a.weight": [6 * 32], "b.weight": [2 * 32]}
        means = read_imatrix(tmp_path / "old.dat").values
        assert means["a.weight"].tolist() == [[1.0] * 4] and means["b.weight"].tolist() == [[3.0] * 4]


def test_a_missing_folder_is_named_before_the_computation(dense: LLM, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"out\.gguf: no such folder as .*none"):
        next(collect(dense, text_chunks(dense, TEXT, 32), tmp_path / "none" / "out.gguf", 32, "text"))


def test_an_expert_without_tokens_counts_once(models: dict[str, Path]) -> None:
    with LLM(str(models["experts"]), device="cpu", ctx_size=32) as llm:
        collector = Collector(llm.loaded.decoder, llm.loaded.checkpoint.tensors, llm.ctx_size)
        with collector.collecting():
            sequence = llm.embedding_sequence(llm.encode("a"), "last")
            llm.add(sequence)
            while not sequence.finished:
                llm.step()
            llm.end_step()
        unused = [int((each == 0).sum()) for name, each in collector.counts.items() if "_up_exps" in name]
    assert sum(unused) > 0 and _untouched(collector.sums()) == sum(unused)


def test_devices_with_whole_layers_have_the_sums_of_one(models: dict[str, Path], tmp_path: Path) -> None:
    """Also where text is read between the chunks; parts of layers are refused."""
    files = tmp_path / "one.gguf", tmp_path / "two.gguf"
    model = str(models["experts"])
    imatrix(model, TEXT, files[0], 32, chunks=3, device="cpu")
    shared = {"device": "cpu", "tensor_parallel": 2, "threads": 2, "ctx_size": 32}
    with LLM(model, split="layer", **shared) as llm:

        def read_more(_: object) -> None:
            llm.embed("a text of another request")

        found = imatrix(llm, TEXT, files[1], 32, chunks=3, save_every=2, progress=read_more)
    assert files[0].read_bytes() == files[1].read_bytes() and found.tensors > 0
    sizes = ModelSizes(feed_forward=128, heads=2, kv_heads=2, head_dim=32)
    wide = str(write_tiny(tmp_path / "wide.gguf", kind="F32", sizes=sizes))
    with LLM(wide, **shared) as llm, pytest.raises(EngineError, match="give them whole layers with --split"):
        imatrix(llm, TEXT, files[1], 32)


def test_nothing_is_left_of_a_run_that_fails(
    dense: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = text_chunks(dense, TEXT, 32)
    backend = dense.loaded.decoder.blk[0].ffn.backend
    runs = collect(dense, chunks, tmp_path / "out.gguf", 32, "text")
    next(runs)
    runs.close()
    assert not list(tmp_path.iterdir())
    assert dense.loaded.decoder.blk[0].ffn.backend is backend

    def poison(collector: Collector, name: str, rows: torch.Tensor) -> None:
        collector._put(name, rows[:1].double() * np.nan, rows[:1, 0].long())

    monkeypatch.setattr(Collector, "_add", poison)
    with pytest.raises(EngineError, match=r"activations before blk\.0\..* are not finite"):
        list(collect(dense, chunks[:1], tmp_path / "out.gguf", 32, "text"))
    assert not list(tmp_path.iterdir())


def test_sums_of_other_files_are_added(dense: LLM, models: dict[str, Path], tmp_path: Path) -> None:
    chunks = text_chunks(dense, TEXT, 32)
    theirs, out = read_sums(HERE / "dense.imatrix"), tmp_path / "out.gguf"
    *_, one = collect(dense, chunks[:2], tmp_path / "one.gguf", 32, "text")
    list(collect(dense, chunks[:2], out, 32, "text", before=[theirs, theirs]))
    found, own = read_sums(out), read_sums(tmp_path / "one.gguf")
    assert found.chunks == 2 + 2 * theirs.chunks and found.datasets == (*theirs.datasets, "text")
    name = "blk.1.ffn_down.weight"
    wanted = own.sums[name].squares + 2 * theirs.sums[name].squares
    assert np.allclose(found.sums[name].squares, wanted, rtol=1e-6)
    assert found.sums[name].counts.tolist() == [32 * (2 + 2 * 4)] and one.begun == 0
    other = read_sums(HERE / "experts.imatrix.dat")
    assert other.chunk_size == 0 and other.in_chunks_of(32)["blk.0.ffn_down_exps.weight"].counts.tolist() == [
        128
    ]
    narrow = replace(theirs, sums={name: Sums(np.ones((1, 32)), np.array([1]))})
    with pytest.raises(EngineError, match=f"{name}: columns of experts to add differ, 32 of 1 and 64"):
        list(collect(dense, chunks[:1], out, 32, "text", before=[narrow]))
    with LLM(str(models["experts"]), device="cpu", ctx_size=32) as experts:
        list(collect(experts, chunks[:2], out, 32, "text", before=[other]))
    found = read_sums(out).sums["blk.0.ffn_down_exps.weight"]
    assert found.squares.shape == (4, 32) and found.counts.sum() == 4 * 128 + 64 * 2


@pytest.mark.parametrize("architecture", ["llama", "qwen35moe", "deepseek2", "gemma3n", "gemma4"])
def test_matrices_have_values(architecture: str, folder: Path) -> None:
    """Every matrix that a type is chosen for, but look-ups and what no product reads row by row."""
    old, merged = architecture == "llama", architecture == "qwen35moe"
    sizes = ModelSizes(architecture=architecture, experts=4 if old else None, separate=old, gate_up=merged)
    path = write_tiny(folder / f"{architecture}.gguf", architecture, kind="F32", sizes=sizes)
    with LLM(str(path), device="cpu", ctx_size=32) as llm:
        imatrix(llm, TEXT, folder / "out.gguf", 32, chunks=1)
        shapes = {name: tensor.shape for name, tensor in llm.loaded.checkpoint.tensors.items()}
    sums = read_sums(folder / "out.gguf").sums
    for name, each in sums.items():
        assert each.squares.shape[1] == shapes[name][-1], name
        assert len(each.counts) == (shapes[name][0] if len(shapes[name]) > 2 else 1), name
        assert each.counts.sum() <= 32 * (sizes.experts_used if len(each.counts) > 1 else 1), name
    apart = ("conv1d", "attn_k_b", "attn_v_b", "altup", "norm")
    missing = {
        name
        for name, shape in shapes.items()
        if name.startswith("blk.") and len(shape) > 1 and not any(part in name for part in apart)
    } - sums.keys()
    assert not missing


def test_chunks_must_be_there(dense: LLM, tmp_path: Path) -> None:
    for given, problem in (
        ({"chunks": 0}, "chunks 0: must be 1 or more"),
        ({"from_chunk": -1}, "from_chunk -1: must be 0 or more"),
        ({"from_chunk": 10**6}, "from chunk 1000000: the text has .* chunks of 32 tokens"),
    ):
        with pytest.raises(EngineError, match=problem):
            imatrix(dense, TEXT, tmp_path / "out.gguf", 32, **given)
    for text, problem in ((TEXT, "a text, and no model to read it"), ("", "neither a text nor files to add")):
        with pytest.raises(EngineError, match=problem):
            imatrix(None, text, tmp_path / "out.gguf")


@pytest.mark.gpu
@pytest.mark.parametrize("name", SIZES)
def test_a_gpu_has_llama_imatrixs_values(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    imatrix(models[name], TEXT, tmp_path / "out.gguf", 32, chunks=4, device="cuda")
    ours, theirs = read_sums(tmp_path / "out.gguf"), read_sums(HERE / f"{name}.imatrix")
    assert ours.sums.keys() == theirs.sums.keys()
    for tensor, sums in theirs.sums.items():
        distance = np.linalg.norm(ours.sums[tensor].squares - sums.squares) / np.linalg.norm(sums.squares)
        assert distance < 0.05, tensor
