"""Read exported files with the parsers of their frameworks: `python readers.py FRAMEWORK` in the environment of requirements.txt.

Standard input: a JSON list of folders, each with the files of one export. Standard output, last line: a JSON list with one object for
each folder: `values`, what the parser holds under the framework's own names, or `refused`, the parser's message. perfmodel is not imported.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import yaml

Values = dict[str, Any]


def launch_words(folder: Path, program: str) -> list[str]:
    """The words after `program` in the launch script, with the shell's variables at their defaults."""
    text = (folder / "plan.sh").read_text(encoding="utf-8")
    text = text.replace("${NODE_RANK:-0}", "0").replace("${HEAD_NODE:-localhost}", "localhost")
    line = next(line for line in text.splitlines() if program in line and not line.startswith("#"))
    words = shlex.split(line)
    return words[words.index(program) + 1 :]


def launch_arguments(folder: Path) -> list[str]:
    """Return the words of the array ARGS in the launch script."""
    text = (folder / "plan.sh").read_text(encoding="utf-8")
    return shlex.split(text.split("ARGS=(\n")[1].split("\n)")[0], comments=True)


@contextlib.contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables for a block."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def read_accelerate(folder: Path) -> tuple[Values, list[str]]:
    """Read with `accelerate launch` up to the environment of its processes and the plugins they build; return the script's words too."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    args, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(launch_words(folder, "launch")))
    values: Values = {"launch.num_processes": args.num_processes, "launch.num_machines": args.num_machines}
    values |= {"launch.use_fsdp": args.use_fsdp, "launch.use_deepspeed": args.use_deepspeed, "launch.mixed_precision": args.mixed_precision}
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        _, variables = prepare_deepspeed_cmd_env(args)
    else:
        variables = prepare_multi_gpu_env(args)
    with environment({name: value for name, value in variables.items() if name.startswith(("ACCELERATE", "FSDP", "PARALLELISM"))}):
        if args.use_fsdp:
            fsdp = FullyShardedDataParallelPlugin()
            values |= {
                f"fsdp.{name}": getattr(fsdp, name) for name in ("fsdp_version", "reshard_after_forward", "activation_checkpointing")
            }
            values["fsdp.cpu_offload"] = type(fsdp.cpu_offload).__name__ == "CPUOffloadPolicy"
        if args.use_parallelism_config:
            axes = ParallelismConfig()
            names = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size", "sp_backend", "total_size")
            values |= {f"parallelism.{name}": getattr(axes, name) for name in names}
            values["parallelism.cp_comm_strategy"] = getattr(axes.cp_handler, "cp_comm_strategy", None)
        if args.use_deepspeed:
            deepspeed = DeepSpeedPlugin()
            values["deepspeed.zero_stage"] = deepspeed.zero_stage
            values |= {f"deepspeed.offload_{name}": getattr(deepspeed, f"offload_{name}_device") for name in ("optimizer", "param")}
    return values, args.training_script_args


def read_trl(folder: Path) -> Values:
    """Read with accelerate's launcher and TRL's parser of sft.py."""
    from trl import ModelConfig, ScriptArguments, SFTConfig, TrlParser

    values, words = read_accelerate(folder)
    words = [*words, "--use_cpu", "true"]  # no GPU: bf16 is refused without it
    _, trainer, model = TrlParser((ScriptArguments, SFTConfig, ModelConfig)).parse_args_and_config(words)
    return values | _plain({"trainer": vars(trainer), "model": vars(model)})


def read_deepspeed(folder: Path) -> Values:
    """Read with DeepSpeedConfig, for the number of data-parallel ranks that the launch line starts."""
    import deepspeed.comm as dist
    from deepspeed.runtime.config import DeepSpeedConfig

    words = launch_words(folder, "torchrun")
    options = dict(itertools.pairwise([*words, *launch_arguments(folder)]))
    ranks = int(options["--nnodes"]) * int(options["--nproc_per_node"])
    dist.get_rank, dist.get_world_size = (lambda group=None: 0), (lambda group=None: ranks)
    config = DeepSpeedConfig(str(folder / options["--deepspeed"]))
    zero = config.zero_config
    return _plain(
        {
            "world_size": config.world_size,
            "train_batch_size": config.train_batch_size,
            "train_micro_batch_size_per_gpu": config.train_micro_batch_size_per_gpu,
            "gradient_accumulation_steps": config.gradient_accumulation_steps,
            "bf16": config.bfloat16_config.enabled,
            "fp16": config.float16_config.enabled,
            "optimizer": config.optimizer_name,
            "zero_stage": int(zero.stage),
            "overlap_comm": zero.overlap_comm,
            "offload_optimizer": zero.offload_optimizer and zero.offload_optimizer.device,
            "offload_param": zero.offload_param and zero.offload_param.device,
        }
    )


def read_llama_factory(folder: Path) -> Values:
    """Read with LLaMA-Factory's parser of training arguments, and the files of accelerate or DeepSpeed that go with it."""
    from llamafactory.hparams.parser import _parse_train_args

    values = read_accelerate(folder)[0] if (folder / "plan.accelerate.yaml").exists() else {}
    config = yaml.safe_load((folder / "plan.yaml").read_text(encoding="utf-8"))
    if name := config.pop("deepspeed", None):  # read apart: the Trainer wants the processes that it starts
        from accelerate.utils.deepspeed import HfDeepSpeedConfig

        deepspeed = HfDeepSpeedConfig(str(folder / name))
        values |= {"deepspeed.zero_stage": deepspeed._stage, "deepspeed.offload": deepspeed.is_offload()}
    model, data, trainer, tuning, _ = _parse_train_args({**config, "use_cpu": True})
    return values | _plain({"model": vars(model), "data": vars(data), "trainer": vars(trainer), "tuning": vars(tuning)})


def read_axolotl(folder: Path) -> Values:
    """Read with axolotl's schema, with that of its Liger plugin."""
    _without("ring_flash_attn")
    from axolotl.integrations.liger.args import LigerArgs
    from axolotl.utils.schemas.config import AxolotlInputConfig

    class Config(AxolotlInputConfig, LigerArgs):
        """The schema that axolotl builds where the plugin is named."""

    config = yaml.safe_load((folder / "plan.yaml").read_text(encoding="utf-8"))
    unknown = set(config) - set(Config.model_fields)
    if unknown:  # the schema passes these over
        raise ValueError(f"no field of axolotl: {', '.join(sorted(unknown))}")
    values = _plain(Config(**config).model_dump())
    if config.get("deepspeed"):
        values["deepspeed.zero_stage"] = json.loads((folder / config["deepspeed"]).read_text())["zero_optimization"]["stage"]
    return values


def read_torchtitan_python(folder: Path) -> Values:
    """Read with ConfigManager of torchtitan 0.3, which imports the module and calls its function."""
    from dataclasses import asdict

    sys.path[:0] = [str(Path(sys.prefix) / "torchtitan-0.3"), str(folder)]
    sys.modules.pop("plan", None)
    _without("torchtitan.distributed.minimal_async_ep.kernels", "torch.utils.tensorboard")
    from torchtitan.config.manager import ConfigManager

    config = ConfigManager().parse_args(launch_words(folder, "torchtitan.train"))
    names = ("training", "parallelism", "compile")
    values = _plain({name: asdict(getattr(config, name)) for name in names})
    kind = type(config.activation_checkpoint).__qualname__
    return values | {"activation_checkpoint": kind, "model": config.model_spec.name, "flavor": config.model_spec.flavor}


def read_torchtitan(folder: Path) -> Values:
    """Read with ConfigManager of torchtitan 0.2, the last one that loads TOML."""
    _without("torchtitan.models.moe.kernels")
    from torchtitan.config.manager import ConfigManager

    words = launch_words(folder, "torchtitan.train")
    return _plain(ConfigManager().parse_args(words).to_dict())


#: Keys that Automodel's recipe reads one by one.
_AUTOMODEL_KEYS = {"local_batch_size": "step_scheduler.local_batch_size", "seq_len": "dataset.seq_len", "fp8": "fp8.enabled"}


def read_automodel(folder: Path) -> Values:
    """Read with NeMo Automodel's loader, its typed sections, and its parser of `distributed`."""
    from nemo_automodel.components.config.loader import load_yaml_config
    from nemo_automodel.recipes._dist_utils import parse_distributed_section
    from nemo_automodel.recipes._typed_config import RecipeConfig

    words = launch_words(folder, "--config")
    raw = load_yaml_config(words[0])
    recipe = RecipeConfig(raw)
    distributed = parse_distributed_section(raw.distributed.to_dict())
    strategy = distributed.pop("strategy_config")
    values = {key: value for key, value in distributed.items() if isinstance(value, (bool, int, str))}
    values |= {f"strategy.{key}": value for key, value in vars(strategy).items()} | {"strategy": type(strategy).__name__}
    values |= {name: raw.get(key) for name, key in _AUTOMODEL_KEYS.items()} | {"global_batch_size": recipe.step_scheduler.global_batch_size}
    values |= {"optimizer": type(recipe.optimizer).__name__, "loss": type(recipe.loss_fn).__name__}
    values |= {f"model.{key}": value for key, value in raw.model.to_dict().items()}
    values |= {f"peft.{key}": value for key, value in vars(raw.peft.instantiate()).items()} if "peft" in raw else {}
    return _plain(values)


def _without(*modules: str) -> None:
    """Stand in for modules of kernels, which do not import on a CPU and of which a parser uses no more than the names."""
    for name in modules:
        module = MagicMock(name=name)
        module.__spec__, module.__path__ = ModuleSpec(name, None), []
        sys.modules[name] = module


def read_megatron(folder: Path) -> Values:
    """Build megatron-core's records from the flags that have their names; the package has no parser of flags."""
    from dataclasses import fields

    import torch
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import transformer_config
    from megatron.core.transformer.transformer_config import TransformerConfig

    transformer_config.is_te_min_version = lambda *_, **__: True  # Transformer Engine does not import on a CPU

    text = (folder / "plan.sh").read_text(encoding="utf-8")
    flags: Values = {}
    for line in text.split("ARGS=(\n")[1].split("\n)")[0].splitlines():
        name, *values = shlex.split(line, comments=True)
        flags[name.removeprefix("--").replace("-", "_")] = _number(" ".join(values)) if values else True
    flags |= {theirs: flags.get(name) for theirs, name in _MEGATRON_NAMES.items()} | {"pipeline_dtype": torch.bfloat16}
    flags["add_bias_linear"] = "disable_bias_linear" not in flags
    flags["recompute_modules"] = str(flags["recompute_modules"]).split() if "recompute_modules" in flags else None
    flags["attention_backend"] = None
    values = {}
    for record in (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig):
        names = {item.name for item in fields(record) if item.init}
        values |= vars(record(**{name: value for name, value in flags.items() if name in names and value is not None}))
    return _plain({name: value for name, value in values.items() if name in flags})


def read_megatron_bridge(folder: Path) -> Values:
    """Check the overrides of a recipe against megatron-core's records, from which Megatron-Bridge derives its own."""
    from dataclasses import fields

    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    records = {"model": TransformerConfig, "optimizer": OptimizerConfig, "ddp": DistributedDataParallelConfig}
    values: Values = {}
    for word in launch_arguments(folder):
        key, _, value = word.partition("=")
        section, _, name = key.rpartition(".")
        if section in records and name not in {item.name for item in fields(records[section])}:
            raise ValueError(f"{key} is no field of {records[section].__name__}")
        values[key] = _number(value)
    for section in ("optimizer", "ddp"):
        records[section](**{key.rpartition(".")[2]: value for key, value in values.items() if key.startswith(f"{section}.")})
    return values


def read_ms_swift(folder: Path) -> Values:
    """Parse the arguments of `swift sft` over SftArguments, then load the preset of DeepSpeed and check packing.

    The rest of `__post_init__` is left out: it downloads the model.
    """
    from swift.arguments import SftArguments

    arguments = _swift_arguments(SftArguments, folder)
    arguments._check_padding_free()
    arguments._init_deepspeed()
    zero = (arguments.deepspeed or {}).get("zero_optimization", {})
    values = {"deepspeed.zero_stage": zero.get("stage", 0)}
    values |= {f"deepspeed.{name}": zero.get(name, {}).get("device", "none") for name in ("offload_optimizer", "offload_param")}
    return _plain(vars(arguments)) | values


def read_swift_megatron(folder: Path) -> Values:
    """Parse the arguments of `megatron sft` over MegatronSftArguments, then check Muon and the layout of virtual stages.

    The rest of `__post_init__` is left out: it downloads the model and starts the processes. `mcore_bridge` converts weights and
    needs Transformer Engine.
    """
    _without("mcore_bridge", "mcore_bridge.model")
    from swift.megatron.arguments import MegatronSftArguments

    arguments = _swift_arguments(MegatronSftArguments, folder)
    arguments._init_vpp_size()
    arguments._check_muon()
    return _plain(vars(arguments))


def _swift_arguments(kind: type, folder: Path) -> Any:
    """Return the arguments of ms-swift with the values that its parser reads, without `__post_init__`."""
    from swift.utils.utils import _patch_get_type_hints
    from transformers import HfArgumentParser

    with _patch_get_type_hints():  # as swift.utils.parse_args does
        parser = HfArgumentParser([kind])
    namespace, unknown = parser.parse_known_args(launch_arguments(folder))
    if unknown:
        raise ValueError(f"no argument of {kind.__name__}: {' '.join(unknown)}")
    arguments = object.__new__(kind)
    vars(arguments).update(vars(namespace))
    return arguments


def read_maxtext(folder: Path) -> Values:
    """Read with MaxText's pyconfig, for the number of devices that is the product of the mesh's axes in the file.

    Orbax and Pathways, for checkpoints and elastic training, are left out.
    """
    _without("orbax", "orbax.checkpoint", "pathwaysutils", "pathwaysutils.elastic")
    multi_tier = "orbax.checkpoint.experimental.emergency.multi_tier_checkpointing"
    _without("orbax.checkpoint.experimental", "orbax.checkpoint.experimental.emergency", multi_tier)
    import jax
    from maxtext.configs import pyconfig
    from maxtext.utils.max_utils import fill_unspecified_mesh_axes

    words = launch_words(folder, "maxtext.trainers.pre_train.train")
    mesh = yaml.safe_load((folder / words[0]).read_text(encoding="utf-8"))
    num_devices = math.prod(size for key, size in mesh.items() if key.startswith("ici_"))
    with patch.object(jax, "devices", return_value=jax.local_devices() * num_devices):
        overrides = ["skip_jax_distributed_system=true", f"base_output_directory={folder}"]
        config = pyconfig._initialize_pydantic(["train.py", *words, *overrides])
    fill_unspecified_mesh_axes([*config.ici_parallelism], config.num_target_devices, "ICI")
    return _plain(config.model_dump())


#: Fields of megatron-core with other names than Megatron-LM's flags (arguments.py, core_transformer_config_from_args).
_MEGATRON_NAMES = {
    "fp8": "fp8_format",
    "fp4": "fp4_format",
    "num_moe_experts": "num_experts",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
}


def _number(text: str) -> Any:
    """A flag's value as a number where it is one."""
    with contextlib.suppress(ValueError):
        return json.loads(text)
    return text


def _plain(value: Any, prefix: str = "") -> Any:
    """A tree as flat keys with values that JSON has; others as text."""
    if isinstance(value, dict):
        flat: Values = {}
        for key, entry in value.items():
            name = f"{prefix}{key}"
            flat |= _plain(entry, f"{name}.") if isinstance(entry, dict) else {name: _plain(entry)}
        return flat
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, str):
        return str(getattr(value, "value", value))
    return value if value is None or isinstance(value, (bool, int, float)) else str(getattr(value, "value", value))


READERS = {
    "megatron": read_megatron,
    "megatron-bridge": read_megatron_bridge,
    "trl": read_trl,
    "deepspeed": read_deepspeed,
    "llama-factory": read_llama_factory,
    "axolotl": read_axolotl,
    "torchtitan": read_torchtitan,
    "torchtitan-python": read_torchtitan_python,
    "nemo-automodel": read_automodel,
    "ms-swift": read_ms_swift,
    "swift-megatron": read_swift_megatron,
    "maxtext": read_maxtext,
}


def main() -> None:
    """Read every folder with one framework's parser."""
    reader = READERS[sys.argv[1]]
    answers = []
    for folder in map(Path, json.load(sys.stdin)):
        os.chdir(folder)
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                answers.append({"values": reader(folder)})
            except (Exception, SystemExit) as error:
                answers.append({"refused": f"{type(error).__name__}: {error}"[:500]})
    print(json.dumps(answers))


if __name__ == "__main__":
    variables = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    variables["DISABLE_VERSION_CHECK"] = "1"  # LLaMA-Factory's pins
    with tempfile.TemporaryDirectory() as home, environment({"HF_HOME": home, **variables}):
        main()
