"""Saved prefixes: restored by another engine they are not computed again, and what does not fit is refused."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quengine import LLM, EngineError, SamplingParams
from quengine.context import prefix_file
from quengine.context.prefix_file import PrefixFiles, content_digest
from quengine.context.saved_prefix import restore_prefix, save_prefix
from tests.gguf_builder import ModelSizes
from tests.tiny_models import write_tiny

PROMPT = [(11 * n + 3) % 250 for n in range(150)]
PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SHAPE: dict[str, Any] = {
    "embedding": 64,
    "feed_forward": 64,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 32,
    "context": 256,
}
WINDOWS = {"gemma3.attention.sliding_window": 50, "gemma3.attention.sliding_window_pattern": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prefixes")


@pytest.fixture(scope="module")
def path(folder: Path) -> Path:
    return write_tiny(folder / "tiny.gguf", kind="Q8_0", sizes=ModelSizes(**SHAPE))


@pytest.fixture(scope="module")
def windowed(folder: Path) -> Path:
    """A layer that keeps all positions, and one that keeps 50."""
    sizes = ModelSizes("gemma3", **SHAPE)
    return write_tiny(folder / "windowed.gguf", "gemma3", "Q8_0", sizes=sizes, changes=WINDOWS)


@pytest.fixture(scope="module")
def saver(path: Path) -> Iterator[LLM]:
    with load(path) as llm:
        yield llm


@pytest.fixture(scope="module")
def saved_file(saver: LLM, folder: Path) -> Path:
    saver.generate([PROMPT], PARAMS)
    assert save(saver, PROMPT, folder / "saved") == 150
    return folder / "saved"


def load(path: Path, **options: Any) -> LLM:
    return LLM(path, device="cpu", parallel=2, threads=1, **options)


def files_of(llm: LLM) -> PrefixFiles:
    return PrefixFiles(llm.loaded, llm.config.cache_type, llm.config.deterministic)


def save(llm: LLM, ids: list[int], file: Path) -> int:
    saved = save_prefix(llm.scheduler, llm.model_config, ids)
    assert files_of(llm).write(file, saved) == file.stat().st_size > saved.nbytes
    return len(saved.token_ids)


def restore(llm: LLM, file: Path) -> int:
    saved, size = files_of(llm).read(file)
    assert size == file.stat().st_size
    restore_prefix(llm.scheduler, llm.model_config, saved)
    return len(saved.token_ids)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("path", {}),
        ("path", {"cache_type": "q8_0"}),
        ("path", {"deterministic": True}),
        ("windowed", {"chunk_size": 32}),
        ("windowed", {"chunk_size": 32, "cache_type": "q8_0"}),
        ("windowed", {"chunk_size": 32, "cache_type": "q4_0"}),
    ],
)
def test_a_restored_prompt_is_not_computed_again_and_gives_the_same_text(
    model: str, options: dict[str, Any], folder: Path, request: pytest.FixtureRequest
) -> None:
    """The file has all tokens, and the keys and values of those in whole blocks of 32."""
    tokens, in_blocks = 190, 160
    path, file = request.getfixturevalue(model), folder / "restored"
    with load(path, **options) as llm:
        first = llm.generate([PROMPT], PARAMS)[0]
        assert first.timings.cached_tokens == 0
        again = [*PROMPT, *first.tokens[:20], 1, 2, 3]
        expected = [llm.generate([prompt], PARAMS)[0].tokens for prompt in (PROMPT, again)]
        assert save(llm, PROMPT + first.tokens, file) == tokens
    with load(path, **options) as llm:
        assert restore(llm, file) == tokens and llm.scheduler.cache_used == 0
        for prompt, wanted in zip((again, PROMPT), reversed(expected), strict=True):
            completion = llm.generate([prompt], PARAMS)[0]
            assert completion.tokens == wanted
            assert completion.timings.cached_tokens == min(in_blocks, (len(prompt) - 1) // 32 * 32)


def test_what_the_cache_no_longer_holds_is_not_saved(saver: LLM, folder: Path) -> None:
    assert save(saver, [7] * 100, folder / "nothing") == 0
    with load(saver.loaded.path) as llm:
        assert restore(llm, folder / "nothing") == 0
    saver.generate([PROMPT], PARAMS)
    assert save(saver, [*PROMPT, *[7] * 40], folder / "part") == 128, "whole blocks, where one is missing"


def test_restoring_twice_and_beside_a_running_sequence(path: Path, saved_file: Path) -> None:
    with load(path) as llm:
        stream = llm.stream([9] * 40, PARAMS)
        next(stream)
        assert restore(llm, saved_file) == restore(llm, saved_file) == 150
        text = stream.finish().text
        assert llm.generate([PROMPT], PARAMS)[0].timings.cached_tokens == 128
        assert llm.scheduler.blocks.num_used == 0 and text


def test_a_restored_prefix_needs_room(path: Path, saved_file: Path) -> None:
    with load(path, ctx_size=160) as llm:
        streams = [llm.stream([n] * 150, PARAMS) for n in (8, 9)]
        for stream in streams:
            stream.start()
        llm.step(), llm.step()
        with pytest.raises(EngineError, match="no room for its 128 tokens: 320 of 320 are in use"):
            restore(llm, saved_file)
        used = llm.scheduler.cache_used
        for stream in streams:
            stream.finish()
        assert used == 320 and llm.scheduler.cache_used == 0 and restore(llm, saved_file) == 150


def test_a_file_of_another_engine_is_refused_in_one_line(
    path: Path, windowed: Path, folder: Path, saved_file: Path
) -> None:
    other = write_tiny(folder / "other.gguf", kind="Q8_0", sizes=ModelSizes(**SHAPE), seed=1)
    for model, options, wrong in (
        (other, {}, "its model is '[0-9a-f]{64}', here '[0-9a-f]{64}'"),
        (windowed, {}, "its model is"),
        (path, {"cache_type": "q8_0"}, "its cache type is 'f16', here 'q8_0'"),
        (path, {"deterministic": True}, "its kernels is '.*', here '.*, deterministic'"),
        (path, {"ctx_size": 96}, "it holds 150 tokens, the context 96"),
    ):
        with load(model, **options) as llm, pytest.raises(EngineError, match=wrong) as caught:
            restore(llm, saved_file)
        assert "\n" not in str(caught.value)


def remade(file: Path, change: Callable[[dict[str, Any]], object], version: str | None = None) -> None:
    with_header = dict(load_header(file))
    tensors = load_file(file)
    change(tensors)
    with_header["digest"] = content_digest(tensors)
    save_file(tensors, file, with_header | ({"version": version} if version else {}))


def load_header(file: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        return dict(opened.metadata())


@pytest.mark.parametrize(
    ("change", "version", "wrong"),
    [
        (lambda t: t.pop("absent", None), "9", "its version is '9', here '2'"),
        (lambda t: t.update(token_ids=t["token_ids"] + 100_000), None, "outside the vocabulary"),
        (lambda t: t.update(token_ids=t["token_ids"][:100]), None, "group 0 are not those of 100 tokens"),
        (lambda t: t.update(token_ids=t["token_ids"].float()), None, "no list of numbers 'token_ids'"),
        (lambda t: t.pop("token_ids"), None, "no list of numbers 'token_ids'"),
        (lambda t: t.update({"held.0": t["held.0"][1:]}), None, "its blocks of group 0"),
        (lambda t: t.update({"held.0": t["held.0"] + 1}), None, "its blocks of group 0"),
        (lambda t: t.update({"held.0": torch.tensor([-1, 0, 1, 2, 3])}), None, "its blocks of group 0"),
        (lambda t: t.pop("layer.1.v"), None, "its v of layer 1 is not torch.float16"),
        (
            lambda t: t.update({"layer.0.k": t["layer.0.k"][:, :, :, :16].contiguous()}),
            None,
            "its k of layer 0",
        ),
    ],
)
def test_a_damaged_file_is_refused(
    saver: LLM,
    saved_file: Path,
    folder: Path,
    change: Callable[[dict[str, Any]], object],
    version: str,
    wrong: str,
) -> None:
    copy = folder / "changed"
    copy.write_bytes(saved_file.read_bytes())
    remade(copy, change, version)
    with pytest.raises(EngineError, match=wrong):
        restore(saver, copy)


@pytest.mark.parametrize("place", [-1, -5000])
def test_a_file_with_another_bit_is_refused_by_its_digest(
    saver: LLM, saved_file: Path, folder: Path, place: int
) -> None:
    data = bytearray(saved_file.read_bytes())
    data[place] ^= 4
    (folder / "bit").write_bytes(data)
    with pytest.raises(
        EngineError, match=r"^it is damaged: its contents do not have its digest; save it again$"
    ):
        restore(saver, folder / "bit")


@pytest.mark.parametrize("data", [b"", b"x" * 7, b"\xff" * 64, b"\0" * 64, None])
def test_what_is_no_such_file_is_refused(
    saver: LLM, saved_file: Path, folder: Path, data: bytes | None
) -> None:
    copy = folder / "cut"
    copy.write_bytes(saved_file.read_bytes()[:-100] if data is None else data)
    for file, wrong in (
        (copy, "cannot be read"),
        (folder / "absent", "no such file"),
        (folder, "no such file"),
    ):
        with pytest.raises(EngineError, match=wrong):
            restore(saver, file)


def test_two_threads_write_into_one_folder(
    saver: LLM, saved_file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither moves or removes what the other has not finished."""
    saved, _ = files_of(saver).read(saved_file)
    both, write = Barrier(2), prefix_file.save_file

    def written(*given: Any) -> None:
        write(*given)
        both.wait(timeout=60)

    monkeypatch.setattr(prefix_file, "save_file", written)
    targets = [folder / "one", folder / "two"]
    with ThreadPoolExecutor(2) as pool:
        sizes = list(pool.map(lambda target: files_of(saver).write(target, saved), targets))
    assert sizes == [target.stat().st_size for target in targets]
    assert all(files_of(saver).read(target)[0].token_ids == saved.token_ids for target in targets)


def test_a_file_that_cannot_be_written_leaves_nothing(saver: LLM, folder: Path) -> None:
    (folder / "taken" / "x").mkdir(parents=True)
    before = sorted(folder.iterdir())
    for file in (folder / "taken", folder / "absent" / "x", folder / ("n" * 300)):
        with pytest.raises(EngineError, match="cannot be written"):
            save(saver, PROMPT, file)
    assert sorted(folder.iterdir()) == before
