"""What tokens send to experts and back by kernels of low latency: the tables, the fit to them, and its errors."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perfmodel.calibrate.fits import Array, bare_machine, chosen_rows, fit_logarithm, rounded
from perfmodel.cost.serving.kernels import expert_exchange_time
from perfmodel.foundation.dtypes import Dtype
from perfmodel.hardware.cluster import Cluster
from perfmodel.hardware.serving_kernels import ExpertExchangeModel, ServingKernels
from perfmodel.lab.kernels.held_out import groups_of, unseen_errors
from perfmodel.lab.kernels.tables import read_frame

RANKS = 8.0
"""Of the node that was measured."""

LEAST_EXPERTS = 128
"""Of layers with one or two experts a rank, rows of one expert travel on few compute units: up to four times as long."""

VERSION = "0.5.12"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExchangeTable:
    """Measured exchanges, one way: columns of one length; time [s]."""

    tokens: Array
    top_k: Array
    hidden_size: Array
    experts: Array
    time: Array

    def rows(self, chosen: Any) -> "ExchangeTable":
        return chosen_rows(self, chosen)


def has_exchanges(folder: Path, chip: str) -> bool:
    return _path(folder, chip).is_file()


def _path(folder: Path, chip: str) -> Path:
    return folder / "aiconfigurator" / chip / "comm" / "sglang" / VERSION / "wideep_deepep_ll_perf.parquet"


def read_exchanges(folder: Path, chip: str, way: str) -> ExchangeTable:
    """aiconfigurator's table of DeepEP under SGLang, in one node of eight."""
    frame = read_frame(_path(folder, chip))
    frame = frame[(frame.node_num == 1) & (frame.num_experts >= LEAST_EXPERTS)]
    tokens, top_k, hidden, experts = (
        np.asarray(frame[key], dtype=float) for key in ("num_token", "num_topk", "hidden_size", "num_experts")
    )
    time = np.asarray(frame[f"{way}_avg_t_us"], dtype=float) * 1e-6
    return ExchangeTable(tokens=tokens, top_k=top_k, hidden_size=hidden, experts=experts, time=time)


def predict_exchanges(model: ExpertExchangeModel, way: str, table: ExchangeTable, cluster: Cluster) -> Array:
    machine = bare_machine(cluster, Dtype.BF16, serving=ServingKernels(expert_exchange={way: model}))
    time = expert_exchange_time(
        way,
        tokens=table.tokens,
        top_k=table.top_k,
        hidden_size=table.hidden_size,
        experts=table.experts,
        group_size=RANKS,
        machine=machine,
    )
    return np.asarray(time)


def fit_exchanges(table: ExchangeTable, way: str, cluster: Cluster) -> ExpertExchangeModel:
    def model(x: Array) -> ExpertExchangeModel:
        return ExpertExchangeModel(base_time=rounded(x[0] * 1e-6), expert_time=rounded(x[1] * 1e-9), bandwidth_fraction=rounded(x[2]))

    found = fit_logarithm(
        lambda x: predict_exchanges(model(x), way, table, cluster),
        table.time,
        start=(10, 10, 0.5),
        lower=(0.1, 0, 0.02),
        upper=(100, 200, 1),
    )
    return model(found)


def exchange_errors(table: ExchangeTable, way: str, cluster: Cluster) -> Array:
    """Of every run, by a fit that saw its layer with no number of tokens. [-]"""
    return unseen_errors(
        groups_of(table.top_k, table.hidden_size, table.experts),
        table.time,
        table.rows,
        fit=lambda seen: fit_exchanges(seen, way, cluster),
        predict=lambda model, unseen: predict_exchanges(model, way, unseen, cluster),
    )
