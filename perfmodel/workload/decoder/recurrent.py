"""Mixers with a recurrent state in place of a KV cache: Mamba-2, and the gated delta network of Qwen3-Next.

Heads are in groups m (of B and C; of a key head), which tensor parallelism shards. One product computes all inputs of a group,
concatenated. A short convolution mixes neighbouring positions, a scan the sequence; a gated norm and a product end the branch. From the
convolution to the norm every rank has full sequences of some groups (`s_scan`, `scan_groups`), or continues where the previous rank
stopped.

Saved: the first product's output, the scan's output, the norm's output. Backward recomputes the convolution and the states.
"""

from __future__ import annotations

from perfmodel.workload.decoder.builder import DecoderBuilder, operand
from perfmodel.workload.graph import Operand
from perfmodel.workload.kinds.state_space import ScanChunks, causal_conv, delta_scan, gated_norm, state_scan

_PROJECTED, _SCANNED = "b s m", "b s_scan m_scan"


def mamba_mixer(b: DecoderBuilder, x: str) -> str:
    """Write a Mamba-2 mixer; the first product yields the gate, the inputs with B and C, and the steps of each group, in that order."""
    mamba = b.model.parts.mamba
    assert mamba is not None
    projected = _projected(b, "in_proj", x, "mi", bias=mamba.bias)
    inner = b.sizes["mo"]
    gate = _piece(b, "gate", projected, "mi", "mo", start=0)
    mixed = _piece(b, "mixed", projected, "mi", "mc", start=inner)
    steps = _piece(b, "steps", projected, "mi", "mh", start=inner + b.sizes["mc"])
    mixed = _convolved(b, mixed, bias=mamba.conv_bias, times_larger=b.sizes["mi"] / b.sizes["mc"])
    parameters = tuple(operand(b.parameter(name, "m mh", 2), "m mh") for name in ("dt_bias", "A_log", "D"))
    dims = f"{_SCANNED} mc mh mo"
    sizes = b.of(dims)
    mixed_rows = operand(mixed, "b s m mc")
    scanned = state_scan(
        "scan",
        mixed_rows,
        operand(steps, "b s m mh"),
        parameters,
        operand("scan.out", "b s m mo"),
        sizes,
        chunks=ScanChunks(mixed_rows, sizes, chunk=mamba.chunk_size, num_chunks=b.part_of_token(mamba.chunk_size)),
        groups=((sizes["m"], "m"),),
        heads=((sizes["m"], "m"), (sizes["mh"], "mh")),
        head_dim=mamba.head_dim,
        state=mamba.state_size,
    )
    y = _normed(b, "mamba_norm", b.add(scanned, dims), gate, "m mo", 2, rows_of="m", width=b.sizes["mo"])
    return _ended(b, y, bias=mamba.bias)


def delta_mixer(b: DecoderBuilder, x: str) -> str:
    """Write a gated delta mixer; one product yields queries, keys, values and gate of each group, another writing strengths and decays."""
    delta = b.model.parts.delta
    assert delta is not None
    projected = _projected(b, "in_proj_qkvz", x, "mi")
    strengths = _projected(b, "in_proj_ba", x, "mb")
    mixed = _piece(b, "mixed", projected, "mi", "mc", start=0)
    gate = _piece(b, "gate", projected, "mi", "mo", start=b.sizes["mc"])
    mixed = _convolved(b, mixed, bias=False, times_larger=b.sizes["mi"] / b.sizes["mc"])
    parameters = tuple(operand(b.parameter(name, "m mh", 2), "m mh") for name in ("dt_bias", "A_log"))
    dims = f"{_SCANNED} mc mb mh mo"
    sizes = b.of(dims)
    mixed_rows = operand(mixed, "b s m mc")
    scanned = delta_scan(
        "scan",
        mixed_rows,
        operand(strengths, "b s m mb"),
        parameters,
        operand("scan.out", "b s m mo"),
        sizes,
        chunks=ScanChunks(mixed_rows, sizes, chunk=delta.chunk_size, num_chunks=b.part_of_token(delta.chunk_size)),
        heads=((sizes["m"], "m"), (sizes["mh"], "mh")),
        key_dim=delta.key_head_dim,
        value_dim=delta.value_head_dim,
    )
    y = _normed(b, "delta_norm", b.add(scanned, dims), gate, "mv", 1, rows_of="m mh", width=b.sizes["mv"])
    return _ended(b, y, bias=False)


def _projected(b: DecoderBuilder, name: str, x: str, width: str, *, bias: bool = False) -> str:
    out = b.linear(name, x, f"{_PROJECTED} {width} h", "b s h", f"m {width} h", 2, f"b s m {width}")
    return b.bias(name, out, f"{_PROJECTED} {width}", f"b s m {width}", f"m {width}") if bias else out


def _piece(b: DecoderBuilder, name: str, x: str, width: str, taken: str, *, start: int) -> str:
    return b.piece(name, x, f"b s m {width}", f"{_PROJECTED} {width} {taken}", f"b s m {taken}", start=start)


def _convolved(b: DecoderBuilder, x: str, *, bias: bool, times_larger: float) -> str:
    """Write the convolution. It saves the full tensor of which its input is a view and which others read too."""
    dims, tensor_dims = f"{_SCANNED} mc mt", "b s m mc"
    weight = operand(b.parameter("conv.weight", "m mc mt", 2), "m mc mt")
    shift: Operand | None = operand(b.parameter("conv.bias", "m mc", 2), "m mc") if bias else None
    out = operand("conv.out", tensor_dims)
    operator = causal_conv("conv", operand(x, tensor_dims), weight, shift, out, b.of(dims), taps=b.sizes["mt"])
    return b.add(operator, dims, parts={x: times_larger})


def _normed(b: DecoderBuilder, name: str, x: str, gate: str, weight_dims: str, num_rows: int, *, rows_of: str, width: int) -> str:
    others = dict.fromkeys(word for word in f"{rows_of} {weight_dims}".split() if word not in ("m", "mo"))
    dims = " ".join((_SCANNED, "mo", *others))
    sizes = b.of(dims)
    weight = operand(b.parameter(f"{name}.weight", weight_dims, num_rows), weight_dims)
    rows = tuple((sizes[dim], dim) for dim in ("b", "s", *rows_of.split()))
    operands = (operand(x, "b s m mo"), operand(gate, "b s m mo"), weight, operand(f"{name}.out", "b s m mo"))
    return b.add(gated_norm(name, *operands, sizes, rows=rows, width=width, gates_first=name == "mamba_norm"), dims)


def _ended(b: DecoderBuilder, y: str, *, bias: bool) -> str:
    out = b.linear("out_proj", y, f"{_PROJECTED} mo h", "b s m mo", "h m mo", 1, "b s h")
    return b.bias("out_proj", out, "b s_res h", "b s h", "h") if bias else out
