"""lm-evaluation-harness with its own `hf` model and with ours, on one tiny model with random weights and tasks of every
kind of request: the figures and the generated texts are equal.

    pip install lm-eval[hf]
    python -m benchmarks.checks.lm_eval_backend

Prints a line for each task, and exits with 1 where they differ. Nothing is downloaded.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from quengine.evaluation import lm_eval_model  # noqa: F401  (registers the model)
from tests.llama_cpp_convert import VOCAB, write_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DOCUMENTS = [
    {"question": f"the cat {n} sat on", "choices": [" the mat", " a dog", f" {n} zz"], "answer": n % 3}
    for n in range(6)
]
COMMON: dict[str, Any] = {
    "dataset_path": "json",
    "test_split": "test",
    "doc_to_text": "{{question}}",
    "num_fewshot": 0,
}
TASKS: list[dict[str, Any]] = [
    COMMON
    | {
        "task": "choices",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    COMMON
    | {
        "task": "last_word",
        "output_type": "loglikelihood",
        "doc_to_target": "{{choices[0]}}",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    },
    COMMON
    | {
        "task": "texts",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{(question + choices[0] + ' ') * 40}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    COMMON
    | {
        "task": "generation",
        "output_type": "generate_until",
        "doc_to_target": "a",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
]


def write_model(folder: Path) -> None:
    torch.manual_seed(0)
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=transformers.AutoTokenizer.from_pretrained(folder).eos_token_id,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def results(name: str, arguments: dict[str, Any], data: Path, templated: bool) -> dict[str, dict[str, Any]]:
    """Figures and responses of each task."""
    from lm_eval import simple_evaluate

    tasks = [task | {"dataset_kwargs": {"data_files": {"test": str(data)}}} for task in TASKS]
    found = simple_evaluate(
        name,
        arguments,
        tasks=tasks,
        apply_chat_template=templated,
        bootstrap_iters=0,
        log_samples=True,
        device="cpu",
    )
    assert found is not None
    return {
        task["task"]: {
            "figures": found["results"][task["task"]],
            "responses": [sample["resps"] for sample in found["samples"][task["task"]]],
        }
        for task in TASKS
    }


def differs(one: Any, other: Any) -> bool:
    """Whether values within lists and dicts differ, numbers by more than their rounding."""
    if isinstance(one, dict):
        return any(differs(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) != len(other) or any(map(differs, one, other))
    if isinstance(one, float):
        return abs(one - other) > 2e-3 * max(1.0, abs(one))
    return bool(one != other)


def main() -> int:
    wrong = 0
    torch.set_num_threads(1)  # more take longer for a model of this size
    with tempfile.TemporaryDirectory() as temporary:
        folder, data = Path(temporary) / "model", Path(temporary) / "data.jsonl"
        folder.mkdir()
        write_model(folder)
        data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
        for templated in (False, True):
            theirs = results("hf", {"pretrained": str(folder), "dtype": "float32"}, data, templated)
            ours = results("quengine", {"pretrained": str(folder), "batch_size": 4}, data, templated)
            for task, expected in theirs.items():
                bad = differs(expected, ours[task])
                wrong += bad
                shown = {
                    key: value for key, value in ours[task]["figures"].items() if isinstance(value, float)
                }
                print(f"{'WRONG' if bad else 'equal'}  {task}{' in a chat' if templated else ''}: {shown}")
                if bad:
                    print(f"  theirs {expected}\n  ours   {ours[task]}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
