"""Split models: any file opens all, and a missing or foreign one is refused."""

import pytest

from quengine.models.gguf import GGUFError, open_gguf
from tests.gguf_builder import GGUFBuilder


def shard(number: int, count: int = 3, total: int = 3, **changes: object) -> GGUFBuilder:
    """Part `number` (from 0) with one tensor; the first holds the metadata, as gguf-split writes them."""
    builder = GGUFBuilder()
    if number == 0:
        builder.kv("general.architecture", "llama").kv("general.name", "whole")
    keys = {"split.no": number, "split.count": count, "split.tensors.count": total} | changes
    for key, value in keys.items():
        if value is not None:
            builder.kv(key, value, "int32" if key == "split.tensors.count" else "uint16")
    return builder.tensor(f"t{number}", (4,), data=bytes([number] * 16))


def write_all(folder, builders=None):
    builders = builders or [shard(i) for i in range(3)]
    return [b.write(folder / f"m-{i + 1:05d}-of-00003.gguf") for i, b in enumerate(builders)]


@pytest.mark.parametrize("named", [0, 1, 2])
def test_any_part_opens_all(tmp_path, named):
    paths = write_all(tmp_path)
    with open_gguf(paths[named]) as file:
        assert file.shards == tuple(paths)
        assert list(file.tensors) == ["t0", "t1", "t2"]
        assert [t.data.tobytes()[0] for t in file.tensors.values()] == [0, 1, 2]
        assert [t.path for t in file.tensors.values()] == paths
        assert file.metadata["general.name"] == "whole"
        assert file.nbytes == sum(path.stat().st_size for path in paths)


@pytest.mark.parametrize("missing", [0, 2])
def test_a_missing_part_is_refused_by_name(tmp_path, missing):
    paths = write_all(tmp_path)
    paths[missing].unlink()
    with pytest.raises(
        GGUFError, match=f"m-0000{missing + 1}-of-00003.gguf.*missing: part {missing + 1} of the 3"
    ):
        open_gguf(paths[1])


def test_a_damaged_part_is_refused(tmp_path):
    paths = write_all(tmp_path)
    paths[2].write_bytes(paths[2].read_bytes()[:40])
    with pytest.raises(GGUFError) as caught:
        open_gguf(paths[0])
    assert caught.value.path == paths[2]


@pytest.mark.parametrize(
    ("foreign", "says"),
    [
        (shard(1, count=4), "says part 2 of 4"),
        (shard(0), "says part 1 of 3"),
        (shard(1, total=5), "not of one model"),
        (shard(1).kv("general.name", "another"), "not of one model"),
        (shard(1).tensor("t0", (4,)), "not of one split"),
        (shard(1).tensor("t9", (4,)), "3 tensors announced, the 3 files hold 4"),
        (GGUFBuilder().tensor("t1", (4,)), "says part 1 of 1"),
        (shard(1, **{"split.tensors.count": None}), "split.tensors.count: missing"),
    ],
)
def test_a_foreign_part_is_refused(tmp_path, foreign, says):
    paths = write_all(tmp_path, [shard(0), foreign, shard(2)])
    with pytest.raises(GGUFError, match=says):
        open_gguf(paths[0])


@pytest.mark.parametrize("name", ["model.gguf", "m-00002-of-00003.gguf", "m-00001-of-00004.gguf"])
def test_a_part_whose_name_contradicts_its_keys_is_refused(tmp_path, name):
    with pytest.raises(GGUFError, match=r"must end in -00001-of-00003\.gguf"):
        open_gguf(shard(0).write(tmp_path / name))


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("split.count", -2, "int16"),
        ("split.count", "3", "string"),
        ("split.no", 7, "uint16"),
        ("split.no", True, "bool"),
    ],
)
def test_split_keys_out_of_range_or_of_the_wrong_type_are_refused(tmp_path, key, value, kind):
    builder = GGUFBuilder()
    for name in ("split.no", "split.count", "split.tensors.count"):
        builder.kv(
            name, value if name == key else 1 if name == "split.no" else 3, kind if name == key else "uint16"
        )
    with pytest.raises(GGUFError, match=key):
        open_gguf(builder.write(tmp_path / "m-00002-of-00003.gguf"))


def test_a_split_into_one_is_a_plain_file(tmp_path):
    file = open_gguf(shard(0, count=1, total=1).write(tmp_path / "any-name.gguf"))
    assert len(file.shards) == 1 and list(file.tensors) == ["t0"]


def test_parts_behind_links_are_found_by_the_links_names(tmp_path):
    """The Hugging Face cache names its files by digest and links to them."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    for i in range(3):
        shard(i).write(blobs / f"digest{i}")
        (snapshot / f"m-{i + 1:05d}-of-00003.gguf").symlink_to(blobs / f"digest{i}")
    assert len(open_gguf(snapshot / "m-00003-of-00003.gguf").tensors) == 3
