"""The loss that keeps few logits, of those that a framework's configuration can ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perfmodel.parallel.framework_ref import FrameworkRef
from perfmodel.parallel.loss_forms import CHUNKED_LOSS, FUSED_LOSS

if TYPE_CHECKING:
    from perfmodel.frameworks.profile import ExecutionProfile


def small_loss(profile: ExecutionProfile) -> str:
    """Return a form of the loss that keeps few logits; empty where the framework has none, or has such a loss already.

    All configurations of the profile, or else of the nearest framework that it is based on, can ask for it. A framework whose
    configuration is not read, and the mean of the known ones, may have a loss in chunks.
    """
    from perfmodel.configs.tables import load_tables
    from perfmodel.frameworks.shipped import with_bases

    framework, forms = FrameworkRef.parse(profile.name), (CHUNKED_LOSS, FUSED_LOSS)
    if framework.settings.get("loss") or profile.kernels.loss_form in forms:
        return ""
    for name in with_bases(framework.name):
        tables = [table for table in load_tables().values() if table.profile == name]
        if tables:
            return next((form for form in forms if all(table.can_set("loss", form) for table in tables)), "")
    return CHUNKED_LOSS
