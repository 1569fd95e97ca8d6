"""A mixture of experts in place of the feed-forward layer: each token goes to its best few of E SwiGLUs.

Shazeer et al., Outrageously Large Neural Networks, 2017 (arXiv 1701.06538); routing with the top k of a softmax,
renormalised, as in Mixtral (2401.04088); the load-balancing loss of Switch Transformers (2101.03961, equation 4),
for k experts a token.

Shapes: B sequences, T positions, D dim, E experts, F hidden dim, K experts a token, M = B * T tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gasloc.recipe import ModelConfig


class Experts(nn.Module):
    """Routes each token to `experts_per_token` of `experts` SwiGLUs and adds up what they say, by weight.

    No token is dropped, whatever the load. Each expert's matrices are slices of one parameter, so that all of
    them travel, mix and take the outer step like any other tensor, those that saw no token this round too.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        experts, dim, hidden = config.experts, config.dim, config.hidden_dim
        self._per_token = config.experts_per_token
        self.router = nn.Linear(dim, experts, bias=False)
        self.gate = nn.Parameter(torch.empty(experts, hidden, dim))  # (E, F, D)
        self.up = nn.Parameter(torch.empty(experts, hidden, dim))  # (E, F, D)
        self.down = nn.Parameter(torch.empty(experts, dim, hidden))  # (E, D, F)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # (B, T, D) -> (B, T, D), ()
        """The layer's output, and the load-balancing loss: 1 where all experts are used alike, up to E / K."""
        tokens = x.reshape(-1, x.shape[-1])  # (M, D)
        shares = self.router(tokens).softmax(-1, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
        best, chosen = shares.topk(self._per_token, dim=-1)  # (M, K), (M, K)
        weights = (best / best.sum(-1, keepdim=True)).type_as(x)
        output = torch.zeros_like(tokens)  # (M, D)
        for index in range(len(self.gate)):
            where, rank = (chosen == index).nonzero(as_tuple=True)  # the tokens of this expert
            said = self._say(index, tokens[where]) * weights[where, rank, None]
            output = output.index_add(0, where, said.type_as(output))
        return output.reshape(x.shape), balance(shares, chosen)

    def _say(self, index: int, tokens: Tensor) -> Tensor:  # (m, D) -> (m, D)
        hidden = F.silu(F.linear(tokens, self.gate[index])) * F.linear(tokens, self.up[index])
        return F.linear(hidden, self.down[index])


def balance(shares: Tensor, chosen: Tensor) -> Tensor:  # (M, E) float, (M, K) int64 -> ()
    """`E * sum_e f_e P_e`: f_e the fraction of choices that fell on expert e, P_e its mean share of the router.

    1 where both are uniform; larger the more both pile up on the same experts. Only P carries a gradient.
    """
    experts = shares.shape[-1]
    fractions = torch.bincount(chosen.flatten(), minlength=experts).type_as(shares) / chosen.numel()  # (E,)
    return experts * (fractions * shares.mean(0)).sum()
