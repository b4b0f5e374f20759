"""oneDNN's products in the place of MKL's: the same numbers, to rounding."""

from pathlib import Path

import pytest
import torch
from torch import nn

from raypo.models import linear as module
from raypo.models.linear import OneDnnLinear, use_fastest_linear
from raypo.models.loading import load_causal_lm
from tests.tiny import tiny_policy

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN"
)


def onednn(layer: nn.Linear) -> nn.Linear:
    layer.__class__ = OneDnnLinear
    return layer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 48), (2, 5, 48), (1, 48)])
def test_results_and_gradients_are_those_of_float64(shape: tuple[int, ...], bias: bool):
    torch.manual_seed(0)
    exact = nn.Linear(48, 33, bias=bias, dtype=torch.float64)
    fast = onednn(nn.Linear(48, 33, bias=bias))
    fast.load_state_dict({name: w.float() for name, w in exact.state_dict().items()})
    exact.load_state_dict({name: w.double() for name, w in fast.state_dict().items()})
    x = torch.randn(shape)
    mine, theirs = x.requires_grad_(), x.detach().double().requires_grad_()
    factor = torch.randn(*shape[:-1], 33)
    (fast(mine) * factor).sum().backward()
    (exact(theirs) * factor.double()).sum().backward()

    assert mine.grad is not None
    torch.testing.assert_close(fast(mine).double(), exact(theirs), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-5, atol=1e-5)
    for got, wanted in zip(fast.parameters(), exact.parameters(), strict=True):
        assert got.grad is not None
        torch.testing.assert_close(got.grad.double(), wanted.grad, rtol=1e-5, atol=1e-5)


def test_a_frozen_weight_and_an_input_without_gradient_get_none():
    layer = onednn(nn.Linear(8, 4, bias=False))
    layer.weight.requires_grad_(False)
    x = torch.randn(3, 8, requires_grad=True)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(3, 8))


def test_an_output_may_be_changed_in_place():
    """As Llama 4 and RoCBert do."""
    layer, x = onednn(nn.Linear(8, 4)), torch.randn(2, 3, 8)
    layer(x).mul_(2.0).sum().backward()
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad, 2 * x.sum((0, 1)).expand(4, 8))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_torchs(dtype: torch.dtype):
    torch.manual_seed(0)
    layer, x = nn.Linear(8, 4, dtype=dtype), torch.randn(3, 8, dtype=dtype)
    expected = layer(x)
    assert torch.equal(onednn(layer)(x), expected)
    assert layer(x[:0]).shape == (0, 4)


def test_a_loaded_model_has_them_where_mkl_is_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = str(tiny_policy(tmp_path))
    ids = torch.arange(4, 40)[None]
    logits = []
    for is_slow in (False, True):
        monkeypatch.setattr(module, "mkl_is_slow", lambda is_slow=is_slow: is_slow)
        model = load_causal_lm(folder, dtype="float32")
        assert any(isinstance(layer, OneDnnLinear) for layer in model.modules()) == is_slow
        with torch.no_grad():
            logits.append(model(input_ids=ids, use_cache=False).logits)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)


def test_only_plain_linear_layers_are_changed(monkeypatch: pytest.MonkeyPatch):
    class Other(nn.Linear):
        pass

    monkeypatch.setattr(module, "mkl_is_slow", lambda: True)
    model = nn.Sequential(nn.Linear(2, 2), Other(2, 2))
    use_fastest_linear(model)
    assert [type(layer) for layer in model] == [OneDnnLinear, Other]
