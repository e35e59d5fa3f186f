"""Names of models on the Hugging Face Hub, and which files of a repository one means: quantizations, shards."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from quengine.errors import EngineError

_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
REPO_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
QUANT = re.compile(
    r"(?<![A-Za-z0-9])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|BF16|F16|F32))(?![A-Za-z0-9_])", re.IGNORECASE
)


_HUB_ADDRESS = re.compile(r"(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/|hf://", re.IGNORECASE)


class ModelNameError(EngineError):
    """The name stands for no model, or for more than one."""


@dataclass(frozen=True)
class HubName:
    """What is wanted from a repository: one file, or the one set of files of one quantization."""

    repo: str
    file: str | None = None
    quant: str | None = None

    def __str__(self) -> str:
        if self.file is not None:
            return f"hf:{self.repo}/{self.file}"
        return f"hf:{self.repo}:{self.quant}" if self.quant else f"hf:{self.repo}"


def own_name(model: str) -> str:
    """Rewrites a name that begins with the Hub's address, as links and Ollama's names do, as an `hf:` name.

    `hf.co/user/repo:QUANT`, `https://huggingface.co/user/repo` and the address of a page or of a download of one file
    are rewritten; other names are returned as they are.
    """
    found = _HUB_ADDRESS.match(model)
    if found is None:
        return model
    body = re.split(r"[?#]", model[found.end() :])[0].rstrip("/")
    user, _, rest = body.partition("/")
    repo, _, rest = rest.partition("/")
    kind, _, rest = rest.partition("/")
    if kind in ("resolve", "blob", "raw", "tree"):
        kind, _, rest = rest.partition("/")[2].partition("/")  # without the revision
    path = "/".join(part for part in (kind, rest) if part)
    return f"hf:{user}/{repo}" + (f"/{path}" if path.lower().endswith(".gguf") else "")


def parse_hub_name(name: str) -> HubName:
    """Reads `hf:user/repo:QUANT`, `hf:user/repo/folder/file.gguf` or `hf:user/repo`.

    Raises ModelNameError.
    """
    body = name.removeprefix("hf:")
    body, colon, quant = body.partition(":")
    user, _, rest = body.partition("/")
    repo_name, _, file = rest.partition("/")
    repo = f"{user}/{repo_name}"
    parts_ok = (
        REPO_NAME.fullmatch(repo)
        and not (file and colon)
        and (quant or not colon)
        and ".." not in file.split("/")
    )
    if not parts_ok or (file and not file.lower().endswith(".gguf")):
        raise ModelNameError(
            f"{name}: not a model name; write hf:user/repo:QUANT (QUANT as Q4_K_M) or hf:user/repo/file.gguf"
        )
    return HubName(repo, file or None, quant or None)


def file_sets(files: Iterable[str]) -> list[tuple[str, ...]]:
    """The .gguf files of a repository, shards of one model together and in order."""
    sets: dict[str, list[str]] = {}
    for file in sorted(files):
        if file.lower().endswith(".gguf"):
            shard = _SHARD.search(file)
            sets.setdefault(file[: shard.start()] + f"-of-{shard[2]}" if shard else file, []).append(file)
    return [tuple(found) for found in sets.values()]


def missing_shards(files: Sequence[str]) -> list[str]:
    """The shards that are missing from a set, by the count in its files' names."""
    shard = _SHARD.search(files[0])
    if shard is None:
        return []
    stem, total = files[0][: shard.start()], int(shard[2])
    wanted = [f"{stem}-{index:05d}-of-{total:05d}.gguf" for index in range(1, total + 1)]
    return [file for file in wanted if file not in files]


def without_shard(file: str) -> str:
    """A file's name without shard number and suffix."""
    return Path(_SHARD.sub(".gguf", file)).stem


def quant_of(file: str) -> str:
    """The quantization in a file's name, as "Q4_K_M", or an empty string."""
    found = QUANT.findall(without_shard(file))
    return str(found[-1]) if found else ""


def fits(wanted: HubName, files: Sequence[str]) -> bool:
    """Whether a set of files is one that `wanted` may mean."""
    if wanted.file is not None:
        return wanted.file in files
    return not is_companion(files[0]) and (wanted.quant is None or _has_quant(files[0], wanted.quant))


def choose_files(wanted: HubName, files: Iterable[str]) -> tuple[str, ...]:
    """The files, in shard order, that `wanted` means among those of its repository.

    Raises ModelNameError, listing what there is, when none or more than one set fits.
    """
    sets = file_sets(files)
    fitting = [found for found in sets if fits(wanted, found)]
    if not sets:
        raise ModelNameError(f"{wanted}: {wanted.repo} has no .gguf files")
    if not fitting:
        raise ModelNameError(f"{wanted}: no such file in {wanted.repo}; it has {_listed(sets)}")
    if len(fitting) > 1:
        example = f"hf:{wanted.repo}/{fitting[0][0]}"
        raise ModelNameError(
            f"{wanted}: {len(fitting)} files fit: {_listed(fitting)}; name one, as in {example}"
        )
    lost = missing_shards(fitting[0])
    if lost:
        raise ModelNameError(
            f"{wanted}: {wanted.repo} lacks {len(lost)} of its shards, the first is {lost[0]}"
        )
    return fitting[0]


def _listed(sets: Sequence[Sequence[str]]) -> str:
    return ", ".join(
        found[0] + (f" (and {len(found) - 1} more shards)" if len(found) > 1 else "") for found in sets
    )


def is_companion(file: str) -> bool:
    """Vision projectors and importance matrices lie beside the models and are not models."""
    stem = Path(file).name.lower()
    return "mmproj" in stem or "imatrix" in stem


def _has_quant(file: str, quant: str) -> bool:
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(quant)}(?![A-Za-z0-9_])", file, re.IGNORECASE) is not None
