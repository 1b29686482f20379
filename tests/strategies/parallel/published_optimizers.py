"""Optimizers with the operations of published ones: timm's AdamP, SGDP, CAdamW, MARS, NovoGrad, Kron, and others."""

import torch
from torch.nn import functional


class Published(torch.optim.Optimizer):
    """Calls `update` with each parameter, its gradient and its state; it returns what is added to the parameter."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr, "step": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    update = self.update(parameter, parameter.grad, self.state[parameter], group["step"])
                    parameter.add_(update, alpha=-group["lr"])


def adam(parameter, gradient, state, step, betas=(0.9, 0.999)):
    """Return Adam's two averages, the second as a denominator."""
    if not state:
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
    state["exp_avg"].mul_(betas[0]).add_(gradient, alpha=1 - betas[0])
    state["exp_avg_sq"].mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    return state["exp_avg"], (state["exp_avg_sq"].sqrt() / (1 - betas[1] ** step) ** 0.5).add_(1e-8)


def project(parameter, gradient, update, delta=0.1):
    """Remove what changes the norm of a scale-invariant weight, as AdamP does."""
    shape = [1] * parameter.dim()
    for view in (lambda x: x.reshape(x.shape[0], -1), lambda x: x.reshape(1, -1)):
        weight = view(parameter)
        cosine = functional.cosine_similarity(view(gradient), weight, dim=1, eps=1e-8).abs_()
        if cosine.max() < delta / weight.shape[1] ** 0.5:
            norms = weight.norm(p=2, dim=1).reshape([-1, *shape[1:]])
            normal = parameter / norms.add_(1e-8)
            update -= normal * view(normal * update).sum(dim=1).reshape([-1, *shape[1:]])
            return update
    return update


class AdamP(Published):
    def update(self, parameter, gradient, state, step):
        average, denominator = adam(parameter, gradient, state, step)
        update = average / denominator
        return project(parameter, gradient, update) if parameter.dim() > 1 else update


class SGDP(Published):
    def update(self, parameter, gradient, state, step):
        momentum = state.setdefault("momentum", torch.zeros_like(parameter)).mul_(0.9).add_(gradient)
        return project(parameter, gradient, momentum.clone()) if parameter.dim() > 1 else momentum


class CAdamW(Published):
    def update(self, parameter, gradient, state, step):
        average, denominator = adam(parameter, gradient, state, step)
        mask = (average * gradient > 0).to(gradient.dtype)
        mask.div_(mask.mean().clamp_(min=1e-3))
        return (average * mask) / denominator


class Mars(Published):
    def update(self, parameter, gradient, state, step):
        last = state.setdefault("last_grad", torch.zeros_like(parameter))
        corrected = (gradient - last).mul_(0.025 * 9.0).add_(gradient)
        norm = torch.norm(corrected)
        if norm > 1.0:
            corrected.div_(norm)
        last.copy_(gradient)
        average, denominator = adam(parameter, corrected, state.setdefault("adam", {}), step)
        return average / denominator


class NovoGrad(Published):
    def update(self, parameter, gradient, state, step):
        norm = torch.sum(torch.pow(gradient, 2))
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros([]).to(norm)
            state["exp_avg_sq"].copy_(norm)
        else:
            state["exp_avg_sq"].mul_(0.98).add_(norm, alpha=0.02)
        gradient.div_(state["exp_avg_sq"].sqrt().add_(1e-8))
        return state["exp_avg"].mul_(0.95).add_(gradient)


class Kron(Published):
    def update(self, parameter, gradient, state, step):
        if parameter.dim() < 2:
            return gradient
        if not state:
            state["left"] = torch.eye(parameter.shape[0], dtype=parameter.dtype)
        state["left"].mul_(0.9).add_(torch.einsum("ij,kj->ik", gradient, gradient))
        return torch.linalg.solve(state["left"], gradient)


class Lion(Published):
    def update(self, parameter, gradient, state, step):
        average = state.setdefault("exp_avg", torch.zeros_like(parameter))
        update = average.clone().mul_(0.9).add(gradient, alpha=0.1).sign_()
        average.lerp_(gradient, 0.01)
        return update


class PlainState(Published):
    """Keeps its state in tensors that are made from a shape, as many optimizers of research code do."""

    def update(self, parameter, gradient, state, step):
        if not state:
            state["exp_avg"] = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            state["steps"] = torch.zeros(())
        state["steps"] += 1
        state["exp_avg"].mul_(0.9).add_(gradient, alpha=0.1)
        update = torch.where(gradient.abs() > 1e-3, state["exp_avg"], torch.zeros(()).to(gradient))
        return update / (1 - 0.9 ** state["steps"].item())


class RowSums(Published):
    """Keeps a sum for each row, so that shards of the rows are updated as the whole is."""

    def update(self, parameter, gradient, state, step):
        rows = gradient.reshape(gradient.shape[0], -1).square().mean(1)
        state["rows"] = state.get("rows", 0) + rows
        return gradient / state["rows"].sqrt().add(1e-8).reshape(-1, *[1] * (gradient.dim() - 1))


class Lamb(torch.optim.Optimizer):
    """Adam on gradients whose norm over all parameters is limited, as timm's Lamb is (arXiv 1904.00962)."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.square().sum() for p in held]).sum().sqrt().clamp(min=1.0)
        for parameter in held:
            gradient, state = parameter.grad / norm, self.state[parameter]
            first = state.setdefault("first", torch.zeros_like(parameter)).lerp_(gradient, 0.1)
            second = state.setdefault("second", torch.zeros_like(parameter)).lerp_(gradient.square(), 0.01)
            update = first / (second.sqrt() + 1e-8)
            parameter.sub_(update * self.param_groups[0]["lr"] * parameter.norm() / update.norm())
