"""A Qwen3-MoE written as Hugging Face writes it: norms and rotary positions by hand, heads repeated, a mask that is added, experts in a
loop over what one-hot vectors pick."""

import torch
from torch import nn
from torch.nn import functional


class RmsNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(dtype)


class Rotary(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / (1e6 ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)), persistent=False)

    def forward(self, x, positions):
        inv_freq = self.inv_freq[None, :, None].float().expand(positions.shape[0], -1, 1)
        angles = (inv_freq @ positions[:, None, :].float()).transpose(1, 2)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def turned(x, cos, sin):
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def repeated(x, times):
    b, h, s, d = x.shape
    return x[:, :, None].expand(b, h, times, s, d).reshape(b, h * times, s, d)


class Attention(nn.Module):
    def __init__(self, h, n, g, d, *, eager):
        super().__init__()
        self.d, self.groups, self.eager = d, n // g, eager
        self.q_proj, self.o_proj = nn.Linear(h, n * d, bias=False), nn.Linear(n * d, h, bias=False)
        self.k_proj, self.v_proj = nn.Linear(h, g * d, bias=False), nn.Linear(h, g * d, bias=False)
        self.q_norm, self.k_norm = RmsNorm(d), RmsNorm(d)

    def forward(self, x, turns, mask):
        shape = (*x.shape[:-1], -1, self.d)
        q = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        cos, sin = (turn.unsqueeze(1) for turn in turns)
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        k, v = repeated(k, self.groups), repeated(v, self.groups)
        if self.eager:
            weights = torch.matmul(q, k.transpose(2, 3)) * self.d**-0.5 + mask[:, :, :, : k.shape[-2]]
            weights = functional.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
            out = torch.matmul(functional.dropout(weights, 0.0, self.training), v)
        else:
            out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(out.transpose(1, 2).contiguous().reshape(*x.shape[:-1], -1).contiguous())


class Mlp(nn.Module):
    def __init__(self, h, f):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(h, f, bias=False), nn.Linear(h, f, bias=False)
        self.down_proj = nn.Linear(f, h, bias=False)

    def forward(self, x):
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class SparseBlock(nn.Module):
    def __init__(self, h, f, e, k):
        super().__init__()
        self.e, self.k = e, k
        self.gate, self.experts = nn.Linear(h, e, bias=False), nn.ModuleList([Mlp(h, f) for _ in range(e)])

    def forward(self, x):
        b, s, h = x.shape
        x = x.view(-1, h)
        weights = functional.softmax(self.gate(x), dim=1, dtype=torch.float)
        weights, selected = torch.topk(weights, self.k, dim=-1)
        weights /= weights.sum(dim=-1, keepdim=True)
        weights = weights.to(x.dtype)
        out = torch.zeros((b * s, h), dtype=x.dtype, device=x.device)
        mask = functional.one_hot(selected, num_classes=self.e).permute(2, 1, 0)
        for number in range(self.e):
            choice, token = torch.where(mask[number].squeeze(0))
            output = self.experts[number](x[None, token].reshape(-1, h)) * weights[token, choice, None]
            out.index_add_(0, token, output.to(x.dtype))
        return out.reshape(b, s, h)


class Layer(nn.Module):
    def __init__(self, h, n, g, d, f, e, k, *, eager):
        super().__init__()
        self.self_attn, self.mlp = Attention(h, n, g, d, eager=eager), SparseBlock(h, f, e, k)
        self.input_layernorm, self.post_attention_layernorm = RmsNorm(h), RmsNorm(h)

    def forward(self, x, turns, mask):
        x = x + self.self_attn(self.input_layernorm(x), turns, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen3Moe(nn.Module):
    def __init__(self, layers, vocab, h, n, g, d, f, e, k, *, eager=False):
        super().__init__()
        self.embed_tokens, self.rotary_emb, self.norm = nn.Embedding(vocab, h), Rotary(d), RmsNorm(h)
        self.layers = nn.ModuleList([Layer(h, n, g, d, f, e, k, eager=eager) for _ in range(layers)])
        self.lm_head = nn.Linear(h, vocab, bias=False)

    def forward(self, input_ids):
        x, s = self.embed_tokens(input_ids), input_ids.shape[1]
        positions = torch.arange(s)[None]
        mask = torch.triu(torch.full((s, s), torch.finfo(x.dtype).min), diagonal=1)
        mask *= torch.arange(s) > positions.reshape(-1, 1)
        mask = mask[None, None].expand(input_ids.shape[0], 1, -1, -1)
        turns = self.rotary_emb(x, positions)
        for layer in self.layers:
            x = layer(x, turns, mask)
        return self.lm_head(self.norm(x))
