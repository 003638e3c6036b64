"""Zero-bubble schedules against the runs of their paper: samples a second of four GPT models on A100, and the gain over 1F1B.

Source: Qi et al. 2024, Zero Bubble Pipeline Parallelism (arXiv 2401.10241), table 4: 1F1B and ZB-1p; first and last stage one layer fewer.
"""

import pytest

import perfmodel
from perfmodel.parallel.plan import make_plan
from perfmodel.workload.job import TrainingJob
from perfmodel.workload.models import load_model

#: Layers, heads, hidden size, micro-batch, stages; micro-batches -> samples a second of a GPU with 1F1B and with zero-bubble.
RUNS = {
    "gpt-1.5b": ((22, 24, 2304, 6, 8), {24: (11.8, 12.9), 32: (12.5, 13.4), 64: (13.6, 14.2)}),
    "gpt-6.2b": ((30, 32, 4096, 3, 8), {24: (3.50, 3.88), 32: (3.70, 4.00), 64: (4.03, 4.20)}),
    "gpt-14.6b": ((46, 40, 5120, 1, 16), {48: (1.40, 1.61), 64: (1.49, 1.67), 128: (1.64, 1.76)}),
    "gpt-28.3b": ((62, 48, 6144, 1, 32), {96: (0.76, 0.87), 128: (0.80, 0.90), 256: (0.88, 0.96)}),
}
CASES = [(name, m) for name, (_, runs) in RUNS.items() for m in runs]


def samples_per_second(name, num_microbatches, schedule):
    (layers, heads, hidden, micro_batch, stages), _ = RUNS[name]
    model = load_model("gpt3-175b").having(
        name=name, num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads,
        num_key_value_heads=heads, head_dim=hidden // heads, intermediate_size=4 * hidden, max_position_embeddings=1024,
    )  # fmt: skip
    inner = (layers + 2) // stages
    job = TrainingJob(model=model, global_batch=micro_batch * num_microbatches, seq_len=1024)
    plan = make_plan(
        job, cluster="dgx-a100", num_chips=stages, pp=stages, micro_batch=micro_batch, schedule=schedule, profile="megatron",
        stage_layers=(inner - 1, *[inner] * (stages - 2), inner - 1),
    )  # fmt: skip
    return job.global_batch / perfmodel.predict(plan).step_time / stages


@pytest.mark.parametrize(("name", "num_microbatches"), CASES)
def test_gain_of_zero_bubble_over_1f1b(name, num_microbatches):
    published = RUNS[name][1][num_microbatches]
    predicted = [samples_per_second(name, num_microbatches, schedule) for schedule in ("1f1b", "zero-bubble")]
    assert predicted[1] / predicted[0] == pytest.approx(published[1] / published[0], rel=0.03)
    assert predicted == pytest.approx(published, rel=0.15)
