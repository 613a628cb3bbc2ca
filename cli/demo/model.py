"""A small byte-level decoder: pre-norm attention and MLP blocks, about a million parameters."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 256
_ZERO_AT_FIRST = ("position.weight", "head.weight", "attention_out.weight", "mlp_down.weight")


class Block(nn.Module):
    """Causal self-attention, then a four times wider MLP, each behind a norm and a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp_up = nn.Linear(width, 4 * width, bias=False)
        self.mlp_down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` and result: `[batch, time, width]`."""
        x = x + self.attention_out(self._attend(self.query_key_value(self.attention_norm(x))))
        widened: torch.Tensor = self.mlp_down(functional.gelu(self.mlp_up(self.mlp_norm(x))))
        return x + widened

    def _attend(self, fused: torch.Tensor) -> torch.Tensor:
        """`fused`: `[batch, time, 3 * width]`, queries, keys and values side by side."""
        query, key, value = (
            part.view(*part.shape[:2], self.heads, -1).transpose(1, 2)
            for part in fused.chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


class Decoder(nn.Module):
    """Predicts the next byte."""

    def __init__(self, width: int, heads: int, depth: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self._initialize()

    def _initialize(self) -> None:
        """Start from knowing nothing (blocks add nothing, all bytes are equally likely), which
        learns fastest in the few steps there are."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.05)
        nn.init.normal_(self.embedding.weight, std=0.5)
        for name, parameter in self.named_parameters():
            if name.endswith(_ZERO_AT_FIRST):
                nn.init.zeros_(parameter)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """`tokens`: `[batch, time]`, bytes as int64. Returns logits, `[batch, time, 256]`."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def sequence_losses(model: nn.Module, sequences: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy, in nats per byte, of each sequence: `[batch, time + 1]` to `[batch]`."""
    logits = model(sequences[:, :-1])
    losses = functional.cross_entropy(logits.transpose(1, 2), sequences[:, 1:], reduction="none")
    return losses.mean(dim=1)
