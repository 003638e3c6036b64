"""A plan of serving is the same alone and among others, to the last bit."""

import numpy as np
import pytest

from perfmodel.cost.resolve import choose_calibration
from perfmodel.cost.serving.estimate import ServingEstimator
from perfmodel.foundation.dtypes import Dtype
from perfmodel.frameworks.engine import load_engine
from perfmodel.hardware.reader import load_cluster
from perfmodel.planner.serving.space import ServingSpace, cross, layouts
from perfmodel.workload.quantization import quantization_named
from perfmodel.workload.serving import Speculation
from tests.planner.serving.serving_searches import serving_job


def drawn(which, about):
    places = np.flatnonzero(which)
    return places[:: max(len(places) // about, 1)]


@pytest.mark.parametrize("words", [{"concurrency": 40}, {"rate": 3.0}, {}, {"speculation": Speculation(draft_tokens=2, acceptance=0.7)}])
@pytest.mark.parametrize(
    ("model", "engine", "quantization"),
    [
        ("llama-3-8b", "vllm", "fp8"),
        ("deepseek-v3", "sglang", "fp8-block"),
        ("gpt-oss-120b", "tensorrt-llm", "mxfp4"),
        ("deepseek-v3", "vllm", "fp8-block"),
    ],
)
def test_a_row_is_its_plan(model, engine, quantization, words):
    cluster = load_cluster("hgx-h200", num_chips=16)
    job = serving_job(model, quantization, **words)
    of = ServingEstimator(
        model=job.model,
        cluster=cluster,
        calibration=choose_calibration(cluster.chip),
        engine=load_engine(engine).having(prefill_context_since=""),  # as one whose version has all that its profile knows
        quantization=quantization_named(quantization),
        cache=Dtype.BF16,
    )
    rows = cross(layouts(job.model, cluster, of.engine, ServingSpace()).columns, (0, 3000), (0, 1, 24))
    assert bool((rows.dcp > 1).any()) == (engine == "vllm")
    assert bool((rows.pcp > 1).any()) == ((model, engine) == ("deepseek-v3", "vllm"))
    rows = rows.take(np.concatenate([drawn(rows.tp > 0, 60), drawn(rows.dcp > 1, 20), drawn(rows.pcp > 1, 20)]))
    served = of.serve(job, rows)
    for at in np.concatenate([drawn(rows.tp > 0, 8), drawn(rows.dcp > 1, 4), drawn(rows.pcp > 1, 4)]):
        alone = of.predict(job, rows.layout(at))
        assert alone.ttft.mean == served.load.ttft[at]
        assert alone.tpot.mean == served.load.tpot[at]
        assert alone.request_latency.mean == served.load.request_latency[at]
        assert alone.tokens_per_second_per_chip == served.tokens_per_second_per_chip[at]
        assert alone.max_sequences == served.memory.sequences[at]
