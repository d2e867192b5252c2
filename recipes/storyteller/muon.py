"""Muon (momentum, orthogonalised by Newton-Schulz) for weight matrices and stacks of them."""

from collections import defaultdict

import torch

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(g_NMK: torch.Tensor) -> torch.Tensor:
    """The nearest semi-orthogonal matrix of each of N matrices, roughly, in bf16."""
    a, b, c = NEWTON_SCHULZ
    x = g_NMK.bfloat16()
    if tall := x.shape[-2] > x.shape[-1]:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        xx = x @ x.mT
        x = a * x + (b * xx + c * xx @ xx) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Parameters of one shape are updated together; steps have AdamW's size (RMS 0.2 lr)."""

    def __init__(self, params, lr: float, weight_decay: float, momentum: float = 0.95):
        params = list(params)
        by_shape = defaultdict(list)
        for p in params:
            by_shape[p.shape].append(p)
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__([{"params": ps} for ps in by_shape.values()], defaults)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            ps, lr, mu = group["params"], group["lr"], group["momentum"]
            grad = torch.stack([p.grad for p in ps])
            state = self.state[ps[0]]
            if not state:
                state["momentum"] = torch.zeros_like(grad)
            state["momentum"].lerp_(grad, 1 - mu)
            update = orthogonalise(grad.lerp(state["momentum"], mu).flatten(0, -3))
            update = update.view_as(grad) * (0.2 * max(ps[0].shape[-2:]) ** 0.5)
            torch._foreach_mul_(ps, 1 - lr * group["weight_decay"])
            torch._foreach_add_(ps, list(update.float().unbind()), alpha=-lr)
