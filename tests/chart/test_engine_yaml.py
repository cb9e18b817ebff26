"""`engine.yaml`, read by the engine's own parser: options, their resolution, the request cap, and what is refused."""

import argparse
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from matrix import CASES
from pool_sizing import DRAFT, TARGETS, write_model
from rendering import EXAMPLES, VALUES, engine_yaml, merged, refusal, texts
from server_ext.options import engine_option_names, read_config
from server_ext.serve import _early_parser, _engine_options, _names, _pair_arguments
from value_docs import CHART


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Folders with configurations alone, of the kinds that the examples serve, and what a tiny pair is made of."""
    folder = tmp_path_factory.mktemp("models")
    return SimpleNamespace(
        target=write_model(folder / "target", TARGETS["linear attention"]),
        draft=write_model(folder / "draft", DRAFT | {"sliding_window": 2048}),
        block_size=8,
        window_tokens=64,
    )


@pytest.fixture
def engine(models: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that lets the engine parse and resolve the rendered file of some values."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.plugins import load_plugins

    load_plugins()
    monkeypatch.setattr("server_ext.tiny.build.ensure", lambda name, progress: models)

    def resolve(text: str) -> tuple[Any, Any]:
        options = yaml.safe_load(text)
        # Models of the same kind that are here stand in for those that are to be downloaded.
        here = {"model-path": models.target, "speculative-draft-model-path": models.draft}
        options |= {name: path for name, path in here.items() if name in options}
        file = tmp_path / "engine.yaml"
        file.write_text(yaml.safe_dump(options))
        read_config(str(file), engine_option_names() | _names(_early_parser()))
        arguments = _pair_arguments(options["pair"]) if "pair" in options else []
        server_args = _engine_options(["--config", str(file)], arguments)
        return server_args, resolving_view(server_args)

    return resolve


def request_cap(server_args: Any) -> int:
    """Return the engine's own figure for a draft pool on a target without state checkpoints."""
    from sglang.srt.model_executor.pool_configurator import compute_swa_request_cap
    from sglang.srt.runtime_context import SpawnRanks, bounded_draft_kv_window, get_schedule, publish

    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    window = bounded_draft_kv_window()
    assert window is not None
    return compute_swa_request_cap(page_size=get_schedule().page_size, window=window, attn_dp_size=1)


PARSED = [
    *EXAMPLES,
    "defaults",
    "engine options",
    "tiny pair with windows",
    "ratio 1 without a window",
    "data parallel",
]


@pytest.mark.parametrize("case", PARSED)
def test_the_engine_resolves_what_the_values_say(engine: Any, case: str) -> None:
    values = merged(VALUES, CASES[case])
    server_args, resolved = engine(engine_yaml(CASES[case]))
    assert resolved.max_running_requests == values["maxRunningRequests"]
    assert resolved.tp_size == values["tensorParallelSize"]
    assert (resolved.host, resolved.port, resolved.enable_metrics) == ("0.0.0.0", 30000, True)
    if values["device"] == "cuda":
        assert resolved.mem_fraction_static == values["memFractionStatic"]
        assert resolved.served_model_name == (values["model"]["name"] or resolved.model_path)
    speculative = values["speculative"]
    assert resolved.speculative_draft_kv_ratio == speculative["draftKvRatio"]
    if values["model"]["draft"]:
        assert resolved.speculative_algorithm == "DFLASH"
        assert resolved.speculative_draft_window_size == speculative["draftWindowSize"]
        assert resolved.speculative_num_draft_tokens == (speculative["blockSize"] or DRAFT["block_size"])
    else:
        assert resolved.speculative_algorithm is None
    for name, value in values["engineConfig"].items():
        assert getattr(resolved, name.replace("-", "_")) == value
    if speculative["draftKvRatio"] < 1:
        window, block, page = speculative["draftWindowSize"], speculative["blockSize"], resolved.page_size
        per_request = -(-window // page) * page + 128 * block + page + 2 * block
        assert resolved.page_size == values["engineConfig"].get("page_size", 1)
        expected = values["maxRunningRequests"] * per_request + 2 * resolved.chunked_prefill_size + page
        # Whole pages of window: the draft pool asks for the cap with a window that is rounded up.
        assert request_cap(server_args) == expected


@pytest.mark.parametrize("requests", [1, 8, 48])
@pytest.mark.parametrize("page_size", [1, 64])
def test_the_chart_knows_the_request_cap(engine: Any, requests: int, page_size: int) -> None:
    values = {
        "maxRunningRequests": requests,
        "engineConfig": {"chunked-prefill-size": 8192, "page-size": page_size},
    }
    server_args, _ = engine(engine_yaml(values))
    cap = request_cap(server_args)
    assert f"can hold {cap} of its tokens" in re.sub(r"\s+", " ", texts(values)["sglang-dflash/templates/NOTES.txt"])
    # And refuses where the engine would, one token less than the cap, and not a token sooner.
    limit = {"engineConfig": {"max-total-tokens": 4 * cap}}
    texts(merged(values, limit))
    limit = {"engineConfig": {"max-total-tokens": 4 * cap - 1}}
    assert f"can hold {cap}: set speculative.draftKvRatio=" in refusal(merged(values, limit))


def test_the_readmes_figures() -> None:
    def cap(requests: int) -> int:
        return requests * (2048 + 128 * 8 + 1 + 2 * 8) + 2 * 8192 + 1

    text = (CHART / "README.md").read_text()
    assert f"{cap(8):,} tokens for 8 requests and {cap(48):,} for 48" in text


def unbounded_options() -> dict[str, Any]:
    """Return the options that the chart refuses beside a ratio below 1, with their value when off."""
    text = (CHART / "templates" / "_validate.tpl").read_text()
    block = re.search(r'define "sglang-dflash.unboundedOptions" -\}\}\n(.*?)\n\{\{- end', text, re.DOTALL)
    assert block is not None
    return yaml.safe_load(block[1])


SWITCHED_ON = {"disaggregation-mode": "decode", "kv-canary": "log", "radix-cache-backend": "mine", "dcp-size": 2}


@pytest.mark.parametrize("name", unbounded_options())
def test_an_option_that_does_not_go_with_a_ratio(name: str) -> None:
    value = SWITCHED_ON.get(name, True)
    assert f"does not go with {name}: drop that option" in refusal({"engineConfig": {name: value}})


def test_the_chart_refuses_all_that_the_engine_refuses() -> None:
    from sglang.srt.arg_groups import draft_kv_ratio_hook

    source = Path(draft_kv_ratio_hook.__file__).read_text()
    body = source.partition("def _check_incompatible_flags")[2].partition("\ndef ")[0]
    flags = set(re.findall(r"--([a-z-]+)", body))
    by_rules_of_their_own = {"chunked-prefill-size", "kv-cache-dtype", "speculative-draft-kv-cache-dtype"}
    assert flags - by_rules_of_their_own == set(unbounded_options())
    (dtypes,) = re.findall(r"draft_kv_dtype in \((.*?)\)", body)
    rules = (CHART / "templates" / "_validate.tpl").read_text()
    assert f"(list {dtypes.replace(',', '')})" in rules


def test_other_names_of_options_are_known(engine: Any) -> None:
    from sglang.srt.server_args import ServerArgs

    text = (CHART / "templates" / "_engine.tpl").read_text()
    block = re.search(r'define "sglang-dflash.engineAliases" -\}\}\n(.*?)\n\{\{- end', text, re.DOTALL)
    assert block is not None
    aliases = yaml.safe_load(block[1])
    named = set(re.findall(r'"([a-z]+(?:-[a-z]+)+)"', text + (CHART / "templates" / "_validate.tpl").read_text()))
    named |= set(unbounded_options()) | {"host", "port", "revision", "model-path", "nnodes", "node-rank"}
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    seen = {}
    for action in parser._actions:
        names = [option[2:] for option in action.option_strings if option.startswith("--")]
        for first in named.intersection(names) - aliases.keys():
            seen |= {name: first for name in names if name != first}
    assert aliases.items() <= seen.items() | {("nccl-init-addr", "dist-init-addr")}
    assert seen.items() <= aliases.items()
