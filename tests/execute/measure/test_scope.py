"""The measured sizes span the sizes that plans use."""

from __future__ import annotations

import pytest

from perfmodel.execute.measure.scope import make_scope


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("brief", [True, False])
def test_scopes_span_the_sizes_that_plans_use(device: str, brief: bool):
    scope = make_scope(device, brief=brief, logit_bytes=40.0)
    assert max(scope.elements) >= 2**20
    assert max(scope.message_bytes) >= 8 * 2**20
    assert scope.matmuls
    assert scope.attentions
