"""Launch options of benchmarks, from their scripts, where their tables do not contain them.

InferenceMAX (github.com/SemiAnalysisAI/InferenceX, formerly InferenceMAX): benchmarks/*.sh at the commits of the runs, October 2025 to
March 2026. Its runs are the ones that state mean lengths: no other benchmark draws random lengths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from perfmodel.foundation.dtypes import Dtype
from perfmodel.validation.fields import optional_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Launch options of an engine.

    max_batch, max_tokens   of an attention rank; 0: the engine's defaults
    cache                   replaces the cache's stated dtype; None: as stated
    """

    max_batch: int = 0
    max_tokens: int = 0
    cache: Dtype | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Script:
    """Options of launch scripts for an engine, a model (prefix of its name) and chips (prefix; "" for any).

    of_clients   `max_batch` is the number of clients (--max-num-seqs=$CONC)
    """

    engine: str
    model: str
    chip: str = ""
    since: tuple[int, ...] = ()
    before: tuple[int, ...] = (99,)
    of_clients: bool = False
    launch: Launch = field(default_factory=Launch)

    def is_of(self, engine: str, model: str, chip: str, version: tuple[int, ...]) -> bool:
        same = engine == self.engine and model.startswith(self.model) and chip.startswith(self.chip)
        return same and self.since <= version < self.before


_SCRIPTS = (
    # 70b_fp8_h100_{docker,slurm}.sh: `--config=config.yaml` contains kv-cache-dtype: fp8, but vLLM reads such a file only if the flag is
    # written as two words (vllm/utils/__init__.py of 0.10.2, parse_args: "if '--config' in args"), so the cache stays in 16 bits
    _Script(engine="vllm", model="Llama-3-70B", chip="h100", before=(0, 11), of_clients=True, launch=Launch(cache=Dtype.BF16)),
    _Script(engine="vllm", model="Llama-3-70B", of_clients=True),  # 70b_fp8_h200_slurm.sh, 70b_fp8_b200_docker.sh
    _Script(engine="vllm", model="moonshotai/Kimi-K2.5", of_clients=True),  # kimik2.5_fp4_b200.sh, kimik2.5_int4_{b200,h200}.sh
    _Script(engine="vllm", model="gpt-oss-120b", chip="h", of_clients=True),  # gptoss_fp4_{h100,h200}.sh
    _Script(engine="vllm", model="gpt-oss-120b", chip="b200", launch=Launch(max_batch=512)),  # gptoss_fp4_b200.sh
    _Script(engine="vllm", model="MiniMaxAI/MiniMax-M2.5", chip="h100", launch=Launch(max_batch=256)),  # minimaxm2.5_fp8_h100.sh
    _Script(engine="tensorrt-llm", model="Llama-3-70B", launch=Launch(max_tokens=16384)),  # 70b_fp8_{h200,b200}_trt_slurm.sh
)


def launch_of(inputs: Mapping[str, Any], engine: str, chip: str, version: tuple[int, ...]) -> Launch:
    """Return the launch options of the run that `inputs` describe."""
    name = (inputs.get("model") or {}).get("name")
    if inputs.get("input_len_mean") is None or not name:
        return Launch()
    script = next((script for script in _SCRIPTS if script.is_of(engine, name, chip, version)), None)
    if script is None:
        return Launch()
    clients = optional_count(inputs, "batch") if script.of_clients else None
    return script.launch if clients is None else replace(script.launch, max_batch=clients)
