"""The time of one serving step on columns of plans, from the rows of the forward pass: what `load.py` knows of a model and a machine.

    t = host + sum over layers of (products + experts + attention + passes + collectives) + logits and choice of a token

A step has T rows on a rank of attention: a token for each sequence that decodes (1 + drafted where it verifies), and the new tokens of
prompts. All but attention only sees T; attention sees each sequence with its cache. Rows of the head are sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.collectives import collective_time
from perfmodel.cost.compute import attention_time, streaming_time
from perfmodel.cost.evaluate import members_inside
from perfmodel.cost.machine import Machine
from perfmodel.cost.serving.context import CONTEXT_AXIS, DCP, PCP, context_traffic
from perfmodel.cost.serving.kernels import (
    cached_attention_time,
    grouped_weight_time,
    latent_decode_time,
    small_all_reduce_time,
    weight_product_time,
)
from perfmodel.cost.serving.program import ServingProgram
from perfmodel.cost.serving.routing import fullest_rank, share_met
from perfmodel.cost.serving.states import UPDATE_KERNELS, state_bytes, state_elements
from perfmodel.cost.serving.work import AttentionRow, Calls, Work
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.columns import Column
from perfmodel.foundation.dtypes import Dtype, itemsize
from perfmodel.frameworks.engine import Engine
from perfmodel.hardware.calibration import COLLECTIVE_CODE, LATENT_KERNEL, KernelClass
from perfmodel.parallel.grid import LayoutGrid
from perfmodel.workload.causal import ALL_BEFORE
from perfmodel.workload.quantization import QUANTIZATIONS, Quantization

Array = NDArray[np.float64]

#: Parts of a step, in the order in which they are shown.
PARTS = ("products", "experts", "attention", "passes", "communication", "logits", "pipeline_sends", "host")

_ALL_REDUCE = COLLECTIVE_CODE[CollectiveKind.ALL_REDUCE]
#: Who is told apart: ranks of tensor parallelism, those that share prompts, and all those that have tokens of their own.
_GROUPS = {"tp": ("tp_kv", "tp_q"), "pcp": (CONTEXT_AXIS,), "tokens": (CONTEXT_AXIS, "dp_replicate", "dp_shard")}


@dataclass(slots=True, kw_only=True, eq=False)
class StepCosts:
    """`ServingTimes` of columns of plans: arguments broadcast against them; so do results.

    grid          of a replica's chips: tp and pp, attention ranks as dp_replicate, ranks that share prompts as cp
    tp, pp, dp    degrees; expert_parts: ranks that experts are dealt over
    dcp           ranks of tp that share the tokens of a cache (`context.py`)
    pcp           ranks that share the tokens of a prompt; pcp_cut: pcp where they share those of a cache too, else 1
    """

    decode_program: ServingProgram
    prompt_program: ServingProgram
    machine: Machine
    engine: Engine
    quantization: Quantization
    cache: Dtype
    grid: LayoutGrid
    dcp: Array
    pcp: Array
    pcp_cut: Array
    tp: Array
    pp: Array
    dp: Array
    expert_parts: Array
    distinct_experts: float = 0.0
    _sizes: dict[tuple[int, bool], tuple[Array, list[Array]]] = field(default_factory=dict, init=False, repr=False)
    _groups: dict[tuple[int, str], tuple[Array, list[Array]]] = field(default_factory=dict, init=False, repr=False)

    # --- as loads ask -------------------------------------------------------------------------------------------------------------

    def decode(self, sequences: Column, cached: Column, new_tokens: Column = 1.0) -> Array:
        """A step in which so many sequences of a replica have `new_tokens` each over `cached` tokens. [s]"""
        return self.total(self.parts(sequences, cached, new_tokens=new_tokens))

    def prefill(self, tokens: Column, cached: Column = 0.0, prompts: Column = 1.0) -> Array:
        """A step of `prompts` prompts of `tokens` new tokens each after `cached` ones. [s]"""
        return self.total(self.parts(0.0, 0.0, prompt_tokens=tokens, prompt_cached=cached, prompts=prompts))

    def mixed(
        self,
        sequences: Column,
        cached: Column,
        prompt_tokens: Column,
        prompt_cached: Column = 0.0,
        prompts: Column = 1.0,
        new_tokens: Column = 1.0,
    ) -> Array:
        """A decode step that also takes `prompt_tokens` new tokens of each of `prompts` prompts. [s]"""
        return self.total(
            self.parts(
                sequences,
                cached,
                prompt_tokens=prompt_tokens,
                prompt_cached=prompt_cached,
                prompts=prompts,
                new_tokens=new_tokens,
            )
        )

    @staticmethod
    def total(parts: Mapping[str, Array]) -> Array:
        return sum((parts[name] for name in PARTS), np.zeros(()))

    # --- evaluation ---------------------------------------------------------------------------------------------------------------

    def parts(
        self,
        sequences: Column,
        cached: Column,
        *,
        prompt_tokens: Column = 0.0,
        prompt_cached: Column = 0.0,
        prompts: Column = 1.0,
        new_tokens: Column = 1.0,
    ) -> dict[str, Array]:
        """Seconds of each of `PARTS`; they add up to the step."""
        given = (sequences, cached, new_tokens, prompts, prompt_tokens, prompt_cached)
        columns = len(self.tp)
        shape = np.broadcast_shapes(*(np.shape(each) for each in given), (columns,))
        flat = [np.broadcast_to(np.asarray(each, dtype=float), shape).reshape(-1) for each in given]
        repeats = flat[0].size // columns
        b, z, new, p, q, x = flat
        has_prompt = q > 0
        ranks, stages, pcp = (np.tile(each, repeats) for each in (self.dp * self.pp, self.pp, self.pcp))
        work = Work(
            decoding=_at_once(b, ranks),
            cached=np.maximum(z, 1.0),
            new_tokens=new,
            prompts=np.where(has_prompt, _at_once(p, ranks), 0.0),
            prompt_tokens=np.where(has_prompt, q, 0.0),
            prompt_cached=x,
            tokens=_at_once(b, stages) * new + np.where(has_prompt, _at_once(p, stages) * q, 0.0),
            copies=(pcp - 1.0) * (_at_once(b, stages) * new),
            sharing=pcp,
        )
        if not has_prompt.any():
            found = self._evaluate(self.decode_program, work, repeats)
        elif has_prompt.all():
            found = self._evaluate(self.prompt_program, work, repeats)
        else:
            one = self._evaluate(self.decode_program, work, repeats)
            other = self._evaluate(self.prompt_program, work, repeats)
            found = {name: np.where(has_prompt, other[name], one[name]) for name in PARTS}
        return {name: time.reshape(shape) for name, time in found.items()}

    def _evaluate(self, program: ServingProgram, work: Work, repeats: int) -> dict[str, Array]:
        counts = program.counts
        sizes, inside = self._axes(program, repeats)
        rows = work.rows
        padded = rows if program.is_prompt else self._padded(rows)
        amount, of_head = self._amounts(program, sizes, padded, work), self._amounts(program, sizes, work.outputs, work)
        products, logits = self._products(program, amount, of_head)
        passes = self._streaming(program, amount, of_head)
        attention = self._attention(program, amount, work, repeats)
        communication = self._communication(program, amount, sizes, inside)
        shared = self._shared_context(program, amount, work, repeats)
        experts, exchanges = self._experts(program, padded, work, repeats)
        sent, gathered = self._around(program, padded, work, repeats)
        layers = np.delete(np.arange(len(counts)), program.head)
        found = {
            "products": _in_order(counts[layers], products[layers]),
            "experts": experts,
            "attention": attention,
            "passes": _in_order(counts[layers], passes[layers]),
            "communication": _in_order(counts, communication) + exchanges + shared,
            "logits": logits + passes[program.head] + gathered,
            "pipeline_sends": sent,
        }
        device = sum(found.values(), np.zeros(()))
        found["host"] = self._host(program, device, work, repeats)
        return found

    @staticmethod
    def _amounts(program: ServingProgram, sizes: Array, rows: Array, work: Work) -> Array:
        """Amounts of the rows of this rank. Rows of prompts are sharded over cp, and the graph is that of all of them."""
        return program.amounts(sizes, rows * work.sharing if program.is_prompt else rows)

    def _axes(self, program: ServingProgram, repeats: int) -> tuple[Array, list[Array]]:
        """Sizes of the groups of axes, and members inside tiers. Rows that decode are the same on all ranks of cp."""
        key = (repeats, program.is_prompt)
        if key not in self._sizes:
            masks = program.rows.amounts.masks
            if not program.is_prompt:
                masks = tuple(mask - {CONTEXT_AXIS} for mask in masks)
            sizes = np.array([self.grid.size(mask) for mask in masks])
            tiers = [np.tile(each, (1, repeats)) for each in members_inside(masks, self.grid)]
            if len(self._sizes) > 64:
                self._sizes.clear()
                self._groups.clear()
            self._sizes[key] = np.tile(sizes, (1, repeats)), tiers
        return self._sizes[key]

    def _padded(self, rows: Array) -> Array:
        """Rows of a step as captured graphs have them; a mean between two whole numbers of rows is as far between theirs."""
        known = np.array((*self.engine.scheduling.graph_sizes, np.inf)) if self.engine.host.has_graphs else np.array([np.inf])

        def captured(whole: Array) -> Array:
            above = known[np.searchsorted(known, whole)]
            return np.where(np.isfinite(above), np.maximum(above, whole), whole)

        low = np.maximum(np.floor(rows + 1e-9), 1.0)
        least = captured(low)
        return np.asarray(least + np.maximum(rows - low, 0.0) * (captured(low + 1.0) - least))

    # --- parts --------------------------------------------------------------------------------------------------------------------

    def _products(self, program: ServingProgram, amount: Array, of_head: Array) -> tuple[Array, Array]:
        """[regions, columns] of the layers' calls, and [columns] of the output matrix."""
        total = np.zeros((len(program.regions), amount.shape[1]))
        for call in self._calls(program, amount, of_head):
            np.add.at(total, program.fused.region[call.which], self.product_time(program, call))
        return total, total[program.head]

    def product_time(self, program: ServingProgram, calls: Calls) -> Array:
        """[calls, columns] [s]"""
        return np.asarray(
            weight_product_time(
                batch=calls.batch,
                m=calls.m,
                n=calls.n,
                k=calls.k,
                quantization=self.format_of(calls),
                machine=self.machine,
                casts=self.engine.kernels.casts,
                untuned=1.0 if program.is_prompt else self.engine.kernels.few_rows_fraction,
            )
        )

    def format_of(self, calls: Calls) -> Quantization:
        return self.quantization if calls.is_low else QUANTIZATIONS["bf16"]

    def _calls(self, program: ServingProgram, amount: Array, of_head: Array) -> Iterator[Calls]:
        """Fused calls of one format each, those of the layers and those of the head."""
        fused, columns = program.fused, program.rows.matmul.columns
        first = fused.rows[fused.starts]
        low_parts = self.quantization.parts(beside_experts=bool(program.experts))
        is_low = np.array([part in low_parts for part in fused.parts])
        for values, here in ((amount, fused.region != program.head), (of_head, fused.region == program.head)):
            width = np.add.reduceat(values[columns["n"][fused.rows]], fused.starts, axis=0)
            for low in (False, True):
                which = np.flatnonzero(here & (is_low == low))
                if len(which):
                    batch, m, k = (values[columns[name][first[which]]] for name in ("batch", "m", "k"))
                    yield Calls(which=which, is_low=low, batch=batch, m=m, n=width[which], k=k)

    def calls(self, program: ServingProgram, work: Work) -> list[Calls]:
        """The products of a step of one plan."""
        sizes, _ = self._axes(program, 1)
        return list(self._calls(program, *(self._amounts(program, sizes, rows, work) for rows in (work.rows, work.outputs))))

    def attention_rows(self, program: ServingProgram, work: Work) -> list[tuple[AttentionRow, float, float]]:
        """Attention of a step of one plan: each kind, its number of layers, and the time of one. [s]"""
        sizes, _ = self._axes(program, 1)
        found = self._attention_times(program, self._amounts(program, sizes, work.rows, work), work)
        return [(row, count, float(time[0])) for row, count, time in found]

    def _streaming(self, program: ServingProgram, amount: Array, of_head: Array) -> Array:
        rows, machine = program.rows.streaming, self.machine
        codes = rows.columns["kernel"][:, None]
        is_head = (rows.segments == program.head)[:, None]

        def passes(values: Array) -> Any:
            num_bytes = np.add.reduceat(values[rows.accesses], rows.access_starts, axis=0)
            return streaming_time(num_bytes=num_bytes, num_elements=values[rows.columns["elements"]], kernel_class=codes, machine=machine)

        time = np.where(is_head, passes(of_head), passes(amount))
        floors = machine.streaming.table[0][rows.columns["kernel"]][:, None]
        time = time - np.where(program.along[:, None], floors, 0.0)
        total = np.zeros((len(program.regions), amount.shape[1]))
        np.add.at(total, rows.segments, time)
        return total

    def _attention(self, program: ServingProgram, amount: Array, work: Work, repeats: int) -> Array:
        """Attention time of all layers: sequences that decode over their cache, prompts over their tokens, states read and written."""
        total = np.zeros(amount.shape[1])
        for _, count, time in self._attention_times(program, amount, work):
            total += count * time
        for _, count, time in self.state_times(program, work, repeats):
            total += count * time
        return total

    def state_times(self, program: ServingProgram, work: Work, repeats: int) -> Iterator[tuple[str, int, Array]]:
        """Each mixer with a state, how many layers have it, and what one of them takes of sequences that decode: read and written. [s]"""
        model = program.model
        for place in program.states:
            region = program.regions[place]
            mixer = next(kind.mixer for kind in model.layer_kinds if kind.name == region.name)
            sequences = work.decoding / np.tile(self.tp, repeats)
            num_bytes, elements = 2.0 * state_bytes(model, mixer) * sequences, state_elements(model, mixer) * sequences
            yield mixer, region.count, self._pass(num_bytes, elements, UPDATE_KERNELS[mixer])

    def _attention_times(self, program: ServingProgram, amount: Array, work: Work) -> Iterator[tuple[AttentionRow, float, Array]]:
        """Each kind of attention, how many layers have it, and what one of them takes. [s]"""
        for row, segment in enumerate(program.rows.attention.segments):
            one = _attention_row(program, row, amount)
            yield one, float(program.regions[segment].count), self._attention_time(one, work, program)

    def _attention_time(self, one: AttentionRow, work: Work, program: ServingProgram) -> Array:
        """Attention time of one layer. [s]"""
        model = program.model
        window = model.sliding_window or model.attention_chunk
        share = model.sliding_layer_fraction if window else 0.0
        top = model.latent.index_top if model.latent is not None and model.latent.index_heads else 0
        total = np.zeros_like(work.cached)
        if work.decoding.any():
            time = self._over_windows(partial(self._decoding, one, work), work.cached, window, share, top)
            total = np.where(work.decoding > 0, time, 0.0)
        if program.is_prompt:
            seen = work.prompt_tokens + work.prompt_cached
            time = self._over_windows(partial(self._prompts, one, work), seen, window, share, top)
            if top:
                time = np.where(seen > top, np.maximum(time, self._chosen(one, work, float(top))), time)
            total = total + np.where(work.prompts > 0, time, 0.0)
        return total + self._indexing(work) + self.engine.kernels.sparse_attention_time if top else total

    @staticmethod
    def _over_windows(time: Callable[[Array], Array], tokens: Array, window: int, share: float, top: int) -> Array:
        """Layers that see all tokens and those that see a window of them."""
        if top:
            return time(np.minimum(tokens, float(top)))
        if not share:
            return time(tokens)
        cut = time(np.minimum(tokens, float(window)))
        return cut if share == 1.0 else share * cut + (1.0 - share) * time(tokens)

    def _decoding(self, of: AttentionRow, work: Work, cached: Array) -> Array:
        machine, width = self.machine, itemsize(self.cache)
        dcp, cut = (np.tile(each, len(cached) // len(each)) for each in (self.dcp, self.pcp_cut))
        of, cached = replace(of, heads=of.heads * dcp), np.maximum(cached / (dcp * cut), 1.0)
        if of.is_latent:
            time = latent_decode_time(
                batch=work.decoding,
                heads=of.heads,
                key_length=cached,
                machine=machine,
                latent_dim=of.value_dim,
                rotary_dim=of.head_dim - of.value_dim,
                cache_itemsize=width,
                queries=work.new_tokens,
            )
        else:
            time = cached_attention_time(
                batch=work.decoding,
                heads=of.heads,
                kv_heads=of.kv_heads if self.engine.kernels.shares_key_values else of.heads,
                key_length=cached,
                head_dim=of.head_dim,
                machine=machine,
                cache_itemsize=width,
                queries=work.new_tokens,
            )
        return np.asarray(time) / self.engine.kernels.decode_attention_fraction

    def _shared_context(self, program: ServingProgram, amount: Array, work: Work, repeats: int) -> Array:
        """Communication of ranks that share the tokens of a cache, in all layers. [s]"""
        total = np.zeros(amount.shape[1])
        if np.max(self.dcp * self.pcp_cut) <= 1:
            return total
        dcp, cut = np.tile(self.dcp, repeats), np.tile(self.pcp_cut, repeats)
        latent = self.decode_program.model.latent
        for row, segment in enumerate(program.rows.attention.segments):
            one = _attention_row(program, row, amount)
            sent = context_traffic(one, work, latent, dcp=dcp, cut=cut, cache_bytes=itemsize(self.cache))
            time = np.where(sent.weighted > 0, self._pass(sent.weighted), 0.0)
            for kind, axes, num_bytes in sent.collectives:
                group = self._context_group(axes, repeats)
                time = time + np.where(num_bytes > 0, self._collective(COLLECTIVE_CODE[kind], num_bytes, *group), 0.0)
            total += program.regions[segment].count * np.where(dcp * cut > 1, time, 0.0)
        return total

    def _context_group(self, axes: frozenset[str], repeats: int) -> tuple[Array, list[Array]]:
        """Ranks that share the tokens of a cache: those of tp, those of pcp, or both; and how many lie inside a domain of each tier."""
        size: Array = np.ones(1)
        inside: list[Array] = []
        for axis, members, of in ((DCP, self.dcp, "tp"), (PCP, self.pcp_cut, "pcp")):
            if axis in axes:
                here = np.tile(members, repeats)
                near = [np.minimum(each, here) for each in self._group(of, repeats)[1]]
                size, inside = size * here, [one * other for one, other in zip(inside, near, strict=True)] if inside else near
        return size, inside

    def _prompts(self, of: AttentionRow, work: Work, seen: Array) -> Array:
        """Causal only among the new tokens: z - (q - 1) / 2 of z keys on average, and of a window no more than it holds.

        Of a prompt that ranks share each has q / pcp queries, a piece of either end, and all of them as many keys.
        """
        q = np.maximum(work.prompt_tokens, 1.0)
        keys = np.maximum(seen, 1.0)
        whole = work.prompt_tokens + work.prompt_cached
        unseen = 1.0 - ALL_BEFORE.seen_by_slowest(work.sharing, head_tail=True)
        share = np.where(seen < whole, 1.0, (keys - unseen * (np.minimum(q, keys) - 1.0)) / keys)
        machine = self.machine
        is_latent = of.is_latent and LATENT_KERNEL in machine.attention
        kernel = LATENT_KERNEL if is_latent else "flash"
        return np.asarray(
            attention_time(
                batch=work.prompts,
                heads=of.heads,
                kv_heads=of.kv_heads,
                query_length=q / work.sharing,
                key_length=keys,
                head_dim=of.head_dim,
                causal_fraction=share,
                itemsize=2.0,
                machine=machine,
                kernel=kernel,
                value_head_dim=of.value_dim,
            )
        )

    def _chosen(self, of: AttentionRow, work: Work, top: float) -> Array:
        """Prompts longer than what is chosen: every new token reads latents of its own choice, as a sequence that decodes does."""
        latent = self.decode_program.model.latent
        assert latent is not None
        new, before = np.maximum(work.prompt_tokens, 1.0), work.prompt_cached
        return np.asarray(
            latent_decode_time(
                batch=work.prompts * new / work.sharing,
                heads=of.heads,
                key_length=keys_within(top, new, before),
                machine=self.machine,
                latent_dim=latent.key_value_rank,
                rotary_dim=latent.rope_head_dim,
                cache_itemsize=itemsize(self.cache),
            )
        )

    def _indexing(self, work: Work) -> Array:
        """A sparse indexer's scores: its keys, a byte each, read once for a sequence; a few heads' products in 8 bits."""
        latent = self.decode_program.model.latent
        assert latent is not None
        width, heads = latent.index_head_dim, latent.index_heads
        queries = work.decoding * work.new_tokens * work.cached + work.own_prompt_rows * work.prompt_tokens * 0.5
        read = (work.decoding * work.cached + work.prompts * work.prompt_tokens) * width
        computed = 2.0 * queries * heads * width / (0.5 * self.machine.peak_flop_rate)
        return np.maximum(self._pass(read), computed)

    def _pass(self, num_bytes: Array, elements: Column = 0.0, kernel: KernelClass = KernelClass.DEFAULT) -> Array:
        return np.asarray(streaming_time(num_bytes=num_bytes, num_elements=elements, kernel_class=kernel, machine=self.machine))

    def _communication(self, program: ServingProgram, amount: Array, sizes: Array, inside: list[Array]) -> Array:
        """[regions, columns] of collectives between the operators."""
        rows = program.rows.traffic
        total = np.zeros((len(program.regions), amount.shape[1]))
        if not rows.names:
            return total
        group = rows.columns["group"]
        time = self._collective(
            rows.columns["kind"][:, None], amount[rows.columns["amount"]], sizes[group], [each[group] for each in inside]
        )
        np.add.at(total, rows.segments, time)
        return total

    def _collective(self, code: Any, num_bytes: Array, size: Array, inside: list[Array]) -> Array:
        """By the library, or by the engine's own kernels where these are quicker; of one member nothing."""
        if np.max(size) <= 1:
            return np.zeros(np.broadcast_shapes(np.shape(num_bytes), np.shape(size)))
        machine = self.machine
        time = collective_time(code, num_bytes, group_size=size, inside=inside, machine=machine)
        if self.engine.kernels.fuses_all_reduce:
            time = np.where(code == _ALL_REDUCE, np.minimum(time, small_all_reduce_time(num_bytes, size, machine)), time)
        return np.where(size > 1, time + self.engine.kernels.rank_skew_time, 0.0)

    def _experts(self, program: ServingProgram, rows: Array, work: Work, repeats: int) -> tuple[Array, Array]:
        """Routed experts of all layers and what tokens send to them and back; `rows` of this rank as they are padded. [s]

        T tokens of all attention ranks meet; of the experts that they choose (`share_met`) the fullest rank sets the pace. Tokens
        are gathered from the attention ranks and their sums scattered to them, and reduced over the ranks that share them (tp); or each
        row travels to its expert and back, whichever is quicker.
        """
        model, experts = program.model, program.model.experts
        nothing = np.zeros_like(rows)
        if experts is None:
            return nothing, nothing
        tp, pcp, dp, ep = (np.tile(each, repeats) for each in (self.tp, self.pcp, self.dp, self.expert_parts))
        shared_by = tp * pcp * dp / ep
        tokens, computed = (each * rows / np.maximum(work.rows, 1e-12) for each in (work.tokens, work.tokens + work.copies))
        total, k = float(experts.num_experts), float(experts.top_k)
        share = np.full_like(tokens, self.distinct_experts / total) if self.distinct_experts else share_met(tokens, total, k)
        more_met, more_rows = fullest_rank(share, tokens, total, k, ep)
        here = np.maximum(np.minimum(total * share * more_met, total) / ep, np.clip(tokens * k, 1e-9, 1.0))
        time = np.asarray(
            grouped_weight_time(
                experts=here,
                rows=np.maximum(np.minimum(computed * k * more_rows / ep, computed * k), here),
                tokens=computed,
                hidden_size=float(model.hidden_size),
                intermediate_size=experts.width / shared_by,
                quantization=self.quantization,
                machine=self.machine,
                up_projections=2 if experts.gated else 1,
            )
        )
        num = sum(float(program.regions[region].count) for region in program.experts)
        return num * time, num * self._exchange(rows, computed, repeats)

    def _exchange(self, rows: Array, tokens: Array, repeats: int) -> Array:
        """Exchange of experts in one layer. [s]

        By the library: with DeepEP's kernels of low latency, which tables have as quicker, published runs come out worse (20 of
        TensorRT-LLM's: TPOT 9.4 -> 10.2 % off; 20 of SGLang's on GB200: 27 -> 30 %).
        """
        model = self.decode_program.model
        experts = model.experts
        assert experts is not None
        hidden = 2.0 * model.hidden_size
        kinds = CollectiveKind
        of_tp, of_dp = self._group("tp", repeats), self._group("tokens", repeats)
        everywhere = tokens * hidden
        summed = self._collective(_ALL_REDUCE, rows * hidden, *of_tp)
        gathered = sum(self._collective(COLLECTIVE_CODE[kind], everywhere, *of_dp) for kind in (kinds.ALL_GATHER, kinds.REDUCE_SCATTER))
        sent = rows * experts.top_k * hidden
        each = 2.0 * self._collective(COLLECTIVE_CODE[kinds.ALL_TO_ALL], sent, *of_dp)
        return summed + np.minimum(gathered, each)

    def _group(self, which: str, repeats: int) -> tuple[Array, list[Array]]:
        key = (repeats, which)
        if key not in self._groups:
            axes = _GROUPS[which]
            inside = [np.tile(each, repeats) for each in self.grid.group_inside(axes)]
            self._groups[key] = np.tile(self.grid.size(axes), repeats), inside
        return self._groups[key]

    def _around(self, program: ServingProgram, rows: Array, work: Work, repeats: int) -> tuple[Array, Array]:
        """Sends between stages, and the gather of logits, before which ranks that share prompts gather what lies behind the last layer."""
        model, gather = program.model, COLLECTIVE_CODE[CollectiveKind.ALL_GATHER]
        of_tp, pp = self._group("tp", repeats), np.tile(self.pp, repeats)
        gathered = self._collective(gather, work.outputs * (2.0 * model.vocab_size), *of_tp)
        gathered = gathered + self._collective(gather, rows * work.sharing * (2.0 * model.hidden_size), *self._group("pcp", repeats))
        if np.max(pp) <= 1:
            return np.zeros_like(gathered), gathered
        pair = np.where(pp > 1, 2.0, 1.0)
        inside = [np.minimum(np.tile(hop, repeats), pair) for hop in self.grid.hop[:-1]] + [pair]
        send = collective_time(
            CollectiveKind.SEND_RECV, rows * (2.0 * model.hidden_size), group_size=pair, inside=inside, machine=self.machine
        )
        return np.where(pp > 1, (pp - 1.0) * send, 0.0), gathered

    def _host(self, program: ServingProgram, device: Array, work: Work, repeats: int) -> Array:
        """Exposed host time: launches without CUDA graphs, and the engine's own time of a step and of each sequence."""
        engine, pp = self.engine, np.tile(self.pp, repeats)
        sequences = (work.decoding + work.prompts) * pp
        own = engine.host.step_time + engine.host.sequence_time * sequences
        launched = np.zeros_like(device)
        if program.is_prompt:
            launched = np.full_like(device, program.model.num_hidden_layers * engine.host.layer_prefill_time)
        if not engine.host.has_graphs:
            kernels = len(program.fused.names) + len(program.rows.streaming.names) + len(program.rows.attention.names)
            blocks = max(sum(1 for region in program.regions if region.is_block), 1)
            launched = np.maximum(launched, kernels / blocks * program.model.num_hidden_layers * engine.host.launch_time)
        if self.machine.host_is_chip:
            return launched + own  # nothing runs beside it
        waits = np.maximum(launched - device, 0.0)
        return waits + (engine.host.step_time if program.is_prompt and engine.host.overlaps_host else own)


def keys_within(most: Column, queries: Column, before: Column) -> Any:
    """Keys that each of the new tokens sees after `before` others where it sees at most so many, on average over them. [-]"""
    growing = np.clip(np.asarray(most, dtype=float) - before, 0.0, queries)  # those that see all before them
    return (growing * (before + 0.5 * (growing + 1.0)) + (queries - growing) * most) / queries


def _attention_row(program: ServingProgram, row: int, amount: Array) -> AttentionRow:
    rows = program.rows.attention
    heads, kv_heads = (amount[rows.columns[name][row]] for name in ("heads", "kv_heads"))
    widths = (int(rows.columns[name][row]) for name in ("head_dim", "value_head_dim"))
    return AttentionRow(rows.names[row], heads, kv_heads, *widths)


def _in_order(counts: Array, times: Array) -> Array:
    """Their sum over regions, in order: a product of matrices orders its terms by the number of columns, and a column would not be itself
    among others."""
    total = counts[0] * times[0]
    for count, time in zip(counts[1:], times[1:], strict=True):
        total = total + count * time
    return np.asarray(total)


def _at_once(number: Array, places: Array) -> Array:
    """Number in the fullest of several places: an equal share, but at least 1 if there is any."""
    return np.maximum(number / places, np.minimum(number, 1.0))


__all__ = ["PARTS", "StepCosts", "keys_within"]
