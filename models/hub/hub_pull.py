"""Fetches models from the Hugging Face Hub into the cache that every program shares.

A pull can be interrupted anywhere and goes on where it stopped; a file appears under its name only after its
digest was checked. huggingface_hub gives the listing, the transfer with its progress bar, the credentials,
the lock and the links; the partial file is kept here, because releases from 2.0 on delete theirs.
"""

import errno
import hashlib
import io
import logging
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from quengine.errors import CannotRunError, EngineError
from quengine.models.gguf.whole_file import file_size
from quengine.models.hub.hub import ModelNotHereError, hub_name
from quengine.models.hub.hub_cache import cache_dir, find_in_cache, repo_dir
from quengine.models.hub.hub_name import HubName, ModelNameError, choose_files
from quengine.models.hub.projectors import choose_projector

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

logger = logging.getLogger(__name__)

LISTING_TIMEOUT = 30.0
"""Seconds to wait for the hub's listing of a repository."""


class DigestError(EngineError):
    """The downloaded file differs from what the hub lists; it was deleted."""


class HubRefusedError(EngineError):
    """The hub has no such repository, or does not show it to this user."""


class HubError(CannotRunError):
    """The hub cannot be reached, or fails."""


@dataclass(frozen=True)
class HubFile:
    """One file of a repository at one commit. `digest`: its sha256, or the git object id of a small file."""

    repo: str
    commit: str
    name: str
    size: int
    digest: str

    @property
    def blob(self) -> Path:
        return repo_dir(self.repo) / "blobs" / self.digest

    @property
    def partial(self) -> Path:
        return self.blob.with_name(f"{self.digest}.incomplete")

    @property
    def link(self) -> Path:
        return repo_dir(self.repo) / "snapshots" / self.commit / self.name

    def missing_bytes(self) -> int:
        if self.link.exists() or self.blob.exists():
            return 0
        return self.size - min(self.size, self.partial.stat().st_size if self.partial.exists() else 0)


Watch = Callable[[HubFile, int], None]
"""Called with a file and how many of its bytes are here: at first and after each part that is written. What it raises
ends the pull; the next one goes on from there."""


def pull_model(
    name: str,
    offline: bool = False,
    projector: bool = True,
    say: Callable[[str], None] = lambda _: None,
    watch: Watch = lambda _file, _nbytes: None,
) -> Path:
    """Fetches a model's files unless they are in the cache, and returns the first.

    Args:
        name: an alias of the catalogue or an `hf:` name.
        offline: never use the network; HF_HUB_OFFLINE has the same effect.
        projector: fetch the projector of images (mmproj) as well, where the repository has one for the model.
        say: takes lines for the user.
        watch: follows the progress.

    Raises:
        ModelNameError: the name means no file, or several.
        ModelNotHereError: it is not here and must not be fetched.
        HubRefusedError: there is no such repository, or it asks for consent or a login.
        HubError: the hub cannot be reached or fails. Whatever arrived is kept for the next pull.
        DigestError: the bytes are not those the hub lists.
        CannotRunError: too little disk space.
    """
    from huggingface_hub import constants

    wanted = hub_name(name)
    if offline or constants.HF_HUB_OFFLINE:
        found = find_in_cache(wanted)
        if found is None:
            raise ModelNotHereError(
                f"{name}: not on this machine, and offline; pull it without --offline or HF_HUB_OFFLINE"
            )
        return found
    files = _list_files(wanted, projector)
    _check_space(files)
    for file in files:
        _fetch(file, say, watch)
    _note_commit(files[0])
    return files[0].link


def _list_files(wanted: HubName, projector: bool) -> list[HubFile]:
    """The model's files, in order, and its projector if `projector`."""
    from huggingface_hub import HfApi

    with _hub_errors(f"hf:{wanted.repo}"):
        info = HfApi().model_info(wanted.repo, files_metadata=True, timeout=LISTING_TIMEOUT)
    siblings = {sibling.rfilename: sibling for sibling in info.siblings or []}
    files, names = [], choose_files(wanted, siblings)
    beside = choose_projector(names[0], siblings) if projector else None
    for name in (*names, *([beside] if beside else [])):
        path, sibling = PurePosixPath(name), siblings[name]
        digest = sibling.lfs.sha256 if sibling.lfs is not None else sibling.blob_id
        if path.is_absolute() or ".." in path.parts or sibling.size is None or not info.sha or not digest:
            raise HubError(
                f"hf:{wanted.repo}: the hub's listing of {name} has no usable path, size, commit or digest"
            )
        if not (digest.isalnum() and info.sha.isalnum()):
            raise HubError(f"hf:{wanted.repo}: the hub's listing of {name} has a malformed digest or commit")
        files.append(HubFile(wanted.repo, info.sha, name, sibling.size, digest))
    return files


def _check_space(files: list[HubFile]) -> None:
    folder = cache_dir()
    folder.mkdir(parents=True, exist_ok=True)
    needed, free = sum(file.missing_bytes() for file in files), shutil.disk_usage(folder).free
    if needed > free:
        raise CannotRunError(
            f"not enough disk space in {folder}: {file_size(needed)} to download, {file_size(free)} free; "
            f"make room, or set HF_HUB_CACHE to a folder on another disk"
        )


def _fetch(file: HubFile, say: Callable[[str], None], watch: Watch) -> None:
    """Makes `file.link` exist: downloads the rest of the blob if needed, one process at a time."""
    watch(file, file.size - file.missing_bytes())
    if file.link.exists():
        return
    file.blob.parent.mkdir(parents=True, exist_ok=True)
    with _only_one(file, say):
        if not file.blob.exists():
            _download(file, watch)
            say(f"checking {file.name}")
            _check_digest(file)
            file.partial.replace(file.blob)
    _link(file)


@contextmanager
def _only_one(file: HubFile, say: Callable[[str], None]) -> Iterator[None]:
    """Holds the lock that huggingface_hub itself takes for this blob, so its own downloads wait as well."""
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    path = cache_dir() / ".locks" / repo_dir(file.repo).name / f"{file.digest}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        try:
            held.enter_context(WeakFileLock(path, timeout=0.2))
        except TimeoutError:
            say(f"{file.name} is being pulled by another process: waiting for it")
            held.enter_context(WeakFileLock(path))
        yield


class _PartialFile(io.BufferedWriter):
    """The end of `file.partial`, whose growth is watched."""

    def __init__(self, file: HubFile, watch: Watch) -> None:
        super().__init__(io.FileIO(file.partial, "ab"))
        self._file, self._watch = file, watch

    def write(self, buffer: "Buffer") -> int:
        count = super().write(buffer)
        self._watch(self._file, self.tell())
        return count


def _download(file: HubFile, watch: Watch) -> None:
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    if file.size > constants.MAX_HTTP_DOWNLOAD_SIZE:
        raise HubError(
            f"{file.name}: {file_size(file.size)} is more than the hub sends in one plain download; fetch it with: "
            f"hf download {file.repo} {file.name}"
        )
    if file.partial.exists() and file.partial.stat().st_size > file.size:
        file.partial.unlink()
    headers = {**build_hf_headers(library_name="quengine"), "Accept-Encoding": "identity"}
    url = hf_hub_url(file.repo, file.name, revision=file.commit)
    shown = PurePosixPath(file.name).name
    with _hub_errors(f"hf:{file.repo}/{file.name}", file):
        while True:
            with _PartialFile(file, watch) as out:
                had = out.tell()
                try:
                    http_get(
                        url,
                        out,
                        resume_size=had,
                        headers=headers,
                        expected_size=file.size,
                        displayed_filename=shown,
                    )
                    return
                except _transport_error() as error:
                    # As long as something came, the connection is worth another try.
                    if out.tell() == had:
                        raise
                    logger.warning("%s: %s; going on from %s", shown, error, file_size(out.tell()))


def _transport_error() -> type[Exception]:
    """The base class of errors of httpx or httpx2, whichever this release of huggingface_hub uses."""
    from huggingface_hub.errors import HfHubHTTPError

    base: type[Exception] = HfHubHTTPError.__bases__[0]
    return base


def _check_digest(file: HubFile) -> None:
    """Raises DigestError unless the file's digest is right: its sha256 (64 digits), or git's sha1 of a blob (40)."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    sha256 = len(file.digest) == 64
    digest = hashlib.sha256() if sha256 else hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
    with (
        file.partial.open("rb") as data,
        tqdm(  # type: ignore[no-untyped-call]
            total=file.size, unit="B", unit_scale=True, desc="checking", delay=1, leave=False, disable=None
        ) as bar,
    ):
        while chunk := data.read(1 << 22):
            digest.update(chunk)
            bar.update(len(chunk))
    found = digest.hexdigest()
    if found != file.digest:
        file.partial.unlink()
        raise DigestError(
            f"{file.name}: the download has {'sha256' if sha256 else 'git sha1'} {found}, "
            f"the hub lists {file.digest}; the download was deleted, pull again"
        )


def _link(file: HubFile) -> None:
    """Lets huggingface_hub name the blob in its snapshot, as a link or, where there are none, a copy."""
    from huggingface_hub import hf_hub_download

    with _hub_errors(f"hf:{file.repo}/{file.name}", file):
        hf_hub_download(file.repo, file.name, revision=file.commit)


def _note_commit(file: HubFile) -> None:
    main = repo_dir(file.repo) / "refs" / "main"
    main.parent.mkdir(parents=True, exist_ok=True)
    beside = main.with_name("main.new")
    beside.write_text(file.commit)
    beside.replace(main)


@contextmanager
def _hub_errors(what: str, file: HubFile | None = None) -> Iterator[None]:
    """Turns what huggingface_hub raises into one line for the user."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
    )

    try:
        yield
    except GatedRepoError as error:
        raise HubRefusedError(
            f"{what}: a gated repository: accept its terms on its page, then run: hf auth login"
        ) from error
    except RepositoryNotFoundError as error:
        raise HubRefusedError(
            f"{what}: no such repository on {constants.ENDPOINT}, or a private one: run hf auth login"
        ) from error
    except HFValidationError as error:
        raise ModelNameError(f"{what}: {str(error).splitlines()[0]}") from error
    except HfHubHTTPError as error:
        raise HubError(f"{what}: {str(error).splitlines()[0]}{_kept(file)}") from error
    except _transport_error() as error:
        why = re.sub(r"\[Errno -?\d+\] ", "", str(error))
        raise HubError(f"{what}: cannot reach {constants.ENDPOINT}: {why}{_kept(file)}") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise CannotRunError(f"{what}: no more room in {cache_dir()}{_kept(file)}") from error
        raise HubError(f"{what}: {str(error).splitlines()[0]}{_kept(file)}") from error


def _kept(file: HubFile | None) -> str:
    if file is None:
        return ""
    return f"; {file_size(file.size - file.missing_bytes())} of {file_size(file.size)} is kept, pull again to go on"
