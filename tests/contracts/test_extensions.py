"""ARCHITECTURE.md, "To add X": a toy of each kind is written into a copy of the package, in the files that its row names and no others."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from shutil import copytree, ignore_patterns

import pytest

from tests.contracts.sources import PACKAGE

ROOT = PACKAGE.parent
#: Row of the table -> files and folders that it names.
ROWS = {
    cells[1].strip(): re.findall(r"`([\w/.*]+)`", cells[2])
    for cells in (line.split("|") for line in (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines())
    if len(cells) == 5
}


@dataclass(frozen=True, kw_only=True)
class Toy:
    """An extension.

    row     of the table in ARCHITECTURE.md
    edits   file, relative to the package -> (line that it has, text after it) pairs; a new file has no such line
    script  uses the toy; ends with an assertion
    """

    row: str
    edits: dict[str, tuple[tuple[str, str], ...]]
    script: str


OPERATOR = Toy(
    row="an operator kind",
    edits={
        "workload/kinds/toy.py": (
            (
                "",
                """
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.workload.graph import Operand, Operator
from perfmodel.workload.work import OwnTraffic, Pass, Stream, passes


def total(name, x, output, sizes):
    entries = tuple((size, dim) for dim, size in sizes.items())
    work = (Stream(kernel="default", elements=entries, accesses=passes(entries, entries)),)
    traffic = OwnTraffic(kind=CollectiveKind.ALL_REDUCE, over=("n",), extent=((sizes["b"], "b"),), phase=Pass.FORWARD)
    x, y = Operand(tensor=x, dims=tuple(sizes)), Operand(tensor=output, dims=tuple(sizes))
    return Operator(name=name, kind="total", dims=sizes, inputs=(x,), output=y, forward=work, backward=work, traffic=(traffic,))
""",
            ),
        ),
        "execute/per_operator/functions.py": (
            (
                "FUNCTIONS: Mapping[str, NetworkFunction] = {",
                '    "total": lambda inputs, context: inputs[0] - inputs[0].sum(-1, keepdim=True),',
            ),
        ),
    },
    script="""
import perfmodel
from perfmodel.execute.per_operator.run import check_network_plan
from perfmodel.workload.kinds.toy import total
from perfmodel.workload.networks.builder import NetworkBuilder

b = NetworkBuilder("toy", batch=4, source="a test")
x = b.linear("up", b.input("x", 4, 8), "b d", "n d", "b n", bias=False, new={"n": 8})
x = b.add(total("total", x, "total.out", {"b": 4, "n": 8}), 4, 8)
b.cross_entropy(b.linear("down", x, "b n", "v n", "b v", bias=False, new={"v": 4}), "b v", "v")
best = perfmodel.shard_network(b.build(), cluster="localhost", chips=1).best
assert best.plan.cuts.shardings["total"] == {}
check_network_plan(b.build(), best.plan, device="cpu")
""",
)

KERNEL = Toy(
    row="a class of streaming kernels",
    edits={"hardware/calibration.py": (('    DELTA_UPDATE = "delta_update"', '    TOY = "toy"'),)},
    script="""
from dataclasses import replace

from perfmodel.cost.compute import streaming_time
from perfmodel.cost.machine import resolve_machine
from perfmodel.hardware.calibration import KernelClass
from perfmodel.hardware.reader import load_calibration, load_cluster

base = load_calibration("h100")
kernel = base.kernels.streaming["default"]
streaming = {**base.kernels.streaming, KernelClass.TOY: replace(kernel, bandwidth_fraction=kernel.bandwidth_fraction / 2)}
calibration = replace(base, kernels=replace(base.kernels, streaming=streaming))
machine = resolve_machine(load_cluster("dgx-h100"), calibration)
times = {kernel: streaming_time(num_bytes=1e9, num_elements=0.0, kernel_class=kernel, machine=machine) for kernel in ("default", "toy")}
assert 1.9 < times["toy"] / times["default"] <= 2.0, times
""",
)

RECIPE = Toy(
    row="a number format",
    edits={
        "workload/job.py": (('    NVFP4 = "nvfp4"', '    FP8_TOY = "fp8-toy"'),),
        "workload/recipes.py": (
            (
                "        for recipe in (",
                """
            Recipe(
                name="fp8-toy", product=Dtype.FP8, needs=Dtype.FP8, copy_bytes=1.5, weight_copies=1, activation_copies=1,
                gradient_copies=1, row_multiple=16, is_order_alone=False, reads_twice=False, sends_rows=False, gathers_weights=False,
                source="a test",
            ),""",
            ),
        ),
        "workload/quantization.py": (
            (
                "            _plain(Dtype.FP16),",
                """
            Quantization(
                name="w3a16", weight_bytes=0.375, activation_bytes=2.0, product=Dtype.BF16, needs=Dtype.BF16, measured_as="w4a16",
                source="a test",
            ),""",
            ),
        ),
    },
    script="""
from pathlib import Path

import perfmodel
from perfmodel.foundation.resources import resource_dir

job = dict(model="llama-3-8b", cluster="dgx-h100", chips=8, seq_len=4096, global_batch=32, zero=1)
times = [perfmodel.predict(precision=name, **job).step_time for name in ("bf16-mixed", "fp8-current", "fp8-toy")]
assert times[0] > times[1] > times[2], times
text = (resource_dir("strategies") / "engines" / "vllm.yaml").read_text(encoding="utf-8")
text = text.replace("name: vllm", "name: toy").replace("formats:", "formats:\\n  - {format: w3a16, units: [bf16]}", 1)
Path("toy.yaml").write_text(text, encoding="utf-8")
service = dict(model="llama-3-8b", cluster="dgx-h100", chips=1, input_len=1024, output_len=256, concurrency=1, engine="toy.yaml")
times = [perfmodel.serve(quantization=name, **service).tpot.mean for name in ("bf16", "w4a16", "w3a16")]
assert times[0] > times[1] > times[2], times
""",
)

ENGINE_OPTION = Toy(
    row="an option of a serving engine",
    edits={
        "frameworks/engine.py": (("    sampler_bytes: float = 0.0", "    toy_bytes: float = 0.0"),),
        "cost/serving/memory.py": (
            (
                "    context, graphs = engine.memory.context_bytes + links, engine.memory.graph_bytes",
                "    context = context + engine.memory.toy_bytes",
            ),
        ),
    },
    script="""
from pathlib import Path

import perfmodel
from perfmodel.foundation.resources import resource_dir

text = (resource_dir("strategies") / "engines" / "vllm.yaml").read_text(encoding="utf-8")
Path("toy.yaml").write_text(text.replace("name: vllm", "name: toy") + "\\ntoy_bytes: 10 GB\\n", encoding="utf-8")
service = dict(model="llama-3-8b", cluster="dgx-h100", chips=1, input_len=1024, output_len=256, concurrency=1)
vllm, toy = (perfmodel.serve(engine=engine, **service).memory["context"] for engine in ("vllm", "toy.yaml"))
assert toy - vllm == 10e9, (toy, vllm)
""",
)

SCHEDULE = Toy(
    row="a pipeline schedule",
    edits={
        "parallel/choices.py": (
            ('    DUALPIPEV = "dualpipev"', '    TOY = "toy"'),
            ("_TRAITS: Mapping[str, Mapping[str, Any]] = {", '    "toy": {"is_simulated": True},'),
        ),
        "cost/schedules.py": (
            (
                "    PipelineSchedule.DUALPIPEV: DualPipeV(),",
                "    PipelineSchedule.TOY: Toy(),",
            ),
            (
                "    return _from_file(schedule) if isinstance(schedule, ScheduleTable) else SCHEDULES[schedule]",
                """

class Toy(Simulated):
    placement = Placement.LOOP

    def order(self, rank, num_ranks, num_microbatches, num_chunks):
        return OneForwardOneBackward().order(rank, num_ranks, num_microbatches, num_chunks)
""",
            ),
        ),
        "execute/uniform/parallelize.py": (
            ("    PipelineSchedule.DUALPIPEV: ScheduleDualPipeV,", "    PipelineSchedule.TOY: Schedule1F1B,"),
        ),
    },
    script="""
import perfmodel

job = dict(model="gpt2", cluster="dgx-h100", chips=2, seq_len=128, global_batch=4, pp=2, micro_batch=1)
known, toy = (perfmodel.predict(schedule=name, **job) for name in ("1f1b", "toy"))
assert abs(toy.step_time / known.step_time - 1.0) < 0.002, (toy.step_time, known.step_time)
assert abs(toy.memory["total"] / known.memory["total"] - 1.0) < 1e-9, (toy.memory, known.memory)
assert not perfmodel.audit_plan(toy.plan).differences()
""",
)

OBJECTIVE = Toy(
    row="an objective of a search",
    edits={
        "planner/result.py": (
            ('    GOODPUT_TIME = "goodput-time"', '    CARBON = "carbon"'),
            (
                '        """Whether it is a total of the whole run. On given chips each of these increases with the step time, which ranks '
                'the plans."""',
                "        if self is Objective.CARBON:\n            return True",
            ),
        ),
        "verbs/training.py": (
            (
                "    totals = run_totals(days, goodput=share, **costs)",
                "    if objective is Objective.CARBON:\n        return tuple(np.asarray(totals.carbon).tolist())",
            ),
        ),
        "report/search_tables.py": (
            (
                "_VALUES: Mapping[Objective, tuple[str, Callable[[float], str]]] = {",
                '    Objective.CARBON: ("run t CO2", lambda value: f"{value:,.1f}"),',
            ),
        ),
    },
    script="""
import perfmodel
from perfmodel.cli.app import run

job = "--model llama-3-8b --cluster dgx-h100 --chips 8 --seq-len 4k --global-batch 32 --tokens 1T --top 2"
code = run(["search", *job.split(), "--objective", "carbon"])
assert code in (0, None), code
""",
)

VERB = Toy(
    row="a command",
    edits={
        "verbs/toy.py": (("", 'def greeting(name: str) -> str:\n    return f"hello {name}"\n'),),
        "cli/toy.py": (
            (
                "",
                """
from perfmodel.cli.words import command


@command()
def toy(name: str) -> None:
    from perfmodel.verbs.toy import greeting

    print(greeting(name))
""",
            ),
        ),
        "cli/app.py": (("VERBS = {", '    "toy": ("toy", "Greet."),'),),
    },
    script="""
import subprocess
import sys

done = subprocess.run([sys.executable, "-m", "perfmodel", "toy", "reader"], capture_output=True, text=True)
assert (done.returncode, done.stdout) == (0, "hello reader\\n"), done
""",
)

TOYS = (OPERATOR, KERNEL, RECIPE, ENGINE_OPTION, SCHEDULE, OBJECTIVE, VERB)


def is_named(file, row):
    """Whether a row of the table names the file, or its folder for a new file."""
    return any(file == name or (name.endswith("/") and file.startswith(name)) for name in ROWS[row])


def written(text, toy_edits):
    for line, addition in toy_edits:
        assert f"{line}\n" in text if line else not text, f"{line!r}: no longer in the file; adapt the toy"
        text = text.replace(f"{line}\n", f"{line}\n{addition.lstrip(chr(10))}\n", 1) if line else addition
    return text


@pytest.mark.parametrize("toy", TOYS, ids=lambda toy: toy.row)
def test_a_toy_of_each_kind_changes_the_named_files_alone(toy, tmp_path):
    assert [file for file in toy.edits if not is_named(file, toy.row)] == []
    copytree(PACKAGE, tmp_path / "perfmodel", ignore=ignore_patterns("__pycache__"))
    for folder in ("hardware_specs", "strategies"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    for file, edits in toy.edits.items():
        path = tmp_path / "perfmodel" / file
        path.write_text(written(path.read_text(encoding="utf-8") if path.exists() else "", edits), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", toy.script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
