"""Every command that the documents and the help's examples name, run on this machine's GPU, with a line for each.

    python -m benchmarks.checks.gpu_commands                      engine's commands
    python -m benchmarks.checks.gpu_commands --benchmarks         those of benchmarks/cuda as well
    python -m benchmarks.checks.gpu_commands --only bench --full  as they are written, with their sizes

The commands are read from README.md, docs/ and the command table, so that the list is whole. Models that they name are
replaced by one with random weights (`--model`, else `mistral-7b-2l`), files by ones made for the purpose; without
`--full`, released shapes are replaced by slices of two layers, and numbers of tokens by small ones. What needs a
network, more GPUs than there are, or another program is left out, with the reason.

A command passes if it exits with 0 and leaves no process of its group behind, or if it runs until `--limit` without an
error. A server passes if it becomes healthy, completes a text and exits with 0 on SIGTERM. The exit code is 1 if a
command failed.
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader

from benchmarks.startup import PORT, healthy
from quengine.cli.command_table import COMMANDS
from quengine.models.synthetic.presets import PRESETS
from quengine.models.synthetic.synthetic import write_synthetic
from tests.cli.test_documents import PRESENT, ROOT, benchmark_lines, command_lines
from tests.gguf_builder import ModelSizes
from tests.hf_mutations import write_convertible
from tests.models.quantize.test_quantize_file import write_imatrix
from tests.tiny_models import write_tiny

ENGINE = (sys.executable, "-m", "quengine.cli")
MODEL_FLAGS = {"-m", "--model", "--draft-model", "--a", "--b"}
NAMES_A_MODEL = {"show", "run", "chat"}
SLICES = {"mistral-7b": "mistral-7b-2l", "qwen3-30b-a3b": "qwen3-30b-a3b-2l"}
MOST = {"-n": 16, "-p": 512, "-d": 1024, "-r": 1}
"""Largest number kept in a list behind each of these flags, unless --full."""
NETWORK = {"pull", "rm", "ps", "stop"}
FILES = {
    "city.json": '{"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}}',
    "answer.gbnf": 'root ::= "yes" | "no"\n',
    "pirate.toml": 'model = "MODEL"\nsystem = "You are a pirate."\n',
    "Modelfile": "FROM MODEL\nSYSTEM You are Mario.\n",
    "models.toml": '[a]\nmodel = "MODEL"\n',
    "mcp.json": '{"mcpServers": {}}',
    "keys": "a-key-of-this-check\n",
    "edit.txt": "Rename area to measure: area = 2 * area",
    "question.txt": "Why is the sky blue?",
    "notes.txt": "The sky is blue.",
}
KEY = FILES["keys"].strip()
OF_A_MODEL = ("benchmarks.cuda.launch_cost",)
"""Benchmarks that take a model's file."""


@dataclass(frozen=True)
class Outcome:
    """What became of one command. reason: why it was left out, or what it said last where it failed."""

    kind: str
    seconds: float = 0.0
    reason: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a GGUF file in place of the random one")
    parser.add_argument("--only", default="", help="those that match this regular expression")
    parser.add_argument("--skip", default="", help="not those that match this regular expression")
    parser.add_argument("--benchmarks", action="store_true", help="those of benchmarks/cuda too")
    parser.add_argument("--full", action="store_true", help="with the sizes that are written")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of one command")
    parser.add_argument("--device", default="cuda", help="of commands that do not say one")
    given = parser.parse_args()
    failed, outcomes = 0, list[dict[str, object]]()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        check = Check(Path(folder), given.model, given.full, given.limit, given.device)
        lines = list(documented())
        if given.benchmarks:
            lines += documented_benchmarks()
        for line in dict.fromkeys(lines):
            text = " ".join(line)
            if not re.search(given.only, text) or (given.skip and re.search(given.skip, text)):
                continue
            outcome = check.run(line)
            failed += outcome.kind == "FAILED"
            outcomes.append({"command": text, **vars(outcome)})
            print(f"{outcome.kind:8} {outcome.seconds:6.1f} s  {text[:110]}  {outcome.reason}", flush=True)
    print(json.dumps({"gpu": gpu_name(), "torch": torch.__version__, "failed": failed, "of": len(outcomes)}))
    return int(failed > 0)


def gpu_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


def documented() -> Iterator[tuple[str, ...]]:
    """The arguments of every `engine` command of the documents and of the examples."""
    for path in PRESENT:
        for words in command_lines(path.read_text()):
            yield ("engine", *words)
    for entry in COMMANDS.values():
        for example in entry.examples:
            yield tuple(shlex.split(example.partition(" < ")[0].partition(" | ")[0]))


def documented_benchmarks() -> Iterator[tuple[str, ...]]:
    """The benchmarks of kernels that the documents name, without flags."""
    for path in PRESENT:
        for name, _ in benchmark_lines(path):
            module = name.removesuffix(".py").rstrip(".").replace("/", ".")
            if module.startswith("benchmarks.cuda."):
                yield ("python", "-m", module)


class Check:
    """Runs commands in a folder of its own, whose files are those that the documents name."""

    def __init__(self, folder: Path, model: str | None, full: bool, limit: float, device: str) -> None:
        self.folder, self.full, self.limit, self.device = folder, full, limit, device
        (folder / "models").mkdir()
        self.model = model or str(write_synthetic(folder / "models" / "a.gguf", PRESETS["mistral-7b-2l"]))
        for name, text in FILES.items():
            (folder / name).write_text(text.replace("MODEL", self.model))
        (folder / "keys").chmod(0o600)
        for name in ("project", "talks"):
            (folder / name).mkdir()
        write_convertible(folder / "folder")
        sizes = ModelSizes(embedding=256, feed_forward=512)
        tensors = GGUFReader(write_tiny(folder / "model-f16.gguf", kind="F16", sizes=sizes)).tensors
        columns = {each.name: int(each.shape[0]) for each in tensors if len(each.shape) == 2}
        write_imatrix(
            folder / "imatrix.gguf", {name: np.ones((1, n), np.float32) for name, n in columns.items()}
        )
        self.environment = {
            **os.environ,
            "HOME": str(folder),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        }

    def run(self, line: tuple[str, ...]) -> Outcome:
        """The outcome of one command as a document has it."""
        if reason := self._left_out(line):
            return Outcome("left out", 0.0, reason)
        if line[0] == "python":
            return self._to_its_end([sys.executable, *line[1:], *[self.model] * (line[-1] in OF_A_MODEL)])
        words = self._here([word for word in line[1:] if word != "-v"])
        began = time.monotonic()
        try:
            if words[0] == "serve":
                return Outcome("ok", *self._serve(words))
            return self._to_its_end([*ENGINE, *words])
        except CheckError as failure:
            return Outcome("FAILED", time.monotonic() - began, str(failure))

    def _left_out(self, line: tuple[str, ...]) -> str:
        words = set(line)
        if line[1] in NETWORK or (line[1] == "list" and "--all" in words):
            return "speaks to the Hub or to a running server"
        if line[1] == "cp" and "pirate" not in words:
            return "copies a downloaded model"
        if "--ray" in words:
            return "needs Ray"
        counts = re.findall(
            r"(?:-tp|--tensor-parallel|--replicas) (?:\d+,)*(\d+)|cuda:(?:tp|layer)(\d+)", " ".join(line)
        )
        devices = re.findall(r"--devices ([\d,]+)", " ".join(line))
        wanted = max(
            [1, *(int(n) for pair in counts for n in pair if n), *(d.count(",") + 1 for d in devices)]
        )
        if "layer" in words and "-ts" in words:
            wanted = max(wanted, 2)
        on_cpu = "cpu" in words
        if wanted > max(1, torch.cuda.device_count()) and not on_cpu:
            return f"needs {wanted} GPUs"
        if line[:2] == ("engine", "kernels") and "catalogue,model.gguf" in words and not self.full:
            return "builds for every model of the catalogue: --full"
        return ""

    def _here(self, words: list[str]) -> list[str]:
        """The arguments with what is on this machine in place of names, and with small sizes."""
        made = [words[0]]
        for at, word in enumerate(words[1:], 1):
            before = words[at - 1]
            if before in MODEL_FLAGS and not re.fullmatch(r"reference|cpu(:.*)?|cuda(:.*)?", word):
                made.append(self.model)
            elif before == "--synthetic" and not self.full:
                made.append(SLICES.get(word, _tiny(word)))
            elif before in MOST and not self.full and re.fullmatch(r"[\d,]+", word):
                made.append(",".join(str(min(int(each), MOST[before])) for each in word.split(",")))
            elif at == 1 and words[0] in NAMES_A_MODEL and not word.startswith("-"):
                made.append(self.model)
            elif word.startswith("["):  # "[--deterministic]": both ways stand in the document
                continue
            elif word == "/keys":  # a container's
                made.append("keys")
            else:
                made.append(word.replace("~", str(self.folder)))
        if words[0] in ("chat", "run"):
            made += ["--chat-template", "chatml"]
        if words[0] in ("generate", "chat", "run") and "-n" not in words:
            made += ["-n", "16"]
        if words[:2] == ["kernels", "clear"]:
            made.append("-y")
        if words[0] == "parity" and "--quick" not in words and not self.full:
            made += ["--texts", "1", "--prompts", "1", "--tokens", "8"]
        takes_device = words[0] in ("generate", "chat", "run", "bench", "serve")
        if takes_device and not {"--device", "--synthetic", "-tp", "--cpu-moe"} & set(made):
            made += ["--device", self.device]
        return made

    def _to_its_end(self, command: list[str]) -> Outcome:
        began = time.monotonic()
        process = subprocess.Popen(
            command, cwd=self.folder, env=self.environment, text=True, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            said, _ = process.communicate("Hello\n/exit\n", timeout=self.limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
            if "Traceback" not in said and "error:" not in said:
                return Outcome("ok, cut", self.limit)
            return Outcome("FAILED", self.limit, _last_line(said))
        seconds = time.monotonic() - began
        if not _ended(process.pid):
            return Outcome("FAILED", seconds, "left processes behind")
        if process.returncode or "Traceback" in said:
            return Outcome("FAILED", seconds, f"exit {process.returncode}: {_last_line(said)}")
        return Outcome("ok", seconds)

    def _serve(self, words: list[str]) -> tuple[float]:
        began = time.monotonic()
        log = (self.folder / "serve.log").open("w+")
        process = subprocess.Popen(
            [*ENGINE, *words, "--port", str(PORT)], cwd=self.folder, env=self.environment, text=True,
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            healthy()
            text = completion()
            if not text:
                raise CheckError("an empty completion")
            process.send_signal(signal.SIGTERM)
            if code := process.wait(60):
                raise CheckError(
                    f"exit {code} by SIGTERM: {_last_line((self.folder / 'serve.log').read_text())}"
                )
        except (OSError, SystemExit, subprocess.TimeoutExpired) as error:
            said = (self.folder / "serve.log").read_text()
            raise CheckError(f"{error}: {_last_line(said)}") from error
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            log.close()
        return (time.monotonic() - began,)


def _ended(group: int) -> bool:
    """Whether no process of a group is there a second later; those that are, are ended."""
    for _ in range(20):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    os.killpg(group, signal.SIGKILL)
    return False


class CheckError(Exception):
    """Why a server did not do what it should."""


def completion() -> str:
    """Eight tokens of the first model that the server on PORT has."""
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    base = f"http://127.0.0.1:{PORT}/v1"
    with urllib.request.urlopen(urllib.request.Request(f"{base}/models", headers=headers), timeout=60) as got:
        model = json.load(got)["data"][0]["id"]
    body = json.dumps({"model": model, "prompt": "1 2 3", "max_tokens": 8}).encode()
    request = urllib.request.Request(f"{base}/completions", body, headers)
    with urllib.request.urlopen(request, timeout=120) as got:
        return str(json.load(got)["usage"]["completion_tokens"])


def _tiny(preset: str) -> str:
    """The tiny preset of a released one's architecture."""
    architecture = PRESETS[preset].architecture
    of_it = (name for name, each in PRESETS.items() if each.architecture == architecture)
    return next((name for name in of_it if name.endswith("tiny")), "tiny")


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "nothing was said"


if __name__ == "__main__":
    sys.exit(main())
