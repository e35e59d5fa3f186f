"""Packs of compiled kernels: a zip file with entries of Triton's cache, for machines that would otherwise compile
them.

    manifest.json           what follows, as JSON
    KEY/NAME.cubin          the machine code of one kernel for one GPU
    KEY/NAME.json           Triton's metadata of it

KEY is the kernel's folder in Triton's cache: a digest of its source, constants, options, the GPU's capability and
Triton's own files, so Triton looks up no other. The manifest has the SHA-256 of each file; digests of the files of
Triton and of the kernels' modules, for which the pack was built; and the types that launchers are built from
(launcher.py). A pack is a program: installing one means running its kernels.
"""

import base64
import json
import re
import shutil
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import triton
from triton.runtime.cache import triton_key

from quengine.errors import EngineError
from quengine.kernels.cuda.launch.compile_messages import Built
from quengine.kernels.cuda.launch.launcher import LauncherSpec
from quengine.kernels.cuda.launch.triton_cache import (
    DIGEST_SUFFIX,
    CheckedCache,
    kernel_names,
    source_stamp,
)

FORMAT = 1
_MANIFEST = "manifest.json"
_KEY = re.compile(r"[A-Z2-7]{52}")
_FILE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,149}\.(cubin|json)")
_MOST_KERNELS, _MOST_BYTES = 50_000, 32 << 20
"""Limits: kernels per pack, and bytes per file; twice that for the manifest."""
_RECORD = "quengine-pack-"
_DATE = (1980, 1, 1, 0, 0, 0)
"""The date of every file in a pack: the same kernels make the same bytes."""


@dataclass(frozen=True)
class Pack:
    """A pack's manifest. kernels: the SHA-256 of each file, by kernel key. triton, source: digests of Triton and of
    the kernels' modules that the pack was built with.
    """

    triton_version: str
    triton: str
    source: str
    targets: tuple[str, ...]
    models: tuple[str, ...]
    kernels: Mapping[str, Mapping[str, str]]
    launchers: tuple[LauncherSpec, ...]

    def check_is_for_this_engine(self, name: str) -> None:
        """Raises EngineError if the pack is for another Triton or other kernels, so that none would be looked up."""
        if self.triton != _triton():
            raise EngineError(
                f"{name} is for Triton {self.triton_version}, and this is Triton {triton.__version__}"
                + (" of another build" if self.triton_version == triton.__version__ else "")
                + "; build it anew with: engine kernels build"
            )
        if self.source != source_stamp().hex():
            raise EngineError(
                f"{name} has the kernels of another version of the engine; build it anew with: engine kernels build"
            )


class _Manifest(msgspec.Struct):
    """`Pack` as JSON."""

    format: int
    triton_version: str
    triton: str
    source: str
    targets: tuple[str, ...]
    models: tuple[str, ...]
    kernels: dict[str, dict[str, str]]
    launchers: list[tuple[tuple[Any, ...], str]]


@dataclass(frozen=True)
class InstalledPack:
    """An installed pack: the number of its kernels that are intact in the cache, and their bytes."""

    name: str
    pack: Pack
    whole: int
    nbytes: int
    is_current: bool


def write_pack(path: Path, built: Sequence[Built], targets: Sequence[str], models: Sequence[str]) -> Pack:
    """Writes kernels that are in Triton's cache to a pack, through a temporary file beside `path`.

    Raises EngineError if a kernel is missing.
    """
    contents = {kernel.key: _entry(kernel) for kernel in built}
    launchers = dict.fromkeys(kernel.launcher for kernel in built if kernel.launcher is not None)
    pack = Pack(
        triton.__version__, _triton(), source_stamp().hex(), tuple(targets), tuple(models),
        {key: {name: sha256(data).hexdigest() for name, data in files.items()} for key, files in contents.items()},
        tuple(launchers),
    )  # fmt: skip
    beside = path.with_name(f".{path.name}.partial")
    try:
        with zipfile.ZipFile(beside, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr(zipfile.ZipInfo(_MANIFEST, _DATE), _as_json(pack), zipfile.ZIP_DEFLATED)
            for key, files in sorted(contents.items()):
                for name, data in files.items():
                    file.writestr(zipfile.ZipInfo(f"{key}/{name}", _DATE), data, zipfile.ZIP_DEFLATED)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return pack


def install_pack(path: Path) -> Pack:
    """Installs the kernels of a pack in Triton's cache, all or none.

    Raises EngineError for a file that is no pack, is damaged, or is for another Triton or other kernels.
    """
    try:
        with zipfile.ZipFile(path) as file:
            pack = _manifest(file, path.name)
            pack.check_is_for_this_engine(path.name)
            for _ in _files(file, pack, path.name):  # check all files before any is written
                pass
            for key, files in _files(file, pack, path.name):
                manager = CheckedCache(key)
                group = {name: manager.put(data, name) for name, data in files.items()}
                manager.put_group(next(name for name in files if name.endswith(".json")), group)
    except (zipfile.BadZipFile, zipfile.LargeZipFile, EOFError, NotImplementedError) as error:
        raise EngineError(f"{path.name} is no pack of kernels: {error}") from None
    record = _as_json(pack).encode()
    installed = _folder() / f"{_RECORD}{sha256(record).hexdigest()[:32]}"
    installed.write_bytes(json.dumps([path.name]).encode() + b"\n" + record)
    return pack


def installed_packs() -> list[InstalledPack]:
    """The packs installed in Triton's cache."""
    found = []
    for path in sorted(_folder().glob(f"{_RECORD}*")):
        try:
            title, record = path.read_bytes().split(b"\n", 1)
            (name,), pack = json.loads(title), _parsed(record)
        except (OSError, ValueError, msgspec.DecodeError):
            continue
        folders = [_folder() / key for key in pack.kernels]
        whole = [folder for folder in folders if folder.is_dir() and kernel_names(folder)]
        current = (pack.triton, pack.source) == (_triton(), source_stamp().hex())
        found.append(InstalledPack(str(name), pack, len(whole), sum(map(_nbytes, whole)), current))
    return found


@dataclass(frozen=True)
class CacheSummary:
    """The engine's share of Triton's cache."""

    folder: Path
    kernels: int
    nbytes: int


def cache_summary() -> CacheSummary:
    """The number of kernels, and the bytes of kernels and launchers."""
    folders = _own_folders()
    kernels = sum(any(folder.glob("*.cubin")) for folder in folders)
    return CacheSummary(_folder(), kernels, sum(map(_nbytes, folders)))


def clear_kernels() -> None:
    """Removes the engine's files from Triton's cache."""
    for folder in _own_folders():
        shutil.rmtree(folder, ignore_errors=True)
    for path in _folder().glob("quengine-*"):
        path.unlink(missing_ok=True)


def _own_folders() -> list[Path]:
    """Folders of kernels and launchers that have digests; those of other programs have none."""
    folders = (
        [path for path in _folder().iterdir() if _KEY.fullmatch(path.name)] if _folder().is_dir() else []
    )
    return [folder for folder in folders if any(folder.glob(f"*{DIGEST_SUFFIX}"))]


def _entry(kernel: Built) -> dict[str, bytes]:
    manager = CheckedCache(kernel.key)
    names = [
        name for stem in kernel_names(_folder() / kernel.key) for name in (f"{stem}.cubin", f"{stem}.json")
    ]
    read = {name: manager.read(name) for name in names}
    files = {name: data for name, data in read.items() if data is not None}
    if len(files) != 2:
        raise EngineError(f"{kernel.name} was not compiled: {kernel.error or 'its files are gone again'}")
    return files


def _files(file: zipfile.ZipFile, pack: Pack, name: str) -> Iterator[tuple[str, dict[str, bytes]]]:
    """The files of each kernel, checked against the manifest's digests; unlisted files are not read."""
    for key, digests in pack.kernels.items():
        files = {each: _read(file, f"{key}/{each}", _MOST_BYTES, name) for each in digests}
        for each, data in files.items():
            if sha256(data).hexdigest() != digests[each]:
                raise EngineError(
                    f"{name} is damaged: {key}/{each} has another digest; fetch or build it anew"
                )
        yield key, files


def _read(file: zipfile.ZipFile, member: str, most: int, name: str) -> bytes:
    try:
        with file.open(member) as opened:
            data = opened.read(most + 1)
    except (KeyError, RuntimeError):  # RuntimeError: it is encrypted
        raise EngineError(f"{name} is no pack of kernels, or damaged: it has no {member}") from None
    if len(data) > most:
        raise EngineError(f"{name} is no pack of kernels: {member} has more than {most >> 20} MiB")
    return data


def _manifest(file: zipfile.ZipFile, name: str) -> Pack:
    try:
        return _parsed(_read(file, _MANIFEST, 2 * _MOST_BYTES, name))
    except (ValueError, msgspec.DecodeError, RecursionError) as error:
        raise EngineError(f"{name} is no pack of kernels: its manifest: {error}") from None


def _parsed(text: bytes) -> Pack:
    """Raises ValueError or msgspec.DecodeError for an invalid manifest."""
    told = msgspec.json.decode(text, type=_Manifest)
    if told.format != FORMAT:
        raise ValueError(f"format {told.format}, not {FORMAT}")
    if len(told.kernels) > _MOST_KERNELS:
        raise ValueError(f"{len(told.kernels)} kernels, and {_MOST_KERNELS} are the most")
    for key, files in told.kernels.items():
        stems = {name.partition(".")[0] for name in files}
        if (
            not _KEY.fullmatch(key)
            or len(files) != 2
            or len(stems) != 1
            or not all(map(_FILE.fullmatch, files))
        ):
            raise ValueError(f"{key[:80]!r} with {list(files)[:3]} is no kernel's folder")
    launchers = tuple(LauncherSpec(types, maps) for types, maps in told.launchers)
    return Pack(
        told.triton_version, told.triton, told.source, told.targets, told.models, told.kernels, launchers
    )  # fmt: skip


def _as_json(pack: Pack) -> str:
    launchers = [(spec.types, spec.maps) for spec in pack.launchers]
    return json.dumps({"format": FORMAT, **vars(pack), "launchers": launchers}, indent=None)


def _triton() -> str:
    """A digest of Triton's compiler files."""
    return base64.b32encode(sha256(triton_key().encode()).digest()).decode()[:32]


def _folder() -> Path:
    return Path(triton.knobs.cache.dir)


def _nbytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
