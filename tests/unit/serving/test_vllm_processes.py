"""Names of pushed weights in an engine that holds adapters."""

from torch import Tensor, nn, zeros

from raypo.serving.vllm_processes import _named_for_adapters


class Wrapper(nn.Module):
    """vLLM's wrapper of a layer that may have adapters, as of 0.23."""

    def __init__(self):
        super().__init__()
        self.base_layer = nn.Linear(2, 2)


class WrapperThatLoads(Wrapper):
    """The same, as of 0.32."""

    def load_weights(self, weights: Tensor) -> None: ...


def names_for(wrapper: type[nn.Module]) -> list[str]:
    layer = nn.ModuleDict({"qkv_proj": wrapper(), "o_proj": wrapper(), "norm": nn.LayerNorm(2)})
    model = nn.ModuleDict({"layers": nn.ModuleList([layer]), "embed": nn.Embedding(2, 2)})
    model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}  # type: ignore[assignment]
    pushed = ["layers.0.k_proj.weight", "layers.0.o_proj.bias", "layers.0.norm.weight"]
    pushed.append("embed.weight")
    return [name for name, _ in _named_for_adapters(model, ((n, zeros(2)) for n in pushed))]


def test_names_get_the_level_of_a_wrapper_that_does_not_load_weights_itself():
    assert names_for(Wrapper) == [
        "layers.0.k_proj.base_layer.weight",
        "layers.0.o_proj.base_layer.bias",
        "layers.0.norm.weight",
        "embed.weight",
    ]


def test_names_stay_if_the_wrapper_loads_weights_itself():
    assert names_for(WrapperThatLoads)[:2] == ["layers.0.k_proj.weight", "layers.0.o_proj.bias"]
