"""A decoder in the style of Llama 3: RMSNorm, rotary positions, grouped-query attention, SwiGLU or experts.

Dubey et al., The Llama 3 Herd of Models, 2024 (arXiv 2407.21783); Su et al., RoFormer (2104.09864); Ainslie et
al., GQA (2305.13245); Shazeer, GLU Variants (2002.05202).

Shapes: B sequences, T positions, D dim, N query heads, G key-value heads, H = D / N head size, V vocabulary.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gasloc.experts import Experts
from gasloc.recipe import ModelConfig

_STD = 0.02


class RMSNorm(nn.Module):
    """`x / rms(x) * weight`, with the mean square taken in float32. Zhang and Sennrich, 1910.07467."""

    def __init__(self, dim: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))  # (D,)
        self._epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D) -> (B, T, D)
        wide = x if x.dtype == torch.float64 else x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._epsilon)
        return normed.type_as(x) * self.weight


class Attention(nn.Module):
    """Causal self-attention; `heads / key_value_heads` query heads share one key and value head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._heads, self._shared_heads = config.heads, config.key_value_heads
        self._head_dim = config.dim // config.heads
        shared = self._shared_heads * self._head_dim
        self.query = nn.Linear(config.dim, config.dim, bias=False)
        self.key = nn.Linear(config.dim, shared, bias=False)
        self.value = nn.Linear(config.dim, shared, bias=False)
        self.output = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # (B, T, D), (T, H/2) -> (B, T, D)
        batch, length, dim = x.shape
        query = self.query(x).view(batch, length, self._heads, self._head_dim).transpose(1, 2)  # (B, N, T, H)
        key = self.key(x).view(batch, length, self._shared_heads, self._head_dim).transpose(1, 2)  # (B, G, T, H)
        value = self.value(x).view(batch, length, self._shared_heads, self._head_dim).transpose(1, 2)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        group = self._heads // self._shared_heads
        if group > 1:  # expanded by hand: `enable_gqa` has no fast kernel on the CPU
            key = key.repeat_interleave(group, dim=1)  # (B, N, T, H)
            value = value.repeat_interleave(group, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)  # (B, N, T, H)
        output: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, length, dim))
        return output


class FeedForward(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.up = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.down = nn.Linear(config.hidden_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # (B, T, D) -> (B, T, D), ()
        """The layer's output; and 0, since there is no load to balance."""
        output: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return output, x.new_zeros(())


class Block(nn.Module):
    """One layer: attention, then feed-forward, each on a normed input and added to the stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_epsilon)
        self.attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config.dim, config.norm_epsilon)
        self.feed_forward: FeedForward | Experts = FeedForward(config) if config.experts == 1 else Experts(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:  # (B, T, D) -> (B, T, D), ()
        """The stream after this layer, and the layer's load-balancing loss."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        change, balance = self.feed_forward(self.feed_forward_norm(x))
        return x + change, balance


class Decoder(nn.Module):
    """Tokens to next-token logits. Make one with `build`, which also initialises it."""

    cos: Tensor  # (context, H/2)
    sin: Tensor  # (context, H/2)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim, config.norm_epsilon)
        self.head = nn.Linear(config.dim, config.vocabulary_size, bias=False)
        if config.tied_embeddings:
            self.head.weight = self.embedding.weight
        cos, sin = rotations(config.context_length, config.dim // config.heads, config.rope_theta)
        # follow from the config, so neither saved nor sent
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) int64 -> (B, T, V)
        """Logits of the token after each position. T is at most the context length."""
        return self._forward(tokens)[0]

    def _forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:  # (B, T) int64 -> (B, T, V), ()
        """Logits, and the mean load-balancing loss of the layers."""
        length = tokens.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.embedding(tokens)  # (B, T, D)
        balances = []
        for layer in self.layers:
            x, balance = layer(x, cos, sin)
            balances.append(balance)
        logits: Tensor = self.head(self.norm(x))
        return logits, torch.stack(balances).mean()

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:  # (B, T) int64, (B, T) int64 -> ()
        """Mean cross-entropy in nats per token, computed in float32 or wider.

        With experts and in training, the load-balancing loss is added by its weight in the config.
        """
        logits, balance = self._forward(inputs)  # (B, T, V), ()
        wide = logits if logits.dtype == torch.float64 else logits.float()
        loss = F.cross_entropy(wide.flatten(0, 1), targets.flatten())
        if self.config.experts > 1 and self.training:
            return loss + self.config.balance_weight * balance
        return loss


def build(config: ModelConfig, seed: int) -> Decoder:
    """A decoder with the same bytes for every peer that gives the same config and seed, whatever its device.

    Matrices are normal with standard deviation 0.02; those that write into the residual stream have it divided
    by sqrt(2 * layers), so that the stream's size does not grow with depth (Radford et al., GPT-2). Float32, on
    the CPU; the global random state is neither read nor changed.
    """
    with torch.device("meta"):
        model = Decoder(config)
    model.to_empty(device="cpu")
    if config.tied_embeddings:
        model.head.weight = model.embedding.weight
    generator = torch.Generator("cpu").manual_seed(seed)
    small = _STD / math.sqrt(2 * config.layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(1.0)
            else:
                writes = name.endswith(("attention.output.weight", "feed_forward.down.weight", "feed_forward.down"))
                parameter.normal_(0.0, small if writes else _STD, generator=generator)
        cos, sin = rotations(config.context_length, config.dim // config.heads, config.rope_theta)
        model.cos.copy_(cos)
        model.sin.copy_(sin)
    return model


def parameter_count(config: ModelConfig) -> int:
    """How many numbers are trained; a tied head counts once. Makes no model."""
    head_dim = config.dim // config.heads
    attention = 2 * config.dim * config.dim + 2 * config.dim * config.key_value_heads * head_dim
    feed_forward = 3 * config.dim * config.hidden_dim * config.experts
    if config.experts > 1:
        feed_forward += config.dim * config.experts  # the router
    embeddings = config.vocabulary_size * config.dim * (1 if config.tied_embeddings else 2)
    return embeddings + config.layers * (attention + feed_forward + 2 * config.dim) + config.dim


def rotations(length: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of position * theta^(-2i / head_dim): two (length, head_dim / 2), float32."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)  # (H/2,)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies  # (T, H/2)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # (B, N, T, H), (T, H/2), (T, H/2) -> (B, N, T, H)
    """Turns the pair (i, i + H/2) of each head by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.type_as(x)
