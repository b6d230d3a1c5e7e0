"""Optimizer classes as a user may write them: usable ones, and those that must be refused."""

from __future__ import annotations

from typing import Any

import torch


class DecayingSign(torch.optim.Optimizer):
    """Sign descent with a momentum; its state has a number, and a momentum that each step replaces."""

    def __init__(self, params: Any, lr: float = 1e-3, decay: float = 0.9):
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                state["age"] = state.get("age", 0) + 1
                old = state.get("average", torch.zeros_like(parameter))
                state["average"] = group["decay"] * old + (1 - group["decay"]) * parameter.grad
                parameter -= group["lr"] / state["age"] * state["average"].sign()


class Normalized(DecayingSign):
    """Divides a gradient by its norm, so that an element's update depends on other elements."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                parameter -= group["lr"] * parameter.grad / parameter.grad.norm()


class CountingInAttribute(DecayingSign):
    """Counts its steps in an attribute, which no checkpoint would hold."""

    def __init__(self, params: Any, lr: float = 1e-3):
        super().__init__(params, lr)
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.num_steps += 1
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                parameter -= group["lr"] / self.num_steps * parameter.grad


class WithText(DecayingSign):
    """Keeps text in its state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                self.state[parameter]["note"] = "stepped"
                parameter -= group["lr"] * parameter.grad


class WithoutLr(torch.optim.Optimizer):
    """Has no learning rate."""

    def __init__(self, params: Any):
        super().__init__(params, {})


NOT_AN_OPTIMIZER = object
