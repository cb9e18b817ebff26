"""The rules as files: valid, documented, and each alert at both sides of its threshold."""

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from cached_tools import prometheus
from monitoring import promql
from monitoring.__main__ import CHART, alert_settings, rules_text
from monitoring.alerts import ANY_TARGET, RUNBOOK, Windows, alerts, recording_rules
from rendering import NAMESPACE, RELEASE, at, find, manifests, merged

REPOSITORY = Path(__file__).parents[2]
FILE = CHART / "rules" / "alerts.yaml"
RULES = {rule.get("alert") or rule["record"]: rule for rule in yaml.safe_load(FILE.read_text())["groups"][0]["rules"]}
ALERTS = [name for name, rule in RULES.items() if "alert" in rule]
SETTINGS = alert_settings()
ALWAYS = at("monitoring.rules.create", "always")

TARGET = {"namespace": NAMESPACE, "release": RELEASE, "service": "demo-sglang-dflash", "pod": "a"}
ENGINE = TARGET | {"model_name": "m", "engine_type": "unified", "tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}


def promtool(*arguments: str | Path) -> None:
    result = subprocess.run([prometheus() / "promtool", *arguments], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr


# -- files


def test_promtool_accepts_the_file() -> None:
    promtool("check", "rules", FILE)


def test_each_alert_has_all_it_needs() -> None:
    assert ALERTS == [alert.name for alert in alerts(Windows())] == list(SETTINGS)
    for name in ALERTS:
        rule, setting = RULES[name], SETTINGS[name]
        assert rule["for"] == setting["for"] and rule["labels"] == {"severity": setting["severity"]}
        assert setting["severity"] in ("critical", "warning", "info")
        assert {"summary", "description", "runbook_url"} == rule["annotations"].keys()
        if "threshold" in setting:
            assert rule["expr"].split()[-1] == str(setting["threshold"])


def test_queries_are_promql_and_never_of_the_lossy_gauges() -> None:
    """`num_retracted_reqs` forgets between two scrapes, and `token_usage` is the fullest of all pools."""
    recorded = set(recording_rules(Windows()))
    for name, rule in RULES.items():
        selectors = promql.selectors(rule["expr"])
        assert selectors, name
        for selector in selectors:
            assert selector.name not in {"sglang:num_retracted_reqs", "sglang:token_usage"}
            assert selector.name in recorded or re.match(r"sglang_dflash_|sglang:|up$", str(selector.name)), name
            (of_target,) = [matcher for matcher in selector.matchers.matchers if matcher.name == "release"]
            assert f'{of_target.name}!=""' == ANY_TARGET


def test_the_runbook_has_a_section_for_each_alert() -> None:
    text = (REPOSITORY / RUNBOOK).read_text()
    sections = re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    of_alerts = {title: body for title, body in sections if title.startswith("SGLang")}
    assert list(of_alerts) == ALERTS
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for name, body in of_alerts.items():
        assert RULES[name]["annotations"]["runbook_url"] == f"{RUNBOOK}#{name.lower()}"
        means, confirm, change = (
            re.search(rf"\*\*{word}\*\*(.+?)(?=\n\n|\Z)", body, re.DOTALL) for word in ("Means", "Confirm", "Change")
        )
        assert means and confirm and change, name
        named = re.findall(r"`((?:[a-z]\w*)(?:\.\w+)+)`", body)
        for path in named:
            node: Any = values
            if path.split(".")[0] in values and not path.endswith(".json"):
                for key in path.split("."):
                    assert key in node, f"{name}: {path} is no value of the chart"
                    node = node[key]


# -- what the chart makes of them


def rendered(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    (group,) = find(manifests(merged(ALWAYS, values)), "PrometheusRule", "-alerts")["spec"]["groups"]
    return {rule.get("alert") or rule["record"]: rule for rule in group["rules"]}


def test_by_default_the_chart_only_confines_them_to_the_release(tmp_path: Path) -> None:
    rules = rendered({})
    own = f'namespace="{NAMESPACE}",service="{TARGET["service"]}"'
    assert {name: {**rule, "expr": rule["expr"].replace(own, ANY_TARGET)} for name, rule in rules.items()} == RULES
    for rule in rules.values():
        assert rule["expr"].count(own) == len(promql.selectors(rule["expr"]))
    file = tmp_path / "rules.yaml"
    file.write_text(rules_text({"groups": [{"name": "rendered", "rules": list(rules.values())}]}))
    promtool("check", "rules", file)


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_can_be_changed_and_switched_off(name: str) -> None:
    settings = {"severity": "page", "for": "7m"} | ({"threshold": 0.125} if "threshold" in SETTINGS[name] else {})
    changed = rendered(at(f"monitoring.rules.alerts.{name}", settings))
    assert (changed[name]["for"], changed[name]["labels"]["severity"]) == ("7m", "page")
    if "threshold" in SETTINGS[name]:
        assert changed[name]["expr"].split()[-1] == "0.125"
        assert changed[name]["expr"].split()[:-1] == rendered({})[name]["expr"].split()[:-1]
    off = rendered(at(f"monitoring.rules.alerts.{name}.enabled", False))
    assert set(RULES) - set(off) == {name}


def test_the_runbook_can_be_elsewhere() -> None:
    rules = rendered(at("monitoring.rules.runbookUrl", "https://example.com/runbook"))
    for name in ALERTS:
        assert rules[name]["annotations"]["runbook_url"] == f"https://example.com/runbook#{name.lower()}"


# -- both sides of each threshold


@dataclass(frozen=True)
class Case:
    """Series by metric (with own labels in braces) in promtool's notation, a value a minute, and what fires when."""

    alert: str
    series: Mapping[str, str]
    minute: int
    fires: bool
    labels: Mapping[str, str] | None = None


def _both(
    alert: str, firing: Mapping[str, str], quiet: Mapping[str, str], minute: int, **labels: str
) -> tuple[Case, Case]:
    return Case(alert, firing, minute, True, labels), Case(alert, quiet, minute, False)


def _pool(name: str, *, used: str, size: int = 1000, usage: str) -> dict[str, str]:
    pool = f'{{pool="{name}"}}'
    return {
        f"sglang_dflash_pool_used_slots{pool}": used,
        f"sglang_dflash_pool_size_slots{pool}": f"{size}x60",
        f"sglang_dflash_pool_usage_ratio{pool}": usage,
    }


def _queue(waiting: int, running: int, usage: str) -> dict[str, str]:
    return {
        "sglang:num_queue_reqs": f"{waiting}x60",
        "sglang:num_running_reqs": f"{running}x60",
        "sglang_dflash_max_running_requests": "8x60",
        'sglang_dflash_pool_usage_ratio{pool="full"}': usage,
        'sglang_dflash_pool_usage_ratio{pool="draft"}': "0.1x60",
    }


def _accept(accepted: str) -> dict[str, str]:
    return {"sglang_dflash_accepted_tokens_total": accepted, "sglang_dflash_verify_steps_total": "0+100x2000"}


CASES = [
    # 810 of 1000 and 20 more a minute: full in 10 minutes; with 10 more it is not.
    *_both(
        "SGLangPoolFilling",
        _pool("draft", used="810+20x30", usage="0.81+0.02x30"),
        _pool("draft", used="810+5x30", usage="0.81+0.005x30"),
        8,
        pool="draft",
    ),
    # Half full and growing fast is not yet of interest.
    Case("SGLangPoolFilling", _pool("full", used="500+30x9", usage="0.5+0.03x9"), 8, False),
    # Full and flat is a busy server.
    Case("SGLangPoolFilling", _pool("mamba", used="1000x30", usage="1x30"), 8, False),
    *_both(
        "SGLangRequestsRetracted",
        {'sglang_dflash_retracted_requests_total{cause="swa"}': "0 0 0 6x20"},
        {'sglang_dflash_retracted_requests_total{cause="swa"}': "0 0 0 4x20"},
        10,
        cause="swa",
    ),
    *_both(
        "SGLangRequestsAborted",
        {'sglang_dflash_retraction_aborted_requests_total{cause="full"}': "0 0 0 1x20"},
        {'sglang_dflash_retraction_aborted_requests_total{cause="full"}': "3x20"},
        10,
        cause="full",
    ),
    *_both(
        "SGLangEvictionNotWorking",
        {
            'sglang_dflash_request_held_max_slots{pool="draft"}': "100 208x9",
            'sglang_dflash_request_held_bound_slots{pool="draft"}': "207x9",
        },
        {
            'sglang_dflash_request_held_max_slots{pool="draft"}': "100 207x9",
            'sglang_dflash_request_held_bound_slots{pool="draft"}': "207x9",
        },
        4,
        pool="draft",
    ),
    *_both(
        "SGLangWindowPoolTight",
        {'sglang_dflash_pool_cacheable_prefixes{pool="draft"}': "0x9"},
        {'sglang_dflash_pool_cacheable_prefixes{pool="draft"}': "1x9"},
        6,
        pool="draft",
    ),
    *_both(
        "SGLangPrefixReuseLost",
        {
            'sglang_dflash_prefix_lost_tokens_total{pool="draft"}': "0+11x40",
            'sglang:realtime_tokens_total{mode="prefill_compute"}': "0+60x40",
            'sglang:realtime_tokens_total{mode="prefill_cache"}': "0+40x40",
            'sglang:realtime_tokens_total{mode="decode"}': "0+1000x40",
        },
        {
            'sglang_dflash_prefix_lost_tokens_total{pool="draft"}': "0+9x40",
            'sglang:realtime_tokens_total{mode="prefill_compute"}': "0+60x40",
            'sglang:realtime_tokens_total{mode="prefill_cache"}': "0+40x40",
            'sglang:realtime_tokens_total{mode="decode"}': "0+1000x40",
        },
        30,
    ),
    # A day at 5 tokens a step, then 3.4 (68 %), or 3.6 (72 %).
    *_both(
        "SGLangAcceptLengthCollapsed",
        _accept("0+500x500 250340+340x200"),
        _accept("0+500x500 250360+360x200"),
        540,
    ),
    *_both("SGLangQueueStuck", _queue(1, 7, "0.49x60"), _queue(1, 7, "0.5x60"), 6),
    Case("SGLangQueueStuck", _queue(1, 8, "0.1x60"), 6, False),
    Case("SGLangQueueStuck", _queue(0, 1, "0.1x60"), 6, False),
    *_both(
        "SGLangNotServing",
        {
            "sglang:num_running_reqs": "1x30",
            "sglang:num_queue_reqs": "0x30",
            'sglang:realtime_tokens_total{mode="decode"}': "0+59x30",
        },
        {
            "sglang:num_running_reqs": "1x30",
            "sglang:num_queue_reqs": "0x30",
            'sglang:realtime_tokens_total{mode="decode"}': "0+60x30",
        },
        12,
    ),
    # No token ever, and nothing to do.
    Case("SGLangNotServing", {"sglang:num_running_reqs": "0x30", "sglang:num_queue_reqs": "2x30"}, 12, True, {}),
    Case("SGLangNotServing", {"sglang:num_running_reqs": "0x30", "sglang:num_queue_reqs": "0x30"}, 12, False),
    *_both("SGLangScrapeMissing", {"up": "0x30"}, {"up": "1x30"}, 16),
    # Loading takes its time.
    Case("SGLangScrapeMissing", {"up": "0x14 1x30"}, 16, False),
    *_both(
        "SGLangPluginInactive",
        {"up": "1x30", "sglang_dflash_up": "0x30"},
        {"up": "1x30", "sglang_dflash_up": "1x30"},
        6,
    ),
    Case("SGLangPluginInactive", {"up": "1x30"}, 6, True, {}),
]  # fmt: skip
# Which labels the alert has beside those of the engine.
OF_TARGET = {"SGLangPluginInactive"}
OF_SERVICE = {"SGLangScrapeMissing"}


def _series(metric: str, values: str) -> dict[str, str]:
    name, _, own = metric.partition("{")
    base = TARGET if name == "up" else ENGINE
    labels = ",".join(f'{label}="{value}"' for label, value in base.items())
    return {"series": f"{name}{{{labels}{',' + own if own else '}'}", "values": values}


def _alert(case: Case) -> str:
    """Return the series that says that the alert fires."""
    labels = {name: value for name, value in ENGINE.items() if not name.endswith("_rank")}
    if case.alert in OF_TARGET:
        labels = TARGET
    elif case.alert in OF_SERVICE:
        labels = {name: TARGET[name] for name in ("namespace", "service")}
    labels = labels | {"severity": SETTINGS[case.alert]["severity"]} | dict(case.labels or {})
    labels |= {"alertname": case.alert, "alertstate": "firing"}
    return "ALERTS{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}"


def test_every_alert_has_both_cases() -> None:
    for fires in (True, False):
        assert {case.alert for case in CASES if case.fires is fires} == set(ALERTS)


def test_alerts_at_both_sides_of_their_thresholds(tmp_path: Path) -> None:
    tests = []
    for i, case in enumerate(CASES):
        firing = [{"labels": _alert(case), "value": 1}] if case.fires else []
        question = {"expr": f'ALERTS{{alertstate="firing",alertname="{case.alert}"}}', "eval_time": f"{case.minute}m"}
        tests.append(
            {
                "name": f"{i} {case.alert}",
                "interval": "1m",
                "input_series": [_series(metric, values) for metric, values in case.series.items()],
                "promql_expr_test": [question | {"exp_samples": firing}],
            }
        )
    file = tmp_path / "tests.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(FILE)], "evaluation_interval": "1m", "tests": tests}))
    promtool("test", "rules", file)


def test_a_release_sees_its_own_servers_alone(tmp_path: Path) -> None:
    """Another service is in trouble, and of its own Prometheus knows no server."""
    file, tests = tmp_path / "rules.yaml", tmp_path / "tests.yaml"
    file.write_text(rules_text({"groups": [{"name": "rendered", "rules": list(rendered({}).values())}]}))
    trouble = {"up": "1x30", "sglang_dflash_up": "0x30", 'sglang_dflash_pool_cacheable_prefixes{pool="draft"}': "0x30"}
    others = [_series(metric, values) for metric, values in trouble.items()]
    for series in others:
        series["series"] = series["series"].replace(TARGET["service"], "another")
    labels = f'namespace="{NAMESPACE}",service="{TARGET["service"]}",severity="critical"'
    missing = f'ALERTS{{alertname="SGLangScrapeMissing",alertstate="firing",{labels}}}'
    question = {"expr": 'ALERTS{alertstate="firing"}', "eval_time": "20m"}
    question |= {"exp_samples": [{"labels": missing, "value": 1}]}
    test = {"interval": "1m", "input_series": others, "promql_expr_test": [question]}
    tests.write_text(yaml.safe_dump({"rule_files": [str(file)], "evaluation_interval": "1m", "tests": [test]}))
    promtool("test", "rules", tests)
