"""Flags of llama.cpp, Ollama, vLLM and mlx-lm that no command has: what to write here in their place.

`benchmarks/checks/peer_flags.py` compares the table with another version of these programs.
"""

from collections.abc import Mapping

_ALWAYS = "always on"
_OF_FILE = "the model's file says it"
_OF_TEMPLATE = "the chat template says it"
_ADAPTERS = "--lora FILE[:SCALE] loads a LoRA adapter; requests choose among them"
_NO_CONTROL = "control vectors are not supported"
_IMAGES = "--mmproj FILE names a projector, --no-mmproj leaves it out; the projector's file sets the rest"
_NO_SOUND = "audio and video are not supported"
_MEDIA = "--media-path DIR, --image-urls, or data: URLs"
_NO_ROPE = "the file's metadata sets the rotary embedding; there is no flag to change it"
_NO_TRAINING = "there is no training here"
_NO_DIFFUSION = "diffusion models are not supported"
_NO_SPEECH = "speech models are not supported"
_OTHER_TOOL = "of another tool of llama.cpp, which has no counterpart here"
_PLACEMENT = "threads run where the system puts them; start `taskset` or `numactl` in front of engine"
_DRAFTS = "drafts run as the model does; --draft-model and --draft-tokens are their flags"
_LOGS = "engine -v COMMAND logs more; redirect standard error into a file"
_MEMORY = "-c, --parallel and --cache-type set the memory of the cache; `engine show MODEL` prints it"
_PREFIXES = "the prefix cache shares and evicts blocks by itself"
_ONE_HUB_NAME = "-m hf:user/repo:QUANT or hf:user/repo/file.gguf"
_BY_NAME = "-m NAME; `engine list --all` shows the names"
_NO_PIPELINE = "--tensor-parallel N, or --split layer for whole layers"
_SCHEDULER = "the scheduler needs no setting; --parallel N and --ubatch-size N bound a step"
_CUDA_GRAPHS = "CUDA graphs are captured by themselves"
_CORS = "--cors-origin ORIGIN admits an origin"
_TLS = "put a reverse proxy in front for TLS, headers or paths"

_ANSWERS: Mapping[str, str] = {
    # Devices, memory, threads
    "-ngl --gpu-layers": "all layers are on the --device; cpu for none, --n-cpu-moe for experts",
    "--n-gpu-layers --num-gpu": "all layers are on the --device; cpu for none, --n-cpu-moe for experts",
    "-ncffn --n-cpu-ffn -ot --override-tensor": "--n-cpu-moe N or --cpu-moe keeps experts in host memory",
    "-mg --main-gpu -dev": "--device cuda:N",
    "--list-devices": "engine doctor",
    "--rpc": "--replicas or --ray runs several engines; one model is not split over hosts",
    "-fit -fitp -fitt -fitc": "without -c the context fits the device's memory",
    "--fit --fit-print --fit-target --fit-ctx": "without -c the context fits the device's memory",
    "--gpu-memory-utilization --kv-cache-memory-bytes --num-gpu-blocks-override --swap-space": _MEMORY,
    "--kv-unified-per-slot -kvu --kv-unified": "one paged cache serves all sequences",
    "-no-kvu --no-kv-unified --block-size": "one paged cache serves all sequences",
    "--cpu-offload-gb --kv-offloading-size": "--n-cpu-moe N keeps experts in host memory",
    "--kv-offloading-backend": "--n-cpu-moe N keeps experts in host memory",
    "-kvo --kv-offload -nkvo": "keys and values lie on the --device",
    "--no-kv-offload --op-offload --no-op-offload": "keys and values lie on the --device",
    "-ctk --cache-type-k -ctv": "--cache-type f16, q8_0 or q4_0, for both",
    "--cache-type-v --kv-cache-dtype --kv-bits": "--cache-type f16, q8_0 or q4_0, for both",
    "--kv-group-size --quantized-kv-start --calculate-kv-scales": "--cache-type q8_0",
    "--max-kv-size": "-c N",
    "--mlock -lm --load-mode -lzm --lazy-mode --low-vram": "--no-mmap copies the weights into memory",
    "--repack -nr --no-repack": "weights are used as they are stored, and checked at load",
    "--no-host --check-tensors": "weights are used as they are stored, and checked at load",
    "-tb --threads-batch --num-thread": "--threads N, for prompts too",
    "-C --cpu-mask -Cr --cpu-range --cpu-strict --prio --poll --numa": _PLACEMENT,
    "-Cb --cpu-mask-batch -Crb --cpu-range-batch --cpu-strict-batch --prio-batch --poll-batch": _PLACEMENT,
    "--pipeline-parallel-size -pp --pipeline --data-parallel-rank": _NO_PIPELINE,
    "--tensor-parallel-size": "--tensor-parallel N",
    "--data-parallel-size -dp --api-server-count -asc": "--replicas N",
    "--enable-expert-parallel": "--expert-parallel",
    "--distributed-executor-backend --disable-custom-all-reduce": "ranks exchange by themselves",
    "--all2all-backend": "ranks exchange by themselves",
    # Context, batches, prefixes
    "--max-model-len --num-ctx": "-c N",
    "--max-num-seqs --prompt-concurrency --decode-concurrency": "--parallel N",
    "-b --batch-size --max-num-batched-tokens --num-batch --prefill-step-size": "--ubatch-size N",
    "-cb --cont-batching --enable-chunked-prefill --enable-prefix-caching --async-scheduling": _ALWAYS,
    "-fa --flash-attn --jinja --cache-prompt --embedding --embeddings --rerank --reranking --props": _ALWAYS,
    "-nocb --no-cont-batching --no-cache-prompt --no-enable-prefix-caching": "it cannot be switched off",
    "-cram --cache-ram --cache-reuse --cache-idle-slots --no-cache-idle-slots --prompt-cache-size": _PREFIXES,
    "--prompt-cache-bytes -sps --slot-prompt-similarity --prefix-caching-hash-algo": _PREFIXES,
    "--prompt-cache --prompt-cache-all": "engine serve --slot-save-path saves prefixes",
    "--prompt-cache-ro --prompt-cache-file": "engine serve --slot-save-path saves prefixes",
    "--swa-full": "windowed layers keep their window",
    "--swa-checkpoints -cms --checkpoint-min-step": "windowed layers keep their window",
    "--disable-sliding-window --disable-cascade-attn": "attention is computed as the model has it",
    "-dt --defrag-thold": "attention is computed as the model has it",
    "--max-num-partial-prefills --max-long-partial-prefills --long-prefill-token-threshold": _SCHEDULER,
    "--scheduling-policy --scheduler-cls --stream-interval --num-lookahead-slots": _SCHEDULER,
    "--num-keep": "--keep N",
    "--enforce-eager --cudagraph-capture-sizes --max-cudagraph-capture-size --cuda-graph-sizes": _CUDA_GRAPHS,
    "--max-seq-len-to-capture --compilation-config -O --optimization-level": _CUDA_GRAPHS,
    "-gan --grp-attn-n": "attention is computed as the model has it",
    "-gaw --grp-attn-w --attention": "attention is computed as the model has it",
    # Models and files
    "-hf -hfr --hf-repo -hff --hf-file": _ONE_HUB_NAME,
    "-mu --model-url": f"{_ONE_HUB_NAME}, or download the file and give its path",
    "-dr --docker-repo": f"{_ONE_HUB_NAME}; models of Docker Hub are not fetched",
    "-hft --hf-token": "log in with `hf auth login`, or set HF_TOKEN",
    "--download-dir": "set HF_HUB_CACHE to the folder",
    "--revision --code-revision --tokenizer-revision": "the newest commit of the repository is taken",
    "-cl --cache-list": "engine list",
    "--trust-remote-code": "no code of a model's repository is ever run",
    "--dtype --quantization -q --load-format --model-impl --tokenizer-mode --task --runner": _OF_FILE,
    "--tokenizer --hf-config-path --config-format --hf-overrides --override-kv --convert": _OF_FILE,
    "--generation-config --override-generation-config --pooler-config --override-pooler-config": _OF_FILE,
    "--skip-tokenizer-init --use-default-chat-template --extra-eos-token --spm-infill": _OF_FILE,
    "--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --rope-theta": _NO_ROPE,
    "--yarn-orig-ctx --yarn-ext-factor --yarn-attn-factor --yarn-beta-slow --yarn-beta-fast": _NO_ROPE,
    "--served-model-name": "--alias NAME",
    "--lora-scaled --lora-modules --enable-lora --adapter-path": _ADAPTERS,
    "--max-loras --max-lora-rank --lora-dtype --max-cpu-loras --fully-sharded-loras": _ADAPTERS,
    "--lora-init-without-apply": "--lora FILE:0 loads an adapter that only requests apply",
    "--control-vector --control-vector-scaled --control-vector-layer-range": _NO_CONTROL,
    "-mmu --mmproj-url --mmproj-auto --mmproj-offload --no-mmproj-offload --no-mmproj-auto": _IMAGES,
    "--image-min-tokens --image-max-tokens --mtmd-batch-max-tokens --mm-processor-kwargs": _IMAGES,
    "--mm-encoder-tp-mode --interleave-mm-strings --skip-mm-profiling --limit-mm-per-prompt": _IMAGES,
    "--audio --video --video-fps --video-timestamp-interval --video-ffmpeg-dir": _NO_SOUND,
    "--media-io-kwargs --allowed-local-media-path": _MEDIA,
    "--mm-processor-cache-gb": "--image-cache MIB",
    # Prompts and answers
    "--num-predict": "-n N",
    "-sysf --system-prompt-file": '--system "$(cat FILE)"',
    "-bf --binary-file --in-file --context-file": "-f FILE",
    "--format": "--json-schema {} for any JSON",
    "--think --reasoning": "--reasoning-effort, or --chat-template-kwargs with the template's own switch",
    "-rea": "--reasoning-effort, or --chat-template-kwargs with the template's own switch",
    "--hidethinking --reasoning-preserve --no-reasoning-preserve": "--reasoning-format",
    "--reasoning-budget-message": "--reasoning-budget N ends the reasoning as the template does",
    "--chat-template-args --chat-template-config": "--chat-template-kwargs JSON",
    "--default-chat-template-kwargs": "--chat-template-kwargs JSON",
    "--ignore-chat-template": "--raw",
    "--no-jinja --skip-chat-parsing --no-skip-chat-parsing": _OF_TEMPLATE,
    "--prefill-assistant --no-prefill-assistant": "a last message of the assistant is continued",
    "--prefill-response": "a last message of the assistant is continued",
    "--tool-call-parser --reasoning-parser --enable-auto-tool-choice --tool-parser-plugin": _OF_TEMPLATE,
    "--chat-template-content-format --response-role --guided-decoding-backend": _OF_TEMPLATE,
    "-cnv --conversation -i --interactive -if --interactive-first -st --single-turn": "engine chat",
    "-no-cnv --no-conversation": "--raw",
    "-mli --multiline-input": 'three quotes (""") begin and end a text of several lines in engine chat',
    "--in-prefix --in-suffix --in-prefix-bos": "the chat template writes what stands around a message",
    "-e --escape --no-escape": "prompts are taken as they are; $'...' of the shell has escapes",
    "--verbose-prompt -ptc --print-token-count --show-count --ids": "--show-prompt, or engine tokenize",
    "-sp": "--special",
    "--no-display-prompt --display-prompt": "--show-prompt alone shows it",
    "-co --color --log-colors --simple-io --nowordwrap": "by itself on a terminal; NO_COLOR=1 for none",
    "--stdin": "a pipe or `-f -` is read",
    "--parse-special --no-parse-special": "--special",
    "-l": "--logit-bias",
    "--adaptive-target --adaptive-decay -bs --backend-sampling": "not a sampler of the command line",
    "--min-tokens-to-keep --logits-processors --logits-processor-pattern": "not a sampler here",
    "--max-logprobs --logprobs-mode": "--logprobs N",
    "--perf --no-perf --show-timings --no-show-timings": "--stats/--no-stats",
    # Speculative decoding
    "--num-draft-tokens --spec-draft-n-max --draft-n": "--draft-tokens N",
    "--spec-draft-model --speculative-config": "--draft-model MODEL, or --draft-ngram N",
    "--spec-type --dflash --spec-default": "--draft-model MODEL, --draft-ngram N, or --draft-mtp N",
    "--eagle3": "--draft-model FILE, which may be an EAGLE-3 file",
    "--mtp": "--draft-mtp N",
    "-lcs --lookup-cache-static -lcd --lookup-cache-dynamic": "--draft-ngram N looks up in the text itself",
    "--spec-ngram-mod-n-min --spec-ngram-mod-n-max --spec-ngram-mod-n-match": "--draft-ngram N",
    "--spec-ngram-simple-size-n --spec-ngram-simple-size-m --spec-ngram-simple-min-hits": "--draft-ngram N",
    "--spec-ngram-map-k-size-n --spec-ngram-map-k-size-m --spec-ngram-map-k-min-hits": "--draft-ngram N",
    "--spec-ngram-map-k4v-size-n --spec-ngram-map-k4v-size-m": "--draft-ngram N",
    "--spec-ngram-map-k4v-min-hits": "--draft-ngram N",
    "--spec-ngram-size-n --spec-ngram-size-m --spec-ngram-min-hits": "--draft-ngram N",
    "--spec-draft-hf -hfd -hfrd --hf-repo-draft": "--draft-model hf:user/repo:QUANT",
    "--spec-draft-threads -td --threads-draft --spec-draft-threads-batch -tbd --threads-batch-draft": _DRAFTS,
    "--spec-draft-cpu-mask -Cd --cpu-mask-draft --spec-draft-cpu-range -Crd --cpu-range-draft": _DRAFTS,
    "--spec-draft-cpu-strict --cpu-strict-draft --spec-draft-prio --prio-draft --spec-draft-poll": _DRAFTS,
    "--poll-draft --spec-draft-cpu-mask-batch -Cbd --cpu-mask-batch-draft --poll-batch-draft": _DRAFTS,
    "--spec-draft-cpu-range-batch -Crbd --cpu-range-batch-draft --spec-draft-poll-batch": _DRAFTS,
    "--spec-draft-cpu-strict-batch --cpu-strict-batch-draft": _DRAFTS,
    "--spec-draft-prio-batch --prio-batch-draft": _DRAFTS,
    "--spec-draft-type-k -ctkd --cache-type-k-draft --spec-draft-type-v -ctvd --cache-type-v-draft": _DRAFTS,
    "--spec-draft-override-tensor -otd --override-tensor-draft --spec-draft-cpu-moe -cmoed": _DRAFTS,
    "--cpu-moe-draft --spec-draft-n-cpu-moe --spec-draft-ncmoe -ncmoed --n-cpu-moe-draft": _DRAFTS,
    "--spec-draft-device -devd --device-draft --spec-draft-ngl -ngld --gpu-layers-draft": _DRAFTS,
    "--n-gpu-layers-draft --spec-draft-p-split --draft-p-split --spec-draft-p-min --draft-p-min": _DRAFTS,
    "--spec-draft-backend-sampling --no-spec-draft-backend-sampling --spec-draft-n-min": _DRAFTS,
    "--draft-min --draft-n-min --spec-synth-len --spec-synth-rates": _DRAFTS,
    # The server
    "--no-webui": "--no-ui",
    "--webui": "--ui",
    "--ui-mcp-proxy --webui-mcp-proxy": "--mcp-servers-config FILE: the server itself reaches MCP servers",
    "--no-ui-mcp-proxy --no-webui-mcp-proxy -no-ag --no-agent": "off unless it is asked for",
    "-ag --agent --tools-runtime --tool-server": "--tools and --tools-dir",
    "--ui-config --webui-config": "the page keeps its settings in the browser",
    "--ui-config-file --webui-config-file": "the page keeps its settings in the browser",
    "--keepalive": "engine serve --sleep-idle-seconds N",
    "--enable-sleep-mode": "--sleep-idle-seconds N",
    "-to --timeout": "--read-timeout, --write-timeout and --idle-timeout",
    "--cors-origins --allowed-origins --cors-methods --cors-headers --allowed-methods": _CORS,
    "--allowed-headers --allow-credentials --cors-credentials --no-cors-credentials": _CORS,
    "--ssl-key-file --ssl-cert-file --ssl-keyfile --ssl-certfile --ssl-ca-certs --ssl-cert-reqs": _TLS,
    "--enable-ssl-refresh --api-prefix --root-path --path --middleware --uds --reuse-port": _TLS,
    "--threads-http --sse-ping-interval --headless": "the server needs no setting for it",
    "--h11-max-incomplete-event-size": "--max-body and --header-timeout are its limits",
    "--h11-max-header-count": "--max-body and --header-timeout are its limits",
    "--server-base": "engine ps --url URL",
    "--disable-uvicorn-access-log --disable-log-requests --max-log-len": "--no-access-log",
    "--enable-log-requests --enable-log-outputs": "the access log has a line for each request",
    "--enable-request-id-headers": "the access log has a line for each request",
    "--disable-log-stats --enable-server-load-tracking": "/metrics has the figures; --no-metrics",
    "--otlp-traces-endpoint": "/metrics has the figures; --no-metrics",
    "--collect-detailed-traces --show-hidden-metrics-for-version": "/metrics has the figures",
    "--kv-cache-metrics": "/metrics has the figures",
    "--disable-fastapi-docs --enable-tokenizer-info-endpoint": "/openapi.json and /props are always there",
    "--enable-prompt-tokens-details --enable-force-include-usage --return-tokens-as-token-ids": _ALWAYS,
    "--no-warmup": _ALWAYS,
    # Logs
    "-v --verbose --log-verbose -lv --verbosity --log-verbosity": "before the command: engine -v ...",
    "--log-disable": "--no-stats",
    "--log-file --log-jsonl --no-log-jsonl --log-prompts-dir --log-config-file": _LOGS,
    "--log-prefix --no-log-prefix --log-timestamps --no-log-timestamps --log-level": _LOGS,
    "--uvicorn-log-level --log-error-stack": _LOGS,
    # Measuring
    "-npp -ntg -npl -pps -tgs": "engine bench -p N -n N -b N",
    "--ppl-stride --ppl-output-type --ppl --no-ppl --chunks --chunk --from-chunk": _OTHER_TOOL,
    "--hellaswag --hellaswag-tasks --winogrande --winogrande-tasks --multiple-choice": _OTHER_TOOL,
    "--multiple-choice-tasks --save-logits --logits-output-dir --tensor-filter --check": _OTHER_TOOL,
    "--kl-divergence --save-all-logits": "engine parity --a FILE --b FILE compares two models",
    "--kl-divergence-base": "engine parity --a FILE --b FILE compares two models",
    "-ofreq --output-frequency --output-format": _OTHER_TOOL,
    "--save-frequency --process-output --show-statistics": _OTHER_TOOL,
    "--chunk-size --chunk-separator --junk --pos --method --pca-batch --pca-iter": _OTHER_TOOL,
    "--positive-file --negative-file --output-file -ns --sequences": _OTHER_TOOL,
    "--embd-normalize --embd-output-format": "/v1/embeddings of engine serve",
    "--embd-separator --cls-separator": "/v1/embeddings of engine serve",
    "--completion-bash": "engine --install-completion",
    "--usage": "--help",
    # What is not here
    "--tts-lang --tts-speaker-file": _NO_SPEECH,
    "--diffusion-steps --diffusion-visual --diffusion-eps --diffusion-algorithm": _NO_DIFFUSION,
    "--diffusion-alg-temp --diffusion-block-length --diffusion-cfg-scale": _NO_DIFFUSION,
    "--diffusion-add-gumbel-noise": _NO_DIFFUSION,
    "-lr --learning-rate -lr-min": _NO_TRAINING,
    "--learning-rate-min -decay-epochs --learning-rate-decay-epochs": _NO_TRAINING,
    "-wd --weight-decay -val-split --val-split -epochs --epochs -opt --optimizer": _NO_TRAINING,
    "--embd-gemma-default --fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default": _BY_NAME,
    "--fim-qwen-7b-spec --fim-qwen-14b-spec --fim-qwen-30b-default --gpt-oss-20b-default": _BY_NAME,
    "--gpt-oss-120b-default --vision-gemma-4b-default --vision-gemma-12b-default": _BY_NAME,
    "--draft-quantize --quantize": "files are run as they are stored; engine quantize IN OUT TYPE writes another type",
    "--modelfile --parameters --license --template": "engine show MODEL",
    "--experimental --truncate --dimensions --lib-dir --quantize-activations -qa": "not an option here",
}

FOREIGN: Mapping[str, str] = {name: answer for names, answer in _ANSWERS.items() for name in names.split()}
"""Flag -> what to write in its place, or why there is nothing. A command's own flag of that name comes first."""

_ALL_LAYERS, _SWITCH = "[1-9][0-9]*|-1|all|auto", "on|off|auto|0|1|"
_WITHOUT_EFFECT: Mapping[str, str] = {
    "-ngl --gpu-layers --n-gpu-layers": _ALL_LAYERS,
    "-fa --flash-attn": _SWITCH,
    "-cb --cont-batching --jinja --embedding --embeddings --props --no-warmup": "",
}
NO_EFFECT: Mapping[str, str] = {
    name: values for names, values in _WITHOUT_EFFECT.items() for name in names.split()
}
"""Flags of llama-server that `serve` ignores with a warning, since they ask for what holds anyway. Each maps to a
pattern of the values that are ignored, which matches the empty text where the flag may stand alone."""
