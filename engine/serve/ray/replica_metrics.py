"""The metrics of several replicas as one text, in Prometheus' text format 0.0.4, each sample with its replica's name.

Source: "Exposition formats", Prometheus documentation. All lines of a metric stand together there.
"""

import re
from collections.abc import Mapping

_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(\{)?")


def join_metrics(texts: Mapping[str, str]) -> str:
    """The samples of all `texts`, which are named by replica, under the label `replica`."""
    families: dict[str, tuple[list[str], list[str]]] = {}
    for replica in sorted(texts):
        heads, samples, own = list[str](), list[str](), False
        for line in texts[replica].splitlines():
            if line.startswith("# HELP "):
                heads, samples = families.setdefault(line.split(" ", 3)[2], ([], []))
                own = not heads  # the first replica's description holds for all
            if not line.startswith("#"):
                samples.append(_SAMPLE.sub(rf'\1{{replica="{replica}"' + _closing(line), line, count=1))
            elif own:
                heads.append(line)
    return "".join(f"{line}\n" for heads, samples in families.values() for line in (*heads, *samples))


def _closing(sample: str) -> str:
    """What stands between the new label and the rest of the line."""
    found = _SAMPLE.match(sample)
    return "," if found is not None and found[2] else "}"
