"""Names and prose: module names, first words of docstrings, phrases that a reader has to read twice."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.architecture.test_structure import FILES, PACKAGE_ROOT, get_module, iter_imports

ROOT = PACKAGE_ROOT.parent
DOCUMENTS = sorted(path for pattern in ("*.md", "docs/*.md", "benchmarks/*.md") for path in ROOT.glob(pattern))

# Module names that occur in two packages, with the reason.
SHARED_STEMS = {
    "manifest": "of a dataset, and of a checkpoint: each is the manifest.json of its directory",
}
# Packages whose modules are named after commands and may repeat a name.
NAMED_AFTER_COMMANDS = {"cli", "bench"}
# Words in -ing and -ed that the field uses as nouns.
NOUNS = {"packing", "staging", "logging", "sharding", "profiling", "embedding", "preprocessing"}

# First words that show that a docstring describes a result or a situation instead of naming the action.
NOT_VERBS = """
    a an the this that these those what whatever which whichever who whom whoever whose where whether when while
    why how if as at in of on by for from with without within to into onto over under before after behind beside
    between during until up out off per than then there here it its they them their he she we our you your one
    two three some any each every all both neither either none no nobody nothing not only also same other others
    another most more many much few several such own true false left right first last next new old number
    numbers name names bytes seconds steps tokens rank ranks rows worker workers shape shapes list index
"""
PHRASES = (
    r"\bgo(es)? on\b",
    r"\bgone on\b",
    r"\bgoing on\b",
    r"\bgiven up on\b",
    r"\bwho(m|se)?ever\b",
    r"\bso (many|often)\b",
    r"\b(no|some)body\b",
    r"\bin so many words\b",
    r"\b(is|are) no more\b",
    r"\bbehind (the|it|them|steps|what)\b",
    r"\bhas it that\b",
    r"\bof its own accord\b",
    r"\b(GiB|MiB|tokens|sequences|steps|bytes|seconds|ms|actor|process|thread|worker|CPU|line|copy|checksum) an? "
    r"(gpu|GPU|device|rank|worker|step|node|second|layer|token|position|file|process|microbatch|sequence|parameter|"
    r"task|run|stage|head|block)\b",
)


def is_property(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function is a property, which is described by a noun phrase."""
    names = {getattr(decorator, "id", getattr(decorator, "attr", "")) for decorator in function.decorator_list}
    return bool(names & {"property", "cached_property"})


def test_no_module_name_occurs_in_two_packages() -> None:
    places = defaultdict(list)
    for path in FILES:
        if not path.name.startswith("__") and not NAMED_AFTER_COMMANDS & set(path.relative_to(PACKAGE_ROOT).parts):
            places[path.stem].append(get_module(path))
    repeated = {stem: modules for stem, modules in places.items() if len(modules) > 1}
    assert set(repeated) == set(SHARED_STEMS), repeated


def test_no_module_is_named_by_a_gerund_or_participle() -> None:
    assert not [path for path in FILES if re.fullmatch(r"[a-z]+(ing|ed)", path.stem) and path.stem not in NOUNS]


def test_modules_import_each_other_without_cycles() -> None:
    modules = {get_module(path) for path in FILES}
    graph = {}
    for path in FILES:
        names = (name.removeprefix("raytrain_hpc.") for name, _ in iter_imports(path))
        graph[get_module(path)] = {name for name in names if name in modules}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


@pytest.mark.parametrize("path", FILES, ids=lambda path: get_module(path))
def test_function_docstrings_begin_with_an_imperative_verb(path: Path) -> None:
    wrong = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_property(node):
            first_words = re.findall(r"[A-Za-z'-]+", ast.get_docstring(node) or "")
            if first_words and (first_words[0].lower() in NOT_VERBS.split() or first_words[0].endswith(("ing", "'s"))):
                wrong.append(f"line {node.lineno}: {node.name}: {first_words[0]}")
    assert not wrong


@pytest.mark.parametrize("path", [*FILES, *DOCUMENTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_text_is_free_of_phrases_that_have_to_be_read_twice(path: Path) -> None:
    phrases, lines = re.compile("|".join(PHRASES)), enumerate(path.read_text().splitlines(), 1)
    assert not [f"{number}: {line.strip()}" for number, line in lines if phrases.search(line)]
