"""Which layers are recomputed, and what is offloaded: against the search of all possibilities."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from raytrain_hpc.config.loader import load_config
from raytrain_hpc.config.model_spec import resolve_model_spec
from raytrain_hpc.config.schema import Config
from raytrain_hpc.planner.calibration import Calibration
from raytrain_hpc.planner.hardware import DEVICES, Machine, make_machine
from raytrain_hpc.planner.layout import Layout, resolve_batching, resolve_layout
from raytrain_hpc.planner.memory_model import MemoryModel
from raytrain_hpc.planner.memory_savings import SavingOptions
from raytrain_hpc.planner.search import choose_savings, estimate_layout
from raytrain_hpc.planner.search_space import apply_choice, build_search_space
from raytrain_hpc.planner.workload import LayoutChoice, make_choice, make_workload

ODD = ["model.num_layers=7", "model.hidden_size=1024", "model.num_heads=16", "train.dtype=bf16", "train.seq_len=4096"]
ODD += ["train.global_batch_size=32", "train.micro_batch_size=4"]
ALL = SavingOptions(("none", "selective", "full"), None, ("none",), ("none",))
LAYOUTS = {
    "alone": ["cluster.workers=1"],
    "zero3-2": ["cluster.workers=2", "parallel.zero=3"],
    "pp-2": ["cluster.workers=2", "parallel.pp=2"],
    "pp-3, interleaved": ["cluster.workers=3", "parallel.pp=3", "parallel.pp_schedule=interleaved_1f1b"],
    "pp-2, zbv": ["cluster.workers=2", "parallel.pp=2", "parallel.pp_schedule=zbv"],
}


class Case:
    """A layout with 7 layers, and what each choice of savings needs and costs."""

    def __init__(self, layout: str, *words: str):
        words = (*ODD, *LAYOUTS[layout], *words)
        if layout == "pp-3, interleaved":
            words = (*words, "model.num_layers=13")
        self.config: Config = load_config(None, list(words))
        world_size = int(self.config.cluster.workers)
        self.spec = resolve_model_spec(self.config.model, vocab_size=256, seq_len=4096)
        self.layout: Layout = resolve_layout(self.config, world_size)
        self.batching = resolve_batching(self.config, self.layout)
        self.choice = make_choice(self.config, self.layout, self.batching)
        self.memory = MemoryModel(make_workload(self.config, self.spec))
        self.max_layers = self.memory.get_max_stage_layers(self.layout)
        self.world_size = world_size

    def require_gib(self, choice: LayoutChoice) -> float:
        return self.memory.estimate_footprint(choice).compute_required_gib(DEVICES["h100"])

    def list_all(self) -> list[LayoutChoice]:
        """Return all choices without offload."""
        counts = (*range(1, self.max_layers), 0)
        choices = [
            replace(self.choice, recompute=p, recompute_layers=k) for p, k in product(("selective", "full"), counts)
        ]
        return [self.choice, *choices]  # type: ignore[list-item]

    def make_machine(self, memory_gib: float) -> Machine:
        machine = make_machine("h100", 1, self.world_size)
        return replace(machine, device=replace(machine.device, memory_gib=memory_gib))

    def estimate_step_s(self, choice: LayoutChoice) -> float:
        config, machine = apply_choice(self.config, choice), self.make_machine(80)
        return estimate_layout(config, self.spec, machine, Calibration(), self.layout, self.batching).step_s

    def choose(self, memory_gib: float, *keys: str) -> LayoutChoice:
        space = dict.fromkeys(keys or ("activation_checkpointing", "recompute_layers"))
        machine = self.make_machine(memory_gib)
        return choose_savings(self.config, self.spec, machine, Calibration(), self.layout, self.batching, space)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_more_recomputed_layers_need_less_memory_and_more_time(layout: str) -> None:
    case = Case(layout)
    for policy in ("selective", "full"):
        choices = [choice for choice in case.list_all() if choice.recompute in ("none", policy)]
        needed = [case.require_gib(choice) for choice in choices]
        assert needed == sorted(needed, reverse=True) and needed[0] > needed[-1]
        seconds = [case.estimate_step_s(choice) for choice in choices]
        assert seconds == sorted(seconds) and seconds[0] < seconds[-1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_cheapest_choice_that_fits_is_found(layout: str) -> None:
    """For a device with exactly the memory of each possibility, and for a bit less."""
    case = Case(layout)
    choices, previous = case.list_all(), 0.0
    needed = {choice: case.require_gib(choice) for choice in choices}
    seconds = {choice: case.estimate_step_s(choice) for choice in choices}
    for budget in sorted({gib - epsilon for gib in needed.values() for epsilon in (0.0, 1e-6)}, reverse=True):
        chosen = case.choose(budget)
        fitting = [choice for choice in choices if needed[choice] <= budget]
        if not fitting:
            assert (chosen.recompute, chosen.recompute_layers) == ("full", 0), "the strongest if nothing fits"
            continue
        assert needed[chosen] <= budget
        assert seconds[chosen] == min(seconds[choice] for choice in fitting)
        assert seconds[chosen] >= previous, "a smaller device is never faster"
        previous = seconds[chosen]
    assert case.choose(needed[case.choice]).recompute == "none", "what just fits is not recomputed"


def test_a_stage_with_more_microbatches_in_flight_decides() -> None:
    """Under 1F1B the first of four stages holds four microbatches, or one if there is no other."""
    words = ["cluster.workers=4", "parallel.pp=4", "model.num_layers=16", "train.micro_batch_size=1"]
    many, one = (Case("alone", *words, f"train.global_batch_size={count}") for count in (8, 1))
    budget = many.require_gib(replace(many.choice, recompute="full", recompute_layers=2))
    assert one.require_gib(one.choice) < budget < many.require_gib(many.choice)
    assert one.choose(budget).recompute == "none" != many.choose(budget).recompute
    assert 0 < many.choose(budget).recompute_layers < 4


def test_offload_is_chosen_where_recomputation_does_not_suffice() -> None:
    case = Case("alone", "train.seq_len=4096", "model.num_layers=24")
    keys = ("activation_checkpointing", "recompute_layers", "activation_offload")
    strongest = replace(case.choice, recompute="full")
    offloaded = replace(strongest, activation_offload="cpu")
    assert case.require_gib(offloaded) < case.require_gib(strongest)
    assert case.choose(case.require_gib(strongest), *keys).activation_offload == "none"
    chosen = case.choose(case.require_gib(strongest) - 1e-3, *keys)
    assert chosen.activation_offload == "cpu" and case.require_gib(chosen) < case.require_gib(strongest)


def test_offloaded_bytes_are_in_host_memory() -> None:
    """What leaves the device is on the host, but for the layers in use; moments are counted too."""
    case = Case("alone")
    plain, offloaded = (
        case.memory.estimate_footprint(replace(case.choice, activation_offload=place)) for place in ("none", "cpu")
    )
    assert plain.host == 0 and offloaded.host == plain.activations
    assert offloaded.activations == 0 and offloaded.working > plain.working
    with_moments = case.memory.estimate_footprint(replace(case.choice, offload="cpu"))
    assert with_moments.host == plain.moments and with_moments.moments == 0


def test_settings_of_the_user_are_kept() -> None:
    """A fixed number of layers, a list of policies, and a policy with `recompute_layers=auto`."""
    low = 3.2
    fixed = Case("alone", "parallel.activation_checkpointing=auto", "parallel.recompute_layers=3")
    assert fixed.choose(low, "activation_checkpointing").recompute_layers == 3
    space = build_search_space(load_config(None, ["parallel.activation_checkpointing=full"]), has_accelerator=True)
    assert not {"activation_checkpointing", "recompute_layers"} & space.keys()
    for words, layers in (
        (["parallel.activation_checkpointing=full", "parallel.recompute_layers=auto"], True),
        (["parallel.activation_checkpointing=auto"], True),
        (["parallel.activation_checkpointing=auto", "parallel.recompute_layers=2"], False),
        (["parallel.activation_checkpointing=[none,full]"], False),
        ([], True),
    ):
        assert ("recompute_layers" in build_search_space(load_config(None, words), has_accelerator=True)) == layers
    options = replace(ALL, recompute=("none", "full"), recompute_layers=(2, 5))
    chosen = options.find_cheapest(fixed.choice, 7, lambda choice: choice.recompute_layers == 5, lambda _: 0.0)
    assert (chosen.recompute, chosen.recompute_layers) == ("full", 5)
