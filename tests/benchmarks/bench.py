"""`make bench`: raypo beside what a user would take instead, measured in one run on this machine.

    python -m tests.benchmarks.bench [--only raypo_bf16_short trl_bf16_short ...] [--repeats 5]

Every measurement is a process of its own, one at a time. What was measured is kept in
`runs/bench/<date>.json`; a second call of the same day adds to it, and prints the whole table.
Responses have all the same length, so that everybody does the same work.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import psutil
import yaml

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
SMOLLM2 = ROOT / "examples/smollm2_positive/model"
TRL = "trl>=1.16"
GB = 1e9
PROMPTS, SAMPLES, NEW_TOKENS = 4, 8, 48
LENGTHS = {"short": 15, "long": 200}
DTYPES = {"float32": "float32", "bf16": "bfloat16"}
KL_COEF = 0.04
WORDS = [
    *("time", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school"),
    *("state", "family", "student", "group", "country", "problem", "hand", "part", "place", "case"),
    *("week", "company", "system", "program", "question", "work", "government", "number", "night"),
    *("point", "home", "water", "room", "mother", "area", "money", "story", "fact", "month", "lot"),
]
NEVER = "<jupyter_script>"
"""The end of a response, which the model never samples: so all of them are of one length."""


@dataclass(frozen=True)
class Shape:
    """A Llama's size."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int = 49_152

    @property
    def config(self) -> dict[str, Any]:
        """Values of its `config.json`."""
        return {
            "model_type": "llama",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.hidden // self.heads,
            "tie_word_embeddings": True,
        }


SMALL = Shape(576, 30, 1536, 9, 3)
"""Shape of SmolLM2-135M."""


def prepare_model(folder: Path) -> Path:
    """SmolLM2-135M as `examples.smollm2_positive.prepare` makes it, else a model of its shape.

    Random weights take the same time. Its responses end at `NEVER`.
    """
    if (folder / "config.json").exists():
        return folder
    if not SMOLLM2.exists():
        return random_model(folder, SMALL)
    shutil.copytree(SMOLLM2, folder)
    tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    end = next(token["id"] for token in tokens if token["content"] == NEVER)
    for name in ("config.json", "generation_config.json"):
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(values | {"eos_token_id": end}))
    values = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(values | {"eos_token": NEVER}))
    return folder


def random_model(folder: Path, shape: Shape, *, dtype: str = "float32") -> Path:
    """Save a Llama of random weights with a tokenizer of words, unless it is there."""
    if (folder / "config.json").exists():
        return folder
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    size = shape.vocab
    words = ["<pad>", "<unk>", NEVER, *WORDS]
    words += [f"w{number}" for number in range(size - len(words))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>", eos_token=NEVER
    ).save_pretrained(folder)
    config = LlamaConfig(**shape.config, pad_token_id=0, bos_token_id=None, eos_token_id=2)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model: Any = AutoModelForCausalLM.from_config(config)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def prompts_file(folder: Path, model: Path, tokens: int) -> Path:
    """64 prompts of as many tokens each."""
    from transformers import AutoTokenizer

    file = folder / f"prompts_{model.name}_{tokens}.jsonl"
    tokenizer = AutoTokenizer.from_pretrained(model)
    chosen = random.Random(tokens)
    lines = []
    for _ in range(64):
        text = " ".join(chosen.choice(WORDS) for _ in range(tokens))
        assert len(tokenizer(text)["input_ids"]) == tokens, text
        lines.append(json.dumps({"prompt": text}) + "\n")
    file.write_text("".join(lines))
    return file


def trl_python(folder: Path) -> Path:
    """The interpreter of an environment with TRL, made where there is none."""
    python = folder / "trl/bin/python"
    if not (folder / "trl/made").exists():
        uv = Path(sys.executable).parent / "uv"
        subprocess.run(
            [uv, "venv", "--clear", "--python", sys.executable, folder / "trl"], check=True
        )
        links = os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS", "")
        source = ["--torch-backend", "cpu"] if not links else []
        environment = os.environ | ({"UV_FIND_LINKS": links} if links else {})
        if "PIP_CERT" in os.environ:
            environment.setdefault("SSL_CERT_FILE", os.environ["PIP_CERT"])
        torch_version = subprocess.run(
            [sys.executable, "-c", "import torch; print(torch.__version__)"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        subprocess.run(
            [
                *(uv, "pip", "install", "--quiet", "--python", python, *source),
                *("--override", ROOT / "scripts/overrides-cpu.txt"),
                *(TRL, f"torch=={torch_version}"),
            ],
            check=True,
            env=environment,
        )
        (folder / "trl/made").touch()
    return python


@contextlib.contextmanager
def watched_memory(found: dict[str, Any]) -> Iterator[None]:
    """Peak of what this process's children hold together, files' pages not counted, in GB.

    Anonymous memory of all processes and what lies in /dev/shm (Ray's object store).
    """
    before, peak, done = shutil.disk_usage("/dev/shm").used, 0, threading.Event()

    def look() -> None:
        nonlocal peak
        while not done.wait(0.5):
            total = shutil.disk_usage("/dev/shm").used - before
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    memory = child.memory_info()
                    total += memory.rss - memory.shared
            peak = max(peak, total)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        found["peak_memory_gb"] = peak / GB


def calls_of_step(spans: Sequence[Sequence[Any]]) -> dict[str, float]:
    """Seconds of a step that the replicas worked, by what they did, from a line of the timeline.

    A probe samples too, so `sample_s` counts the batches that began in the phase `generate`.
    `push_s` lasts from the last push's beginning to its end.
    """

    def seconds(*methods: str) -> list[float]:
        return [end - begin for track, name, begin, end in spans if is_call(track, name, methods)]

    def is_call(track: str, name: str, methods: Sequence[str]) -> bool:
        return not track.startswith("worker ") and name in methods

    phases = [(b, e) for track, name, b, e in spans if (track, name) == ("worker 0", "generate")]
    sampled = [
        end - begin
        for track, name, begin, end in spans
        if is_call(track, name, ["submit"]) and any(b <= begin < e for b, e in phases)
    ]
    begins = [begin for track, name, begin, _ in spans if is_call(track, name, ["begin_push"])]
    ends = [end for track, name, _, end in spans if is_call(track, name, ["finish_push"])]
    return {
        "sample_s": sum(sampled),
        "reference_s": sum(seconds("log_probs")),
        "sleep_wake_s": sum(seconds("sleep", "wake_up")),
        "push_s": max(ends) - max(begins) if begins and ends else 0.0,
    }


class Bench:
    """One call's measurements, and what they need."""

    def __init__(self, folder: Path, *, repeats: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.repeats = folder, repeats
        self.model = prepare_model(folder / "smollm2-135m")

    def work(self, dtype: str, length: str, **more: Any) -> dict[str, Any]:
        """What all measurements of one size have in common."""
        tokens = LENGTHS[length]
        work: dict[str, Any] = {
            "model": str(self.model),
            "dtype": DTYPES[dtype],
            "prompts": PROMPTS,
            "samples": SAMPLES,
            "prompt_tokens": tokens,
            "new_tokens": NEW_TOKENS,
            "threads": os.cpu_count(),
            "repeats": self.repeats,
            "steps": 1 + self.repeats,
            "kl_coef": KL_COEF,
        } | more
        file = prompts_file(self.folder, Path(work["model"]), tokens)
        return work | {"prompts_file": str(file)}

    def piece(self, name: str, work: dict[str, Any]) -> dict[str, Any]:
        """One of `bench_pieces`."""
        command = [sys.executable, "-m", "tests.benchmarks.bench_pieces", name, json.dumps(work)]
        return self._measured(command)

    def trl(self, work: dict[str, Any]) -> dict[str, Any]:
        """TRL's GRPOTrainer: the fastest step after the first."""
        python = self.trl_python()
        settings = json.dumps(work | {"folder": str(self.folder / "trl_run")})
        found = self._measured([str(python), str(HERE / "bench_trl.py"), settings])
        return self._of_steps(found, found.pop("steps"), work)

    def trl_python(self) -> Path:
        """The interpreter that has TRL."""
        return trl_python(self.folder)

    def run_file(self, work: dict[str, Any], **sections: Any) -> Path:
        """The config of a raypo run."""
        config: dict[str, Any] = {
            "name": "bench",
            "num_steps": work["steps"] + 1,  # the last one, with its checkpoint, does not count
            "storage_path": str(self.folder / "raypo_runs"),
            "model": {"policy": work["model"], "dtype": work["dtype"]},
            "data": {"prompts": work["prompts_file"], "max_prompt_tokens": work["prompt_tokens"]},
            "reward": {"function": f"{HERE}/bench_pieces.py:number_of_letters"},
            "rollout": {
                "prompts_per_step": work["prompts"],
                "samples_per_prompt": work["samples"],
                "max_new_tokens": work["new_tokens"],
            },
            "ppo": {
                "preset": "grpo",
                "minibatch_size": work["prompts"] * work["samples"],
                "kl": {"coef": work["kl_coef"]},
            },
            "learner": {"cpus_per_worker": work["threads"]},
            "checkpoint": {"every": 1_000_000, "keep": 1},
        }
        for name, section in sections.items():
            config[name] = config.get(name, {}) | section
        file = self.folder / "raypo.yaml"
        file.write_text(yaml.safe_dump(config))
        return file

    def raypo(self, work: dict[str, Any], **sections: Any) -> dict[str, Any]:
        """A raypo run: the fastest step after the first."""
        found, steps = self.raypo_run(work, **sections)
        return self._of_steps(found, steps[:-1], work)

    def raypo_run(
        self, work: dict[str, Any], **sections: Any
    ) -> tuple[dict[str, Any], list[dict[str, float]]]:
        """Run raypo; return start-up and memory, and the seconds of each step by phase."""
        file = self.run_file(work, **sections)
        begin = time.time()
        found = self._measured([sys.executable, "-m", "raypo.cli", "train", str(file), "--fresh"])
        run = self.folder / "raypo_runs/bench"
        lines = (run / "timeline/worker_0.jsonl").read_text().splitlines()
        timeline = [json.loads(line)["spans"] for line in lines]
        found["start_s"] = timeline[0][0][2] - begin
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        steps = []
        for row in rows:
            phases = {name: value for name, value in row.items() if name.startswith("time/")}
            steps.append({name.removeprefix("time/"): value for name, value in phases.items()})
        for step, spans in zip(steps, timeline, strict=True):
            step |= calls_of_step(spans)
        memory = ("perf/memory_", "perf/gpu_memory_")
        found["roles"] = {k: v for k, v in rows[-1].items() if k.startswith(memory)}
        return found, steps

    def _of_steps(
        self, found: dict[str, Any], steps: Sequence[dict[str, float]], work: dict[str, Any]
    ) -> dict[str, Any]:
        best = min(steps[1:], key=lambda step: step["step_s"])
        responses = work["prompts"] * work["samples"]
        found |= best | {
            "first_step_s": steps[0]["step_s"],
            "steps_s": [s["step_s"] for s in steps],
        }
        return found | {"samples_per_s": responses / best["step_s"]}

    def _measured(self, command: list[str]) -> dict[str, Any]:
        """What the command's last line says, its seconds and its memory."""
        found: dict[str, Any] = {}
        begin = time.perf_counter()
        environment = os.environ | {"OMP_NUM_THREADS": str(os.cpu_count())}
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]  # where packages are not installed
        environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
        with watched_memory(found):
            ended = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
            )
        if ended.returncode:
            raise RuntimeError(f"{command}:\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}")
        found["process_s"] = time.perf_counter() - begin
        last = ended.stdout.strip().splitlines()[-1:]
        with contextlib.suppress(json.JSONDecodeError, IndexError):
            found |= json.loads(last[0])
        return found

    def measure(self, name: str) -> dict[str, Any]:
        """What a name of `NAMES` stands for."""
        tool, *rest = name.split("_")
        work = self.work(*rest)
        if tool == "raypo":
            return self.raypo(work)
        if tool in ("trl", "trl8"):
            return self.trl(work | ({"batch": 8} if tool == "trl8" else {}))
        if tool == "critic":
            critic = {"preset": "ppo", "kl": {"coef": 0.02}, "num_epochs": 1}
            found = self.raypo(work, ppo=critic | {"minibatch_size": PROMPTS * SAMPLES})
            return found | {"passes_s": found["log_probs_s"] + found["update_s"]}
        if tool == "barecritic":
            found = self.piece("bare", work | {"critic": True})
            return found | {"passes_s": found["forward_s"] + found["update_s"]}
        return self.piece(tool, work)


TOOLS = ("raypo", "trl", "trl8", "vllm", "bare", "learner", "deepspeed", "critic", "barecritic")
"""trl has all 32 responses in a micro-batch, trl8 has 8: the table shows the faster one."""
CASES = [(dtype, length) for length in LENGTHS for dtype in DTYPES]
NAMES = [f"{tool}_{dtype}_{length}" for dtype, length in CASES for tool in TOOLS]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is asked for, and print the table of all that is known of this day."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=NAMES, choices=NAMES, metavar="NAME")
    parser.add_argument("--repeats", type=int, default=5, help="measured steps after the first")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs/bench")
    options = parser.parse_args(arguments)
    bench = Bench(options.runs.resolve(), repeats=options.repeats)
    file = options.runs / f"{date.today()}.json"
    known = json.loads(file.read_text()) if file.exists() else {"machine": machine(), "found": {}}
    for name in options.only:
        known["found"][name] = bench.measure(name)
        print(name, json.dumps(known["found"][name]), flush=True)
        file.write_text(json.dumps(known, indent=1))
    print(f"\n{table(known)}\n\n{file}")


def machine() -> dict[str, Any]:
    """Return the device and versions of the measurements."""
    from raypo.learner.peak import measured_flops
    from raypo.storage.summary import installed_versions

    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = [line.split(":")[1].strip() for line in info.splitlines() if "model name" in line]
    flags = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f" {flag}" in info]
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "flags": flags,
        "peak_gflops": {name: measured_flops(dtype, "cpu") / 1e9 for name, dtype in DTYPES.items()},
        "versions": installed_versions(),
    }


def table(known: dict[str, Any]) -> str:
    """The four cases side by side, in Markdown; what was not measured is left blank."""
    found = known["found"]
    rows: list[tuple[str, list[str]]] = []

    def row(name: str, of: Any) -> None:
        cells = []
        for dtype, length in CASES:
            case = {tool: found.get(f"{tool}_{dtype}_{length}", {}) for tool in TOOLS}
            both = (case["trl"], case["trl8"])
            case["trl"] = max(both, key=lambda one: one.get("samples_per_s", 0.0))
            try:
                cells.append(f"{of(case, dtype, length):.2f}")
            except (KeyError, ZeroDivisionError):
                cells.append("")
        if any(cells):
            rows.append((name, cells))

    def part(tool: str, key: str) -> Any:
        return lambda case, *_: case[tool][key]

    def ratio(above: tuple[str, str], below: tuple[str, str]) -> Any:
        return lambda case, *_: case[above[0]][above[1]] / case[below[0]][below[1]]

    phases = ("generate_s", "score_s", "log_probs_s", "update_s")
    row("raypo, s a step", part("raypo", "step_s"))
    for phase in (*phases, "push_weights_s", "report_s"):
        row(f"- {phase.removesuffix('_s').replace('_', ' ')}", part("raypo", phase))
    row("TRL, s a step", part("trl", "step_s"))
    for phase in ("generate_s", "reference_s", "update_s"):
        row(f"- {phase.removesuffix('_s')}", part("trl", phase))
    row("raypo, samples/s", part("raypo", "samples_per_s"))
    row("TRL, samples/s", part("trl", "samples_per_s"))
    row("**raypo / TRL**", ratio(("raypo", "samples_per_s"), ("trl", "samples_per_s")))
    row("vLLM, s", part("vllm", "generate_s"))
    row("**vLLM / raypo's generate**", ratio(("vllm", "generate_s"), ("raypo", "generate_s")))
    row("bare forward, s", part("bare", "forward_s"))
    row("raypo's learner alone, forward, s", part("learner", "forward_s"))
    row("**reference in a run / bare**", ratio(("raypo", "score_s"), ("bare", "forward_s")))
    row("bare update, s", part("bare", "update_s"))
    row("raypo's learner alone, update, s", part("learner", "update_s"))
    row("**update in a run / bare**", ratio(("raypo", "update_s"), ("bare", "update_s")))
    row("PPO with a critic: values and update, s", part("critic", "passes_s"))
    row("the same of bare loops, s", part("barecritic", "passes_s"))
    row("**with a critic / bare**", ratio(("critic", "passes_s"), ("barecritic", "passes_s")))
    row("start-up, s", part("raypo", "start_s"))
    row("**start-up / vLLM's own**", ratio(("raypo", "start_s"), ("vllm", "start_s")))
    row("bare optimizer, s", part("bare", "optimizer_s"))
    row("bare DeepSpeed's optimizer (stage 2), s", part("deepspeed", "optimizer_s"))
    row("raypo's optimizer, s", part("learner", "optimizer_s"))
    row(
        "**neither sampling nor pass, % of a step**",
        lambda case, *_: (
            100 * (1 - sum(case["raypo"][phase] for phase in phases) / case["raypo"]["step_s"])
        ),
    )
    row("peak memory raypo, GB", part("raypo", "peak_memory_gb"))
    row("peak memory TRL, GB", part("trl", "peak_memory_gb"))
    for tool in ("raypo", "trl"):
        row(
            f"FLOP utilisation {tool}, %",
            lambda case, dtype, length, tool=tool: (
                100
                * needed_flops(LENGTHS[length])
                / (case[tool]["step_s"] * known["machine"]["peak_gflops"][dtype] * 1e9)
            ),
        )
    heads = [f"{dtype}, {LENGTHS[length]} prompt tokens" for dtype, length in CASES]
    lines = [["", *heads], ["---"] * (1 + len(heads)), *([name, *cells] for name, cells in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def needed_flops(prompt: int) -> float:
    """Of a step: a pass to sample, one of the reference, and an update of three; prompts once."""
    return 5 * pass_flops(SMALL, PROMPTS, SAMPLES, prompt, NEW_TOKENS)


def pass_flops(shape: Shape, prompts: int, samples: int, prompt: int, new: int) -> float:
    """FLOPs of a forward pass over all responses of a step, each prompt read once."""
    from raypo.models.flops import Lengths, forward_flops
    from raypo.models.model_shape import from_config

    responses = prompts * samples * new
    squares = prompts * (prompt**2 + samples * ((prompt + new) ** 2 - prompt**2))
    read = Lengths(prompts * prompt + responses, responses, squares)
    return forward_flops(from_config(shape.config), read)


if __name__ == "__main__":
    main()
