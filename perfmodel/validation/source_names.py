"""Names of the sources of published runs."""

from collections.abc import Mapping

#: Names of the sources of published runs, by the prefix of the ids of their cases.
SOURCE_NAMES: Mapping[str, str] = {
    "bridge": "NeMo Megatron Bridge",
    "colossal": "ColossalAI",
    "dgxc": "DGX Cloud benchmarks",
    "dle": "NVIDIA DeepLearningExamples",
    "ibmfsdp": "IBM FSDP",
    "ironwood": "TPU recipes, Ironwood",
    "korthikanti": "Korthikanti et al., 2022",
    "launcher": "NeMo Launcher",
    "launcher23": "NeMo Launcher, 2023",
    "llama3": "Llama 3 paper",
    "llmc": "llm.c",
    "llmfoundry": "LLM Foundry (MPT)",
    "maxtext": "MaxText",
    "mcore": "Megatron-Core tests",
    "megascale": "MegaScale",
    "megatron": "Megatron-LM",
    "nanotron": "nanotron",
    "nemo": "NeMo",
    "nemo2407a": "NeMo 24.07, August 2024",
    "nemo2407b": "NeMo 24.07, October 2024",
    "simumax": "SimuMax",
    "titan": "torchtitan, H200",
    "titan24": "torchtitan, 2024",
    "titan2506": "torchtitan, June 2025",
    "tpurec": "TPU recipes",
    "uci": "UCI measurements",
    "vtrain": "vTrain",
}


def source_name(source: str) -> str:
    """Return the name of a source as figures print it; a source of the user's own keeps its prefix."""
    return SOURCE_NAMES.get(source, source)
