"""Which weights a critic starts from, and on what scale its first values are."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, Gemma3Config, GPT2Config, Mistral3Config, OPTConfig

from raypo.config import ConfigError, ModelSection, RewardWeights
from raypo.models.critic import Critic, CriticStart, critic_start, save_value_head
from raypo.models.loading import load_reward_model
from raypo.models.scores import sequence_scores
from tests.tiny import tiny_tokenizer
from tests.unit.models.test_heads import CONFIGS, IDS, LLAMA, NOTHING, batch, saved


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tmp_path_factory.mktemp("reward"), LLAMA)


def started(
    folder: str,
    *weights: float,
    of_models: float = 1.0,
    has_other_judges: bool = False,
    normalizes: bool = False,
) -> tuple[Critic, str]:
    """A critic where that many reward models have these weights of their own."""
    reward: list[Any] = [{"path": folder, "weight": weight} for weight in weights]
    start = critic_start(
        ModelSection(policy=folder, reward=reward),  # type: ignore[arg-type]
        RewardWeights(model=of_models),
        has_other_judges=has_other_judges,
        normalizes=normalizes,
    )
    return Critic.load(start, dtype="float32")


def test_first_values_are_on_the_scale_of_what_ppo_trains_on(folder: str):
    critic, words = started(folder, 0.5, of_models=0.2)

    with torch.no_grad():
        values = critic(batch())[:, -1]  # before the last token
        scores = sequence_scores(
            load_reward_model(folder, dtype="float32"), list(IDS[:, :-1].numpy()), NOTHING
        )
    assert scores.abs().min() > 1e-3
    torch.testing.assert_close(values, 0.2 * 0.5 * scores)
    assert words == f"starts from the reward model {folder}, score head included (times 0.1)"


def test_an_encoder_judges_and_is_no_critic(tmp_path: Path):
    encoder = saved(tmp_path / "encoder", CONFIGS["bert"])
    decoder = saved(tmp_path / "decoder", LLAMA)
    for folder in (encoder, decoder):
        tiny_tokenizer(folder)
    section = ModelSection(policy=decoder, reward=[encoder, decoder])  # type: ignore[arg-type]
    start = critic_start(section, RewardWeights(), has_other_judges=False, normalizes=False)
    assert start.path == decoder
    assert start.reward_weight == 1.0
    with pytest.raises(ConfigError, match=r"model\.critic \(.*encoder\): its attention sees later"):
        critic_start(
            ModelSection(policy=decoder, critic=encoder),
            RewardWeights(),
            has_other_judges=False,
            normalizes=False,
        )


def test_where_one_reward_model_says_it_all_nothing_is_multiplied(folder: str):
    words = started(folder, 1.0)[1]
    assert words == f"starts from the reward model {folder}, score head included"


@pytest.mark.parametrize("others", [{"has_other_judges": True}, {}])
def test_what_other_judges_add_is_learned(folder: str, others: dict[str, bool]):
    weights = [2.0] if others else [2.0, 1.0]
    words = started(folder, *weights, **others)[1]
    assert words.endswith("included (times 2; the other scores are learned)")


def test_under_running_normalisation_values_start_at_zero_on_the_reward_models_backbone(
    folder: str,
):
    critic, words = started(folder, 0.5, normalizes=True)

    assert critic(batch()).abs().sum() == 0.0
    assert words.endswith(
        "included (times 0: ppo.shaping.normalize measures the scale of the scores during the run)"
    )
    first = load_reward_model(folder, dtype="float32").base_model.state_dict()
    assert all(torch.equal(first[n], tensor) for n, tensor in critic.backbone.state_dict().items())


TEXT: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
VISION = {
    "hidden_size": 24,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
OF_OTHER_WIDTHS = {
    "gemma3": Gemma3Config(text_config=TEXT, vision_config=VISION, mm_tokens_per_image=4),
    "mistral3": Mistral3Config(
        text_config=TEXT | {"model_type": "mistral"},
        vision_config=VISION | {"model_type": "pixtral"},
    ),
    "opt-350m": OPTConfig(**TEXT, ffn_dim=16, word_embed_proj_dim=8, do_layer_norm_before=False),
    "gpt2": GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2),
}


@pytest.mark.parametrize("name", OF_OTHER_WIDTHS)
def test_a_value_head_is_as_wide_as_the_states_that_it_reads(tmp_path: Path, name: str):
    torch.manual_seed(0)
    AutoModel.from_config(OF_OTHER_WIDTHS[name]).save_pretrained(tmp_path)
    critic, _ = Critic.load(CriticStart(str(tmp_path)), dtype="float32")
    assert critic.value_head.in_features == (8 if name == "opt-350m" else 16)
    torch.nn.init.ones_(critic.value_head.weight)
    values = critic(batch())
    assert values.shape == (3, 6)
    assert values.isfinite().all()


def test_a_value_head_of_other_names_or_widths_is_refused_by_name(tmp_path: Path, folder: str):
    """LLaMA-Factory calls its file so too."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    save_value_head(tmp_path, {"v_head.summary.weight": torch.ones(1, 16)})
    with pytest.raises(ConfigError, match=r"has v_head.summary.weight \[1, 16\], .* weight \["):
        Critic.load(CriticStart(str(tmp_path)), dtype="float32")
    save_value_head(tmp_path, {"weight": torch.ones(1, 16), "bias": torch.ones(1)})
    critic, words = Critic.load(CriticStart(str(tmp_path)), dtype="float32")
    assert critic.value_head.bias.item() == 1.0
    assert words.endswith("value head included")
