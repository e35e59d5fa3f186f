"""The package's version, which files and answers carry."""

from importlib import metadata

import pytest

import quengine


def test_the_version_is_that_of_the_installed_package() -> None:
    assert quengine.__version__ == metadata.version("quengine")


def test_sources_that_are_not_installed_have_a_version_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert quengine.__version__ == "unknown"
