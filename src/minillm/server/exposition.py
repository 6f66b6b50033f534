"""`/metrics`: the engine's sums and the scheduler's gauges as Prometheus text.

Names that vLLM has come under its prefix ``vllm:`` (so its Grafana boards work as they are) or another one; what only
this runtime has is always under ``minillm:``. docs/observability.md lists them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, ProcessCollector
from prometheus_client import Histogram as PrometheusHistogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from minillm.core.errors import ConfigError
from minillm.server.config import METRICS_PREFIXES
from minillm.server.metrics import FINISHED_REASONS, ONE_TWO_FIVE, EngineMetrics, Histogram, Sums

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from minillm.core.base_scheduler import BaseScheduler
    from minillm.core.stats import SchedulerStats
    from minillm.engine.runtime import Runtime

OWN = "minillm:"
WAIT_KINDS = ("blocks", "slots", "budget", "drain", "batch")
CLIENT_GONE = 499
"""Status label of a call whose client hung up before it was answered (nginx's number): nobody's failure here."""
HTTP_SECONDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

Reading = Callable[["SchedulerStats", Sums, int], float]
"""(scheduler's statistics, sums, tokens per block) -> value."""

GAUGES: tuple[tuple[str, str, Reading], ...] = (
    ("num_requests_running", "Requests in the running batch.", lambda s, _, __: s.running),
    ("num_requests_waiting", "Requests in the queue that are not swapped out.", lambda s, _, __: s.waiting - s.swapped),
    ("num_requests_swapped", "Requests in the queue whose KV is in host memory.", lambda s, _, __: s.swapped),
    ("kv_cache_usage_perc", "Share of KV blocks that requests hold; 1 is all.", lambda s, _, __: s.utilisation),
    ("gpu_cache_usage_perc", "Older name of kv_cache_usage_perc.", lambda s, _, __: s.utilisation),
    (
        "cpu_cache_usage_perc",
        "Share of swap slots in use; 1 is all.",
        lambda s, _, __: s.swap_slots_used / s.swap_slots_total if s.swap_slots_total else 0.0,
    ),
)
OWN_GAUGES: tuple[tuple[str, str, Reading], ...] = (
    ("num_requests_prefilling", "Running requests whose prompt is being computed.", lambda s, _, __: s.prefilling),
    ("kv_blocks_free", "KV blocks on the free list.", lambda s, _, __: s.blocks_free),
    ("kv_blocks_evictable", "KV blocks that only the prefix cache keeps.", lambda s, _, __: s.blocks_evictable),
    (
        "kv_blocks_quarantined",
        "Released KV blocks that a running step still uses.",
        lambda s, _, __: s.blocks_quarantined,
    ),
    ("kv_blocks_referenced", "KV blocks that requests hold.", lambda s, _, __: s.blocks_referenced),
    ("kv_blocks_shared", "KV blocks that more than one request holds.", lambda s, _, __: s.blocks_shared),
    ("kv_blocks_total", "KV blocks in the pool.", lambda s, _, __: s.blocks_total),
    (
        "kv_internal_fragmentation",
        "Share of the slots in held KV blocks that have no token, 0 to 1.",
        lambda s, _, __: s.internal_fragmentation,
    ),
    ("swap_slots_used", "Swap slots in use (one holds a KV block).", lambda s, _, __: s.swap_slots_used),
    ("swap_slots_total", "Swap slots in the pool.", lambda s, _, __: s.swap_slots_total),
    ("max_model_len", "Longest prompt and output, in tokens.", lambda s, _, __: s.max_model_len),
)
COUNTERS: tuple[tuple[str, str, Reading], ...] = (
    (
        "prefix_cache_queries",
        "Tokens looked up in the prefix cache.",
        lambda s, _, b: (s.prefix_hits + s.prefix_misses) * b,
    ),
    ("prefix_cache_hits", "Tokens found in the prefix cache.", lambda s, _, b: s.prefix_hits * b),
    (
        "num_preemptions",
        "Preemptions, of either kind.",
        lambda s, _, __: s.counters.preemptions_swap + s.counters.preemptions_recompute,
    ),
    ("prompt_tokens", "Prompt tokens of requests whose prefill is done.", lambda _, m, __: m.prompt_tokens),
    ("generation_tokens", "Generated tokens.", lambda s, _, __: s.counters.generated_tokens),
)
OWN_COUNTERS: tuple[tuple[str, str, Reading], ...] = (
    ("steps", "Engine steps.", lambda s, _, __: s.counters.steps),
    ("requests_submitted", "Requests that entered the queue.", lambda s, _, __: s.counters.submitted),
    ("requests_expired", "Requests cancelled at their deadline.", lambda s, _, __: s.counters.expired),
    (
        "admissions",
        "Admissions from the queue, those after a recompute included.",
        lambda s, _, __: s.counters.admissions,
    ),
    ("prefilled_tokens", "Prompt and rebuilt tokens computed.", lambda s, _, __: s.counters.prefilled_tokens),
    ("cached_tokens", "Tokens that admissions took from the prefix cache.", lambda s, _, __: s.counters.cached_tokens),
    (
        "recomputed_tokens",
        "Tokens whose KV was dropped to be recomputed.",
        lambda s, _, __: s.counters.recomputed_tokens,
    ),
    ("swapped_out_blocks", "KV blocks copied to host memory.", lambda s, _, __: s.counters.swapped_out_blocks),
    ("swapped_in_blocks", "KV blocks copied back from host memory.", lambda s, _, __: s.counters.swapped_in_blocks),
    ("failed_swaps", "Swap copies that failed.", lambda s, _, __: s.counters.failed_swaps),
    (
        "prefix_cache_published_blocks",
        "Full blocks that entered the prefix cache.",
        lambda s, _, __: s.prefix_published,
    ),
    ("prefix_cache_evicted_blocks", "Blocks that the prefix cache gave up.", lambda s, _, __: s.prefix_evictions),
    (
        "copies_on_write",
        "KV blocks copied before a shared one was written.",
        lambda s, _, __: s.counters.copies_on_write,
    ),
    ("discarded_rows", "Sampled rows that counted for nothing.", lambda s, _, __: s.counters.discarded_rows),
    ("drained_steps", "Plans that had to wait for the step in flight.", lambda s, _, __: s.counters.drains),
)
HISTOGRAMS: tuple[tuple[str, str, Callable[[Sums], Histogram]], ...] = (
    ("iteration_tokens_total", "Tokens per engine step.", lambda m: m.step_tokens),
    ("time_to_first_token_seconds", "From arrival to the first token.", lambda m: m.time_to_first_token),
    ("inter_token_latency_seconds", "Between two tokens of a sequence.", lambda m: m.inter_token),
    ("time_per_output_token_seconds", "Older name of inter_token_latency_seconds.", lambda m: m.inter_token),
    (
        "request_time_per_output_token_seconds",
        "A sequence's mean time per token after the first.",
        lambda m: m.mean_inter_token,
    ),
    ("e2e_request_latency_seconds", "From arrival to the end.", lambda m: m.latency),
    ("request_queue_time_seconds", "From arrival to the first step.", lambda m: m.queue_time),
    ("request_inference_time_seconds", "From the first step to the end.", lambda m: m.inference_time),
    ("request_prefill_time_seconds", "From the first step to the first token.", lambda m: m.prefill_time),
    ("request_decode_time_seconds", "From the first token to the end.", lambda m: m.decode_time),
    ("request_prompt_tokens", "Prompt tokens per sequence.", lambda m: m.prompt_lengths),
    ("request_generation_tokens", "Generated tokens per sequence.", lambda m: m.output_lengths),
    ("request_params_n", "The parameter n.", lambda m: m.choices),
    ("request_params_max_tokens", "The parameter max_tokens, where given.", lambda m: m.max_tokens),
)
OWN_HISTOGRAMS: tuple[tuple[str, str, Callable[[Sums], Histogram]], ...] = (
    ("step_seconds", "Time of an engine step, from its plan to its commit.", lambda m: m.step_seconds),
)


class EngineCollector(Collector):
    """Reads one engine at every scrape; nothing is kept here."""

    def __init__(self, runtime: Runtime, metrics: EngineMetrics, model_name: str, prefix: str = "vllm") -> None:
        """`metrics` is the runtime's observer. Raises :class:`ConfigError` for an unknown prefix."""
        if prefix.removesuffix(":") not in METRICS_PREFIXES:
            raise ConfigError(f"metrics_prefix={prefix!r} must be one of {', '.join(METRICS_PREFIXES)}")
        self._runtime = runtime
        self._metrics = metrics
        self._prefix = prefix.removesuffix(":") + ":"
        self._labels = {"model_name": model_name, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        """All families, of one moment."""
        stats, sums = self._runtime.inspect(self._read)
        yield from self._plain(self._prefix, GAUGES, GaugeMetricFamily, stats, sums)
        yield from self._plain(OWN, OWN_GAUGES, GaugeMetricFamily, stats, sums)
        yield from self._plain(self._prefix, COUNTERS, CounterMetricFamily, stats, sums)
        yield from self._plain(OWN, OWN_COUNTERS, CounterMetricFamily, stats, sums)
        ended = {label: sums.ended[label] for label in FINISHED_REASONS.values()}
        ended["error"] = stats.counters.failed  # also those that an engine failure ended, of which no observer hears
        yield self._by_label(self._prefix + "request_success", "Sequences that ended.", "finished_reason", ended)
        kinds = {"swap": stats.counters.preemptions_swap, "recompute": stats.counters.preemptions_recompute}
        yield self._by_label(OWN + "preemptions", "Preemptions by kind.", "kind", kinds)
        waits = {kind: sums.waits[kind] for kind in WAIT_KINDS}
        yield self._by_label(OWN + "head_waits", "Waits of the first in the queue, by what it lacked.", "reason", waits)
        for name, text, histogram in HISTOGRAMS:
            yield self._histogram(self._prefix + name, text, histogram(sums))
        for name, text, histogram in OWN_HISTOGRAMS:
            yield self._histogram(OWN + name, text, histogram(sums))
        yield self._cache_config(stats)

    def _read(self, scheduler: BaseScheduler) -> tuple[SchedulerStats, Sums]:
        return scheduler.stats(), self._metrics.sums.copy()

    def _plain(
        self,
        prefix: str,
        readings: Iterable[tuple[str, str, Reading]],
        family: type[GaugeMetricFamily] | type[CounterMetricFamily],
        stats: SchedulerStats,
        sums: Sums,
    ) -> Iterator[Metric]:
        block_size = self._runtime.model_info.block_size
        for name, text, reading in readings:
            metric = family(prefix + name, text, labels=list(self._labels))
            metric.add_metric(list(self._labels.values()), reading(stats, sums, block_size))
            yield metric

    def _by_label(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        metric = CounterMetricFamily(name, text, labels=[*self._labels, label])
        for key, value in values.items():
            metric.add_metric([*self._labels.values(), key], value)
        return metric

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        """Cumulative buckets, as Prometheus wants them. Counts of tokens end at what a request can have."""
        most = self._runtime.max_model_len if histogram.bounds == ONE_TWO_FIVE else float("inf")
        buckets, below = [], 0
        for bound, count in zip(histogram.bounds, histogram.counts, strict=False):
            below += count
            if bound <= most:
                buckets.append((str(float(bound)), float(below)))
        buckets.append(("+Inf", float(below + histogram.counts[-1])))
        metric = HistogramMetricFamily(name, text, labels=list(self._labels))
        metric.add_metric(list(self._labels.values()), buckets, histogram.total)
        return metric

    def _cache_config(self, stats: SchedulerStats) -> Metric:
        """An info metric: always 1, the values are labels."""
        config, info = self._runtime.config, self._runtime.model_info
        labels = {
            "engine": "0",
            "block_size": info.block_size,
            "cache_dtype": config.kv_cache_dtype,
            "enable_prefix_caching": config.enable_prefix_caching,
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "num_cpu_blocks": stats.swap_slots_total,
            "num_gpu_blocks": stats.blocks_total,
        }
        metric = GaugeMetricFamily(self._prefix + "cache_config_info", "The KV cache's sizes.", labels=list(labels))
        metric.add_metric([str(value) for value in labels.values()], 1)
        return metric


class Exposition:
    """The registry of one server, and its text. Scrapes are rendered one after another in a thread of their own, so
    that neither the event loop nor a pool full of tokenising holds them up."""

    def __init__(
        self, runtime: Runtime, metrics: EngineMetrics, *, model_name: str | None = None, prefix: str = "vllm"
    ) -> None:
        """`model_name` is the label that vLLM's boards select by; None takes the model's own name."""
        self.registry = CollectorRegistry(auto_describe=False)
        name = model_name if model_name is not None else runtime.model_info.name
        self.registry.register(EngineCollector(runtime, metrics, name, prefix))
        ProcessCollector(registry=self.registry)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="minillm-metrics")

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The text and its content type, in the format that an Accept header prefers."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    async def endpoint(self, request: HttpRequest) -> Response:
        """The handler of GET /metrics."""
        loop = asyncio.get_running_loop()
        accept = request.headers.get("accept", "")
        body, content_type = await loop.run_in_executor(self._thread, self.render, accept)
        return Response(body, headers={"Content-Type": content_type})

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)


class HttpMetrics:
    """ASGI middleware that counts requests by route, under the names of the instrumentator that vLLM uses.

    `handler` is the route's template, never the path that was asked for: what a client invents makes no new series.
    A stream's duration lasts to its end.
    """

    def __init__(self, app: ASGIApp, registry: CollectorRegistry) -> None:
        self._app = app
        self._requests = Counter(
            "http_requests", "HTTP requests by route and status.", ["method", "handler", "status"], registry=registry
        )
        self._seconds = PrometheusHistogram(
            "http_request_duration_seconds",
            "Time to the end of the response.",
            ["method", "handler"],
            buckets=HTTP_SECONDS,
            registry=registry,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and count at the end."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_GONE
        begin = asyncio.get_running_loop().time()

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except Exception:
            status = 500
            raise
        finally:
            method = scope["method"] if scope["method"] in _METHODS else "other"
            handler = getattr(scope.get("route"), "path", "none")
            self._requests.labels(method, handler, str(status)).inc()
            self._seconds.labels(method, handler).observe(asyncio.get_running_loop().time() - begin)


_METHODS = frozenset({"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"})
