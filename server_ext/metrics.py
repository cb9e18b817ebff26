"""The Prometheus metrics of this package: one table, and what writes it.

Every metric carries SGLang's own labels (``model_name``, ``engine_type``, ``tp_rank``, ``pp_rank``, ``moe_ep_rank``,
and where SGLang sets them ``dp_rank``, ``priority`` and those of ``--extra-metric-labels``) and follows its
multiprocess rules. A figure that does not apply has no series: an engine without a draft shows no accept length, and a
target without sliding layers no pool ``swa``.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from server_ext.pools import Config, Snapshot

PREFIX = "sglang_dflash_"

Sample = tuple[tuple[str, ...], float]
Read = Callable[[Config, Snapshot], Iterator[Sample]]


@dataclass(frozen=True)
class Metric:
    """One row of the table.

    Attributes:
        name: The full name.
        kind: Prometheus's type.
        labels: Its own labels, beside SGLang's.
        text: What it says; Prometheus's HELP.
        read: Yields its label values and value now; for a counter the total since start. None: written on its own.
    """

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    labels: tuple[str, ...]
    text: str
    read: Read | None = None


def _of_pools(field: str) -> Read:
    """Read a field of each pool that has it."""

    def read(_: Config, snapshot: Snapshot) -> Iterator[Sample]:
        for pool in snapshot.pools:
            if (value := getattr(pool, field)) is not None:
                yield (pool.name,), value

    return read


def _of_pool_configs(field: str) -> Read:
    def read(config: Config, _: Snapshot) -> Iterator[Sample]:
        for pool in config.pools:
            if (value := getattr(pool, field)) is not None:
                yield (pool.name,), value

    return read


def _of_config(field: str) -> Read:
    def read(config: Config, _: Snapshot) -> Iterator[Sample]:
        if (value := getattr(config, field)) is not None:
            yield (), value

    return read


def _of_retractions(field: str) -> Read:
    def read(_: Config, snapshot: Snapshot) -> Iterator[Sample]:
        for retractions in snapshot.retractions:
            yield (retractions.cause,), getattr(retractions, field)

    return read


def _of_speculation(field: str) -> Read:
    def read(_: Config, snapshot: Snapshot) -> Iterator[Sample]:
        if snapshot.speculation is not None:
            yield (), getattr(snapshot.speculation, field)

    return read


def _usage(_: Config, snapshot: Snapshot) -> Iterator[Sample]:
    for pool in snapshot.pools:
        yield (pool.name,), pool.used_slots / pool.size_slots


def _held_within_bound(_: Config, snapshot: Snapshot) -> Iterator[Sample]:
    for pool in snapshot.pools:
        if pool.held_max_slots is not None and pool.held_bound_slots is not None:
            yield (pool.name,), float(pool.held_max_slots <= pool.held_bound_slots)


def _engine_info(config: Config, _: Snapshot) -> Iterator[Sample]:
    values = (config.sglang_version, config.patch_series or "none", config.speculative_algorithm or "none")
    yield values, 1


def _update_time(_: Config, snapshot: Snapshot) -> Iterator[Sample]:
    yield (), snapshot.unix_time_seconds


def _metric(
    name: str, kind: Literal["gauge", "counter", "histogram"], text: str, read: Read | None, *labels: str
) -> Metric:
    return Metric(PREFIX + name, kind, labels, text, read)


UP = _metric("up", "gauge", "1 while every hook of the plugin is in place; 0: all other figures are missing.", None)
ACCEPT_LENGTH = _metric(
    "request_accept_length_tokens",
    "histogram",
    "Tokens per verify step of each finished request, from 1 (nothing accepted) to the block size.",
    None,
)

METRICS = (
    UP,
    _metric("update_timestamp_seconds", "gauge", "Unix time for which these figures hold.", _update_time),
    # The pools now
    _metric("pool_size_slots", "gauge", "Slots of the pool.", _of_pools("size_slots"), "pool"),
    _metric("pool_used_slots", "gauge", "Slots that requests hold.", _of_pools("used_slots"), "pool"),
    _metric(
        "pool_evictable_slots",
        "gauge",
        "Slots that only the prefix cache holds; a request that needs them gets them.",
        _of_pools("evictable_slots"),
        "pool",
    ),
    _metric("pool_free_slots", "gauge", "Slots that nothing holds.", _of_pools("free_slots"), "pool"),
    _metric("pool_usage_ratio", "gauge", "Share of the slots that requests hold, 0 to 1.", _usage, "pool"),
    _metric(
        "pool_high_water_slots",
        "gauge",
        "The most slots that requests held at once since start.",
        _of_pools("high_water_slots"),
        "pool",
    ),
    _metric(
        "pool_size_bytes",
        "gauge",
        "Memory of the pool on each device, padding included.",
        _of_pool_configs("size_bytes"),
        "pool",
    ),
    # One request against its bound
    _metric(
        "request_held_max_slots",
        "gauge",
        "The most slots that one decoding request holds of its own, outside the prefix cache.",
        _of_pools("held_max_slots"),
        "pool",
    ),
    _metric(
        "request_held_bound_slots",
        "gauge",
        "What a decoding request should stay within, however long it generates: window, eviction interval, page and "
        "the reserve of a step.",
        _of_pools("held_bound_slots"),
        "pool",
    ),
    _metric(
        "request_held_within_bound",
        "gauge",
        "1 while every decoding request is within the bound; 0: slots behind the window are not freed.",
        _held_within_bound,
        "pool",
    ),
    # Events
    _metric(
        "window_freed_slots_total",
        "counter",
        "Slots freed because they left a running request's window.",
        _of_pools("window_freed_slots_total"),
        "pool",
    ),
    _metric(
        "evicted_slots_total",
        "counter",
        "Slots taken from the prefix cache because a request needed room.",
        _of_pools("evicted_slots_total"),
        "pool",
    ),
    _metric(
        "prefix_lost_tokens_total",
        "counter",
        "Tokens that the full pool had cached and admitted requests computed again, as their window in this pool was "
        "gone.",
        _of_pools("prefix_lost_tokens_total"),
        "pool",
    ),
    _metric(
        "delayed_admissions_total",
        "counter",
        "Requests that had to wait because the pool had no room for them, counted once for each wait and pool.",
        _of_pools("delayed_admissions_total"),
        "cause",
    ),
    _metric(
        "retracted_requests_total",
        "counter",
        "Requests taken out of the running batch because the next step had no room in the pool.",
        _of_retractions("requests_total"),
        "cause",
    ),
    _metric(
        "retracted_input_tokens_total",
        "counter",
        "Prompt tokens of retracted requests.",
        _of_retractions("input_tokens_total"),
        "cause",
    ),
    _metric(
        "retracted_output_tokens_total",
        "counter",
        "Generated tokens of retracted requests.",
        _of_retractions("output_tokens_total"),
        "cause",
    ),
    _metric(
        "retraction_aborted_requests_total",
        "counter",
        "Requests ended with an error because retracting all others made no room in the pool either.",
        _of_retractions("aborted_requests_total"),
        "cause",
    ),
    # The draft
    _metric(
        "verify_steps_total",
        "counter",
        "Verify steps, one for each request in each.",
        _of_speculation("verify_steps_total"),
    ),
    _metric(
        "accepted_tokens_total",
        "counter",
        "Tokens that verify steps yielded: accepted draft tokens, and the target's own one of each step.",
        _of_speculation("accepted_tokens_total"),
    ),
    ACCEPT_LENGTH,
    # Configuration
    _metric(
        "engine_info",
        "gauge",
        "1, with the SGLang release, the hash of the patch series applied to it and the speculative algorithm as "
        "labels.",
        _engine_info,
        "sglang_version",
        "patch_series",
        "speculative_algorithm",
    ),
    _metric(
        "draft_kv_ratio",
        "gauge",
        "Slots of the draft for each of the target's (--speculative-draft-kv-ratio).",
        _of_config("draft_kv_ratio"),
    ),
    _metric(
        "draft_window_tokens",
        "gauge",
        "Sliding window of the draft (--speculative-draft-window-size).",
        _of_config("draft_window_tokens"),
    ),
    _metric("block_size_tokens", "gauge", "Tokens that one verify step checks.", _of_config("block_size_tokens")),
    _metric("page_size_tokens", "gauge", "Slots are lent in pages of so many.", _of_config("page_size_tokens")),
    _metric(
        "eviction_interval_tokens",
        "gauge",
        "Tokens that leave a window before their slots are freed.",
        _of_config("eviction_interval_tokens"),
    ),
    _metric("max_running_requests", "gauge", "The most requests that run at once.", _of_config("max_running_requests")),
    _metric("pool_window_tokens", "gauge", "Sliding window of the pool.", _of_pool_configs("window_tokens"), "pool"),
    _metric(
        "pool_request_cap_slots",
        "gauge",
        "Slots that the most running requests and their prefill chunks can hold at once.",
        _of_pool_configs("request_cap_slots"),
        "pool",
    ),
    _metric(
        "pool_headroom_slots",
        "gauge",
        "Slots beyond the request cap, for cached prefixes; negative if the pool cannot hold all requests at once.",
        _of_pool_configs("headroom_slots"),
        "pool",
    ),
    _metric(
        "pool_cacheable_prefixes",
        "gauge",
        "Cached prefixes that fit beside the most running requests.",
        _of_pool_configs("cacheable_prefixes"),
        "pool",
    ),
)
"""Every metric, in the order of the table in the README."""


class Exporter:
    """Writes one scheduler's snapshots to Prometheus; `labels` are SGLang's.

    Make it only when SGLang has set ``PROMETHEUS_MULTIPROC_DIR``: `prometheus_client` decides by it as it is imported.
    """

    def __init__(self, labels: Mapping[str, Any], config: Config) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        self._labels, self._config = labels, config
        self._written: dict[tuple[str, tuple[str, ...]], float] = {}
        self._collectors: dict[str, Any] = {}
        for metric in METRICS:
            names = (*labels, *metric.labels)
            if metric.kind == "gauge":
                collector: Any = Gauge(metric.name, metric.text, names, multiprocess_mode="mostrecent")
            elif metric.kind == "counter":
                collector = Counter(metric.name, metric.text, names)
            else:
                buckets = range(1, (config.block_size_tokens or 1) + 1)
                collector = Histogram(metric.name, metric.text, names, buckets=[float(bound) for bound in buckets])
            self._collectors[metric.name] = collector

    def write(self, snapshot: Snapshot, accept_lengths: Sequence[float]) -> None:
        """Write a snapshot, and the accept lengths of the requests that finished since the last one."""
        for metric in METRICS:
            if metric.read is None:
                continue
            for values, value in metric.read(self._config, snapshot):
                child = self._child(metric, values)
                if metric.kind == "counter":
                    key = (metric.name, values)
                    child.inc(value - self._written.get(key, 0))
                    self._written[key] = value
                else:
                    child.set(value)
        for length in accept_lengths:
            self._child(ACCEPT_LENGTH).observe(length)
        self._child(UP).set(1)

    def down(self) -> None:
        """Say that nothing will be written any more."""
        self._child(UP).set(0)

    def _child(self, metric: Metric, values: Sequence[str] = ()) -> Any:
        own = dict(zip(metric.labels, values, strict=True))
        return self._collectors[metric.name].labels(**self._labels, **own)


def report_down() -> None:
    """Export `UP` as 0 for an engine whose hooks are not in place; SGLang's labels are not known to it."""
    if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        from prometheus_client import Gauge

        Gauge(UP.name, UP.text, multiprocess_mode="mostrecent").set(0)
