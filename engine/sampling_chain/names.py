"""The names and letters of samplers, as llama.cpp's `--samplers` and `--sampler-seq` take them."""

from collections.abc import Iterable

from quengine.errors import EngineError, shown

LETTERS = {
    "penalties": "e",
    "dry": "d",
    "top_n_sigma": "s",
    "top_k": "k",
    "typ_p": "y",
    "top_p": "p",
    "min_p": "m",
    "xtc": "x",
    "temperature": "t",
    "infill": "i",
}
"""The letter of each sampler, in the default order; `infill` is not among the default ones."""
DEFAULT_ORDER = tuple(name for name in LETTERS if name != "infill")
MAX_SAMPLERS = 32
"""The most samplers of an order; a sampler may occur several times."""

OFF = ("adaptive_p", "adaptive-p", "a", "tfs_z")
"""Names and a letter of llama.cpp's samplers that clients list, but that are always off here: `adaptive_target` and
`tfs_z` accept no values that switch them on."""

_BY_LETTER = {letter: name for name, letter in LETTERS.items()}
_BY_NAME = {
    **{name.replace("_", between): name for name in LETTERS for between in ("_", "-", "")},
    "nucleus": "top_p",
    "temp": "temperature",
    "typ": "typ_p",
    "typical_p": "typ_p",
}


def read_names(names: Iterable[object]) -> tuple[str, ...]:
    """The samplers of these names, in llama.cpp's spellings (top_k, top-k, topk), without those of `OFF`. Raises
    EngineError for an unknown name."""
    given = [name for name in names if name not in OFF]
    order = tuple(_BY_NAME.get(name.lower(), "") if isinstance(name, str) else "" for name in given)
    if "" in order:
        wrong = shown(given[order.index("")])
        raise EngineError(f"samplers: {wrong} is not one of {', '.join(LETTERS)}")
    return _checked(order)


def read_letters(letters: str) -> tuple[str, ...]:
    """The samplers of these letters, such as "edskypmxt", without those of `OFF`. Raises EngineError for an unknown
    letter."""
    letters = "".join(letter for letter in letters if letter not in OFF)
    wrong = next((letter for letter in letters if letter not in _BY_LETTER), None)
    if wrong is not None:
        known = ", ".join(f"{letter} ({name})" for name, letter in LETTERS.items())
        raise EngineError(f"samplers: the letter {shown(wrong)} is not one of {known}")
    return _checked(tuple(_BY_LETTER[letter] for letter in letters))


def read_flags(texts: Iterable[str]) -> tuple[str, ...]:
    """The samplers of the option --samplers: names separated by `;` or `,`, or letters. Raises EngineError."""
    text = ";".join(texts).replace(",", ";").strip(";")
    names = [name.strip() for name in text.split(";") if name.strip()]
    letters = len(names) == 1 and names[0].lower() not in _BY_NAME and set(names[0]) <= _BY_LETTER.keys()
    return read_letters(names[0]) if letters else read_names(names)


def _checked(order: tuple[str, ...]) -> tuple[str, ...]:
    if len(order) > MAX_SAMPLERS:
        raise EngineError(f"samplers: {len(order)} given, at most {MAX_SAMPLERS} are taken")
    return order
