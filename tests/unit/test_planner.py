"""What `sglang-dflash plan` recommends, warns of and refuses, and how it prints that."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pool_sizing import configurator, write_model
from published import QWEN38_27B, QWEN38_27B_DFLASH2
from server_ext import cli
from server_ext.errors import UserError
from server_ext.planner import engine, report
from server_ext.planner.inputs import EngineOptions, Memory, Workload
from server_ext.planner.plan import Plan, make_plan
from server_ext.planner.runner import Refused
from server_ext.planner.search import Search
from server_ext.planner.weights import weights_gib
from server_ext.tiny.recipe import RECIPES, WINDOW_TOKENS
from test_planner_sizes import server_options

README = Path(__file__).parents[2] / "README.md"
WEIGHTS = ("--weights-gib", "0.001")
MEMORY = Memory(free_gib=0.5, weights_gib=0.001)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folders ``NAME/target`` and ``NAME/draft`` of every tiny pair and of the published one."""
    for name, recipe in RECIPES.items():
        write_model(tmp_path / name / "target", recipe.target)
        write_model(tmp_path / name / "draft", recipe.draft)
    write_model(tmp_path / "qwen3.8" / "target", QWEN38_27B)
    write_model(tmp_path / "qwen3.8" / "draft", QWEN38_27B_DFLASH2)
    return tmp_path


def options_of(folder: Path, name: str, **options: Any) -> EngineOptions:
    defaults = {"draft_window_size": WINDOW_TOKENS, "chunked_prefill_size": 256, "max_running_requests": 1}
    return EngineOptions(str(folder / name / "target"), str(folder / name / "draft"), **defaults | options)


def planned(folder: Path, name: str, workload: Workload, memory: Memory = MEMORY, **options: Any) -> Plan:
    return make_plan(options_of(folder, name, **options), memory, workload, WINDOW_TOKENS)


def starts(plan: Plan) -> tuple[int, int | None]:
    """Return target and window tokens of a start with the plan's options, asked of the engine another way."""
    kv = configurator(plan.options.target, **server_options(plan.options))
    config = kv.config_from_budget(plan.sizes.kv_bytes)
    return config.max_total_num_tokens, config.swa_max_total_num_tokens


@pytest.mark.parametrize("name", ["qwen3", "gdn", "swa"])
@pytest.mark.parametrize(
    ("page_size", "workload"),
    [(1, Workload(2000, 500, 4)), (64, Workload(100, 50, 8)), (64, Workload(6000, 100, 64))],
    ids=str,
)
def test_a_recommended_plan_starts_and_holds_its_requests(
    folder: Path, name: str, page_size: int, workload: Workload
) -> None:
    plan = planned(folder, name, workload, page_size=page_size)
    target_tokens, window_tokens = starts(plan)
    sizes, running = plan.sizes, plan.options.max_running_requests

    assert target_tokens == sizes.target_tokens >= running * workload.request_tokens
    assert 1 <= running <= workload.concurrency and sizes.running_requests == running
    assert sum(point.ratio == plan.ratio for point in plan.points) == 1
    if sizes.window:
        locked = min(sizes.window.retained_tokens, -(-workload.prompt_tokens // page_size) * page_size)
        assert window_tokens == sizes.window.tokens
        assert plan.headroom_tokens == window_tokens - sizes.window.request_cap_tokens - running * locked >= 0
        assert plan.smallest_ratio is not None and plan.ratio >= plan.smallest_ratio
    else:
        assert plan.ratio == 1


def test_the_recommended_ratio_is_the_best_of_all(folder: Path) -> None:
    """No other ratio keeps more requests cached, and none that keeps as many leaves the target more tokens."""
    workload = Workload(2000, 500, 4)
    plan = planned(folder, "qwen3", workload)
    search = Search(options_of(folder, "qwen3"), MEMORY, workload)
    points = [point for n in range(1, 101) if (point := search.point(search.at(4), n / 100)).holds_its_requests]

    assert plan.ratio == 0.04 < len(points) / 100
    assert plan.cached_prefixes == max(point.cached_prefixes for point in points) > points[-1].cached_prefixes
    equal = [point for point in points if point.cached_prefixes == plan.cached_prefixes]
    assert plan.sizes.target_tokens == max(point.sizes.target_tokens for point in equal if point.sizes)


def test_more_requests_than_fit_are_not_recommended(folder: Path) -> None:
    plan = planned(folder, "qwen3", Workload(8000, 1000, 200))
    running = plan.options.max_running_requests

    assert 1 < running < 200
    assert planned(folder, "qwen3", Workload(8000, 1000, running)).options.max_running_requests == running
    one_more = planned(folder, "qwen3", Workload(8000, 1000, running + 1))
    assert one_more.options.max_running_requests == running
    assert any(f"{running} requests fit, {running + 1} do not: they need" in warning for warning in one_more.warnings)


def test_the_state_pool_bounds_the_requests(folder: Path) -> None:
    plan = planned(folder, "gdn", Workload(500, 100, 32), max_mamba_cache_size=24, page_size=64)

    assert plan.sizes.state is not None
    assert plan.options.max_running_requests == 24 // plan.sizes.state.slots_per_request
    assert any("which is what its state pool holds" in warning for warning in plan.warnings)


def test_short_requests_need_no_bounded_pool(folder: Path) -> None:
    plan = planned(folder, "qwen3", Workload(20, 20, 4))

    assert plan.ratio == 1
    assert plan.reason.startswith("A bounded pool saves nothing with requests of 40 tokens")


def test_a_target_with_sliding_layers_gets_its_own_ratio(folder: Path) -> None:
    plan = planned(folder, "swa", Workload(2000, 500, 4))

    assert plan.knob == "swa_full_tokens_ratio" and plan.options.draft_kv_ratio is None
    assert report.values(plan)["swaFullTokensRatio"] == plan.ratio < 0.8
    assert report.values(plan)["speculative"]["draftKvRatio"] == 1
    assert any("sliding-window layers of its own" in warning for warning in plan.warnings)
    with pytest.raises(Refused, match="is not supported on a target with sliding-window layers"):
        planned(folder, "swa", Workload(2000, 500, 4), draft_kv_ratio=0.5)


def test_a_draft_with_a_full_layer_stays_at_ratio_one(folder: Path) -> None:
    draft = RECIPES["qwen3"].draft | {"layer_types": ["sliding_attention", "full_attention"]}
    write_model(folder / "qwen3" / "draft", draft)
    plan = planned(folder, "qwen3", Workload(2000, 500, 4))

    assert plan.ratio == 1 and plan.smallest_ratio is None
    assert [point.ratio for point in plan.points] == [1]
    assert any("layer_types are all 'sliding_attention'" in warning for warning in plan.warnings)
    with pytest.raises(Refused, match="layer_types are all 'sliding_attention'"):
        planned(folder, "qwen3", Workload(2000, 500, 4), draft_kv_ratio=0.5)


@pytest.mark.parametrize(
    ("window", "warning"),
    [
        (2 * WINDOW_TOKENS, "is larger than the draft's own 64: it buys nothing"),
        (WINDOW_TOKENS // 2, "is smaller than the draft's own 64: fewer drafted tokens are accepted"),
    ],
)
def test_another_window_than_the_draft_s(folder: Path, window: int, warning: str) -> None:
    plan = planned(folder, "qwen3", Workload(2000, 500, 4), draft_window_size=window)

    assert any(warning in found for found in plan.warnings)
    assert not any("draft's own" in found for found in planned(folder, "qwen3", Workload(2000, 500, 4)).warnings)


def test_a_pool_that_empties_the_prefix_cache(folder: Path) -> None:
    workload = Workload(2000, 500, 4)
    best = planned(folder, "qwen3", workload)
    assert best.smallest_ratio is not None
    smallest = planned(folder, "qwen3", workload, draft_kv_ratio=best.smallest_ratio + 0.01)

    assert smallest.cached_prefixes < best.cached_prefixes
    assert any("empties the target's prefix cache" in warning for warning in smallest.warnings)
    assert not any("empties" in warning for warning in best.warnings)


@pytest.mark.parametrize("page_size", [1, 64])
def test_impossible_is_what_the_engine_refuses(folder: Path, page_size: int) -> None:
    options = options_of(folder, "qwen3", draft_kv_ratio=0.002, max_total_tokens=65536, page_size=page_size)
    kv_bytes = engine.size(dataclasses.replace(options, draft_kv_ratio=1.0), MEMORY).kv_bytes
    with pytest.raises(Refused) as refused:
        make_plan(options, MEMORY, Workload(100, 100, 8), WINDOW_TOKENS)
    kv = configurator(options.target, **server_options(options))
    with pytest.raises(ValueError) as error:
        kv.config_from_budget(kv_bytes)

    assert str(refused.value) == str(error.value)
    assert "--speculative-draft-kv-ratio 0.002 gives the draft a KV pool of " in str(error.value)


def test_not_even_one_request_fits(folder: Path) -> None:
    with pytest.raises(UserError, match=r"not one request fits: they need 9000 tokens, and the KV pool has \d+"):
        planned(folder, "qwen3", Workload(8000, 1000, 2), Memory(free_gib=0.01, weights_gib=0.001))


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    """Return exit status, output and errors of `sglang-dflash plan`."""
    monkeypatch.setattr(sys, "argv", ["sglang-dflash", "plan", *arguments])
    monkeypatch.setenv("SGLANG_PLATFORM", "cpu_reference")
    status = cli.main()
    output, errors = capsys.readouterr()
    return status, output, errors


def pair(folder: Path, name: str) -> tuple[str, ...]:
    return ("--target", str(folder / name / "target"), "--draft", str(folder / name / "draft"))


def complaint(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """Return the one line with which it refuses."""
    status, output, errors = run(capsys, monkeypatch, *arguments)
    assert (status, output) == (2, "")
    assert errors.count("\n") == 1, errors
    return errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu-memory-gib", "-80"], "--gpu-memory-gib -80: must be greater than 0"),
        (["--gpu-memory-gib", "nan"], "--gpu-memory-gib nan: must be greater than 0"),
        (["--window", "0"], "--window 0: must be at least 1"),
        (["--window", "4"], "--speculative-draft-window-size must be >= --speculative-num-draft-tokens"),
        (["--ratio", "1.5"], "--ratio 1.5: must be greater than 0 and at most 1"),
        (["--mem-fraction-static", "0"], "--mem-fraction-static 0: must be greater than 0 and less than 1"),
        (["--mem-fraction-static", "1"], "--mem-fraction-static 1: must be greater than 0 and less than 1"),
        (["--concurrency", "0"], "--concurrency 0: must be at least 1"),
        (["--prompt-tokens", "-1"], "--prompt-tokens -1: must be at least 1"),
        (["--tensor-parallel-size", "0"], "--tensor-parallel-size 0: must be at least 1"),
        (
            ["--prompt-tokens", "16000"],
            "do not fit in a context of 16384 tokens; shorten them or raise --context-length",
        ),
        (["--weights-gib", "70"], "70.0 GiB of weights leave no room for KV in 80.0 GiB"),
        (["--plot", "plan.docx"], "--plot plan.docx: the name must end in one of "),
        (["--plot", "nowhere/plan.png"], "--plot nowhere/plan.png: there is no folder "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_nonsense_gets_one_line(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    given = [*pair(folder, "qwen3"), *WEIGHTS, "--gpu-memory-gib", "80", "--concurrency", "4", *arguments]
    assert message in complaint(capsys, monkeypatch, *given)


@pytest.mark.parametrize(
    ("role", "content", "message"),
    [
        ("target", "{not JSON", "config.json: not valid JSON: "),
        ("target", "[]", "config.json: expected a JSON object, found a list"),
        ("target", {"hidden_size": None}, "config.json: hidden_size is None; it must be a whole number greater than 0"),
        ("target", {"num_hidden_layers": -4}, "config.json: num_hidden_layers is -4; it must be a whole number"),
        ("draft", {"hidden_size": 256}, "hidden_size is 256, and 128 for the target"),
        ("draft", {"vocab_size": 1}, "vocab_size is 1, and 768 for the target"),
        ("draft", {"num_target_layers": 9}, "num_target_layers is 9, and 4 for the target"),
        ("target", {"architectures": ["NobodysModel"]}, "NobodysModel"),
        ("draft", {"num_key_value_heads": "two"}, "num_key_value_heads"),
        ("draft", {"sliding_window": "wide"}, "config.json: sliding_window is 'wide'; it must be a whole number"),
        ("draft", {"layer_types": 2}, "layer_types"),
    ],
)
def test_a_wrong_config_gets_one_line(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    role: str,
    content: str | dict[str, Any],
    message: str,
) -> None:
    config = RECIPES["qwen3"].target if role == "target" else RECIPES["qwen3"].draft
    text = content if isinstance(content, str) else json.dumps(config | content)
    (folder / "qwen3" / role / "config.json").write_text(text)
    said = complaint(capsys, monkeypatch, *pair(folder, "qwen3"), "--gpu", "H100", "--concurrency", "4")
    assert message in said


def test_missing_keys_are_named(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "qwen3" / "draft" / "config.json").write_text('{"model_type": "qwen3", "hidden_size": 128}')
    said = complaint(capsys, monkeypatch, *pair(folder, "qwen3"), "--gpu", "H100", "--concurrency", "4")
    assert "has no num_hidden_layers, num_attention_heads, vocab_size, architectures; take the model's own" in said


def test_a_folder_without_a_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = complaint(capsys, monkeypatch, *pair(tmp_path, "nothing"), "--gpu", "H100", "--concurrency", "4")
    assert "/nothing/target: No such file or directory; give a folder with the model's config.json" in said


def test_quantized_weights_need_their_size(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RECIPES["qwen3"].target | {"quantization_config": {"quant_method": "fp8"}}
    write_model(folder / "qwen3" / "target", config)
    given = (*pair(folder, "qwen3"), "--gpu", "H100", "--concurrency", "4")
    assert "are quantized and not in the folder, so their size is unknown; give --weights-gib" in complaint(
        capsys, monkeypatch, *given
    )
    (folder / "qwen3" / "target" / "model.safetensors").write_bytes(bytes(2**20))
    status, output, _ = run(capsys, monkeypatch, *given, "--json")
    assert status == 0
    draft_gib = weights_gib(options_of(folder, "qwen3"), target=False)
    assert json.loads(output)["memory"]["weights_gib"] == pytest.approx(2**20 / 2**30 + draft_gib)


def test_a_number_of_gpus_that_does_not_divide_the_model(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = (*pair(folder, "qwen3"), "--gpu", "H100", "--concurrency", "4", "--tensor-parallel-size", "3")
    said = complaint(capsys, monkeypatch, *given)
    assert "/qwen3/target cannot be counted with --tensor-parallel-size 3 (" in said
    assert "give --weights-gib" in said


@pytest.mark.parametrize(
    "geometry", ["layers=16", "layers=16,kv-heads=4,head-dim=x", "layers=0,kv-heads=4,head-dim=2", "16,4,256"]
)
def test_a_wrong_geometry(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, geometry: str
) -> None:
    given = ("--draft", str(folder / "qwen3" / "draft"), *WEIGHTS, "--gpu", "H100", "--concurrency", "4")
    said = complaint(capsys, monkeypatch, "--target-geometry", geometry, *given)
    assert f"--target-geometry {geometry}: expected layers=N,kv-heads=N,head-dim=N with whole numbers" in said


def test_a_geometry_says_nothing_about_weights(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("--draft", str(folder / "qwen3" / "draft"), "--gpu", "H100", "--concurrency", "4")
    said = complaint(capsys, monkeypatch, "--target-geometry", "layers=16,kv-heads=4,head-dim=256", *given)
    assert "says nothing about weights; give --weights-gib too" in said


def test_a_picture_without_matplotlib(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    given = (*pair(folder, "qwen3"), *WEIGHTS, "--gpu", "H100", "--concurrency", "4", "--plot", "plan.png")
    assert "--plot needs matplotlib: pip install matplotlib" in complaint(capsys, monkeypatch, *given)


def test_a_picture_that_cannot_be_written(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "plan.png").mkdir()
    given = (
        *pair(folder, "qwen3"),
        *WEIGHTS,
        "--gpu-memory-gib",
        "0.5",
        "--concurrency",
        "4",
        "--prompt-tokens",
        "500",
    )
    status, _, errors = run(capsys, monkeypatch, *given, "--plot", str(folder / "plan.png"))
    assert (status, errors.count("\n")) == (2, 1)
    assert "plan.png: Is a directory" in errors


def test_text_values_and_picture(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = folder / "plan.svg"
    given = (*pair(folder, "qwen3.8"), "--weights-gib", "54.54", "--gpu", "H200", "--concurrency", "8")
    status, output, errors = run(capsys, monkeypatch, *given, "--plot", str(picture))

    assert (status, errors) == (0, "")
    text, _, block = output.partition("Values for the chart:\n")
    values = yaml.safe_load(block)
    assert values["speculative"]["draftWindowSize"] == 2048 and values["speculative"]["blockSize"] == 8
    ratio = values["speculative"]["draftKvRatio"]
    assert f"Recommended: draft KV ratio {ratio:g}, window 2048, 8 running requests." in text
    (row,) = re.findall(rf"^ +{ratio:g} +(\d+) +(\d+) +(\d+) +(\d+)  recommended$", text, re.MULTILINE)
    target_tokens, draft_tokens, headroom, cached = map(int, row)
    assert draft_tokens == int(target_tokens * ratio)
    assert headroom > 0 and cached > 0
    assert re.search(r"^ +0\.05  the engine refuses to start$", text, re.MULTILINE)
    assert "stays locked in the prefix cache" in text
    assert "Not known" in text
    svg = picture.read_text()
    assert svg.startswith("<?xml") and "</svg>" in svg

    status, output, _ = run(capsys, monkeypatch, *given, "--json")
    found = json.loads(output)
    assert status == 0
    assert found["values"] == values
    assert found["sizes"]["target_tokens"] == target_tokens
    assert found["sizes"]["window"]["tokens"] == draft_tokens
    assert (found["headroom_tokens"], found["cached_prefixes"]) == (headroom, cached)
    assert {point["ratio"] for point in found["points"]} >= {0.05, 0.25, 1.0, ratio}


def test_the_readme_shows_what_is_printed(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    section = re.split(r"^## ", README.read_text(), flags=re.MULTILINE)
    (text,) = [part for part in section if part.startswith("Choose ratio and window\n")]
    shown = "".join(f"{line[4:]}\n" for line in text.splitlines() if line.startswith("    ") or not line)
    (command,) = re.findall(r"^sglang-dflash plan --target target --draft draft (.*)$", shown, re.MULTILINE)
    example = shown[shown.index("GiB on the GPU") :].rstrip()

    status, output, _ = run(capsys, monkeypatch, *pair(folder, "qwen3.8"), *command.split())
    assert status == 0
    assert output.startswith(example + "\n")
    status, output, _ = run(capsys, monkeypatch, *pair(folder, "qwen3.8"), *command.split(), "--concurrency", "16")
    assert "13 requests fit, 16 do not: the engine would run 13" in output


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["plan", "--window", "0"]], ids=" ".join)
def test_help_and_early_refusals_do_not_wait_for_the_engine(arguments: list[str]) -> None:
    program = (
        "import sys; from server_ext import cli\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "print('loaded', sorted({'torch', 'sglang', 'matplotlib', 'transformers'} & sys.modules.keys()))"
    )
    given = ["--target", "x", "--draft", "x", "--gpu", "H100", "--concurrency", "4"] if len(arguments) > 2 else []
    result = subprocess.run(
        [sys.executable, "-c", program, *arguments, *given], text=True, capture_output=True, check=True, timeout=120
    )
    assert result.stdout.endswith("loaded []\n"), result.stdout
