"""Engine of a published run: a profile in `strategies/engines/`, by the words of its `framework` and by its version."""

from __future__ import annotations

import re

from perfmodel.frameworks.engine import GENERIC_ENGINE, version_of

#: Chips on which vLLM of 2024 launched every kernel (Argonne's scripts: --enforce-eager on ROCm).
_EAGER_CHIPS = ("mi210", "mi250")
#: Chips that were too new for tuned libraries: they had no kernels for few rows either.
_UNTUNED_CHIPS = ("mi300",)


def engine_of(framework: object, *, chip: str = "") -> str:
    """Return the name of a profile; `generic` if no engine is named.

    framework   "vllm 0.10.2", "TensorRT-LLM v0.17 (in-flight batching)", ...; vLLM and TensorRT-LLM without a version are those of 2024,
                because later runs state their version
    """
    text = framework.lower()[:200] if isinstance(framework, str) else ""
    if "nim" in re.findall(r"[a-z]+", text):
        return "nim"
    if "vllm" in text:
        if version_of(text) >= (0, 9) or "nan" in text or "nightly" in text:
            return "vllm"
        if chip.startswith(_UNTUNED_CHIPS):
            return "vllm-2024-mi300x"
        return "vllm-2024-eager" if chip.startswith(_EAGER_CHIPS) else "vllm-2024"
    if "trtllm" in text or "tensorrt-llm" in text or "tensorrt llm" in text:
        modern = version_of(text) >= (1, 0) or "dynamo" in text or "pytorch" in text or "nan" in text
        if modern:
            return "tensorrt-llm"
        return "tensorrt-llm-2023" if "nemo" in text or () < version_of(text) < (0, 9) else "tensorrt-llm-2024"
    for name, engine in (
        ("sglang", "sglang"),
        ("fastertransformer", "fastertransformer"),
        ("gpt-fast", "gpt-fast"),
        ("mii", "deepspeed-mii"),
    ):
        if name in text:
            return engine
    if chip.startswith("gaudi") and ("deepspeed" in text or "optimum" in text):
        return "optimum-habana"
    return "deepspeed-mii" if "deepspeed" in text else GENERIC_ENGINE
