"""Graphs and programs of one job, compiled on demand. They depend on the framework's options, not on the machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakValueDictionary

from perfmodel.cost.assigned import boundary_tensors, priced_graph, stage_blocks
from perfmodel.cost.parameters import ParameterProgram, compile_parameters
from perfmodel.cost.program import Program, compile_program
from perfmodel.cost.update import Bytes
from perfmodel.foundation.dtypes import itemsize
from perfmodel.foundation.errors import bad_field
from perfmodel.foundation.session import session_cache
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.frameworks.tiles import CHUNK_TOKENS
from perfmodel.parallel.algebra.derive import derive
from perfmodel.parallel.algebra.rules import RuleSet, apply_rules, rule_set_of
from perfmodel.parallel.choices import CHUNKED_LOSS, AttentionKernel, Dispatcher, Recompute
from perfmodel.parallel.per_operator.assignment import Assignment, check_assignment
from perfmodel.parallel.per_operator.stages import stage_runs
from perfmodel.parallel.per_operator.traffic import derive_assigned
from perfmodel.parallel.plan import Plan
from perfmodel.workload.adapters import with_training
from perfmodel.workload.graph import Graph
from perfmodel.workload.job import TrainingJob
from perfmodel.workload.low_precision import with_recipe
from perfmodel.workload.routing import RankRows
from perfmodel.workload.transformer import build_graph, graph_length

_MOST_COMPILED = 16
"""Jobs whose graphs and programs stay cached, in addition to those of live estimators."""

_MOST_PROGRAMS = 64
"""Programs cached for one job, 0.3 MB each."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Compiled:
    """Graphs and programs of one job under profiles that compile alike, filled on demand. Another thread may empty it at any time."""

    programs: dict[Any, Program] = field(default_factory=dict)
    parameter_programs: dict[tuple[RuleSet | Assignment, int, bool], ParameterProgram] = field(default_factory=dict)
    graphs: dict[tuple[AttentionKernel, Dispatcher, RankRows] | int, Graph] = field(default_factory=dict)


@session_cache(maxsize=1)
def _compiled_of_live_estimators() -> WeakValueDictionary[tuple[Any, ...], Compiled]:
    return WeakValueDictionary()


@session_cache(maxsize=_MOST_COMPILED)
def compiled_for(trained: tuple[Any, ...], compiled: tuple[Any, ...], any_operand_order: bool) -> Compiled:
    """Return the programs that estimators of equal jobs share. The global batch is no part of the key: a program is of one micro-batch.

    trained             of the job (`Programs.trained`)
    compiled            of the profile (`ExecutionProfile.compiled`)
    any_operand_order   the chip takes 8-bit operands in either order, which decides whether the graph has transposed copies
    """
    return _compiled_of_live_estimators().setdefault((trained, compiled, any_operand_order), Compiled())


@dataclass(slots=True, kw_only=True, eq=False)
class Programs:
    """Compiled programs of the plans of one job under one profile.

    sizes              bytes of an element of weights, gradients and optimizer states
    any_operand_order  the chip takes 8-bit operands in either order, which decides whether the graph has transposed copies
    network_at         for a job that trains a network: returns its graph at the batch of one micro-batch
    recomputes         kinds of recomputation whose memory moments are compiled; none if only times are needed
    rank_rows          rows of one given rank; None: those of the slowest and the fullest rank under the job's routing
    compiled           cache, shared by equal jobs and profiles
    """

    job: TrainingJob
    profile: ExecutionProfile
    sizes: Bytes
    any_operand_order: bool
    network_at: Callable[[int], Graph] | None = None
    recomputes: tuple[Recompute, ...] = tuple(Recompute)
    rank_rows: RankRows | None = None
    compiled: Compiled = field(default_factory=Compiled)

    def for_job(self, job: TrainingJob) -> Programs:
        """Return the programs of a job that differs only in batch and sequence length."""
        other = replace(self, job=job)
        return other if job.seq_len == self.job.seq_len or other.trained == self.trained else other.kept()

    def kept(self) -> Programs:
        """Return these programs with the cache that equal jobs share."""
        return replace(self, compiled=compiled_for(self.trained, self.profile.compiled, self.any_operand_order))

    def program(
        self,
        rules: RuleSet | str,
        attention: AttentionKernel,
        recompute_operators: tuple[str, ...],
        dispatcher: Dispatcher = Dispatcher.ALL_TO_ALL,
        *,
        recompute: Recompute | None = None,
        splits_backward: bool = False,
    ) -> Program:
        """Return the program of a rule set, or of the name of a shipped one.

        recompute        the only kind of recomputation whose memory is needed; None: all of `recomputes`
        splits_backward  the pipeline schedule computes weight gradients separately
        """
        rules = rule_set_of(rules)
        key = (rules, attention, recompute_operators, dispatcher, splits_backward, self.recomputes)
        recomputes = self.recomputes
        if recompute in recomputes and key not in self.compiled.programs:
            recomputes = (recompute,)
            key = (*key[:-1], recomputes)
        program = self.compiled.programs.get(key)
        if program is None:
            if len(self.compiled.programs) >= _MOST_PROGRAMS:
                self.compiled.programs.clear()
                self.compiled.parameter_programs.clear()
            graph = self.graph(attention, dispatcher)
            program = self.compiled.programs[key] = compile_program(
                derive(graph, apply_rules(graph, rules)),
                self.profile,
                recompute_operators=recompute_operators,
                attention_kernel=str(attention),
                recomputes=recomputes,
                splits_backward=splits_backward,
            )
        return program

    def having(self, plan: Plan, program: Program) -> Programs:
        """Return the programs of the same graphs with this program for plans like `plan`."""
        key = (plan.sharding, plan.attention, plan.recompute_operators, plan.dispatcher, plan.schedule.splits_backward, self.recomputes)
        return replace(self, compiled=Compiled(programs={key: program}, graphs=self.compiled.graphs))

    def program_of(self, plan: Plan) -> Program:
        """Return the program of a plan's shardings, given by rules or for each operator."""
        assignment, splits = plan.assignment, plan.schedule.splits_backward
        if assignment is None:
            of = plan.rules, plan.attention, plan.recompute_operators, plan.dispatcher
            return self.program(*of, recompute=plan.recompute, splits_backward=splits)
        key = assignment, plan.attention, plan.micro_batch, plan.recompute, plan.recompute_operators, splits
        program = self.compiled.programs.get(key)
        if program is None:
            check_assignment(assignment, self.network(plan.micro_batch))
            stage_runs(self.network(plan.micro_batch), plan)
            program = self.compiled.programs[key] = compile_program(
                derive_assigned(self.assigned_graph(plan, assignment), assignment),
                self.profile,
                recompute_operators=plan.recompute_operators if plan.recompute is Recompute.SELECTIVE else (),
                attention_kernel=str(plan.attention),
                boundary_tensors=boundary_tensors(self.network(plan.micro_batch), assignment),
                recomputes=(plan.recompute,),
                splits_backward=splits,
            )
        return program

    def stage_layers(self, plan: Plan) -> tuple[int, ...]:
        """Return the blocks of each virtual stage."""
        if plan.assignment is None:
            return plan.stage_layers
        return stage_blocks(self.program_of(plan).derivation.graph, plan.assignment)

    def assigned_graph(self, plan: Plan, assignment: Assignment) -> Graph:
        """Return the network at the plan's micro-batch, as it is priced."""
        policy = self.job.policy
        return priced_graph(
            self.network(plan.micro_batch),
            assignment,
            activation_bytes=itemsize(policy.compute),
            parameter_bytes=itemsize(policy.parameter),
        )

    def network(self, batch: int) -> Graph:
        """Return the graph of a job that trains a network."""
        if self.network_at is None:
            rule = "the plan gives each operator a sharding of its own, but the job has no network"
            raise bad_field("model", self.job.model.name, rule, "predict it with its network")
        if batch not in self.compiled.graphs:
            self.compiled.graphs[batch] = self.network_at(batch)
        return self.compiled.graphs[batch]

    @property
    def trained(self) -> tuple[Any, ...]:
        """Job fields that the programs of a decoder depend on: not the batch, and not the length if one program serves all lengths."""
        job = self.job
        return job.model, self.graph_length, job.precision, job.optimizer, job.train, job.routing

    @property
    def graph_length(self) -> int:
        """Sequence length that graphs are built for; 0: a graph of one token, valid for any length."""
        seq_len, kernels = self.job.seq_len, self.profile.kernels
        # the live share of tiles is a step function of the length
        if kernels.tiles_mlp or (kernels.loss_form == CHUNKED_LOSS and seq_len < CHUNK_TOKENS):
            return seq_len
        return graph_length(self.job.transformer, seq_len)

    def graph(
        self, attention: AttentionKernel, dispatcher: Dispatcher = Dispatcher.ALL_TO_ALL, *, rank_rows: RankRows | None = None
    ) -> Graph:
        """Return the graph of sequences of `graph_length`. rank_rows None: the given rank's, else those of the job's routing."""
        rank_rows = rank_rows or self.rank_rows or self.job.routing.rows
        key = (attention, dispatcher, rank_rows)
        if key not in self.compiled.graphs:
            policy = self.job.policy
            graph = build_graph(
                self.job.transformer,
                seq_len=self.graph_length,
                attention=str(attention),
                dropout=self.profile.kernels.dropout,
                activation_bytes=itemsize(policy.compute),
                parameter_bytes=itemsize(policy.parameter),
                dispatcher=str(dispatcher),
                rank_rows=rank_rows,
            )
            if not self.job.train.is_full:
                graph = with_training(graph, self.job.train)
            if policy.recipe is not None:
                graph = with_recipe(
                    graph,
                    policy.recipe.on(any_operand_order=self.any_operand_order),
                    keeps_copies=self.profile.activations.keeps_low_copies,
                    sends_rows=self.profile.exchanges.sends_low_rows,
                    gathers_weights=self.profile.communication.gathers_low_weights,
                    pads_rows=self.profile.pads_rows(dispatcher),
                    master_bytes=itemsize(policy.master),
                )
            self.compiled.graphs[key] = graph
        return self.compiled.graphs[key]

    def parameter_program(self, program: Program, cuts: RuleSet | Assignment | str, zero: int, *, pipelined: bool) -> ParameterProgram:
        """Return the parameter events of a program under a ZeRO stage."""
        key = (cuts if isinstance(cuts, Assignment) else rule_set_of(cuts), zero, pipelined)
        compiled = self.compiled.parameter_programs.get(key)
        if compiled is None:
            compiled = self.compiled.parameter_programs[key] = compile_parameters(
                program.parameters,
                program.regions,
                self.profile,
                zero=zero,
                pipelined=pipelined,
                parameter_bytes=self.sizes.gathered,
                gradient_bytes=self.sizes.gradient.reduced,
            )
        return compiled
