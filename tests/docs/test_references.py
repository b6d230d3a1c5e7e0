"""Names in README.md and docs/ exist: configuration keys, public Python names, messages."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

import raytrain_hpc as rt
from raytrain_hpc.cli.main import main
from raytrain_hpc.config.recipes import list_recipes
from raytrain_hpc.config.schema import SECTIONS, get_fields
from tests.docs.documents import PAGES, ROOT, find_code_spans, read_blocks

FORMER_SECTIONS = {"observe", "optim"}
FILE_ENDINGS = ("yaml", "json", "jsonl", "py", "md", "sh", "html")
MESSAGES_OF_OTHERS = {"Missing authentication token"}  # Ray's
WRITTEN_BY_PROGRAMS = {"faults.md", "parity.md"}


@pytest.mark.parametrize("page", [p for p in PAGES if p.name not in WRITTEN_BY_PROGRAMS], ids=lambda page: page.name)
def test_configuration_keys_exist(page: Path) -> None:
    keys = set()
    text = page.read_text()
    if page.name == "coming_from.md":  # the first column has the names of other projects
        text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)
    for span in find_code_spans(text):
        match = re.fullmatch(r"'?([a-z_]+)\.([a-z_0-9]+)(=.*)?", span)
        if match and match[1] in {*SECTIONS, *FORMER_SECTIONS} and match[2] not in FILE_ENDINGS:
            keys.add(f"{match[1]}.{match[2]}")
    # Attributes of the handles that rt.start and rt.attach return, conventionally called `run`.
    attributes = {f"run.{name}" for handle in (rt.Run, rt.ScriptRun) for name in dir(handle)}
    assert keys - attributes <= set(get_fields())


def test_keys_on_the_page_of_the_configuration_are_those_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers of the Markdown file see this block; the generated page has the reference in its place."""
    monkeypatch.setenv("COLUMNS", "110")
    (block,) = [b for b in read_blocks(ROOT / "docs/configuration.md") if b.language == "{config-reference}"]
    output = CliRunner().invoke(main, ["config"]).output
    assert block.text.strip() == output.strip(), "replace the block by the output of `COLUMNS=110 raytrain-hpc config`"


def test_output_on_the_page_of_the_planner_is_that_of_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYTRAIN_CACHE", str(tmp_path))  # without measurements of this machine
    command, num_outputs = "", 0
    for block in read_blocks(ROOT / "docs/planner.md"):
        command = (block.commands or [command])[0]
        if block.language == "text":
            output = CliRunner().invoke(main, command.split()[1:]).output.splitlines()
            assert [line for line in block.text.splitlines() if line not in [*output, f"$ {command}"]] == []
            num_outputs += 1
    assert num_outputs == 2


def test_readme_names_all_recipes() -> None:
    section = (ROOT / "README.md").read_text().partition("## Recipes\n")[2].partition("```")[0]
    assert {name for name in find_code_spans(section) if " " not in name} == set(list_recipes())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_compile_and_use_public_names(page: Path) -> None:
    for block in read_blocks(page):
        if block.language == "python":
            compile(block.text, f"{page}:{block.line}", "exec")
    names = set(re.findall(r"\brt\.(\w+)", page.read_text()))
    assert names <= set(rt.__all__)


def test_every_public_name_is_on_the_page_of_the_python_api() -> None:
    documented = re.findall(r"^\.\. auto\w+:: (\w+)$", (ROOT / "docs/python_api.md").read_text(), re.MULTILINE)
    assert sorted([*documented, "__version__"]) == sorted(rt.__all__)


def test_messages_in_troubleshooting_exist() -> None:
    known = [text for path in (ROOT / "raytrain_hpc").rglob("*.py") for text in read_strings(path)]
    rows = re.findall(r"^\| (`.*?`) \| ", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    messages = {message for row in rows for message in re.findall(r"`([^`]+)`", row)} - MESSAGES_OF_OTHERS
    assert len(messages) > 50
    assert not [message for message in messages if not is_known(message, known)]


def is_known(message: str, known: list[str]) -> bool:
    """Return whether each fixed part of a message, between `...`, is in a string of the source."""
    parts = [part.strip(" :;=") for part in message.split("...")]
    return all(any(part in text for text in known) or any(fits(part, text) for text in known) for part in parts)


def fits(part: str, text: str) -> bool:
    """Return whether `part` is what a string with placeholders can produce: "needs a number" for "needs {}"."""
    literal = text.replace("{}", "")
    return "{}" in text and len(literal) > 5 and bool(re.fullmatch(re.escape(text).replace(r"\{\}", ".*"), part))


def read_strings(path: Path) -> list[str]:
    """Return the strings of a module, with `{}` for the values of f-strings."""
    strings = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            strings.append("".join(p.value if isinstance(p, ast.Constant) else "{}" for p in node.values))  # type: ignore[misc]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            strings.append(node.value)
    return strings
