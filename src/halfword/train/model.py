"""A Llama-shaped decoder with the weight names and conventions of transformers' LlamaForCausalLM.

Left out, as it is not needed to train: a key-value cache, dropout, biases, rotary scaling.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halfword.errors import UsageError
from halfword.train.config import TrainConfig
from halfword.train.matmul import attention, embedding, linear

IGNORED = -100  # a target that is no token: counts neither in the loss nor among the tokens
NORM_EPS = 1e-5
ROPE_THETA = 10000.0
INIT_STD = 0.02


def build_model(config: TrainConfig, vocab_size: int, device: torch.device) -> "Llama":
    """Make the model in BF16: the same first bits on every device and under every preset."""
    try:
        model = Llama(config, vocab_size)
    except RuntimeError as error:  # nothing narrower is raised for memory that is not there
        fix = f"the model cannot be made: {str(error).splitlines()[0]}"
        raise UsageError("--hidden_dim", config.hidden_dim, fix) from None
    generator = torch.Generator().manual_seed(config.seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # a norm's weight stays one
            continue
        std = INIT_STD
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            std /= math.sqrt(2 * config.num_layers)  # GPT-2: keeps the residual stream's scale
        nn.init.normal_(parameter, std=std, generator=generator)
    for parameter in model.parameters():  # not model.to(): it would round the rotary tables too
        parameter.data = parameter.data.to(torch.bfloat16)
    return model.to(device)


def loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of the cross-entropy over targets that are tokens, in FP32; 0 where there are none."""
    return F.cross_entropy(
        logits.float().flatten(0, -2), targets.flatten(), reduction="sum", ignore_index=IGNORED
    )


class Llama(nn.Module):
    """Token ids (batch, seq) to logits (batch, seq, vocab)."""

    def __init__(self, config: TrainConfig, vocab_size: int) -> None:
        super().__init__()
        self.model = Decoder(config, vocab_size)
        self.lm_head = Linear(config.hidden_dim, vocab_size)
        if config.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Give each position's logits for the token after it."""
        logits: Tensor = self.lm_head(self.model(ids))
        return logits


class Decoder(nn.Module):
    """Token ids (batch, seq) to the last hidden state (batch, seq, hidden)."""

    cos: Tensor  # (seq, head_dim) fp32
    sin: Tensor  # (seq, head_dim) fp32

    def __init__(self, config: TrainConfig, vocab_size: int) -> None:
        super().__init__()
        self.embed_tokens = Embedding(vocab_size, config.hidden_dim)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_dim)
        self.activation_checkpointing = config.activation_checkpointing
        cos, sin = rotary_tables(config.seq_length, config.hidden_dim // config.num_heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Run the layers, recomputing each in the backward pass where that is asked for."""
        x: Tensor = self.embed_tokens(ids)  # (batch, seq, hidden) bf16
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.layers:
            if self.activation_checkpointing and self.training:
                x = checkpoint(layer, x, cos, sin, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, cos, sin)
        normed: Tensor = self.norm(x)
        return normed


class Layer(nn.Module):
    """Attention, then the feed-forward network, each on a normed copy and added back."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = FeedForward(config.hidden_dim, config.ffn_dim)
        self.input_layernorm = RMSNorm(config.hidden_dim)
        self.post_attention_layernorm = RMSNorm(config.hidden_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map (batch, seq, hidden) to the same shape."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        mixed: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return mixed


class Attention(nn.Module):
    """Causal attention with rotary positions; groups of query heads may share a KV head."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        hidden = config.hidden_dim
        self.head_dim = hidden // config.num_heads
        self.q_proj = Linear(hidden, config.num_heads * self.head_dim)
        self.k_proj = Linear(hidden, config.num_kv_heads * self.head_dim)
        self.v_proj = Linear(hidden, config.num_kv_heads * self.head_dim)
        self.o_proj = Linear(config.num_heads * self.head_dim, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map (batch, seq, hidden) to the same shape."""
        query = rotate(self._heads(self.q_proj(x)), cos, sin)  # (batch, heads, seq, head_dim)
        key = rotate(self._heads(self.k_proj(x)), cos, sin)  # (batch, kv_heads, seq, head_dim)
        mixed = attention(query, key, self._heads(self.v_proj(x)))
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU: https://arxiv.org/abs/2002.05202."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, ffn)
        self.up_proj = Linear(hidden, ffn)
        self.down_proj = Linear(ffn, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, seq, hidden) to the same shape."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class RMSNorm(nn.Module):
    """Root mean square norm, in FP32 up to the multiplication by the weight, as Llama's."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, seq, hidden) to the same shape."""
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + NORM_EPS)
        return self.weight * x32.to(x.dtype)


class Linear(nn.Module):
    """A matrix without bias."""

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_dim, in_dim))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, seq, in) to (batch, seq, out)."""
        return linear(x, self.weight)


class Embedding(nn.Module):
    """A row of the hidden state for each token of the vocabulary."""

    def __init__(self, vocab_size: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden))

    def forward(self, ids: Tensor) -> Tensor:
        """Map (batch, seq) to (batch, seq, hidden)."""
        return embedding(ids, self.weight)


def rotary_tables(seq_length: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of position times frequency, each half repeated: (seq, head_dim) fp32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    angles = torch.outer(torch.arange(seq_length).float(), 1.0 / ROPE_THETA**exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + head_dim/2) by its position's angle, in FP32, rounded once."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
