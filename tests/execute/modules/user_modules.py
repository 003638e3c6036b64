"""Ten modules as users write them, small and with random weights, and what their forward is called with."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x):
        return self.layers(x)


class BasicBlock(nn.Module):
    def __init__(self, channels, filters, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, filters, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(filters)
        self.conv2 = nn.Conv2d(filters, filters, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(filters)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride > 1 or channels != filters:
            self.downsample = nn.Sequential(nn.Conv2d(channels, filters, 1, stride, bias=False), nn.BatchNorm2d(filters))

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet18(nn.Module):
    """The layers of torchvision's resnet18, an eighth as wide."""

    def __init__(self, width=8, classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        blocks, channels = [], width
        for stage in range(4):
            for number in range(2):
                filters = width << stage
                blocks.append(BasicBlock(channels, filters, 2 if stage and not number else 1))
                channels = filters
        self.blocks = nn.Sequential(*blocks)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(channels, classes)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(torch.flatten(self.avgpool(self.blocks(x)), 1))


class VisionTransformer(nn.Module):
    """Patches, a class token, learned positions and torch's own encoder layers."""

    def __init__(self, image=16, patch=4, hidden=32, heads=4, layers=2, classes=10):
        super().__init__()
        self.patches = nn.Conv2d(3, hidden, patch, patch)
        self.token = nn.Parameter(torch.randn(1, 1, hidden))
        self.positions = nn.Parameter(0.1 * torch.randn(1, (image // patch) ** 2 + 1, hidden))
        layer = nn.TransformerEncoderLayer(hidden, heads, 4 * hidden, 0.1, F.gelu, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), 1) + self.positions
        return self.head(self.norm(self.encoder(x))[:, 0])


class DoubleConv(nn.Sequential):
    def __init__(self, channels, filters):
        super().__init__(
            nn.Conv2d(channels, filters, 3, padding=1), nn.GroupNorm(4, filters), nn.SiLU(),
            nn.Conv2d(filters, filters, 3, padding=1), nn.GroupNorm(4, filters), nn.SiLU(),
        )  # fmt: skip


class UNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.down1, self.down2 = DoubleConv(3, width), DoubleConv(width, 2 * width)
        self.middle = DoubleConv(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.merge2 = DoubleConv(4 * width, 2 * width)
        self.merge1 = DoubleConv(3 * width, width)
        self.out = nn.Conv2d(width, 2, 1)

    def forward(self, x):
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        middle = self.middle(F.max_pool2d(second, 2))
        x = self.merge2(torch.cat((self.up2(middle), second), 1))
        x = self.merge1(torch.cat((F.interpolate(x, scale_factor=2), first), 1))
        return self.out(x)


class Dlrm(nn.Module):
    def __init__(self, dense=8, rows=(100, 60, 40), features=16):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(number, features, mode="sum") for number in rows)
        self.bottom = nn.Sequential(nn.Linear(dense, 32), nn.ReLU(), nn.Linear(32, features), nn.ReLU())
        pairs = (len(rows) + 1) * len(rows) // 2
        self.top = nn.Sequential(nn.Linear(features + pairs, 32), nn.ReLU(), nn.Linear(32, 1))
        self.register_buffer("pairs", torch.tril_indices(len(rows) + 1, len(rows) + 1, -1))

    def forward(self, dense, first, second, third):
        x = self.bottom(dense)
        bags = [table(ids) for table, ids in zip(self.tables, (first, second, third), strict=True)]
        together = torch.stack([x, *bags], 1)
        products = torch.bmm(together, together.transpose(1, 2))
        return self.top(torch.cat((x, products[:, self.pairs[0], self.pairs[1]]), 1)).squeeze(1)


class LanguageLstm(nn.Module):
    def __init__(self, vocab=50, hidden=32):
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.lstm = nn.LSTM(hidden, hidden, 2, batch_first=True)
        self.head = nn.Linear(hidden, vocab)

    def forward(self, tokens, labels):
        states, _ = self.lstm(self.embedding(tokens))
        return F.cross_entropy(self.head(states).flatten(0, 1), labels.flatten())


class Gpt2Block(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.c_attn, self.c_proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.c_fc, self.mlp_proj = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        b, s, h = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).split(h, 2)
        q, k, v = (tensor.view(b, s, self.heads, h // self.heads).transpose(1, 2) for tensor in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.c_proj(y.transpose(1, 2).contiguous().view(b, s, h)))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    """With the head tied to the table of tokens."""

    def __init__(self, vocab=64, hidden=32, heads=4, layers=2, positions=32):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, hidden), nn.Embedding(positions, hidden)
        self.h = nn.ModuleList(Gpt2Block(hidden, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(hidden)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def rotated(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class LlamaAttention(nn.Module):
    def __init__(self, hidden, heads, kv_heads):
        super().__init__()
        self.head_dim, self.groups = hidden // heads, heads // kv_heads
        self.q_proj = nn.Linear(hidden, hidden, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x, cos, sin):
        b, s, _ = x.shape
        q, k, v = (proj(x).view(b, s, -1, self.head_dim).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        k, v = (tensor[:, :, None].expand(-1, -1, self.groups, -1, -1).reshape(b, -1, s, self.head_dim) for tensor in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, s, -1))


class LlamaMlp(nn.Module):
    def __init__(self, hidden, intermediate):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaRmsNorm(nn.Module):
    """As transformers writes it, not torch's."""

    def __init__(self, hidden, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(hidden)), eps

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class MixtralMoe(nn.Module):
    """Stacked experts, each token weighted by its router."""

    def __init__(self, hidden, intermediate, experts=4, k=2):
        super().__init__()
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.experts, self.k = experts, k
        self.w1 = nn.Parameter(torch.randn(experts, hidden, intermediate) / math.sqrt(hidden))
        self.w3 = nn.Parameter(torch.randn(experts, hidden, intermediate) / math.sqrt(hidden))
        self.w2 = nn.Parameter(torch.randn(experts, intermediate, hidden) / math.sqrt(intermediate))

    def forward(self, x):
        weights, chosen = F.softmax(self.gate(x), -1).topk(self.k, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        weights = torch.zeros(*x.shape[:-1], self.experts).scatter(-1, chosen, weights)
        inner = F.silu(torch.einsum("bsh,ehf->bsef", x, self.w1)) * torch.einsum("bsh,ehf->bsef", x, self.w3)
        return torch.einsum("bsef,efh->bsh", inner * weights[..., None], self.w2)


class LlamaLayer(nn.Module):
    def __init__(self, hidden, heads, kv_heads, mlp):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = LlamaRmsNorm(hidden), LlamaRmsNorm(hidden)
        self.self_attn, self.mlp = LlamaAttention(hidden, heads, kv_heads), mlp

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    def __init__(self, vocab=64, hidden=32, heads=4, kv_heads=2, layers=2, experts=0):
        super().__init__()
        mlp = (lambda: MixtralMoe(hidden, 2 * hidden, experts)) if experts else (lambda: LlamaMlp(hidden, 2 * hidden))
        self.embed_tokens = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(LlamaLayer(hidden, heads, kv_heads, mlp()) for _ in range(layers))
        self.norm, self.lm_head = LlamaRmsNorm(hidden), nn.Linear(hidden, vocab, bias=False)
        self.register_buffer("inv_freq", 1e4 ** (-torch.arange(0, hidden // heads, 2) / (hidden // heads)))

    def forward(self, tokens):
        angles = torch.arange(tokens.shape[1])[:, None] * self.inv_freq
        angles = torch.cat((angles, angles), -1)
        x, cos, sin = self.embed_tokens(tokens), angles.cos(), angles.sin()
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.norm(x))


def mixtral():
    return Llama(experts=4)


class BertSelfAttention(nn.Module):
    """Unfused, with a mask that is given."""

    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.dense = (nn.Linear(hidden, hidden) for _ in range(4))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, x, mask):
        b, s, h = x.shape
        q, k, v = (projection(x).view(b, s, self.heads, -1).permute(0, 2, 1, 3) for projection in (self.query, self.key, self.value))
        scores = q @ k.transpose(-1, -2) / math.sqrt(h // self.heads) + mask
        context = F.dropout(scores.softmax(-1), 0.1, self.training) @ v
        return self.norm(x + self.dense(context.permute(0, 2, 1, 3).reshape(b, s, h)))


class Bert(nn.Module):
    def __init__(self, vocab=60, hidden=32, heads=4, layers=2, positions=16):
        super().__init__()
        self.words, self.positions, self.types = nn.Embedding(vocab, hidden), nn.Embedding(positions, hidden), nn.Embedding(2, hidden)
        self.register_buffer("position_ids", torch.arange(positions).expand(1, -1))
        self.norm = nn.LayerNorm(hidden)
        self.attention = nn.ModuleList(BertSelfAttention(hidden, heads) for _ in range(layers))
        self.up, self.down = (
            nn.ModuleList(nn.Linear(*size) for _ in range(layers)) for size in ((hidden, 4 * hidden), (4 * hidden, hidden))
        )
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(layers))
        self.pooler, self.classifier = nn.Linear(hidden, hidden), nn.Linear(hidden, 3)

    def forward(self, tokens, attention_mask):
        x = self.words(tokens) + self.positions(self.position_ids[:, : tokens.shape[1]]) + self.types(torch.zeros_like(tokens))
        x = self.norm(x)
        mask = (1.0 - attention_mask[:, None, None, :].float()) * torch.finfo(torch.float32).min
        for attention, up, down, norm in zip(self.attention, self.up, self.down, self.norms, strict=True):
            x = attention(x, mask)
            x = norm(x + down(F.gelu(up(x))))
        return self.classifier(torch.tanh(self.pooler(x[:, 0]))), x


#: name -> factory in this file, inputs
MODULES = {
    "mlp": ("Mlp", "x=float32[8,16]"),
    "resnet18": ("ResNet18", "x=float32[8,3,32,32]"),
    "vit": ("VisionTransformer", "images=float32[4,3,16,16]"),
    "unet": ("UNet", "x=float32[4,3,16,16]"),
    "dlrm": ("Dlrm", "dense=float32[8,8] first=int64[8,2] second=int64[8,3] third=int64[8,1]"),
    "lstm": ("LanguageLstm", "tokens=int64[4,6] labels=int64[4,6]"),
    "gpt2": ("Gpt2", "tokens=int64[4,16]"),
    "llama": ("Llama", "tokens=int64[4,16]"),
    "mixtral": ("mixtral", "tokens=int64[4,16]"),
    "bert": ("Bert", "tokens=int64[4,16] attention_mask=int64[4,16]"),
}
