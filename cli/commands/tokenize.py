"""`engine tokenize`: the token ids of a text and what each stands for. Reads the model's header only."""

from typing import TYPE_CHECKING, Annotated

import typer

from quengine.cli.flags import Model, takes_options

if TYPE_CHECKING:
    from quengine.models.tokenizer import Tokenizer


@takes_options
def tokenize(
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The text; - reads standard input.")],
    model: Model,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    no_bos: Annotated[bool, typer.Option("--no-bos", help="Leave out the token that begins a text.")] = False,
    special: Annotated[
        bool, typer.Option("--special", help="Read names of control tokens in TEXT as those tokens.")
    ] = False,
) -> None:
    """Show how a model cuts TEXT into tokens; reads the header only."""
    import sys

    from quengine.cli.terminal import json_line, write_line
    from quengine.models.hub.hub import resolve_model
    from quengine.models.tokenizer import Tokenizer
    from quengine.platform.input_files import read_stream

    path = resolve_model(model)
    tokenizer = Tokenizer.from_hf(path) if path.is_dir() else Tokenizer.from_gguf(path)
    if text == "-":
        text = read_stream(sys.stdin.buffer, "cannot read the text from standard input", replace=True)
    ids = tokenizer.encode(text, bos=not no_bos, special=special)
    if as_json:
        pieces = [_json_piece(tokenizer.token_bytes(i)) for i in ids]
        answer = {"count": len(ids), "ids": ids, "pieces": pieces}
        typer.echo(json_line(answer))
        return
    for token_id in ids:
        write_line(f"{token_id:>7}  {_shown(tokenizer, token_id)}")
    typer.echo(f"{len(ids)} token{'' if len(ids) == 1 else 's'}", err=True)


def _json_piece(raw: bytes) -> str | list[int]:
    """The token's text, or its byte values where they are only part of a character."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


def _shown(tokenizer: "Tokenizer", token_id: int) -> str:
    """One token on one line: quoted text, bytes where they are only part of a character, a control token's name."""
    raw = tokenizer.token_bytes(token_id)
    piece = _json_piece(raw)
    if tokenizer.is_control(token_id):
        return f"{raw.decode(errors='replace')}  (control)"
    return repr(piece) if isinstance(piece, str) else " ".join(f"<{byte:02X}>" for byte in piece)
