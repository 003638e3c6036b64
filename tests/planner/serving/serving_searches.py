"""Searches of serving plans that several tests make."""

from perfmodel.cost.resolve import choose_calibration
from perfmodel.frameworks.engine import load_engine
from perfmodel.hardware.reader import load_cluster
from perfmodel.planner.search import search
from perfmodel.planner.serving.search import serving_plans
from perfmodel.workload.models import load_model
from perfmodel.workload.quantization import quantization_named
from perfmodel.workload.serving import ServingJob, constant


def serving_job(model="llama-3-8b", quantization="bf16", input_len=512, output_len=256, **words):
    return ServingJob(
        model=load_model(model),
        input_len=constant(input_len),
        output_len=constant(output_len),
        quantization=quantization_named(quantization),
        **words,
    )


def searched(job, *, cluster="dgx-h100", chips=8, engine="vllm", top=10, also=("baselines", "front", "remedies"), **words):
    machines = load_cluster(cluster, num_chips=chips)
    plans = serving_plans(job, machines, choose_calibration(machines.chip), load_engine(engine), also=also, **words)
    return search(plans, top=top)
