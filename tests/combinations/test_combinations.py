"""A few random combinations of features; `python -m tests.combinations SEED COUNT` checks many."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.combinations.check import check_combination, write_documents
from tests.combinations.draw import draw_combination
from tests.combinations.table import PAGE, build_page, count_pairs, list_features
from tests.warm_pool import WarmPool


@pytest.fixture(scope="module")
def dataset() -> Iterator[str]:
    with TemporaryDirectory() as directory:
        write_documents(Path(directory))
        yield directory


# 84: elastic ZeRO-1 with unequal numbers of microbatches, which failed once.
@pytest.mark.parametrize(("seed", "number"), [(1, 84), (2, 16), (3, 18), (5, 66)])
def test_a_combination_has_the_losses_of_one_process(pool: WarmPool, dataset: str, seed: int, number: int) -> None:
    outcome = check_combination(pool, draw_combination(seed, number), dataset)
    assert outcome.kind == "equal", outcome


def test_combinations_depend_on_nothing_but_seed_and_number() -> None:
    assert draw_combination(3, 7) == draw_combination(3, 7) != draw_combination(3, 8)
    drawn = {feature for n in range(400) for features in draw_combination(0, n).all_features for feature in features}
    assert set(list_features()) == drawn


def test_the_page_names_what_was_never_executed_together() -> None:
    rows = [
        {"seed": 1, "kind": "equal", "difference": 1e-8, "features": [["GPT-2", "ZeRO-3"], ["GPT-2", "elastic"]]},
        {"seed": 1, "kind": "broken", "difference": 0.0, "features": [["GPT-2", "tiles"], ["GPT-2", "tiles"]]},
    ]
    assert count_pairs(rows)[frozenset(("GPT-2",))] == 2
    lines = {line.split(" | ")[0][2:]: line for line in build_page(rows, "torch").splitlines() if line.startswith("| ")}
    assert lines["GPT-2"].startswith("| GPT-2 | 2 | tensor parallel, ")
    assert "ZeRO-3" not in lines["GPT-2"] and "tiles" in lines["GPT-2"] and "Llama" not in lines["GPT-2"]
    assert "of 2 combinations, 1 are equal" in build_page(rows, "torch").lower()


def test_the_page_has_every_feature() -> None:
    text = PAGE.read_text()
    assert all(f"| {feature} | " in text for feature in list_features())
