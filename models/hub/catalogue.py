"""The short names of models: which repository and file each stands for, read from `catalogue.toml`."""

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType


@dataclass(frozen=True)
class CatalogueEntry:
    """One alias.

    gigabytes: about how large its files are, 10^9 bytes. package: a Python package that ships `package_file`, where
    there is one.
    """

    alias: str
    repo: str
    file: str
    about: str
    gigabytes: float
    verified: str
    package: str | None = None
    package_file: str | None = None


@cache
def catalogue() -> Mapping[str, CatalogueEntry]:
    """Every alias, in the order of the data file."""
    text = Path(__file__).with_name("catalogue.toml").read_text(encoding="utf-8")
    return MappingProxyType(
        {alias: CatalogueEntry(alias=alias, **row) for alias, row in tomllib.loads(text).items()}
    )


def closest_aliases(name: str) -> list[str]:
    """The three aliases that look most like `name`, best first, or fewer; empty when none is near."""
    wanted = name.lower().replace("_", "-").replace(":", "-")
    near = difflib.get_close_matches(wanted, catalogue(), n=3, cutoff=0.6)
    within = [alias for alias in catalogue() if len(wanted) > 2 and wanted in alias]
    return list(dict.fromkeys([*near, *within]))[:3]
