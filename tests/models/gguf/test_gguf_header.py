"""What the GGUF header parser accepts and refuses; a refusal is one line with file, field and byte offset."""

import struct
from pathlib import Path

import numpy as np
import pytest

from quengine.errors import EngineError
from quengine.models.gguf import GGUFError, open_gguf
from tests.gguf_builder import GGUFBuilder, string


def small() -> GGUFBuilder:
    """One entry of every kind and two tensors."""
    return (
        GGUFBuilder()
        .kv("general.architecture", "llama")
        .kv("a.flag", True)
        .kv("a.words", ["one", "", "\u00fc\u4e16"])
        .kv("a.numbers", [1, 2, 3], "int32")
        .tensor("first", (2, 32), "Q8_0", np.arange(68, dtype=np.uint8))
        .tensor("second", (3,), "F32", np.array([1, 2, 3], "<f4"))
    )


def refusal(tmp_path: Path, data: bytes) -> GGUFError:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(GGUFError) as caught:
        open_gguf(path)
    error = caught.value
    assert isinstance(error, EngineError)
    assert error.path == path
    assert str(error).startswith(f"{path}: ") and "\n" not in str(error) and str(error).isprintable()
    assert error.offset is None or 0 <= error.offset <= len(data)
    return error


@pytest.mark.parametrize("version", [2, 3])
def test_versions_2_and_3_open(tmp_path, version):
    builder = small()
    builder.version = version
    with open_gguf(builder.write(tmp_path / "m.gguf")) as file:
        assert file.version == version
        assert file.metadata["a.flag"] is True
        assert list(file.metadata["a.words"]) == ["one", "", "\u00fc\u4e16"]
        assert file.metadata["a.numbers"].tolist() == [1, 2, 3]
        assert file.tensors["first"].shape == (2, 32)
        assert file.tensors["first"].data.tobytes() == bytes(range(68))
        assert file.tensors["second"].data.view("<f4").tolist() == [[1.0, 2.0, 3.0]]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("uint8", 255),
        ("int8", -128),
        ("uint16", 65535),
        ("int16", -32768),
        ("uint32", 2**32 - 1),
        ("int32", -(2**31)),
        ("uint64", 2**64 - 1),
        ("int64", -(2**63)),
        ("float32", 1.5),
        ("float64", 1e300),
        ("bool", False),
        ("string", "\u00e9"),
    ],
)
def test_values_of_every_type_come_back(tmp_path, kind, value):
    builder = GGUFBuilder().kv("k", value, kind).kv("ks", [value, value], kind)
    with open_gguf(builder.write(tmp_path / "m.gguf")) as file:
        assert file.metadata["k"] == value
        assert type(file.metadata["k"]) is type(value)
        assert list(file.metadata["ks"]) == [value, value]


def test_empty_arrays_and_no_tensors_are_fine(tmp_path):
    builder = GGUFBuilder().kv("none", [], "string").kv("no_numbers", [], "float32")
    with open_gguf(builder.write(tmp_path / "m.gguf")) as file:
        assert len(file.metadata["none"]) == 0
        assert len(file.metadata["no_numbers"]) == 0
        assert file.tensors == {}


@pytest.mark.parametrize("path", ["absent.gguf", "."])
def test_a_path_that_is_no_file_is_refused(tmp_path, path):
    with pytest.raises(GGUFError, match=r"no such file|is a folder"):
        open_gguf(tmp_path / path)


def test_an_empty_file_is_refused(tmp_path):
    assert "the file is empty; fetch or copy it again" in str(refusal(tmp_path, b""))


def test_a_bad_magic_is_refused(tmp_path):
    error = refusal(tmp_path, b"GGML" + small().build()[4:])
    assert (error.field, error.offset) == ("magic", 0)


@pytest.mark.parametrize("version", [0, 1, 4, 1000, 2**32 - 1])
def test_other_versions_are_refused(tmp_path, version):
    error = refusal(tmp_path, b"GGUF" + struct.pack("<I", version) + small().build()[8:])
    assert (error.field, error.offset) == ("version", 4)
    assert str(version) in str(error)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_byte_swapped_file_is_refused_as_such(tmp_path, version):
    error = refusal(tmp_path, b"GGUF" + struct.pack(">I", version) + small().build()[8:])
    assert "big-endian" in str(error)


@pytest.mark.parametrize("count", [-1, -(2**63), 2**62, 2**40, 100])
@pytest.mark.parametrize("which", ["tensor_count_field", "entry_count_field"])
def test_impossible_counts_are_refused(tmp_path, which, count):
    builder = small()
    setattr(builder, which, count)
    error = refusal(tmp_path, builder.build())
    assert "negative" in str(error) or "cannot fit" in str(error) or "bytes" in str(error)


def test_truncation_at_every_byte_is_refused_and_called_so(tmp_path):
    whole = small().build()
    path = tmp_path / "cut.gguf"
    # The padding after the last tensor's 12 bytes may be missing.
    needed = len(whole) - (32 - 12)
    for length in range(needed):
        path.write_bytes(whole[:length])
        with pytest.raises(GGUFError, match="cut short or damaged: fetch" if length >= 4 else "empty|magic"):
            open_gguf(path)
    path.write_bytes(whole[:needed])
    assert len(open_gguf(path).tensors) == 2


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 2**40, 70_000])
@pytest.mark.parametrize("where", ["key", "value", "tensor"])
def test_string_lengths_out_of_range_are_refused(tmp_path, length, where):
    bad = struct.pack("<Q", length) + b"abc"
    if where == "key":
        data = GGUFBuilder().raw_entry(bad + struct.pack("<IB", 0, 0)).build()
    elif where == "value":
        data = GGUFBuilder().raw_entry(string("k") + struct.pack("<I", 8) + bad).build()
    else:
        data = GGUFBuilder(tensor_count_field=1).build() + bad + bytes(64)
    assert "needs" in str(refusal(tmp_path, data)) or "at most" in str(refusal(tmp_path, data))


def test_a_tensor_name_over_64_bytes_is_refused(tmp_path):
    assert len(open_gguf(GGUFBuilder().tensor("n" * 64, (1,)).write(tmp_path / "m.gguf")).tensors) == 1
    assert "at most 64" in str(refusal(tmp_path, GGUFBuilder().tensor("n" * 65, (1,)).build()))


@pytest.mark.parametrize(
    ("name", "says"), [(b"", "empty"), (b"a\xff", "UTF-8"), (b"a\0b", "NUL"), (b"\xed\xa0\x80", "UTF-8")]
)
def test_bad_keys_and_tensor_names_are_refused(tmp_path, name, says):
    assert says in str(refusal(tmp_path, GGUFBuilder().kv(name, 1).build()))
    assert says in str(refusal(tmp_path, GGUFBuilder().tensor(name, (4,)).build()))


def test_a_string_value_that_is_not_utf8_is_refused_with_its_offset_when_read(tmp_path):
    builder = GGUFBuilder().kv("k", b"ab\xff")
    file = open_gguf(builder.write(tmp_path / "m.gguf"))
    assert file.metadata["k"] == b"ab\xff"
    with pytest.raises(GGUFError, match=r"k .*not valid UTF-8") as caught:
        file.get_str("k")
    assert builder.build()[caught.value.offset :].startswith(b"ab\xff")


def test_an_array_string_that_is_not_utf8_is_refused_when_read(tmp_path):
    builder = GGUFBuilder().kv("k", [b"fine", b"\xff"], "string")
    strings = open_gguf(builder.write(tmp_path / "m.gguf")).metadata["k"]
    assert strings[0] == "fine"
    assert strings.raw(1) == b"\xff"
    for read in (lambda: strings[1], lambda: strings[-1], lambda: list(strings), lambda: strings[0:2]):
        with pytest.raises(GGUFError, match=r"k\[1\] \(byte \d+\): not valid UTF-8"):
            read()


@pytest.mark.parametrize("kind", [13, 14, 255, 2**32 - 1])
def test_unknown_value_types_are_refused(tmp_path, kind):
    raw = string("k") + struct.pack("<IQ", kind, 0)
    assert "unknown value type" in str(refusal(tmp_path, GGUFBuilder().raw_entry(raw).build()))
    raw = string("k") + struct.pack("<IIQ", 9, kind, 0)
    assert "unknown array element type" in str(refusal(tmp_path, GGUFBuilder().raw_entry(raw).build()))


def test_nested_arrays_are_refused(tmp_path):
    raw = string("k") + struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQB", 0, 1, 7)
    assert "array of arrays" in str(refusal(tmp_path, GGUFBuilder().raw_entry(raw).build()))


@pytest.mark.parametrize("count", [2**64 - 1, 2**61, 2**32, 1000])
@pytest.mark.parametrize("kind", [0, 6, 7, 8, 12])
def test_array_lengths_beyond_the_file_are_refused(tmp_path, kind, count):
    raw = string("k") + struct.pack("<IIQ", 9, kind, count) + bytes(40)
    assert "needs" in str(refusal(tmp_path, GGUFBuilder().raw_entry(raw).build()))


def test_a_string_array_whose_elements_leave_the_file_is_refused(tmp_path):
    raw = string("k") + struct.pack("<IIQ", 9, 8, 2) + string("ok") + struct.pack("<Q", 2**63) + b"abcdefgh"
    assert "longer than the rest" in str(refusal(tmp_path, GGUFBuilder().raw_entry(raw).build()))
    raw = string("k") + struct.pack("<IIQ", 9, 8, 2) + string("x" * 8)
    assert "ends inside" in str(refusal(tmp_path, GGUFBuilder().raw_entry(raw).build()))


def test_long_strings_among_short_ones_are_stepped_over(tmp_path, monkeypatch):
    monkeypatch.setattr("quengine.models.gguf.cursor._STRINGS_AT_ONCE", 4)
    words = ["a", "b" * 255, "c" * 256, "", "d" * 70_000, *"efghi", "j" * 256]
    file = open_gguf(GGUFBuilder().kv("k", words).kv("after", 1).write(tmp_path / "m.gguf"))
    assert list(file.metadata["k"]) == words
    assert file.metadata["after"] == 1


@pytest.mark.parametrize("byte", range(1, 8))
def test_every_byte_of_a_string_length_counts(tmp_path, byte):
    length = bytearray(8)
    length[byte] = 1
    raw = string("k") + struct.pack("<IIQ", 9, 8, 2) + bytes(length) + bytes(64)
    assert "k[0]" in refusal(tmp_path, GGUFBuilder().raw_entry(raw).build()).field


@pytest.mark.parametrize("value", [2, 255])
def test_bools_other_than_0_and_1_are_refused(tmp_path, value):
    raw = string("k") + struct.pack("<IB", 7, value)
    assert "bool" in str(refusal(tmp_path, GGUFBuilder().raw_entry(raw).build()))
    raw = string("k") + struct.pack("<IIQBB", 9, 7, 2, 1, value)
    assert "bool" in str(refusal(tmp_path, GGUFBuilder().raw_entry(raw).build()))


def test_duplicate_keys_and_tensor_names_are_refused(tmp_path):
    error = refusal(tmp_path, small().kv("a.flag", 1).build())
    assert error.field == "a.flag" and "twice" in str(error)
    error = refusal(tmp_path, small().tensor("first", (1,)).build())
    assert "first" in error.field and "twice" in str(error)


@pytest.mark.parametrize("alignment", [0, 3, 24, 2**21, 2**31])
def test_alignments_that_are_no_power_of_two_or_too_large_are_refused(tmp_path, alignment):
    error = refusal(tmp_path, small().kv("general.alignment", alignment).build())
    assert error.field == "general.alignment"


@pytest.mark.parametrize(
    ("value", "kind"), [(32, "uint64"), (32, "int32"), (32.0, "float32"), ("32", "string")]
)
def test_an_alignment_of_another_type_is_refused(tmp_path, value, kind):
    assert "uint32" in str(refusal(tmp_path, small().kv("general.alignment", value, kind).build()))


@pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
def test_other_alignments_are_followed(tmp_path, alignment):
    builder = small().kv("general.alignment", alignment)
    builder.alignment = alignment
    with open_gguf(builder.write(tmp_path / "m.gguf")) as file:
        assert file.tensors["second"].data.view("<f4").tolist() == [[1.0, 2.0, 3.0]]


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ((), "has 0 dimensions"),
        ((1, 1, 1, 1, 1), "has 5 dimensions"),
        ((0,), "not positive"),
        ((4, 0), "not positive"),
        ((-1,), "not positive"),
        ((2**62, 2**62), "needs"),
        ((2**40,), "needs"),
        ((2**31, 2**31, 4), "needs"),
    ],
)
def test_impossible_shapes_are_refused(tmp_path, shape, says):
    error = refusal(tmp_path, small().tensor("odd", shape, "F32", b"").build())
    assert says in str(error) and error.field == "tensor odd"


@pytest.mark.parametrize(("kind", "cols"), [("Q4_0", 16), ("Q8_0", 33), ("Q4_K", 128), ("Q6_K", 300)])
def test_rows_that_are_not_whole_blocks_are_refused(tmp_path, kind, cols):
    error = refusal(tmp_path, small().tensor("odd", (2, cols), kind, bytes(4096)).build())
    assert "block size" in str(error)


@pytest.mark.parametrize("number", [4, 5, 31, 36, 43, 2**31, 2**32 - 1])
def test_unknown_tensor_types_are_refused(tmp_path, number):
    assert f"unknown tensor type {number}" in str(
        refusal(tmp_path, small().tensor("odd", (32,), number, b"").build())
    )


@pytest.mark.parametrize(
    ("offset", "says"),
    [
        (1, "alignment"),
        (33, "alignment"),
        (2**20, "past the end of the file"),
        (2**64 - 32, "past the end of the file"),
    ],
)
def test_offsets_unaligned_or_past_the_end_are_refused(tmp_path, offset, says):
    assert says in str(refusal(tmp_path, small().tensor("odd", (1,), offset=offset).build()))


@pytest.mark.parametrize("offset", [0, 32, 64])
def test_overlapping_tensors_are_refused(tmp_path, offset):
    # "first" covers bytes 0 to 67 of the data.
    error = refusal(tmp_path, small().tensor("odd", (1,), offset=offset).build())
    assert "overlaps" in str(error)


def test_tensors_may_lie_in_any_order(tmp_path):
    builder = GGUFBuilder().tensor("b", (4,), offset=32, data=b"").tensor("a", (4,), offset=0, data=bytes(64))
    assert list(open_gguf(builder.write(tmp_path / "m.gguf")).tensors) == ["b", "a"]


def test_a_43_byte_file_that_declares_a_huge_array_is_refused_at_once(tmp_path):
    head = b"GGUF" + struct.pack("<Iqq", 3, 0, 1)
    data = head + (string("k") + struct.pack("<IIQ", 9, 4, 2**60))[: 43 - len(head)]
    assert len(data) == 43
    refusal(tmp_path, data)


def test_names_from_the_file_cannot_write_to_the_terminal(tmp_path):
    error = refusal(tmp_path, small().kv("\x1b[31mred\n", 1).kv("\x1b[31mred\n", 1).build())
    assert "\x1b" not in str(error)


def test_tensor_data_is_a_read_only_view_of_the_mapping(tmp_path):
    file = open_gguf(small().write(tmp_path / "m.gguf"))
    data = file.tensors["first"].data
    assert not data.flags.writeable and not data.flags.owndata
    file.close()
    assert data.tobytes() == bytes(range(68))
    assert file.tensors == {}
