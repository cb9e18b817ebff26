"""Each cross-field rule by its message: it names the values and the way out, and the way out works."""

import re
from typing import Any

import pytest
import yaml

from matrix import CASES, HPA, TWO_NODES
from rendering import VALIDATION, at, engine_yaml, merged, refusal, texts
from value_docs import CHART

NO_DRAFT = {"model": {"draft": ""}}
CPU = {"device": "cpu", "speculative": {"draftWindowSize": 64}}
LIMITED = {"engineConfig": {"max-total-tokens": 100_000}}
KEDA = {"autoscaling": {"kind": "keda"}}
RWX = {"modelCache": {"accessModes": ["ReadWriteMany"]}}
LEAVE = "or set speculative.draftKvRatio=1"

# Values, the message, and a change that the message proposes (None where it is to leave something out).
CASES_REFUSED: list[tuple[dict[str, Any], str, dict[str, Any] | None]] = [
    (
        at("engineConfig.port", 8000),
        "engineConfig sets port, which the chart does itself: leave it out; service.port is what clients see",
        None,
    ),
    (
        at("engineConfig.admin_api_key", "x"),
        "engineConfig sets admin_api_key, which the chart does itself: put the key into a Secret and name it in "
        "adminApiKey.existingSecret",
        None,
    ),
    (
        {"extraArgs": ["--api-key=x"]},
        "extraArgs sets --api-key, which the chart does itself: put the key into a Secret and name it in "
        "apiKey.existingSecret",
        {"extraArgs": []},
    ),
    (
        {"extraArgs": ["--tensor-parallel-size=2"]},
        "extraArgs sets --tp-size, which engine.yaml has too: use its value, or engineConfig",
        {"extraArgs": []},
    ),
    (
        {"extraEnv": [{"name": "HF_TOKEN", "value": "x"}]},
        "extraEnv sets HF_TOKEN to a literal value that everyone can read: use apiKey, adminApiKey or huggingFaceToken "
        "with existingSecret",
        {"extraEnv": [], "huggingFaceToken": {"existingSecret": "a"}},
    ),
    (
        NO_DRAFT,
        "speculative.draftKvRatio is 0.25, but model.draft is empty: set speculative.draftKvRatio=1, or name a draft",
        at("speculative.draftKvRatio", 1),
    ),
    (
        at("engineConfig.speculative-draft-kv-ratio", 1.5),
        "speculative.draftKvRatio is 1.5: it must be greater than 0 and at most 1",
        at("engineConfig.speculative-draft-kv-ratio", 1),
    ),
    (
        at("engineConfig.speculative-draft-kv-ratio", 0),
        "speculative.draftKvRatio is 0: it must be greater than 0 and at most 1",
        at("engineConfig.speculative-draft-kv-ratio", 0.5),
    ),
    (
        at("engineConfig.speculative-algorithm", "EAGLE"),
        "speculative.draftKvRatio is 0.25, which needs the algorithm DFLASH, not EAGLE: take speculative-algorithm out "
        f"of engineConfig, {LEAVE}",
        at("speculative.draftKvRatio", 1),
    ),
    (
        merged(CPU, at("model.tinyPair", "swa")),
        "speculative.draftKvRatio is 0.25, but the target of model.tinyPair=swa has sliding-window layers of its own: "
        f"set model.tinyPair=qwen3 or gdn, {LEAVE}",
        at("model.tinyPair", "gdn"),
    ),
    (
        at("speculative.draftWindowSize", None),
        "speculative.draftKvRatio is 0.25, but there is no speculative.draftWindowSize: set it to the sliding_window "
        f"of the draft's config.json, {LEAVE}",
        at("speculative.draftWindowSize", 2048),
    ),
    (
        at("engineConfig.enable-hicache", True),
        "speculative.draftKvRatio is 0.25, which does not go with enable-hierarchical-cache: drop that option, "
        + LEAVE,
        at("speculative.draftKvRatio", 1),
    ),
    (
        {"extraArgs": ["--enable_lmcache"]},
        "speculative.draftKvRatio is 0.25, which does not go with enable-lmcache: drop that option, " + LEAVE,
        {"extraArgs": []},
    ),
    (
        at("engineConfig.chunked-prefill-size", -1),
        "speculative.draftKvRatio is 0.25, which does not go with chunked-prefill-size -1: give a positive number of "
        f"tokens, {LEAVE}",
        at("engineConfig.chunked-prefill-size", 4096),
    ),
    (
        at("engineConfig.kv-cache-dtype", "nvfp4"),
        "speculative.draftKvRatio is 0.25, which does not go with a draft KV cache of nvfp4: set "
        f"engineConfig.speculative-draft-kv-cache-dtype to another one, {LEAVE}",
        at("engineConfig.speculative-draft-kv-cache-dtype", "bf16"),
    ),
    (
        {"maxRunningRequests": None},
        "speculative.draftKvRatio is 0.25, but maxRunningRequests is not set, and the engine's 48 need more than most "
        f"draft pools hold: set maxRunningRequests (8 goes with ratio 0.25 on one H200), {LEAVE}",
        {"maxRunningRequests": 8},
    ),
    (
        LIMITED,
        "speculative.draftKvRatio is 0.25 of max-total-tokens 100000, a draft pool of 25000 tokens, but "
        "maxRunningRequests 8 can hold 28809: set speculative.draftKvRatio=0.289, or set maxRunningRequests=6, or "
        "raise engineConfig.max-total-tokens",
        at("speculative.draftKvRatio", 0.289),
    ),
    (
        at("speculative.draftWindowSize", 4),
        "speculative.draftWindowSize is 4, less than speculative.blockSize 8: raise the window, or lower the block",
        at("speculative.blockSize", 4),
    ),
    (
        {"device": "cpu"},
        "device is cpu and speculative.draftWindowSize 2048, but the drafts of the tiny pairs see 64 tokens: set "
        "speculative.draftWindowSize=64 (examples/cpu.yaml has all that goes with device cpu)",
        at("speculative.draftWindowSize", 64),
    ),
    (
        merged(CPU, TWO_NODES),
        "device is cpu, which runs on one node in one rank: set nodes=1 and tensorParallelSize=1, or device=cuda",
        {"nodes": 1, "tensorParallelSize": 1},
    ),
    (
        {"tensorParallelSize": 4},
        "the engine takes 4 GPUs (tensorParallelSize 4, times pp-size and dp-size in engineConfig), but gpu.count 1 on "
        "nodes 1 are 1: set them so that they agree",
        at("gpu.count", 4),
    ),
    (
        merged(at("gpu.count", 3), at("engineConfig.data_parallel_size", 2)),
        "the engine takes 2 GPUs (tensorParallelSize 1, times pp-size and dp-size in engineConfig), but gpu.count 3 on "
        "nodes 1 are 3: set them so that they agree",
        at("gpu.count", 2),
    ),
    (
        {"replicas": 3},
        "modelCache.accessModes is ReadWriteOnce, which one node can mount, but there are up to 3 pods: set it to "
        "[ReadWriteMany] with a storage class that has it, or modelCache.persistent=false",
        at("modelCache.persistent", False),
    ),
    (
        merged(HPA, at("jitCache.persistent", True)),
        "jitCache.accessModes is ReadWriteOnce, which one node can mount, but there are up to 4 pods: set it to "
        "[ReadWriteMany] with a storage class that has it, or jitCache.persistent=false",
        at("jitCache.accessModes", ["ReadWriteMany"]),
    ),
    (
        {"terminationGracePeriodSeconds": 149},
        "terminationGracePeriodSeconds is 149, less than the 150 that preStopSleepSeconds 10, drainTimeoutSeconds 120 "
        "and 20 s to leave need: raise it, or leave it out",
        {"terminationGracePeriodSeconds": 150},
    ),
    (
        {"rollout": {"maxSurge": "0%", "maxUnavailable": 0}},
        "rollout.maxSurge and rollout.maxUnavailable are both 0, so an update could never start: set one of them to 1",
        at("rollout.maxSurge", 1),
    ),
    (
        at("httpRoute.enabled", True),
        "httpRoute.enabled, but httpRoute.parentRefs is empty: name the gateway to attach to",
        at("httpRoute.parentRefs", [{"name": "a"}]),
    ),
    (
        merged(HPA, at("autoscaling.minReplicas", 9)),
        "autoscaling.minReplicas is 9, more than autoscaling.maxReplicas 4: swap or change them",
        at("autoscaling.maxReplicas", 9),
    ),
    (
        merged(HPA, KEDA),
        "autoscaling.kind is keda, but autoscaling.keda.serverAddress is empty: give the address of Prometheus, such "
        "as http://prometheus.monitoring:9090",
        at("autoscaling.keda.serverAddress", "http://prometheus.monitoring:9090"),
    ),
    (
        at("monitoring.monitor.scrapeTimeout", "20s"),
        "monitoring.monitor.scrapeTimeout is 20s, longer than monitoring.monitor.interval 15s: lower it",
        at("monitoring.monitor.scrapeTimeout", "15s"),
    ),
]


@pytest.mark.parametrize(("values", "message", "way_out"), CASES_REFUSED)
def test_a_rule(values: dict[str, Any], message: str, way_out: dict[str, Any] | None) -> None:
    lines = refusal(values).splitlines()
    assert lines[0].startswith(f"execution error at ({VALIDATION}:")
    assert lines[1:] == [message]
    if way_out is not None:
        texts(merged(values, way_out))


def test_every_rule_has_a_test() -> None:
    rules = re.findall(
        r'append \$errors \(?(?:printf )?"((?:[^"\\]|\\.)*)"', (CHART / "templates" / "_validate.tpl").read_text()
    )
    assert len(rules) >= 25
    messages = "\n".join(message for _, message, _ in CASES_REFUSED)
    untested = [rule for rule in rules if not re.search(re.sub(r"%[vds]", ".*", re.escape(rule)), messages)]
    assert untested == []


def test_all_mistakes_are_told_at_once() -> None:
    lines = refusal({"device": "cpu", "replicas": 2, "rollout": {"maxUnavailable": 0}}).splitlines()
    assert len(lines) == 1 + 3


def test_every_option_of_the_chart_is_refused_in_engine_config() -> None:
    text = (CHART / "templates" / "_validate.tpl").read_text()
    block = re.search(r'define "sglang-dflash.reservedOptions" -\}\}\n(.*?)\n\{\{- end', text, re.DOTALL)
    assert block is not None
    reserved = yaml.safe_load(block[1])
    assert len(reserved) > 10
    for name, way_out in reserved.items():
        for values in (at(f"engineConfig.{name}", "x"), {"extraArgs": [f"--{name}=x"]}):
            assert f"{name}, which the chart does itself: {way_out}" in refusal(values)


def test_what_a_value_sets_can_be_set_in_engine_config_too() -> None:
    values = {"engineConfig": {"max_running_requests": 4, "tensor-parallel-size": 2}, "gpu": {"count": 2}}
    options = yaml.safe_load(engine_yaml(values))
    assert options["max-running-requests"] == 4 and options["tp-size"] == 2
    assert not {"max_running_requests", "tensor-parallel-size"} & options.keys()


def test_ranks_with_attention_of_their_own_share_the_requests() -> None:
    """As in the engine's compute_swa_request_cap, which divides by `attn_dp_size`."""
    parallel = {"tensorParallelSize": 2, "gpu": {"count": 2}}
    options = {"chunked-prefill-size": 4096, "dp-size": 2, "enable-dp-attention": True}

    def cap(requests: int) -> str:
        return f"can hold {requests * (2048 + 128 * 8 + 1 + 2 * 8) + 2 * 4096 + 1}: "

    limit = {"max-total-tokens": 20_000}
    assert cap(4) in refusal({**parallel, "engineConfig": options | limit})
    assert cap(1) in refusal({**parallel, "engineConfig": options | limit, "maxRunningRequests": 1})
    assert cap(8) in refusal(
        {**parallel, "engineConfig": options | limit | {"enable-dp-attention": False, "dp-size": 1}}
    )


def test_ratio_1_has_no_rules_of_its_own() -> None:
    texts({
        "speculative": {"draftKvRatio": 1, "draftWindowSize": None},
        "maxRunningRequests": None,
        "engineConfig": {"enable-hierarchical-cache": True, "max-total-tokens": 1000, "kv-cache-dtype": "nvfp4"},
    })  # fmt: skip


def test_what_is_switched_off_does_not_count() -> None:
    texts(
        {"engineConfig": {"enable-lmcache": False, "disaggregation-mode": "null", "dcp-size": 1, "kv-canary": "none"}}
    )


@pytest.mark.parametrize("case", CASES)
def test_no_rule_is_in_the_way(case: str) -> None:
    texts(CASES[case])
