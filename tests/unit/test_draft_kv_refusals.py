"""Every start that `--speculative-draft-kv-ratio` refuses, by its message."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pool_sizing import DFLASH, DRAFT, TARGETS, write_model

FLAG = "--speculative-draft-kv-ratio"


@pytest.fixture
def draft(tmp_path: Path) -> str:
    return write_model(tmp_path / "draft", DRAFT)


@pytest.fixture
def options(tmp_path: Path, draft: str) -> dict[str, Any]:
    """Options that are not refused."""
    return DFLASH | {
        "model_path": write_model(tmp_path / "target", TARGETS["dense"]),
        "speculative_draft_model_path": draft,
        "speculative_draft_kv_ratio": 0.25,
        "chunked_prefill_size": 256,
        "max_running_requests": 8,
        "device": "cpu",
        "skip_tokenizer_init": True,
    }


def validate(options: dict[str, Any]) -> None:
    from sglang.srt.arg_groups.draft_kv_ratio_hook import validate_draft_kv_ratio
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    validate_draft_kv_ratio(ServerArgs(**options))


def refusal(options: dict[str, Any]) -> str:
    """Return the message, which must name the flag with its value and the way out, in one line."""
    with pytest.raises(ValueError) as refused:
        validate(options)
    message = str(refused.value)
    assert message.startswith(f"{FLAG} {options['speculative_draft_kv_ratio']:g} ")
    assert message.endswith(f", or leave {FLAG} at 1.")
    assert "\n" not in message
    return message


def test_a_plain_pair_is_not_refused(options: dict[str, Any]) -> None:
    validate(options)


@pytest.mark.parametrize("ratio", [0.0, -0.25, 1.0001, 2.0, float("nan"), float("inf")])
def test_a_ratio_out_of_range(options: dict[str, Any], ratio: float) -> None:
    with pytest.raises(ValueError, match=rf"{FLAG} must be greater than 0 and at most 1, got {ratio}\."):
        validate(options | {"speculative_draft_kv_ratio": ratio})


@pytest.mark.parametrize("algorithm", [None, "DSPARK", "EAGLE", "EAGLE3", "NGRAM", "STANDALONE"])
def test_another_algorithm(options: dict[str, Any], algorithm: str | None) -> None:
    message = refusal(options | {"speculative_algorithm": algorithm})

    assert f"requires --speculative-algorithm DFLASH, got {algorithm or 'none'}. Serve a DFLASH draft" in message


def test_no_window(options: dict[str, Any]) -> None:
    message = refusal(options | {"speculative_draft_window_size": None})

    assert "requires --speculative-draft-window-size" in message


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("enable_hierarchical_cache", True, "--enable-hierarchical-cache"),
        ("enable_unified_memory", True, "--enable-unified-memory"),
        ("enable_hisparse", True, "--enable-hisparse"),
        ("enable_lmcache", True, "--enable-lmcache"),
        ("enable_flexkv", True, "--enable-flexkv"),
        ("enable_unified_cache_external_linker", True, "--enable-unified-cache-external-linker"),
        ("radix_cache_backend", "mine", "--radix-cache-backend mine"),
        ("enable_kv_cache_sharding", True, "--enable-kv-cache-sharding"),
        ("enable_page_major_kv_layout", True, "--enable-page-major-kv-layout"),
        ("disaggregation_mode", "prefill", "--disaggregation-mode prefill"),
        ("disaggregation_mode", "decode", "--disaggregation-mode decode"),
        ("enable_pd_role_switch", True, "--enable-pd-role-switch"),
        ("disaggregation_decode_enable_offload_kvcache", True, "--disaggregation-decode-enable-offload-kvcache"),
        ("dcp_size", 2, "--dcp-size 2"),
        ("kv_canary", "log", "--kv-canary log"),
        ("chunked_prefill_size", -1, "--chunked-prefill-size -1"),
        ("chunked_prefill_size", None, "--chunked-prefill-size None"),
        ("kv_cache_dtype", "mxfp8", "a draft KV cache of mxfp8"),
        ("kv_cache_dtype", "nvfp4", "a draft KV cache of nvfp4"),
        ("kv_cache_dtype", "fp4_mx_block16", "a draft KV cache of fp4_mx_block16"),
    ],
)
def test_an_option_that_does_not_go_with_it(options: dict[str, Any], option: str, value: Any, named: str) -> None:
    message = refusal(options | {option: value})

    assert f"is not supported with {named}" in message
    assert ". Drop that option, or" in message


def test_a_block_scaled_target_may_have_a_plain_draft(options: dict[str, Any]) -> None:
    validate(options | {"kv_cache_dtype": "nvfp4", "speculative_draft_kv_cache_dtype": "bf16"})


def test_a_target_with_sliding_windows(options: dict[str, Any], tmp_path: Path) -> None:
    target = write_model(tmp_path / "gemma", TARGETS["sliding windows"])
    for more in ({}, {"disable_hybrid_swa_memory": True}):
        message = refusal(options | {"model_path": target, "attention_backend": "triton"} | more)
        assert f"is not supported on a target with sliding-window layers ({target})" in message


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ({"layer_types": ["full_attention"] * 2}, ["full_attention"] * 2),
        ({"layer_types": ["sliding_attention", "full_attention"]}, ["sliding_attention", "full_attention"]),
        # Hugging Face's Qwen3 fills in full attention up to `max_window_layers`, whatever `sliding_window` says.
        ({}, ["full_attention"] * 2),
        ({"model_type": "llama"}, None),
    ],
    ids=["full", "mixed", "filled in", "missing"],
)
def test_a_draft_that_is_not_all_sliding(
    options: dict[str, Any], tmp_path: Path, written: dict[str, Any], shown: Any
) -> None:
    config = {name: value for name, value in DRAFT.items() if name != "layer_types"} | written
    folder = write_model(tmp_path / "other", config)
    message = refusal(options | {"speculative_draft_model_path": folder})

    assert f"requires a draft whose layer_types are all 'sliding_attention'; {folder} has {shown}. " in message


class Elsewhere:
    """A platform that says nothing about the bounded draft pool."""

    def __init__(self, out_of_tree: bool) -> None:
        self._out_of_tree = out_of_tree

    def is_out_of_tree(self) -> bool:
        return self._out_of_tree

    def supports_speculative_draft_kv_ratio(self) -> bool:
        from sglang.srt.platforms.interface import SRTPlatform

        return SRTPlatform.supports_speculative_draft_kv_ratio(self)  # type: ignore[arg-type]


@pytest.fixture
def platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from sglang.srt.arg_groups import draft_kv_ratio_hook

    monkeypatch.setattr(draft_kv_ratio_hook, "current_platform", Elsewhere(request.param))
    yield


@pytest.mark.parametrize(
    ("platform", "where"),
    [(True, "platform Elsewhere"), (False, "device 'cpu'")],
    indirect=["platform"],
)
def test_a_device_that_is_not_declared(options: dict[str, Any], platform: None, where: str) -> None:
    message = refusal(options)

    assert f"is not supported on {where}. Serve on a CUDA device" in message


@pytest.mark.parametrize("platform", [False], indirect=True)
def test_cuda_needs_no_declaration(options: dict[str, Any], platform: None) -> None:
    from sglang.srt.runtime_context import override_platform

    with override_platform(is_cuda=True):
        validate(options | {"device": "cuda"})
    with override_platform(is_cuda=False):
        assert "is not supported on device 'cuda'" in refusal(options | {"device": "cuda"})


def test_the_start_of_an_engine_runs_the_checks(options: dict[str, Any]) -> None:
    from sglang.srt.server_args import ServerArgs

    with pytest.raises(ValueError, match=f"{FLAG} 0.25 is not supported with --radix-cache-backend mine"):
        ServerArgs(**options | {"radix_cache_backend": "mine"}).resolve_once()


def test_a_window_below_the_block(options: dict[str, Any]) -> None:
    from sglang.srt.server_args import ServerArgs

    with pytest.raises(ValueError, match="window_size=4, block_size=8"):
        ServerArgs(**options | {"speculative_draft_window_size": 4}).resolve_once()
