"""Files quantized whole: metadata, tensors, imatrix files of both formats, and what is left after an error."""

import shutil
import struct
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter

import quengine
from quengine.errors import CannotRunError, EngineError
from quengine.kernels.block_formats import FORMATS, dequantize
from quengine.models.gguf import open_gguf
from quengine.models.gguf.whole_file import check_disk
from quengine.models.quantize import quantize_file
from quengine.models.quantize.imatrix import read_imatrix
from tests.llama_cpp_quantize import ggml_quantize

EXPERTS = 3
Floats = np.ndarray[Any, np.dtype[np.float32]]


def weights() -> dict[str, Floats]:
    rng = np.random.default_rng(4)
    shapes = {
        "token_embd.weight": (40, 256),
        "blk.1.ffn_down.weight": (256, 512),
        "blk.0.ffn_down_exps.weight": (EXPERTS, 8, 256),
        "blk.0.attn_norm.weight": (256,),
        "output.weight": (40, 256),
    }
    return {
        name: (rng.standard_normal(shape) * 0.02).astype(np.float16).astype(np.float32)
        for name, shape in shapes.items()
    }


def write_model(path: Path, kind: type = np.float16, **changed: Floats) -> Path:
    writer = GGUFWriter(path, "llama")
    for key, value in (("block_count", 2), ("attention.head_count", 4), ("attention.head_count_kv", 1)):
        writer.add_uint32(f"llama.{key}", value)
    writer.add_file_type(1)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "\u00e9"])
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0, 2.0])
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_float32("llama.rope.freq_base", 1e6)
    for name, values in (weights() | changed).items():
        writer.add_tensor(name, values if values.ndim == 1 else values.astype(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model.gguf")


def only(folder: Path, *names: str) -> bool:
    """Whether a folder has these files and nothing else, such as the beginning of one."""
    return sorted(path.name for path in folder.iterdir()) == sorted(names)


def stored(path: Path) -> dict[str, tuple[str, np.ndarray]]:
    with open_gguf(path) as file:
        return {name: (tensor.type_name, np.array(tensor.data)) for name, tensor in file.tensors.items()}


def test_tensors_are_what_ggml_makes_of_them_in_llama_cpps_order(model: Path, tmp_path: Path) -> None:
    result = quengine.quantize(model, tmp_path / "q8.gguf", "q8_0")
    found = stored(tmp_path / "q8.gguf")
    assert list(found) == [
        *("output.weight", "token_embd.weight"),
        *("blk.0.attn_norm.weight", "blk.0.ffn_down_exps.weight", "blk.1.ffn_down.weight"),
    ]
    for name, values in weights().items():
        kind, data = found[name]
        assert kind == ("F32" if values.ndim == 1 else "Q8_0")
        expected = values if values.ndim == 1 else ggml_quantize("Q8_0", values.reshape(-1, values.shape[-1]))
        assert data.tobytes() == expected.tobytes()
    assert result.path == tmp_path / "q8.gguf" and result.nbytes == result.path.stat().st_size
    assert result.source_bytes == model.stat().st_size and 8.5 < result.bits_per_weight < 8.7
    assert only(tmp_path, "model.gguf", "q8.gguf")


def test_metadata_stay_and_the_keys_of_quantization_are_set(model: Path, tmp_path: Path) -> None:
    quengine.quantize(model, tmp_path / "out.gguf", "Q4_K_M")
    with open_gguf(model) as before, open_gguf(tmp_path / "out.gguf") as after:
        assert list(after.metadata)[-2:] == ["general.quantization_version", "general.file_type"]
        assert (after.metadata["general.quantization_version"], after.metadata["general.file_type"]) == (
            2,
            15,
        )
        for key, entry in before.entries.items():
            if key != "general.file_type":
                value = after.metadata[key]
                assert after.entries[key].type_name == entry.type_name
                assert list(value) == list(entry.value) if hasattr(value, "__len__") else value == entry.value


@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_the_source_may_be_of_any_float(kind: type, tmp_path: Path) -> None:
    source = write_model(tmp_path / "source.gguf", kind)
    quengine.quantize(source, tmp_path / "a.gguf", "Q6_K")
    expected = quengine.quantize(write_model(tmp_path / "half.gguf"), tmp_path / "b.gguf", "Q6_K")
    assert (
        stored(tmp_path / "a.gguf")["output.weight"][1].tobytes()
        == stored(tmp_path / "b.gguf")["output.weight"][1].tobytes()
    )
    assert {tensor.type_name for tensor in expected.tensors} == {"F32", "Q6_K"}


def test_the_number_of_threads_changes_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quengine.models.quantize import quantizer

    quengine.quantize(model, tmp_path / "a.gguf", "Q3_K_M", threads=1)
    monkeypatch.setitem(quantizer._PIECE, "cpu", 1024)
    quengine.quantize(model, tmp_path / "b.gguf", "Q3_K_M", threads=3)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_a_plan_alone_has_the_sizes_of_the_file(model: Path, tmp_path: Path) -> None:
    plan = quengine.quantize(model, None, "Q4_K_M", tensor_types=["ffn_down_exps=q5_k"])
    assert only(tmp_path, "model.gguf")
    done = quengine.quantize(model, tmp_path / "out.gguf", "Q4_K_M", tensor_types=["ffn_down_exps=q5_k"])
    assert plan.nbytes == done.nbytes == (tmp_path / "out.gguf").stat().st_size
    assert plan.tensors == done.tensors
    types = {tensor.name: tensor.type_name for tensor in plan.tensors}
    assert types["blk.0.ffn_down_exps.weight"] == "Q5_K" and types["output.weight"] == "Q6_K"


def test_a_plan_says_what_an_imatrix_is_needed_for(model: Path) -> None:
    needing = quengine.quantize(model, None, "IQ2_M").needing_imatrix
    assert needing == ("blk.0.ffn_down_exps.weight", "blk.1.ffn_down.weight")
    assert not quengine.quantize(model, None, "IQ3_S").needing_imatrix


def test_a_plan_has_the_types_that_rows_are_too_short_for(tmp_path: Path) -> None:
    narrow = write_model(
        tmp_path / "narrow.gguf", **{"blk.1.ffn_down.weight": np.ones((256, 96), np.float32)}
    )
    for mix, kind in (("IQ3_S", "IQ4_NL"), ("TQ1_0", "Q4_0"), ("Q1_0", "F16")):
        plan = {each.name: each for each in quengine.quantize(narrow, None, mix).tensors}
        down, others = plan.pop("blk.1.ffn_down.weight"), plan.values()
        assert (down.type_name, down.wanted_type) == (kind, mix)
        assert all(each.type_name == each.wanted_type for each in others)


@pytest.mark.parametrize("mix", ["IQ1_M", "IQ3_M", "TQ2_0"])
def test_codebook_and_ternary_mixes_are_files_of_their_types(mix: str, model: Path, tmp_path: Path) -> None:
    matrix = write_imatrix(tmp_path / "i.gguf", importance())
    quengine.quantize(model, tmp_path / "out.gguf", mix, imatrix=matrix, tensor_types=["output=nvfp4"])
    expected = {
        "IQ1_M": ("Q2_K", "IQ1_M", "IQ1_M"),
        "IQ3_M": ("IQ3_S", "IQ3_S", "IQ3_S"),
        "TQ2_0": ("Q4_K", "TQ2_0", "TQ2_0"),
    }[mix]
    found = stored(tmp_path / "out.gguf")
    names = "token_embd.weight", "blk.0.ffn_down_exps.weight", "blk.1.ffn_down.weight"
    assert tuple(found[name][0] for name in names) == expected
    assert found["output.weight"][0] == "NVFP4"
    for name in names[1:]:
        kind, data = found[name]
        values = dequantize(FORMATS[kind], torch.from_numpy(data)).numpy()
        rows = weights()[name].reshape(values.shape)
        share = {"IQ1_M": 0.6, "IQ3_M": 0.25, "TQ2_0": 1.2}[mix]
        assert np.abs(values - rows).mean() < share * np.abs(rows).mean()


def importance() -> dict[str, Floats]:
    rng = np.random.default_rng(5)
    shapes = {"blk.0.ffn_down_exps.weight": (EXPERTS, 256), "blk.1.ffn_down.weight": (1, 512)}
    return {name: np.exp(rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}


def write_imatrix(path: Path, values: dict[str, Floats]) -> Path:
    """As llama-imatrix writes it: sums of squares, and how many activations each expert met; the last met none."""
    writer = GGUFWriter(path, "imatrix")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["calibration.txt", "more.txt"])
    writer.add_uint32("imatrix.chunk_count", 7)
    writer.add_uint32("imatrix.chunk_size", 512)
    for name, mean in values.items():
        counts = np.full((len(mean), 1), 64, np.float32)
        if len(mean) > 1:
            counts[-1] = 0
        writer.add_tensor(f"{name}.in_sum2", mean * 64)
        writer.add_tensor(f"{name}.counts", counts)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_dat(path: Path, values: dict[str, Floats]) -> Path:
    data = struct.pack("<i", len(values))
    for name, mean in values.items():
        data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", 4, mean.size)
        data += (mean * 4).astype("<f4").tobytes()
    path.write_bytes(data + struct.pack("<ii", 9, 8) + b"text.txt")
    return path


def test_both_formats_of_imatrix_files_are_read(tmp_path: Path) -> None:
    new, old = write_imatrix(tmp_path / "i.gguf", importance()), write_dat(tmp_path / "i.dat", importance())
    read, older = read_imatrix(new), read_imatrix(old)
    assert (read.datasets, read.chunks) == (("calibration.txt", "more.txt"), 7)
    assert (older.datasets, older.chunks) == (("text.txt",), 9)
    for name, mean in importance().items():
        expected = mean.copy()
        assert np.array_equal(older.of(name, (len(mean), 8, mean.shape[1])), expected)
        if len(mean) > 1:
            expected[-1] = 1
        assert np.array_equal(read.of(name, (len(mean), 8, mean.shape[1])), expected)


def test_errors_are_weighted_by_the_importance_of_columns(model: Path, tmp_path: Path) -> None:
    matrix = write_imatrix(tmp_path / "i.gguf", importance())
    result = quengine.quantize(model, tmp_path / "out.gguf", "Q4_K_S", imatrix=matrix, threads=1)
    quengine.quantize(model, tmp_path / "plain.gguf", "Q4_K_S", threads=1)
    assert set(result.without_imatrix) == {"output.weight", "token_embd.weight"}
    with open_gguf(tmp_path / "out.gguf") as file:
        keys = {key: value for key, value in file.metadata.items() if key.startswith("quantize.")}
    assert keys == {
        "quantize.imatrix.file": "i.gguf",
        "quantize.imatrix.dataset": "calibration.txt",
        "quantize.imatrix.entries_count": 2,
        "quantize.imatrix.chunks_count": 7,
    }
    read, found, plain = read_imatrix(matrix), stored(tmp_path / "out.gguf"), stored(tmp_path / "plain.gguf")
    for name in importance():
        values = weights()[name]
        by_expert = read.of(name, values.shape)
        assert by_expert is not None
        errors = [
            sum(_error(kind, part, rows, each) for part, rows, each in _experts(data, values, by_expert))
            for kind, data in (found[name], plain[name])
        ]
        theirs = sum(
            _error(found[name][0], ggml_quantize(found[name][0], rows, each), rows, each)
            for _, rows, each in _experts(found[name][1], values, by_expert)
        )
        assert errors[0] < errors[1] and errors[0] <= theirs


def _experts(data: np.ndarray, values: Floats, importances: Floats) -> Any:
    count = len(importances)
    columns = values.shape[-1]
    return zip(np.split(data, count), values.reshape(count, -1, columns), importances, strict=True)


def _error(kind: str, data: np.ndarray, rows: Floats, importances: Floats) -> float:
    difference = dequantize(FORMATS[kind], torch.from_numpy(np.array(data))).numpy() - rows
    return float((difference**2 * importances).sum())


def test_a_split_is_one_model(model: Path, tmp_path: Path) -> None:
    parts = [tmp_path / f"part-{i + 1:05d}-of-00002.gguf" for i in range(2)]
    named = list(weights().items())
    for i, path in enumerate(parts):
        writer = GGUFWriter(path, "llama")
        for key, value in (("no", i), ("count", 2)):
            writer.add_uint16(f"split.{key}", value)
        writer.add_int32("split.tensors.count", len(named))
        if i == 0:
            writer.add_uint32("llama.block_count", 2)
        for name, values in named[:2] if i == 0 else named[2:]:
            writer.add_tensor(name, values if values.ndim == 1 else values.astype(np.float16))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    quengine.quantize(parts[1], tmp_path / "one.gguf", "Q8_0")
    quengine.quantize(model, tmp_path / "same.gguf", "Q8_0")
    one, same = stored(tmp_path / "one.gguf"), stored(tmp_path / "same.gguf")
    assert {name: data.tobytes() for name, (_, data) in one.items()} == {
        name: data.tobytes() for name, (_, data) in same.items()
    }
    with open_gguf(tmp_path / "one.gguf") as file:
        assert not [key for key in file.metadata if key.startswith("split.")]


def test_quantized_tensors_are_quantized_again_on_request_alone(model: Path, tmp_path: Path) -> None:
    quengine.quantize(model, tmp_path / "q8.gguf", "Q8_0")
    with pytest.raises(
        EngineError, match=r"tensor output.weight .*is quantized already \(Q8_0, to be Q6_K\)"
    ):
        quengine.quantize(tmp_path / "q8.gguf", tmp_path / "out.gguf", "Q4_0")
    quengine.quantize(tmp_path / "q8.gguf", tmp_path / "out.gguf", "Q4_0", allow_requantize=True)
    assert stored(tmp_path / "out.gguf")["token_embd.weight"][0] == "Q4_0"
    assert only(tmp_path, "model.gguf", "q8.gguf", "out.gguf")


def test_what_lies_on_a_grid_of_16_values_is_not_rounded_to_32_others(model: Path, tmp_path: Path) -> None:
    paths = [tmp_path / f"{kind}.gguf" for kind in ("q4_1", "q5_1")]
    quengine.quantize(model, paths[0], "Q4_1")
    quengine.quantize(paths[0], paths[1], "Q5_1", allow_requantize=True)
    before, after = (stored(path)["blk.1.ffn_down.weight"] for path in paths)
    values = dequantize(FORMATS["Q4_1"], torch.from_numpy(before[1])).double()
    error = dequantize(FORMATS["Q5_1"], torch.from_numpy(after[1])).double() - values
    assert float(error.square().sum() / values.square().sum()) < 1e-5


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    values = weights()["blk.1.ffn_down.weight"]
    values[17, 5] = np.inf
    source = write_model(tmp_path / "inf.gguf", **{"blk.1.ffn_down.weight": values})
    with pytest.raises(EngineError, match=r"inf.gguf: tensor blk.1.ffn_down.weight .*not finite"):
        quengine.quantize(source, tmp_path / "out.gguf", "Q4_K_M")
    assert only(tmp_path, "inf.gguf")


def test_weights_that_a_type_does_not_hold_are_no_infinities(tmp_path: Path) -> None:
    values = weights()["blk.1.ffn_down.weight"]
    values[17, 5] = -70000.0
    source = write_model(tmp_path / "large.gguf", np.float32, **{"blk.1.ffn_down.weight": values})
    for mix, types, kind, most in (
        ("F16", (), "F16", "65504"),
        ("Q8_0", (), "Q8_0", "65504"),
        ("Q8_0", ("ffn_down=iq4_nl",), "IQ4_NL", "65504"),
        ("Q8_0", ("ffn_down=nvfp4",), "NVFP4", "2688"),
    ):
        problem = f"blk.1.ffn_down.weight .*has weights up to 70000, and {kind} holds {most} at most: choose"
        with pytest.raises(EngineError, match=problem):
            quengine.quantize(source, tmp_path / "out.gguf", mix, tensor_types=types, threads=1)
    assert only(tmp_path, "large.gguf")
    quengine.quantize(source, tmp_path / "out.gguf", "BF16", threads=1)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, OSError(28, "No space left on device")])
def test_nothing_is_left_of_a_file_that_was_not_finished(model: Path, tmp_path: Path, error: Any) -> None:
    (tmp_path / "out.gguf").write_bytes(b"before")

    def interrupt(_tensor: object, place: int, _count: int) -> None:
        if place == 2:
            raise error

    kind = CannotRunError if isinstance(error, OSError) else error
    with pytest.raises(kind):
        quengine.quantize(model, tmp_path / "out.gguf", "Q4_K_M", progress=interrupt)
    assert only(tmp_path, "model.gguf", "out.gguf") and (tmp_path / "out.gguf").read_bytes() == b"before"


def test_a_disk_that_is_too_full_is_found_before(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 40, 0, 1 << 26))
    with pytest.raises(
        CannotRunError, match=r"out.gguf: needs 0.\d\d MB of disk and 67.11 MB to spare, 67.11 MB are"
    ):
        quengine.quantize(model, tmp_path / "out.gguf", "Q4_K_M")


def test_a_disk_for_a_file_of_unknown_size_has_room_to_spare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 40, 0, 1 << 20))
    with pytest.raises(CannotRunError, match=r"out.gguf: needs 67.11 MB of free disk, 1.05 MB are free"):
        check_disk(tmp_path / "out.gguf", 0)


def test_other_mistakes_are_errors_of_one_line(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    (tmp_path / "text.dat").write_bytes(b"\x01\0\0\0\xff\0\0\0short")
    other = write_dat(tmp_path / "other.dat", {"blk.1.ffn_down.weight": np.ones((1, 100), np.float32)})
    negative = write_dat(tmp_path / "negative.dat", {"blk.1.ffn_down.weight": -np.ones((1, 512), np.float32)})
    without = write_dat(tmp_path / "without.dat", {"blk.1.ffn_down.weight": np.ones((1, 512), np.float32)})
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("Q4_K_M", {"threads": 0}, "threads 0: must be 1 or more"),
        ("Q4_K_M", {"imatrix": tmp_path / "text.dat"}, "not an imatrix file, or cut short at byte 8"),
        ("Q4_K_M", {"imatrix": tmp_path / "no.dat"}, "no imatrix file here"),
        ("Q4_K_M", {"imatrix": model}, "has no imatrix.datasets: not an imatrix file"),
        ("Q4_K_M", {"imatrix": other}, "has 100 values, the tensor 512: an imatrix of another model"),
        ("Q4_K_M", {"imatrix": negative}, "negative or not finite"),
        ("Q2_K_S", {}, "Q2_K_S needs an imatrix, for blk.0.ffn_down_exps.weight in Q2_K: --imatrix FILE"),
        ("IQ2_XS", {}, "IQ2_XS needs an imatrix, for blk.0.ffn_down_exps.weight in IQ2_XS: --imatrix FILE"),
        (
            "IQ1_S",
            {"imatrix": without},
            "no values for blk.0.ffn_down_exps.weight, which needs them in IQ1_S",
        ),
        ("Q4_K_M", {"tensor_types": ["ffn_down"]}, "must be PATTERN=TYPE, as ffn_down=q6_k"),
        ("Q4_K_M", {"tensor_types": ["ffn_(=q6_k"]}, "is not a regular expression"),
        ("Q4_K_M", {"tensor_types": ["ffn_down=q8_k"]}, "no tensor type q8_k: F32, "),
    ]
    for mix, options, message in cases:
        with pytest.raises(EngineError, match=message):
            quengine.quantize(model, out, mix, **options)
    with pytest.raises(EngineError, match="that is the file to be quantized"):
        quengine.quantize(model, model, "Q8_0")
    with pytest.raises(
        EngineError, match=f"is a folder; make a file of it first: engine convert {tmp_path} -o"
    ):
        quengine.quantize(tmp_path, tmp_path / "out.gguf", "Q4_K_M")
    with pytest.raises(EngineError, match="no such folder as"):
        quengine.quantize(model, tmp_path / "no" / "out.gguf", "Q8_0")
    assert not out.exists() and quantize_file.QUANTIZATION_VERSION == 2


@pytest.mark.gpu
def test_a_gpu_writes_the_same_file(model: Path, tmp_path: Path) -> None:
    matrix = write_imatrix(tmp_path / "i.gguf", importance())
    for device in ("cpu", "cuda"):
        quengine.quantize(model, tmp_path / f"{device}.gguf", "Q4_K_M", imatrix=matrix, device=device)
    assert (tmp_path / "cpu.gguf").read_bytes() == (tmp_path / "cuda.gguf").read_bytes()
