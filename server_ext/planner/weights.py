"""What weights take on a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from server_ext.errors import UserError
from server_ext.planner.inputs import EngineOptions
from server_ext.planner.runner import configurator, engine_errors

_GIB = 2**30


def weights_gib(options: EngineOptions, *, target: bool) -> float:
    """Return what a rank's weights of the target or the draft take: SGLang's own model class, built without data.

    Raises `UserError` when the class cannot be built that way.
    """
    with engine_errors(options):
        import torch
        from sglang.srt.model_loader.utils import get_model_architecture
        from sglang.srt.runtime_context import get_parallel

        kv = configurator(options)
        model_config = kv.model_config if target else kv.spec_aux_config.draft_model_config
        model_class, _ = get_model_architecture(model_config)
        default_dtype = torch.get_default_dtype()
        torch.set_default_dtype(model_config.dtype)
        try:
            with torch.device("meta"), get_parallel().override(**_stand_in_groups(options.tensor_parallel_size)):
                model = model_class(config=model_config.hf_config)
        except Exception as error:  # of any kind: these classes are written for loading
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise UserError(
                f"the weights of {model_config.model_path} cannot be counted with --tensor-parallel-size "
                f"{options.tensor_parallel_size} ({reason}); if that is right, give --weights-gib"
            ) from error
        finally:
            torch.set_default_dtype(default_dtype)
        return sum(weight.numel() * weight.element_size() for weight in model.parameters()) / _GIB


def _stand_in_groups(tensor_parallel_size: int) -> dict[str, Any]:
    """Return what model classes ask of their process groups: a size and a place in it."""
    from sglang.srt.runtime_context import get_parallel

    wide = {"world_group", "tp_group", "attn_tp_group", "moe_tp_group"}
    return {
        name: SimpleNamespace(
            world_size=tensor_parallel_size if name in wide else 1,
            rank=0,
            rank_in_group=0,
            local_rank=0,
            is_first_rank=True,
            is_last_rank=True,
            cpu_group=None,
            device_group=None,
        )
        for name in dir(type(get_parallel()))
        if name.endswith("_group")
    }
