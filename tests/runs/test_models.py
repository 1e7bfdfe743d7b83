"""What a learner is refused by name."""

from __future__ import annotations

import pytest
import torch

from lowroll.config import from_mapping
from lowroll.kernels.support import no
from lowroll.model.spec import spec_from_config
from lowroll.runs.assembly import models
from lowroll.runs.assembly.compute import Compute
from tests.fixtures.bands import CONFIG, EXPERTS

FP8 = from_mapping({"model": "m", "train": {"backward": "fp8"}})
CUDA = Compute(torch.device("cuda"), torch.bfloat16)
DENSE = spec_from_config(CONFIG)


def test_experts_have_no_gradient_in_fp8() -> None:
    with pytest.raises(ValueError, match=r"train\.backward: fp8: experts' .*; write dense"):
        models.refuse_backward(
            FP8, Compute(torch.device("cpu"), torch.float32), spec_from_config(CONFIG | EXPERTS)
        )


def test_a_device_without_such_products_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {"now": no("torch has no e4m3 product for the device")}
    monkeypatch.setattr(models, "scaled_mm_supports", lambda device: answer["now"])
    with pytest.raises(ValueError, match=r"train\.backward: fp8: .* for the device; write dense"):
        models.refuse_backward(FP8, CUDA, DENSE)
    models.refuse_backward(from_mapping({"model": "m"}), CUDA, DENSE)
    answer["now"] = no("")
    models.refuse_backward(FP8, CUDA, DENSE)
    answer["now"] = no("not asked")
    models.refuse_backward(FP8, Compute(torch.device("cpu"), torch.bfloat16), DENSE)


@pytest.mark.parametrize("share", [None, False, True])
def test_shared_prompts_are_refused_where_they_cannot_be(share: bool | None) -> None:
    cfg = from_mapping({"model": "m", "train": {"share_prompts": share}})
    models.refuse_sharing(cfg, CUDA, DENSE)
    window = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    qwen2 = {**CONFIG, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    refused = [
        (CUDA, spec_from_config({**qwen2, **window})),
        (Compute(torch.device("cuda"), torch.float32), DENSE),
    ]
    for compute, spec in refused:
        if not share:
            models.refuse_sharing(cfg, compute, spec)
            continue
        with pytest.raises(ValueError, match=r"train\.share_prompts: .*; write null"):
            models.refuse_sharing(cfg, compute, spec)
