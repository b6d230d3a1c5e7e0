"""Callbacks for tests, which report through the console lines of their rank."""

from __future__ import annotations

from typing import Any

import torch

from raytrain_hpc import Callback, ParameterState
from raytrain_hpc.training.callback_list import HOOKS


def get_notes(records: list[dict[str, Any]]) -> list[str]:
    """Return the console lines that a rank has printed."""
    return [record["text"] for record in records if record["type"] == "note"]


def _make_hook(hook: str) -> Any:
    def report(self: Any, *arguments: Any) -> None:
        self.context.log(f"{self.name}: {hook} {self.context.step}")

    return report


class HookRecorder(Callback):
    """Report every hook with the number of committed steps."""

    def __init__(self, name: str = "hooks", priority: int = 0):
        self.name, self.priority = name, priority


for _hook in HOOKS:
    setattr(HookRecorder, _hook, _make_hook(_hook))


class Counters(Callback):
    """State of every kind: a number, a nested value, a replicated tensor, and one tensor per parameter."""

    def __init__(self) -> None:
        self.num_steps, self.losses = 0, []  # type: ignore[var-annotated]
        self.histogram = torch.zeros(3, dtype=torch.int64)

    def on_generation_start(self) -> None:
        self.sums = ParameterState({name: torch.zeros_like(w) for name, w in self.context.parameters.items()})

    def pre_train(self) -> None:
        self.context.log(f"state: {self.num_steps} {self.losses} {self.histogram.tolist()}")

    @torch.no_grad()
    def post_step(self, metrics: dict[str, Any]) -> None:
        self.num_steps += 1
        self.losses = [*self.losses, {"loss": metrics["train/loss"]}]
        self.histogram[self.context.step % 3] += 1
        for name, weight in self.context.parameters.items():
            self.sums[name].add_(weight)

    def close(self) -> None:
        self.context.log(f"end: {self.num_steps} {self.losses} {self.histogram.tolist()}")

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps, "losses": self.losses, "histogram": self.histogram, "sums": self.sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_steps, self.losses = state["num_steps"], state["losses"]


class Requester(Callback):
    """Make requests on one rank: {hook: {step: [(method, arguments), ...]}}."""

    def __init__(self, rank: int, requests: dict[str, dict[int, list[tuple[str, tuple[Any, ...]]]]]):
        self._rank, self._requests = rank, requests

    def pre_train(self) -> None:
        self._request("pre_train")

    def post_step(self, metrics: dict[str, Any]) -> None:
        self._request("post_step")

    def post_eval(self, metrics: dict[str, Any]) -> None:
        self.context.log(f"evaluated {self.context.step}: {metrics.get('val/loss')}")
        self._request("post_eval")

    def post_checkpoint_saved(self) -> None:
        self.context.log(f"saved {self.context.step}")

    def _request(self, hook: str) -> None:
        for method, arguments in self._requests.get(hook, {}).get(self.context.step, ()):
            if self.context.rank == self._rank:
                getattr(self.control, method)(*arguments)


class Failing(Callback):
    """Raise an exception in one hook of one rank at one step."""

    def __init__(self, hook: str, step: int, *, rank: int = 0, optional: bool = False, text: str = "no\nreason"):
        self._hook, self._step, self._rank, self.optional, self._text = hook, step, rank, optional, text

    def pre_step(self) -> None:
        self._fail("pre_step")

    def post_step(self, metrics: dict[str, Any]) -> None:
        self._fail("post_step")

    def close(self) -> None:
        self._fail("close")

    def _fail(self, hook: str) -> None:
        if (hook, self.context.step, self.context.rank) == (self._hook, self._step, self._rank):
            raise ValueError(self._text)


class FailingCounter(Failing):
    """Fail in `post_step` of rank 0 at a step, before tensors are changed in place as on the other ranks. Optional."""

    def __init__(self, step: int):
        super().__init__("post_step", step, optional=True)

    def on_generation_start(self) -> None:
        self.count = torch.zeros(1)
        self.counts = ParameterState({name: torch.zeros_like(w) for name, w in self.context.parameters.items()})

    def post_step(self, metrics: dict[str, Any]) -> None:
        super().post_step(metrics)
        for tensor in (self.count, *self.counts.values()):
            tensor += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "counts": self.counts}


class FixedState(Callback):
    """A callback whose state is what it is given."""

    def __init__(self, state: dict[str, Any], *, by_rank: bool = False):
        self._state, self._by_rank = state, by_rank

    def state_dict(self) -> dict[str, Any]:
        return {**self._state, **({"rank": self.context.rank} if self._by_rank else {})}


class PeerFailure(Callback):
    """Fail in one hook of one rank at one step, as a collective does when another rank is lost."""

    def __init__(self, hook: str, step: int, rank: int, priority: int = 0):
        self._at, self.priority = (hook, step, rank), priority

    def post_step(self, metrics: dict[str, Any]) -> None:
        self._fail("post_step")

    def post_eval(self, metrics: dict[str, Any]) -> None:
        self._fail("post_eval")

    def _fail(self, hook: str) -> None:
        if (hook, self.context.step, self.context.rank) == self._at and self.context.generation == 1:
            raise RuntimeError("Connection closed by peer")


class EvaluationEffects(Callback):
    """Change state of every kind, and the weights, after each evaluation."""

    def __init__(self) -> None:
        self.num_evaluations = 0
        self.count = torch.zeros(1, dtype=torch.int64)

    def on_generation_start(self) -> None:
        self.counts = ParameterState({name: torch.zeros_like(w) for name, w in self.context.parameters.items()})

    @torch.no_grad()
    def post_eval(self, metrics: dict[str, Any]) -> None:
        self.num_evaluations += 1
        for tensor in (self.count, *self.counts.values()):
            tensor += 1
        for weight in self.context.parameters.values():
            weight *= 1.125
        metrics["val/count"] = self.num_evaluations

    def close(self) -> None:
        counts = {float(count) for tensor in self.counts.values() for count in (tensor.min(), tensor.max())}
        self.context.log(f"end: {self.num_evaluations} {self.count.item()} {sorted(counts)}")

    def state_dict(self) -> dict[str, Any]:
        return {"num_evaluations": self.num_evaluations, "count": self.count, "counts": self.counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_evaluations = state["num_evaluations"]
