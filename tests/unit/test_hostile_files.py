"""Files of others: a model's folder brings no code that runs, and no text becomes HTML or code."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import raypo
from raypo.checks.model_checks import check_model
from raypo.config import ConfigError
from raypo.models.checkpoint import read_config
from raypo.models.loading import load_tokenizer
from tests.tiny import tiny_policy

PACKAGE = Path(raypo.__file__).parent
CODE = """
import pathlib
pathlib.Path({mark!r}).touch()
from transformers import LlamaConfig as Config, PreTrainedTokenizerFast as Tokenizer
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model whose config and tokenizer name classes of a file in its folder."""
    folder = tiny_policy(tmp_path / "policy")
    (folder / "own.py").write_text(CODE.format(mark=str(tmp_path / "ran")))
    for name, auto_map in (
        ("config.json", {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Config"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["own.Tokenizer", "own.Tokenizer"]}),
    ):
        path = folder / name
        values = json.loads(path.read_text()) | {"auto_map": auto_map}
        if name == "config.json":
            values["model_type"] = "own"
        path.write_text(json.dumps(values))
    return folder


def test_code_in_a_models_folder_is_not_run(model: Path, tmp_path: Path):
    load_tokenizer(str(model))  # as an ordinary one
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_config(str(model))
    check_model("model.policy", str(model))
    assert not (tmp_path / "ran").exists()


def calls(name: str) -> Iterator[tuple[str, ast.Call]]:
    """Yield the calls of a function or method of this name in the package, with their places."""
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if f"{name}(" in text else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == name:
                yield f"{path.relative_to(PACKAGE)}:{node.lineno} {ast.unparse(node)}", node


def keyword(call: ast.Call, name: str) -> object:
    values = {entry.arg: entry.value for entry in call.keywords}
    return getattr(values.get(name), "value", None)


def test_no_file_is_unpickled_and_no_model_may_bring_code():
    loads = [
        (where, call)
        for where, call in calls("load")
        if where.split(" ")[1].startswith(("torch.load(", "np.load("))
    ]
    assert len(loads) >= 4
    for where, call in loads:
        is_numpy = " np.load(" in where
        name, value = ("allow_pickle", False) if is_numpy else ("weights_only", True)
        assert keyword(call, name) is value, where
    for where, call in calls("from_pretrained"):
        assert keyword(call, "trust_remote_code") in (None, False), where
    for name in ("eval", "exec", "system"):
        dangerous = [w for w, call in calls(name) if call.args and "model" not in w]
        assert not dangerous
    # Files that are unpickled: none but those of `Tuner.restore`, which SECURITY.md names.
    read = [w for w, _ in calls("load") if " pickle.load(" in w or " cloudpickle.load(" in w]
    assert [w.split(":")[0] for w in read] == ["custom/in_subprocess.py"], "its standard input"


def test_the_script_of_the_page_makes_no_html_of_texts():
    script = (PACKAGE / "report/templates/page.js").read_text()
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert way not in script
    assert "textContent" in script
