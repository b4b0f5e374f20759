"""Schemas of torchvision's operators: scripts/setup.sh appends this to torchvision/extension.py."""

if not _has_ops():  # noqa: F821
    _schemas = torch.library.Library("torchvision", "FRAGMENT")  # noqa: F821
    _schemas.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _schemas.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
