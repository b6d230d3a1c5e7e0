"""Code blocks, shell commands and code spans of README.md and the pages in docs/."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAM = "raytrain-hpc"
# Scripts whose arguments are those of `raytrain-hpc train`, and the variable that holds those of pbs.sh.
TRAIN_SCRIPTS = {"cluster/slurm.sh", "examples/submit_job.sh"}
TRAIN_VARIABLE = "RUN_ARGS="
_OPERATORS = {"&&", "||", "|", ";", "&", ">", "<"}
_FENCE = re.compile(r"^( *)(`{3,}|~{3,})(\S*)[^\n]*\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:\A|(?<=\n\n))((?: {4}[^\n]*\n(?:\n(?= {4}))?)+)")


@dataclass(frozen=True)
class Block:
    """A code block. `language` is that of its fence; "" for an indented block."""

    language: str
    text: str
    line: int

    @property
    def commands(self) -> list[str]:
        """Shell commands: the lines after `$`, or all lines of a block for a shell that has none."""
        lines = re.sub(r"\\\n *", "", self.text).splitlines()
        if any(line.startswith("$ ") for line in lines):
            return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        if self.language in ("bash", "sh", "shell", "console"):
            return [line for line in lines if line.strip() and not line.startswith("#")]
        return [line for line in lines if line.startswith(f"{PROGRAM} ")]


def read_blocks(page: Path) -> list[Block]:
    """Return all code blocks of a page, in order."""
    text = page.read_text()
    blocks = [Block(m[3], m[4], text[: m.start()].count("\n") + 1) for m in _FENCE.finditer(text)]
    without_fences = _FENCE.sub(lambda m: re.sub(r"[^\n]", "", m[0]), text)
    for match in _INDENTED.finditer(without_fences):
        code = re.sub(r"^ {4}", "", match[1], flags=re.MULTILINE)
        blocks.append(Block("", code, without_fences[: match.start()].count("\n") + 1))
    return sorted(blocks, key=lambda block: block.line)


def find_code_spans(text: str) -> Iterator[str]:
    """Yield the inline code of Markdown text."""
    yield from (match[1] for match in re.finditer(r"(?<!`)`([^`\n]+)`(?!`)", _FENCE.sub("", text)))


def list_program_calls(command: str) -> list[list[str]]:
    """Return the arguments of every call of raytrain-hpc in a shell command, also of those that scripts make."""
    words, calls = shlex.split(command, comments=True), []
    for index, word in enumerate(words):
        arguments = list(_take_arguments(words[index + 1 :]))
        if word == PROGRAM and (index == 0 or words[index - 1] in {*_OPERATORS, "--"}):
            calls.append(arguments)
        elif word in TRAIN_SCRIPTS:
            calls.append(["train", *arguments])
        elif word.startswith(TRAIN_VARIABLE):
            calls.append(["train", *word.removeprefix(TRAIN_VARIABLE).split()])
    return calls


def _take_arguments(words: list[str]) -> Iterator[str]:
    for word in words:
        if word in _OPERATORS:
            return
        yield word
