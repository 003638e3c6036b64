"""Examples and terms at the end of the help of each verb."""

from __future__ import annotations

_JOB = "--model llama-3-8b --cluster dgx-h100 --chips 64 --global-batch 512 --seq-len 8k"

#: Verb -> two example command lines.
EXAMPLES: dict[str, tuple[str, str]] = {
    "predict": (f"predict {_JOB} --tp 2 --profile megatron", "predict plan.yaml --chips 128 --seq-len 8k,16k --csv table.csv"),
    "search": (
        f"search {_JOB} --save plan.yaml",
        "search --model config.json --cluster dgx-h100 --nodes 4,8 --batch-tokens 4M --seq 8k",
    ),
    "serve": (
        "serve --model llama-3.3-70b --cluster dgx-h100 --chips 8 --input-len 1k --output-len 1k --concurrency 64",
        "serve --model deepseek-v3 --cluster hgx-h200 --chips 8 --input-len 1k --output-len 1k --concurrency 64 --operators",
    ),
    "explore": (
        f"explore {_JOB} --tp 2 --vary chip.memory.bandwidth=1..8TB/s",
        f"explore {_JOB.replace('--cluster', '--from')} --to dgx-b200",
    ),
    "sweep": ("sweep llama-3-chips --out results.parquet", "sweep study.yaml --out results.csv --jobs 1"),
    "explain": ("explain llama-3.1-405b --why-not tp=16,pp=8", "explain plan.yaml --trust"),
    "advise": ("advise train.toml --cluster dgx-h100 --chips 64", "advise llama-3.1-405b"),
    "export": ("export plan.yaml --to torchtitan --out train.toml", "export fsdp --to trl"),
    "compare": ("compare plan.yaml fsdp", "compare a.yaml b.yaml --plot plans.png"),
    "trace": ("trace plan.yaml --out trace.json.gz", "trace --measured torch_profile.json --plan plan.yaml"),
    "report": ("report plan.yaml --out report.html", "report plan.yaml fsdp --out comparison.html"),
    "web": ("web", "web --port 8600 --no-browser"),
    "mcp": ("mcp", "mcp --help"),
    "run": ("run plan.yaml --shrink", "run plan.yaml --steps 50 --save runs.jsonl"),
    "audit": ("audit plan.yaml", "audit fsdp --rank 3 --json"),
    "calibrate": ("calibrate", "calibrate --brief --save this-machine.yaml"),
    "validate": ("validate cases.jsonl --by source,chip", "validate cases.jsonl --out predictions.csv --plots figures"),
    "fit": ("fit runs.csv --save mine.yaml", "fit train.log --plan plan.yaml --profile torchtitan --json"),
    "demo": ("demo", "demo --json"),
    "shard": (
        "shard resnet50 --cluster dgx-a100 --chips 16",
        'shard mynets:make_net --inputs "x=float32[64,3,224,224]" --cluster dgx-a100 --chips 16',
    ),
    "import": (
        'import "torch.nn:Linear(8, 8)" --inputs "float32[4,8]"',
        'import mynets:make_net --inputs "x=float32[64,3,224,224]" --search 32 --save graph.json',
    ),
    "chips": ("chips", "chips --json"),
    "chip": ("chip --from a100-spec", "chip --from mine.yaml --save chip.yaml"),
    "clusters": ("clusters", "clusters dgx-h100"),
    "models": ("models", "models llama-3-8b"),
    "networks": ("networks", "networks --json"),
    "profiles": ("profiles", "profiles megatron"),
    "engines": ("engines", "engines vllm --json"),
    "assumptions": ("assumptions --sources", "assumptions --json"),
    "schema": ("schema chip", "schema predict --json"),
    "doctor": ("doctor", "doctor --json"),
    "calibrations": ("calibrations", "calibrations h100"),
    "limits": (
        "limits --model llama-3-8b --cluster dgx-h100 --chips 8 --seq-len 8k",
        "limits --model llama-3-70b --cluster dgx-h100 --seq-len 8k --zero 1 --recompute none",
    ),
}

_WORDS = (
    "profile: the assumed framework, and what it does with a plan: what it overlaps, keeps and rounds (`perfmodel profiles`)",
    "calibration: measurements of a chip; partial calibration: its best point only, or measurements of another chip; "
    "prior: the mean of the vendor's other measured chips; spec sheet: neither is known",
    "based on: which of these a number comes from",
    "sizes: 8k is 8192 and 4M is 4194304; tokens to train on count in powers of ten, 15T is 15e12",
)
_DEFAULTS = (
    "left out: micro-batch 1, recompute none, schedule 1f1b (interleaved with --virtual-stages), sequence parallelism where tp > 1, ZeRO 0 "
    "(3 with --dp-shard or --fsdp), bf16-mixed, adamw, flash attention or the profile's"
)
_SEARCHED = "left out: every value of a knob is tried; bf16-mixed, adamw, flash attention or the profile's"


def epilog(verb: str) -> str:
    """Return the examples and terms of a verb, with fixed line breaks."""
    from perfmodel.cli.help import shell_lines

    examples = [line for example in EXAMPLES.get(verb, ()) for line in shell_lines(f"perfmodel {example}", width=78)]
    lines = ["\b", "Examples:", *(f"  {line}" for line in examples)]
    if verb in ("predict", "search"):
        lines += ["", _DEFAULTS if verb == "predict" else _SEARCHED]
        lines += [part for word in _WORDS for part in ("", word)]
    return "\n".join(lines)
