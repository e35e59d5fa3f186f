"""lm-eval: a task of multiple choice by local-completions, one of generated text by local-chat-completions."""

import json
import subprocess
import sys
from pathlib import Path

url, name, model = sys.argv[1:4]
Path("rows.json").write_text(
    "\n".join(
        json.dumps(
            {"question": f"{n} + 1 =", "choices": [f" {n + 1}", f" {n}"], "answer": 0, "text": str(n + 1)}
        )
        for n in range(4)
    )
)
COMMON = f"""
dataset_path: json
dataset_kwargs: {{data_files: {{test: {Path("rows.json").absolute()}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
Path("choice.yaml").write_text(
    f"task: local_choice\noutput_type: multiple_choice\n{COMMON}"
    'doc_to_choice: "{{choices}}"\ndoc_to_target: "{{answer}}"\nmetric_list: [{metric: acc}]\n'
)
Path("text.yaml").write_text(
    f"task: local_text\noutput_type: generate_until\n{COMMON}"
    'doc_to_target: "{{text}}"\ngeneration_kwargs: {until: ["\\n"], max_gen_toks: 8}\n'
    "metric_list: [{metric: exact_match}]\n"
)
RUNS = (
    (
        "local-completions",
        "completions",
        f",tokenizer={model},tokenizer_backend=huggingface",
        "local_choice",
        (),
    ),
    ("local-chat-completions", "chat/completions", "", "local_text", ("--apply_chat_template",)),
)
for kind, path, more, task, flags in RUNS:
    where = f"model={name},base_url={url}/v1/{path},num_concurrent=2,max_retries=1{more}"
    command = ["lm_eval", "--model", kind, "--model_args", where, "--tasks", task, "--include_path", "."]
    subprocess.run([*command, "--output_path", f"out-{task}", *flags], check=True)
    (found,) = Path(f"out-{task}").rglob("results*.json")
    scores = json.loads(found.read_text())["results"][task]
    assert any(isinstance(value, float) and 0 <= value <= 1 for value in scores.values()), scores
