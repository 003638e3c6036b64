"""Decoders for the tests of imports, written as public implementations are: attention, latents, and experts in each way to run them."""

import torch
from torch import nn
from torch.nn import functional

from perfmodel.execute.importer.import_graph import import_module
from perfmodel.workload.imported.input_spec import parse_inputs


def places(s):
    return torch.arange(s)[:, None], torch.arange(s)[None]


def causal(s):
    return torch.ones(s, s, dtype=torch.bool).tril()


def window(number):
    def mask(s):
        query, key = places(s)
        return (key <= query) & (key > query - number)

    return mask


class Mixer(nn.Module):
    """Attention of `n` heads over `g`: queries, keys and values by three products or, fused, by one."""

    def __init__(self, h, n, g, d, *, fused=False, bias=False, normed=False, mask=None):
        super().__init__()
        self.mask = mask
        self.sizes, self.d = (n * d, g * d, g * d), d
        self.projections = nn.ModuleList(
            [nn.Linear(h, sum(self.sizes), bias=bias)] if fused else [nn.Linear(h, s, bias=bias) for s in self.sizes]
        )
        self.out = nn.Linear(n * d, h, bias=bias)
        self.norms = nn.ModuleList([nn.RMSNorm(d), nn.RMSNorm(d)]) if normed else None

    def forward(self, x, other=None):
        projected = (
            self.projections[0](x).split(self.sizes, dim=-1)
            if len(self.projections) == 1
            else [projection(x) for projection in self.projections]
        )
        if other is not None:
            projected = (projected[0], self.projections[1](other), self.projections[2](other))
        q, k, v = (tensor.unflatten(-1, (-1, self.d)).transpose(1, 2) for tensor in projected)
        if self.norms is not None:
            q, k = self.norms[0](q), self.norms[1](k)
        out = self.attend(q, *(tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v)))
        return self.out(out.transpose(1, 2).flatten(2))

    def attend(self, q, k, v):
        mask = None if self.mask is None else self.mask(q.shape[2])
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


def added(scores, seen):
    return scores + torch.where(seen, 0.0, torch.finfo(scores.dtype).min)


def filled(scores, seen):
    return scores.masked_fill(~seen, float("-inf"))


def picked(scores, seen):
    return torch.where(seen, scores, torch.finfo(scores.dtype).min)


class ByHand(Mixer):
    """Two products and a softmax; `put` says what is not seen, `sinks` are logits that no key has (gpt-oss)."""

    def __init__(self, *widths, put=None, sinks=False, **how):
        super().__init__(*widths, **how)
        self.put, self.sinks = put, nn.Parameter(torch.empty(widths[1])) if sinks else None

    def attend(self, q, k, v):
        scores = q @ k.transpose(-1, -2) * self.d**-0.5
        if self.mask is not None:
            scores = self.put(scores, self.mask(q.shape[2]))
        if self.sinks is not None:
            scores = torch.cat((scores, self.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
        return scores.float().softmax(-1).to(v.dtype)[..., : k.shape[2]] @ v


class Linear(Mixer):
    """Attention without a softmax."""

    def attend(self, q, k, v):
        return q @ (k.transpose(-1, -2) @ v)


class Forward(nn.Module):
    def __init__(self, h, f, *, form="gated", bias=False):
        super().__init__()
        self.form, self.width = form, f
        ups = {"gated": [f, f], "fused": [2 * f], "plain": [f]}[form]
        self.up = nn.ModuleList(nn.Linear(h, width, bias=bias) for width in ups)
        self.down = nn.Linear(f, h, bias=bias)

    def forward(self, x):
        if self.form == "plain":
            return self.down(functional.gelu(self.up[0](x)))
        gate, up = self.up[0](x).chunk(2, -1) if self.form == "fused" else [projection(x) for projection in self.up]
        return self.down(functional.silu(gate) * up)


class Layer(nn.Module):
    """`norms`: before each branch, after it, both, or one before both branches."""

    def __init__(self, h, mixer, forward, *, norm=nn.RMSNorm, parallel=False, norms="before"):
        super().__init__()
        self.mixer, self.feed, self.parallel = mixer, forward, parallel
        self.before = nn.ModuleList(norm(h) for _ in range({"after": 0, "one": 1}.get(norms, 2)))
        self.after = nn.ModuleList(norm(h) for _ in range(2 if norms in ("after", "both") else 0))

    def branch(self, number, part, x):
        output = part(self.before[number](x) if self.before else x)
        return self.after[number](output) if self.after else output

    def forward(self, x):
        if self.parallel:
            normed = [norm(x) for norm in self.before]
            return x + self.mixer(normed[0]) + self.feed(normed[-1])
        x = x + self.branch(0, self.mixer, x)
        return x + self.branch(1, self.feed, x)


class Net(nn.Module):
    def __init__(self, layers, *, h=64, vocab=500, positions=0, tied=False, norm=nn.RMSNorm, head=True):
        super().__init__()
        self.table, self.layers = nn.Embedding(vocab, h), nn.ModuleList(layers)
        self.positions = nn.Embedding(positions, h) if positions else None
        self.last = norm(h)
        self.head = nn.Linear(h, vocab, bias=False) if head else None
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens):
        x = self.table(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.last(x) if self.head is None else self.head(self.last(x))


def imported(make, inputs="int64[2,32]"):
    return import_module(make, parse_inputs([inputs]), name="net")


class Latent(nn.Module):
    """DeepSeek's latent attention as its authors publish it: latents of queries (or none) and of keys and values, positions in a part of
    each head, those of keys shared. `apart`: a product of their own makes them."""

    def __init__(self, h, n, query_rank, rank, nope, rope, value, *, apart=False):
        super().__init__()
        self.n, self.nope, self.rope, self.rank = n, nope, rope, rank
        if query_rank:
            self.q_a, self.q_a_norm = nn.Linear(h, query_rank, bias=False), nn.RMSNorm(query_rank)
        self.q_b = nn.Linear(query_rank or h, n * (nope + rope), bias=False)
        self.kv_a, self.kv_a_norm = nn.Linear(h, rank + (0 if apart else rope), bias=False), nn.RMSNorm(rank)
        self.k_rope = nn.Linear(h, rope, bias=False) if apart else None
        self.kv_b, self.o = nn.Linear(rank, n * (nope + value), bias=False), nn.Linear(n * value, h, bias=False)

    def turned(self, x):
        angles = torch.arange(x.shape[-2]).float()[:, None] / 10000.0 ** (torch.arange(self.rope) / self.rope)
        first, second = x.chunk(2, -1)
        return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()

    def forward(self, x):
        b, s, _ = x.shape
        q = self.q_b(self.q_a_norm(self.q_a(x)) if hasattr(self, "q_a") else x).view(b, s, self.n, -1).transpose(1, 2)
        q, q_rope = q.split([self.nope, self.rope], -1)
        latent, k_rope = (self.kv_a(x), self.k_rope(x)) if self.k_rope is not None else self.kv_a(x).split([self.rank, self.rope], -1)
        keys_and_values = self.kv_b(self.kv_a_norm(latent)).view(b, s, self.n, -1).transpose(1, 2)
        k, v = keys_and_values.split([self.nope, keys_and_values.shape[-1] - self.nope], -1)
        k_rope = self.turned(k_rope.view(b, s, 1, -1).transpose(1, 2)).expand(-1, self.n, -1, -1)
        return self.o(self.attend(torch.cat((q, self.turned(q_rope)), -1), torch.cat((k, k_rope), -1), v).transpose(1, 2).flatten(2))

    def attend(self, q, k, v):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class LatentByHand(Latent):
    """As DeepSeek's inference code computes it."""

    def attend(self, q, k, v):
        scores = torch.einsum("bhsd,bhtd->bhst", q, k) * (self.nope + self.rope) ** -0.5
        scores = scores + torch.full((q.shape[2],) * 2, float("-inf")).triu_(1)
        return torch.einsum("bhst,bhtd->bhsd", scores.softmax(-1, dtype=torch.float32), v)


# --- experts ----------------------------------------------------------------------------------------------------------------------


def softmax_first(scores, k):
    """Mixtral's and Qwen's router."""
    weights, chosen = torch.softmax(scores, -1).topk(k, -1)
    return weights / weights.sum(-1, keepdim=True), chosen


def softmax_after(scores, k):
    """gpt-oss's."""
    weights, chosen = scores.topk(k, -1)
    return weights.softmax(-1), chosen


def in_groups(scores, k, groups=4, top=2):
    """DeepSeek-V3's: sigmoids, and the best of the groups whose best two are best."""
    scores = scores.sigmoid()
    chosen = scores + torch.zeros(scores.shape[-1])
    by_group = chosen.view(len(scores), groups, -1)
    best = by_group.topk(2, -1)[0].sum(-1).topk(top, -1)[1]
    kept = torch.zeros(len(scores), groups).scatter_(1, best, 1).unsqueeze(-1).expand_as(by_group).flatten(1)
    chosen = chosen.masked_fill(~kept.bool(), 0.0).topk(k, -1)[1]
    weights = scores.gather(1, chosen)
    return weights / weights.sum(-1, keepdim=True), chosen


def best_one(scores, k):
    """Switch's."""
    return torch.softmax(scores, -1).max(-1, keepdim=True)


class Mixture(nn.Module):
    """`e` experts of width `f`, `k` for each token, which `run` runs (below). `shared`: the width of what every token runs besides."""

    def __init__(self, h, f, e, k, run, *, route=softmax_first, shared=0, gate=False, bias=False):
        super().__init__()
        self.e, self.k, self.run, self.route, self.f = e, k, run, route, f
        self.router = nn.Linear(h, e, bias=bias)
        if run in STACKED:
            self.up, self.down = nn.Parameter(torch.empty(e, h, 2 * f)), nn.Parameter(torch.empty(e, f, h))
            self.biases = nn.ParameterList([torch.empty(e, 2 * f), torch.empty(e, h)]) if bias else None
        else:
            self.experts = nn.ModuleList(Forward(h, f, bias=bias) for _ in range(e))
        self.shared = Forward(h, shared) if shared else None
        self.shared_gate = nn.Linear(h, 1, bias=False) if gate else None

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        out = self.run(self, rows, *self.route(self.router(rows), self.k))
        if self.shared is not None:
            shared = self.shared(rows)
            out = out + (shared if self.shared_gate is None else torch.sigmoid(self.shared_gate(rows)) * shared)
        return out.view_as(x)


def by_one_hot(m, x, weights, chosen):
    """Mixtral in a loop: each expert takes the tokens that chose it."""
    out, mask = torch.zeros_like(x), functional.one_hot(chosen, m.e).permute(2, 1, 0)
    for number, expert in enumerate(m.experts):
        choice, token = torch.where(mask[number])
        out.index_add_(0, token, expert(x[None, token].reshape(-1, x.shape[-1])) * weights[token, choice, None])
    return out


def by_number(m, x, weights, chosen):
    """DeepSeek's inference code: likewise, by comparing."""
    out = torch.zeros_like(x)
    for number, expert in enumerate(m.experts):
        token, choice = torch.where(chosen == number)
        out[token] += expert(x[token]) * weights[token, choice, None]
    return out


def all_in_turn(m, x, weights, chosen):
    """Every expert runs every token."""
    full, out = torch.zeros(len(x), m.e).scatter(-1, chosen, weights), torch.zeros_like(x)
    for number, expert in enumerate(m.experts):
        out = out + expert(x) * full[:, number : number + 1]
    return out


def gated(gate_and_up):
    gate, up = gate_and_up.chunk(2, -1)
    return functional.silu(gate) * up


def all_at_once(m, x, weights, chosen):
    """Llama 4's and gpt-oss's experts: products of all experts with all tokens."""
    full = torch.zeros(len(x), m.e).scatter(1, chosen, weights)
    products = torch.bmm(x.repeat(m.e, 1).view(m.e, len(x), -1), m.up)
    products = torch.bmm(gated(products if m.biases is None else products + m.biases[0][:, None]), m.down)
    return ((products if m.biases is None else products + m.biases[1][:, None]) * full.T[..., None]).sum(0)


def by_letters(m, x, weights, chosen):
    """Likewise, where only the weights' first position says which expert."""
    full = torch.zeros(len(x), m.e).scatter(1, chosen, weights)
    return torch.einsum("tef,efh->th", gated(torch.einsum("th,ehf->tef", x, m.up)) * full[..., None], m.down)


def in_turn_of_stack(m, x, weights, chosen):
    out = torch.zeros_like(x)
    for number in range(m.e):
        token, choice = torch.where(chosen == number)
        out = out.index_add(0, token, gated(x[token] @ m.up[number]) @ m.down[number] * weights[token, choice, None])
    return out


def sorted_by_expert(m, x, weights, chosen):
    """Grouped products, rows sorted by their experts."""
    order = chosen.flatten().argsort()
    ends = torch.bincount(chosen.flatten(), minlength=m.e).cumsum(0).int()
    products = functional.grouped_mm(x[order // m.k].bfloat16(), m.up.bfloat16(), offs=ends)
    products = functional.grouped_mm(gated(products), m.down.bfloat16(), offs=ends).to(x.dtype)
    return torch.zeros_like(x).index_add(0, order // m.k, products * weights.flatten()[order, None])


def by_taken_weights(m, x, weights, chosen):
    """gpt-fast: the weights of each token's experts."""
    products = gated(torch.einsum("th,tkhf->tkf", x, m.up[chosen]))
    return torch.einsum("tkh,tk->th", torch.einsum("tkf,tkfh->tkh", products, m.down[chosen]), weights)


LOOPS = (by_one_hot, by_number, all_in_turn)
STACKED = (all_at_once, by_letters, in_turn_of_stack, sorted_by_expert, by_taken_weights)
