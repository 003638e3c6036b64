"""Settings that would help a plan and that the framework's configuration can express."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perfmodel.parallel.choices import CHUNKED_LOSS, FUSED_LOSS, WHOLE_LOSS
from perfmodel.parallel.framework_ref import FrameworkRef

if TYPE_CHECKING:
    from perfmodel.cost.machine import Machine
    from perfmodel.frameworks.profile import ExecutionProfile
    from perfmodel.parallel.plan import Plan


def small_loss(profile: ExecutionProfile) -> str:
    """Return a form of the loss that keeps few logits; empty if the framework has none, or uses one already.

    A framework without a configuration reader, and the mean of the known frameworks, may have a chunked loss.
    """
    forms = (CHUNKED_LOSS, FUSED_LOSS)
    if FrameworkRef.parse(profile.name).settings.get("loss", WHOLE_LOSS) != WHOLE_LOSS or profile.kernels.loss_form in forms:
        return ""
    return settable(profile, "loss", forms, unknown=CHUNKED_LOSS)


def settable(profile: ExecutionProfile, name: str, values: tuple[str, ...], *, unknown: str = "") -> str:
    """Return the first of these values that all configurations of a framework can express; empty if there is none.

    The configurations are those of the profile, else of the nearest framework that it is based on; `unknown` without a configuration
    reader.
    """
    from perfmodel.configs.tables import load_tables
    from perfmodel.frameworks.shipped import with_bases

    for base in with_bases(FrameworkRef.parse(profile.name).name):
        tables = [table for table in load_tables().values() if table.profile == base]
        if tables:
            return next((value for value in values if all(table.can_set(name, value) for table in tables)), "")
    return unknown


def faster_attention(profile: ExecutionProfile, machine: Machine) -> str:
    """Return a newer fused-attention kernel that the chip has and the framework can use; empty if there is none.

    It compares kernels on chips with measurements of several generations over long sequences (`SustainedRates.long_attention`).
    """
    kernel_now, rates = profile.kernels.attention_kernel, machine.fused_attention.long
    if kernel_now not in rates:
        return ""
    faster = tuple(kernel for kernel in ("flash3", "cudnn") if kernel in rates and rates[kernel] > rates[kernel_now])
    return settable(profile, "attention_kernel", faster, unknown=faster[0] if faster else "")


def attention_note(plan: Plan, profile: ExecutionProfile, machine: Machine) -> str:
    """Return a note on a faster attention kernel for a plan of which attention is most of the FLOP; empty if there is none."""
    if plan.attention != "flash":
        return ""
    kernel = "" if "attention_kernel" in plan.framework.settings else faster_attention(profile, machine)
    if not kernel:
        return ""
    kernel_now = profile.kernels.attention_kernel
    ratio = machine.fused_attention.long[kernel][0] / machine.fused_attention.long[kernel_now][0]
    return (
        f"attention is most of the FLOP and runs as {kernel_now}, the default of {FrameworkRef.parse(profile.name).name}: "
        f"{kernel} is up to {ratio:.1f} times as fast on this chip (--setting attention_kernel={kernel})"
    )
