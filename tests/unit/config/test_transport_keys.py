"""rollout.engine.transport: which one fits, and what is said where one cannot work."""

import pytest

from raypo.config import ConfigError, EngineSection, PPOConfig
from tests.unit.config.test_run_config import with_keys


@pytest.mark.parametrize(
    ("colocated", "use_gpu", "chosen"),
    [
        (True, True, "ipc"),
        (False, True, "nccl"),
        (True, False, "object"),
        (False, False, "object"),
    ],
)
def test_auto_takes_the_one_that_fits(colocated: bool, use_gpu: bool, chosen: str):
    section = EngineSection()
    assert section.resolved_transport(colocated=colocated, use_gpu=use_gpu) == chosen
    by_name = EngineSection.model_validate({"transport": chosen})
    assert by_name.resolved_transport(colocated=colocated, use_gpu=use_gpu) == chosen
    everywhere = EngineSection(transport="object")
    assert everywhere.resolved_transport(colocated=colocated, use_gpu=use_gpu) == "object"


@pytest.mark.parametrize(
    ("transport", "colocated", "use_gpu", "message"),
    [
        ("ipc", False, True, "needs engine and learner worker on one GPU.*auto, nccl or object"),
        ("nccl", True, True, "a separate GPU for every member.*auto, ipc or object"),
        ("ipc", True, False, r"needs GPUs.*learner\.use_gpu.*auto or object"),
        ("nccl", False, False, r"needs GPUs.*learner\.use_gpu.*auto or object"),
    ],
)
def test_one_that_cannot_work_is_refused_with_the_remedy(
    transport: str, colocated: bool, use_gpu: bool, message: str
):
    section = EngineSection.model_validate({"transport": transport})
    with pytest.raises(
        ConfigError, match=rf"rollout\.engine\.transport \({transport}\).*{message}"
    ):
        section.resolved_transport(colocated=colocated, use_gpu=use_gpu)


def test_engines_that_share_a_gpu_are_no_members_of_a_group_over_nccl():
    """NCCL refuses two ranks on one GPU, or hangs."""
    auto = EngineSection()
    apart = {"colocated": False, "use_gpu": True}
    assert auto.resolved_transport(**apart, share_gpus=True) == "object"
    keys = {"placement__mode": "dedicated", "rollout__engine__count": 2, "learner__use_gpu": True}
    keys["rollout__engine__gpu_memory_fraction"] = 0.4
    half = {"placement__gpus": {"engine": 0.5}, "rollout__engine__transport": "nccl"}
    with pytest.raises(
        ConfigError, match=r"several engines share one.*placement\.gpus\.engine to 1"
    ):
        PPOConfig.parse(with_keys(**keys, **half))
    assert PPOConfig.parse(with_keys(**keys, placement__gpus={"engine": 0.5})).engines_share_gpus
    alone = PPOConfig.parse(with_keys(**{**keys, **half, "rollout__engine__count": 1}))
    assert not alone.engines_share_gpus
