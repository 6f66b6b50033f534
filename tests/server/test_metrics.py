"""The observer's sums against what the requests themselves say, and the text of /metrics."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
from engine_fakes import WAIT, EngineDriver, ScriptedRunner, by_request, eventually, letters, make_runtime, wait_idle
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from minillm.core.errors import ConfigError, EngineDeadError
from minillm.core.sampling_params import SamplingParams
from minillm.engine.runtime import Runtime
from minillm.server.exposition import Exposition, HttpMetrics
from minillm.server.metrics import EngineMetrics, Histogram


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def tokens(count: int, **options) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **options)


def samples(exposition: Exposition) -> dict[str, float]:
    """Values by name and all labels but the model's and the engine's."""
    found: dict[str, float] = {}
    for family in parse_text(exposition.render()[0].decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            key = sample.name + (json.dumps(labels, sort_keys=True) if labels else "")
            assert key not in found, f"{key} twice"
            found[key] = sample.value
    return found


def run(driver: EngineDriver, clock: Clock, seconds: float) -> None:
    """Step to the end; every step takes `seconds`."""
    while driver.engine.has_work:
        clock.now += seconds
        driver.step()


class TestHistogram:
    def test_a_bound_belongs_to_the_bucket_below_it(self) -> None:
        histogram = Histogram([1, 2])
        for value in (0.5, 1, 1.5, 2, 2.5):
            histogram.observe(value)
        histogram.observe(1.25, times=3)
        assert histogram.counts == [2, 5, 1]
        assert histogram.total == pytest.approx(11.25)


class TestObserver:
    def test_times_of_one_request(self) -> None:
        metrics, clock = EngineMetrics(), Clock()
        driver = EngineDriver(observer=metrics, clock=clock)
        driver.add("a", "abcd", tokens(5))
        clock.now += 3.0  # in the queue until the first step is planned
        original = driver.runner.forward

        def slow(plan):
            clock.now += 0.5
            return original(plan)

        driver.runner.forward = slow
        driver.run()
        sums = metrics.sums
        assert sums.queue_time.total == pytest.approx(3.0)
        assert sums.prefill_time.total == pytest.approx(0.5)
        assert sums.time_to_first_token.total == pytest.approx(3.5)
        assert sums.decode_time.total == pytest.approx(2.0)
        assert sums.inference_time.total == pytest.approx(2.5)
        assert sums.latency.total == pytest.approx(5.5)
        assert sums.inter_token.total == pytest.approx(2.0)
        assert sum(sums.inter_token.counts) == 4
        assert sums.mean_inter_token.total == pytest.approx(0.5)
        assert list(metrics.first_token_times) == [pytest.approx(3.5)]
        assert list(metrics.token_times) == [pytest.approx(0.5)]
        assert sums.prompt_tokens == 4
        assert sums.ended == {"length": 1}
        assert sums.step_tokens.total == 4 + 4
        assert sums.step_seconds.total == pytest.approx(2.5)
        assert sum(second.generated for second in metrics.throughput) == 5
        assert sum(second.prefilled for second in metrics.throughput) == 4

    @pytest.mark.parametrize("asynchronous", [False, True])
    @pytest.mark.parametrize("mode", ["swap", "recompute"])
    def test_intervals_between_tokens_sum_up_to_decode_times(self, mode: str, asynchronous: bool) -> None:
        """Under preemption too, where a sequence's next token comes many steps later."""
        metrics, clock = EngineMetrics(), Clock()
        driver = EngineDriver(
            observer=metrics,
            clock=clock,
            num_blocks=20,
            num_swap_blocks=40,
            preemption_mode=mode,
            asynchronous=asynchronous,
        )
        for i in range(10):
            driver.add(f"r{i}", "hello" + "x" * i, tokens(20 + i))
        run(driver, clock, 0.25)
        counters = driver.engine.stats().counters
        assert counters.preemptions_swap + counters.preemptions_recompute > 5
        assert (counters.preemptions_swap > 0) == (mode == "swap")
        decode = [o.metrics.decode_time for o in driver.outputs.values()]
        assert metrics.sums.inter_token.total == pytest.approx(sum(decode))
        assert sum(metrics.sums.inter_token.counts) == counters.generated_tokens - 10
        assert max(o.metrics.num_preemptions for o in driver.outputs.values()) > 0
        assert metrics.sums.time_to_first_token.total == pytest.approx(
            sum(o.metrics.time_to_first_token for o in driver.outputs.values())
        )
        assert metrics.sums.waits["blocks"] > 0
        assert metrics._broken_off == {}

    def test_every_sequence_ends_once_and_nothing_is_kept(self) -> None:
        metrics, clock = EngineMetrics(), Clock()
        runner = ScriptedRunner(
            script=by_request({"stopped": letters("xyz")}), row_failures={("bad", 2): "planted failure"}
        )
        driver = EngineDriver(runner, observer=metrics, clock=clock, num_blocks=128)
        driver.add("group", "abc", tokens(6, n=3, seed=1))
        driver.add("stopped", "abc", tokens(50, stop=["yz"]))
        driver.add("bad", "abc", tokens(50))
        driver.add("cancelled", "abc", tokens(50))
        driver.add("late", "abc", tokens(50), timeout=2.0)
        driver.add("cut", "abcd", tokens(50, n=2))
        driver.add("scored", "abcd", SamplingParams(max_tokens=0, prompt_logprobs=1))
        for _ in range(4):
            clock.now += 0.25
            driver.step()
        assert driver.cancel("cancelled") and driver.cancel("cut")
        run(driver, clock, 0.25)
        assert metrics.sums.ended == {"length": 3 + 1, "stop": 1, "error": 1, "abort": 1 + 1 + 2}
        assert metrics._live == {} and metrics._groups == {} and metrics._broken_off == {}
        assert metrics._scheduled_at == {}
        assert metrics.sums.prompt_tokens == 3 * 5 + 4 + 4
        assert metrics.sums.choices.counts[:2] == [5, 1]
        # What was cut short is in no latency.
        assert sum(metrics.sums.latency.counts) == 5

    def test_a_group_is_followed_until_its_last_member_is_cancelled(self) -> None:
        metrics = EngineMetrics()
        runner = ScriptedRunner(script=by_request({"g": letters("xyz")}))
        driver = EngineDriver(runner, observer=metrics)
        driver.add("g", "abc", tokens(40, n=2, stop=["xyz"]))
        for _ in range(6):
            driver.step()
        assert metrics.sums.ended == {"stop": 1}, "choice 0 ended, choice 1 runs on"
        assert "g" in metrics._groups
        driver.cancel("g")
        assert metrics.sums.ended == {"stop": 1, "abort": 1}
        assert metrics._groups == {}


@pytest.fixture
def served() -> Iterator[tuple[Runtime, EngineMetrics, Exposition]]:
    metrics = EngineMetrics()
    with make_runtime(observer=metrics, num_blocks=20, num_swap_blocks=40, preemption_mode="swap") as runtime:
        exposition = Exposition(runtime, metrics, model_name='a "name"')
        yield runtime, metrics, exposition
        exposition.close()


class TestText:
    def test_values_agree_with_the_engine(self, served) -> None:
        runtime, _, exposition = served
        for future in [runtime.submit(f"hello {i}", tokens(30)) for i in range(12)]:
            future.result(WAIT)
        wait_idle(runtime)
        stats, found = runtime.stats(), samples(exposition)
        assert found["vllm:generation_tokens_total"] == 12 * 30
        assert found["vllm:prompt_tokens_total"] == sum(len(f"hello {i}") for i in range(12))
        assert found["vllm:num_preemptions_total"] == stats.counters.preemptions_swap > 0
        assert found['minillm:preemptions_total{"kind": "swap"}'] == stats.counters.preemptions_swap
        assert found["minillm:swapped_out_blocks_total"] == stats.counters.swapped_out_blocks > 0
        assert found['vllm:request_success_total{"finished_reason": "length"}'] == 12
        assert found['vllm:request_success_total{"finished_reason": "abort"}'] == 0
        assert found["vllm:prefix_cache_hits_total"] == stats.prefix_hits * 4
        assert found["vllm:prefix_cache_queries_total"] == (stats.prefix_hits + stats.prefix_misses) * 4
        blocks = [found[f"minillm:kv_blocks_{kind}"] for kind in ("free", "evictable", "quarantined", "referenced")]
        assert sum(blocks) == found["minillm:kv_blocks_total"] == 20
        assert found['minillm:head_waits_total{"reason": "blocks"}'] > 0
        assert found["vllm:iteration_tokens_total_count"] == stats.counters.steps
        for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_prompt_tokens"):
            assert found[f"vllm:{name}_count"] == 12
            assert found[f'vllm:{name}_bucket{{"le": "+Inf"}}'] == 12
        assert found["vllm:inter_token_latency_seconds_count"] == 12 * 29
        info = next(key for key in found if key.startswith("vllm:cache_config_info"))
        assert '"num_gpu_blocks": "20"' in info and '"block_size": "4"' in info

    def test_gauges_while_requests_run_wait_and_are_swapped_out(self) -> None:
        metrics, gate, submitted = EngineMetrics(), threading.Event(), threading.Event()
        runner = ScriptedRunner()
        with make_runtime(
            runner, observer=metrics, num_blocks=8, num_swap_blocks=40, preemption_mode="swap", max_num_seqs=4
        ) as runtime:
            exposition = Exposition(runtime, metrics)
            forward = runner.forward

            def stop_when_swapped(plan):
                assert submitted.wait(WAIT)
                if plan.swap_outs:
                    runner.entered.clear()
                    metrics.swap_seen = True  # type: ignore[attr-defined]
                    assert gate.wait(WAIT)
                return forward(plan)

            runner.forward = stop_when_swapped  # type: ignore[method-assign]
            futures = [runtime.submit("abcdefgh", tokens(16)) for _ in range(6)]
            submitted.set()
            eventually(lambda: hasattr(metrics, "swap_seen"), "a swap-out")
            stats, found = runtime.stats(), samples(exposition)
            gate.set()
            assert found["vllm:num_requests_swapped"] == stats.swapped > 0
            assert found["vllm:num_requests_running"] == stats.running > 0
            assert found["vllm:num_requests_waiting"] == stats.waiting - stats.swapped > 0
            assert found["vllm:num_requests_waiting"] + stats.swapped + stats.running == 6
            assert found["vllm:cpu_cache_usage_perc"] == pytest.approx(stats.swap_slots_used / 40)
            assert 0 < found["vllm:kv_cache_usage_perc"] == found["vllm:gpu_cache_usage_perc"] <= 1
            for future in futures:
                future.result(WAIT)

    def test_buckets_are_cumulative_and_vllms(self, served) -> None:
        runtime, _, exposition = served
        runtime.submit("abc", tokens(3)).result(WAIT)
        for family in parse_text(exposition.render()[0].decode()):
            if family.type != "histogram":
                continue
            counts = [s.value for s in family.samples if s.name.endswith("_bucket")]
            assert counts == sorted(counts), family.name
        found = samples(exposition)
        bounds = [k for k in found if k.startswith("vllm:request_prompt_tokens_bucket")]
        assert [json.loads(key.split("_bucket")[1])["le"] for key in bounds] == [
            *("1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "+Inf")
        ], "1-2-5 up to max_model_len, which the pool reduces to 80"
        assert 'vllm:time_to_first_token_seconds_bucket{"le": "0.001"}' in found
        assert 'vllm:e2e_request_latency_seconds_bucket{"le": "0.3"}' in found

    def test_the_prefix_renames_vllms_names_alone(self, served) -> None:
        runtime, metrics, _ = served
        found = samples(Exposition(runtime, metrics, prefix="minillm"))
        assert "minillm:num_requests_running" in found and "minillm:kv_blocks_free" in found
        assert not any(name.startswith("vllm:") for name in found)
        with pytest.raises(ConfigError, match="sglang"):
            Exposition(runtime, metrics, prefix="sglang")

    def test_openmetrics_where_it_is_asked_for(self, served) -> None:
        runtime, _, exposition = served
        runtime.submit("abc", tokens(3)).result(WAIT)
        body, kind = exposition.render("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.1")
        assert kind.startswith("application/openmetrics-text")
        names = {family.name for family in parse_openmetrics(body.decode())}
        assert {"vllm:generation_tokens", "vllm:num_requests_running", "vllm:iteration_tokens_total"} <= names
        assert exposition.render("*/*")[1].startswith("text/plain")

    def test_a_dead_engine_still_answers(self) -> None:
        metrics = EngineMetrics()
        with make_runtime(ScriptedRunner(raise_in={"forward": 3}), observer=metrics) as runtime:
            with pytest.raises(EngineDeadError):
                runtime.submit("abc", tokens(8)).result(WAIT)
            found = samples(Exposition(runtime, metrics))
            assert found['vllm:request_success_total{"finished_reason": "error"}'] == 1
            assert found["vllm:num_requests_running"] == 0


async def fetch(app: Starlette, *paths: str) -> list[httpx.Response]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return [await client.get(path) for path in paths]


async def call_without_answer(app: Starlette, path: str) -> None:
    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        raise AssertionError(message)

    scope = {
        "type": "http",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [],
    }
    await app(scope | {"scheme": "http", "server": ("test", 80), "root_path": ""}, receive, send)


class Asgi:
    """An application that a route calls as it is."""

    def __init__(self, app) -> None:
        self._app = app

    async def __call__(self, scope, receive, send) -> None:
        await self._app(scope, receive, send)


class TestHttp:
    def test_routes_are_counted_by_template_and_status(self, served) -> None:
        _, _, exposition = served

        async def item(request):
            return JSONResponse({"id": request.path_params["id"]})

        async def stream(request):
            async def parts():
                yield b"a"
                await asyncio.sleep(0.05)
                yield b"b"

            return StreamingResponse(parts())

        async def broken(request):
            raise ValueError("planted")

        async def left(scope, receive, send):
            """The client has gone."""

        async def breaks_off(scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            raise ValueError("planted")

        routes = [Route("/items/{id}", item), Route("/stream", stream), Route("/broken", broken)]
        routes += [Route("/left", Asgi(left)), Route("/breaks-off", Asgi(breaks_off))]
        app = Starlette(routes=[*routes, Route("/metrics", exposition.endpoint)])
        app.add_middleware(HttpMetrics, registry=exposition.registry)
        asyncio.run(call_without_answer(app, "/left"))
        paths = ("/items/1", "/items/2", "/stream", "/broken", "/breaks-off", "/nothing/<script>", "/metrics")
        *_, last = asyncio.run(fetch(app, *paths))
        assert last.status_code == 200 and last.headers["content-type"].startswith("text/plain; version=0.0.4")
        found = {}
        for family in parse_text(last.text):
            for sample in family.samples:
                if sample.name.startswith("http_"):
                    found[sample.name, sample.labels["handler"], sample.labels.get("status")] = sample.value
        assert found["http_requests_total", "/items/{id}", "200"] == 2
        assert found["http_requests_total", "/broken", "500"] == 1
        assert found["http_requests_total", "/breaks-off", "500"] == 1
        assert found["http_requests_total", "/left", "499"] == 1
        assert found["http_requests_total", "none", "404"] == 1
        assert found["http_request_duration_seconds_sum", "/stream", None] >= 0.05

    def test_scrapes_never_wait_for_a_step(self) -> None:
        """B58: metrics answer at once while a step of the engine hangs, and while another scrape is rendered."""
        gate = threading.Event()
        metrics, runner = EngineMetrics(), ScriptedRunner(gate=gate)
        runtime = make_runtime(runner, observer=metrics)
        try:
            exposition = Exposition(runtime, metrics)
            future = runtime.submit("abc", tokens(4))
            assert runner.entered.wait(WAIT)
            app = Starlette(routes=[Route("/metrics", exposition.endpoint)])
            begin = time.perf_counter()
            responses = asyncio.run(fetch(app, *["/metrics"] * 20))
            assert time.perf_counter() - begin < 2.0
            assert all("vllm:num_requests_running" in response.text for response in responses)
            assert not future.done()
        finally:
            gate.set()
            runtime.close()
