"""What a rank other than rank 0 does with a message: the call of its runner that rank 0 makes of its own."""

from quengine.model_runner import ModelRunner
from quengine.parallel.cached_rows import read_rows, write_rows
from quengine.parallel.wire import Forward, Hidden, Message, Parts, ReadCache, WriteCache


def run(runner: ModelRunner, message: Message) -> None:
    """Compute this rank's part of a step."""
    match message:
        case Forward(phase, rows, all_logits, eager):
            runner.forward(phase, rows, all_logits, eager)
        case Hidden(rows):
            runner.hidden(rows)
        case Parts(rows, parts):
            for _ in runner.logits_of_parts(rows, parts):
                pass
        case ReadCache(start, end):
            read_rows(runner, start, end)
        case WriteCache(start, end, kv_heads):
            write_rows(runner, start, end, kv_heads, None)
