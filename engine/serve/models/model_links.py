"""Names that clients add to the models of a folder, and remove: links to GGUF files, or files themselves.

A name is checked before it becomes a path, and the folders on the way are opened one by one without following a link
(openat, O_NOFOLLOW), so that nothing outside of the folder is made or removed. Nothing that is there is replaced, but
models that clients have created.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from quengine.models.hub.hub_name import is_companion, own_name, without_shard
from quengine.models.hub.presets import toml_text
from quengine.models.hub.projectors import find_projector, projector_name
from quengine.serve.models.model_spec import HUB, parts_of
from quengine.serve.models.preset_file import options_name
from quengine.serve.schemas.errors import ApiError, bad_request

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_MOST = 200
"""Bytes of a name: with the number of a part and the suffix it is one of a file."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def folder_name(given: str) -> str:
    """A name as the folder has it: without the tag `:latest` and the suffix .gguf; names of the hub begin with HUB."""
    name = own_name(given.removesuffix(":latest"))
    if name.lower().endswith(".gguf"):
        above, slash, file = name.rpartition("/")
        name = f"{above}{slash}{without_shard(file)}"
    return f"{HUB}/{name.removeprefix('hf:')}" if name.startswith("hf:") else name


def check_name(name: str, param: str) -> None:
    """Raises ApiError (400) if `name`, from `folder_name`, is no valid name, or the name of a part or a companion."""
    *above, last = name.split("/")
    model, colon, tag = last.partition(":")
    parts = (*above, model, *((tag,) if colon else ()))
    if (
        len(name) > _MOST
        or not all(map(_PART.fullmatch, parts))
        or (above and above[0] != HUB)
        or is_companion(last)
        or without_shard(f"{last}.gguf") != last
    ):
        rule = f"must be a name such as qwen3:4b or {HUB}/user/repo:Q4_K_M"
        raise bad_request(f"{param} = {name[:80]!r}: {rule}", param, "invalid_value")


@contextmanager
def linked_model(
    folder: Path, name: str, file: Path, options: Mapping[str, Any] | None = None
) -> Iterator[None]:
    """Give the model whose first file is `file` the checked name `name` in `folder`, with `options` beside it
    (`preset_file.made_options`); undone where the block raises.

    Its projector, if there is one, is linked beside it under a name that makes it this model's alone. A file on the
    same disk gets a hard link, so that either name can be removed. Otherwise a symbolic link leads to the file itself,
    not to other links.

    Raises:
        ApiError: it is no GGUF file, the name is taken, or the system refuses.
    """
    if file.is_dir():
        raise bad_request(f"{file.name} is a folder: name it a second time in --models-preset")
    *above, last = name.split("/")
    made: list[str] = []
    with _opened(folder, above, make=True) as descriptor:
        try:
            for part in parts_of(file):
                own = last + part.name[len(without_shard(part.name)) :]
                _link(part, own, descriptor)
                made.append(own)
            if (projector := find_projector(file)) is not None:
                own = projector_name(last)
                with suppress(FileExistsError):  # by its name the file is this model's projector
                    _link(projector, own, descriptor)
                    made.append(own)
            if options:
                own = options_name(f"{last}.gguf")
                _write(toml_text(options), own, descriptor)
                made.append(own)
            yield
        except BaseException:
            for own in made:
                os.unlink(own, dir_fd=descriptor)
            raise


def _write(text: str, name: str, folder: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(name, flags, 0o644, dir_fd=folder), "w", encoding="utf-8") as file:
        file.write(text)


def _link(source: Path, name: str, folder: int) -> None:
    if not source.is_symlink():
        with suppress(OSError):  # another disk, or one without hard links
            os.link(source, name, dst_dir_fd=folder)
            return
    os.symlink(os.path.realpath(source), name, dir_fd=folder)


@contextmanager
def unlinked_model(folder: Path, file: Path) -> Iterator[None]:
    """Remove the file `file` of a model, with all its parts, its options and a projector that is named after it. Of a
    link only the link is removed. Undone where the block raises.

    Raises:
        ApiError: it is a folder, not in `folder`, or the system refuses.
    """
    if not file.is_relative_to(folder):
        raise bad_request(f"{file.name} is not in --models-dir, whose models alone are deleted")
    if file.is_dir():
        raise bad_request(f"{file.name} is a folder, which may hold more than a model: delete it by hand")
    above = file.relative_to(folder).parts[:-1]
    hidden: dict[str, str] = {}
    with _opened(folder, above) as descriptor:
        try:
            names = [part.name for part in parts_of(file)]
            beside = (options_name(file.name), projector_name(without_shard(file.name)))
            for name in (*names, *(name for name in beside if file.with_name(name).exists())):
                aside = f".{uuid4().hex}"
                os.rename(name, aside, src_dir_fd=descriptor, dst_dir_fd=descriptor)
                hidden[aside] = name
            yield
        except BaseException:
            for aside, name in hidden.items():
                os.rename(aside, name, src_dir_fd=descriptor, dst_dir_fd=descriptor)
            raise
        for aside in hidden:
            os.unlink(aside, dir_fd=descriptor)
    with suppress(OSError):  # one that is not empty
        for number in range(len(above), 0, -1):
            folder.joinpath(*above[:number]).rmdir()


@contextmanager
def remade_model(
    folder: Path, name: str, existing: Path, file: Path, options: Mapping[str, Any]
) -> Iterator[None]:
    """`linked_model` in place of the model `existing` of that name, which has options beside it. If both are the same
    file, only the options change. Undone where the block raises.

    Raises:
        ApiError: as `linked_model`; or the model has no options, so that its file may be the only one.
    """
    own = existing.with_name(options_name(existing.name))
    if not existing.is_relative_to(folder) or not own.exists():
        wrong = f"there is a model {name} already, which /api/create has not made: delete it first"
        raise bad_request(wrong, code="invalid_value")
    if not file.samefile(existing):
        with unlinked_model(folder, existing), linked_model(folder, name, file, options):
            yield
        return
    with _opened(folder, existing.relative_to(folder).parts[:-1]) as descriptor:
        aside = f".{uuid4().hex}"
        os.rename(own.name, aside, src_dir_fd=descriptor, dst_dir_fd=descriptor)
        try:
            _write(toml_text(options), own.name, descriptor)
            yield
        except BaseException:
            os.rename(aside, own.name, src_dir_fd=descriptor, dst_dir_fd=descriptor)
            raise
        os.unlink(aside, dir_fd=descriptor)


@contextmanager
def _opened(root: Path, parts: "list[str] | tuple[str, ...]", make: bool = False) -> Iterator[int]:
    """A descriptor of a folder below `root`. Raises ApiError for what the system refuses, also in the block."""
    descriptor = -1
    try:
        descriptor = os.open(root, _FOLDER)
        for part in parts:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(part, dir_fd=descriptor)
            deeper = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = deeper
        yield descriptor
    except FileExistsError:
        raise bad_request(f"there is a file {'/'.join(parts) or '.'} of this name already") from None
    except FileNotFoundError:
        raise ApiError(404, "the model's file is gone", code="model_not_found") from None
    except OSError as error:
        raise ApiError(500, f"--models-dir {root}: {error.strerror}") from None
    finally:
        if descriptor >= 0:
            os.close(descriptor)
