"""Sampling in bfloat16, in FP8, and with drafted tokens, side by side on this machine.

    python -m tests.benchmarks.sampling_kinds MODEL [--draft MODEL]

Each kind has a process of its own, and the rounds of all kinds alternate. The prompts ask for a
text to be repeated, which n-grams can draft; free text has fewer accepted drafts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from statistics import median
from typing import IO, Any

from transformers import AutoTokenizer

from raypo.config import EngineSection, SpeculationSection
from raypo.serving.engine import Engine
from raypo.serving.requests import SamplingRequest
from tests.stand_ins import generate

TEXTS = (
    "the train was late again, so everybody missed the start of the concert in the park",
    "our neighbour's dog waits by the gate every morning until the postman has gone by",
    "the museum in our town shows ships, maps and letters of people who never came home",
    "the soup was cold, the bread was old, but the coffee at the airport was worth the wait",
)
BATCHES = (1, 16)
TOKENS, ROUNDS, NUM_DRAFTED = 64, 3, 4


def sections(draft: str | None) -> dict[str, EngineSection]:
    """Return the engine's section of each kind."""
    drafts = SpeculationSection(kind="ngram", num_tokens=NUM_DRAFTED)
    kinds = {
        "bfloat16": EngineSection(),
        "FP8": EngineSection(quantization="fp8"),
        "n-grams": EngineSection(speculation=drafts),
    }
    if draft:
        drafter = SpeculationSection(kind="model", num_tokens=NUM_DRAFTED, model=draft)
        kinds["draft model"] = EngineSection(speculation=drafter)
    return kinds


def sample(model: str, kind: str, draft: str | None) -> None:
    """Sample a batch for each line that is read, and print its seconds and counts as JSON."""
    section = sections(draft)[kind]
    engine = Engine(model, section=section, dtype="bfloat16", max_model_len=256, reads_weights=True)
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"Repeat this three times: {text}"}],
            add_generation_prompt=True,
            return_dict=False,
            return_tensors="np",
        )[0]
        for text in TEXTS
    ]
    print("ready", flush=True)
    for line in sys.stdin:
        requests = [
            SamplingRequest(prompts[i % len(prompts)], TOKENS, temperature=0.7, seed=i)
            for i in range(int(line))
        ]
        before, begin = engine.load_summary()[0], time.perf_counter()
        completions = generate(engine, requests)
        seconds, after = time.perf_counter() - begin, engine.load_summary()[0]
        drafted = after.drafted - before.drafted
        accepted = after.accepted - before.accepted
        tokens = sum(len(completion.token_ids) for completion in completions)
        print(json.dumps([seconds, tokens, drafted, accepted]), flush=True)


def main() -> None:
    """Print a table: tokens per second of each kind and batch, and the share of accepted drafts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--draft")
    parser.add_argument("--kind")
    given = parser.parse_args()
    if given.kind:
        sample(given.model, given.kind, given.draft)
        return
    engines: dict[str, subprocess.Popen[str]] = {}
    for kind in sections(given.draft):
        command = [sys.executable, "-m", "tests.benchmarks.sampling_kinds", *sys.argv[1:]]
        engines[kind] = subprocess.Popen(
            [*command, "--kind", kind], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        while _line(engines[kind].stdout) != "ready":
            pass
    print("| responses at a time | kind | tokens/s | of bfloat16 | drafts accepted |")
    print("|---|---|---|---|---|")
    for batch in BATCHES:
        results: dict[str, list[Any]] = {kind: [] for kind in engines}
        for _ in range(ROUNDS + 1):
            for kind, engine in engines.items():
                assert engine.stdin is not None
                engine.stdin.write(f"{batch}\n")
                engine.stdin.flush()
                results[kind].append(json.loads(_line(engine.stdout)))
        rates = {
            kind: median(tokens / seconds for seconds, tokens, *_ in rounds[1:])
            for kind, rounds in results.items()
        }
        for kind, rounds in results.items():
            drafted = sum(drafts for _, _, drafts, _ in rounds)
            accepted = sum(accepted for *_, accepted in rounds)
            share = f"{accepted / drafted:.0%}" if drafted else ""
            ratio = rates[kind] / rates["bfloat16"]
            print(f"| {batch} | {kind} | {rates[kind]:.1f} | {ratio:.2f} | {share} |")
    for engine in engines.values():
        assert engine.stdin is not None
        engine.stdin.close()
        engine.wait()


def _line(stream: IO[str] | None) -> str:
    assert stream is not None
    line = stream.readline()
    if not line:
        raise RuntimeError("an engine ended; its message is above")
    return line.strip()


if __name__ == "__main__":
    main()
