"""Products of experts with unequal numbers of rows."""

import pytest

torch = pytest.importorskip("torch")

from perfmodel.execute.layers.experts import grouped_linear, weighted_sum  # noqa: E402
from perfmodel.execute.uniform.routing import by_expert, choices_of_counts  # noqa: E402
from perfmodel.workload.layer_specs import Experts  # noqa: E402
from perfmodel.workload.routing import RoutingCounts  # noqa: E402


def test_products_of_uneven_rows_are_those_of_each_expert():
    counts = (3, 0, 2)
    rows, weights = torch.randn(5, 4, dtype=torch.float64), torch.randn(3, 6, 4, dtype=torch.float64)
    inputs = rows.requires_grad_(), weights.requires_grad_(), torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    out = grouped_linear(rows, weights, counts, inputs[2])
    expected = torch.cat([mine @ weight.t() + bias for mine, weight, bias in zip(rows.split(counts), *inputs[1:], strict=True)])
    torch.testing.assert_close(out, expected)
    gradient = torch.randn_like(out)
    gradients, wanted = (torch.autograd.grad(result, inputs, gradient) for result in (out, expected))
    torch.testing.assert_close(gradients, wanted)


def test_rows_of_several_ranks_are_put_in_the_order_of_experts():
    experts = torch.tensor([0, 0, 2] * 2)  # of two ranks: two rows for the first expert, one for the third
    assert experts[by_expert((2, 0, 1), 2, torch.device("cpu"))].tolist() == [0, 0, 0, 0, 2, 2]


def test_tokens_choose_experts_as_counts_say_and_none_twice():
    counts = (4, 0, 3, 1)
    chosen = choices_of_counts(counts, Experts(num_experts=4, top_k=2, width=8), torch.device("cpu"))
    assert chosen.shape == (4, 2)
    assert torch.bincount(chosen.flatten(), minlength=4).tolist() == list(counts)
    assert (chosen[:, 0] != chosen[:, 1]).all()


def test_counts_know_which_experts_the_executor_chooses_and_to_how_many_ranks_a_token_goes():
    counts = RoutingCounts(((4, 0, 3, 1), (2, 2, 2, 2)))
    experts = Experts(num_experts=4, top_k=2, width=8)
    for source, row in enumerate(counts.rows):
        chosen = choices_of_counts(row, experts, torch.device("cpu"))
        assert counts.choices(source, 2).tolist() == chosen.tolist()
        for rank in range(2):
            goes = sum(any(expert // 2 == rank for expert in experts_of_token) for experts_of_token in chosen.tolist())
            assert counts.tokens_to_ranks(2)[source, rank] == goes
    assert counts.tokens_to_ranks(2)[0].tolist() == [4, 4]
    together = RoutingCounts(((4, 4, 0, 0), (4, 4, 0, 0)))
    assert together.tokens_to_ranks(2).tolist() == [[4, 0], [4, 0]]  # eight rows, as four tokens


def test_rows_of_a_token_are_weighted_and_added_up():
    rows, weights = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 3), (5,)))
    tokens = torch.tensor([2, 0, 2, 3, 2])
    out = weighted_sum(rows, weights, tokens, 4)
    expected = torch.stack(
        [sum((w * row for w, row, at in zip(weights, rows, tokens, strict=True) if at == t), rows[0] * 0) for t in range(4)]
    )
    torch.testing.assert_close(out, expected)
    gradient = torch.randn_like(out)
    gradients, wanted = (torch.autograd.grad(result, (rows, weights), gradient) for result in (out, expected))
    torch.testing.assert_close(gradients, wanted)
