"""Cases that have broken other engines on a GPU (B25, B33, B44), through the whole engine; the same on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minillm import EngineConfig, Runtime, SamplingParams
from minillm.bench.models import random_model
from minillm.bench.random_tokenizer import random_tokenizer
from minillm.core.errors import InvalidParameterError
from minillm.engine.factory import build_engine
from minillm.models.loader import LoadedModel

BLOCK = 8
VOCAB = 512


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param


def make(model: LoadedModel, **options: Any) -> Runtime:
    settings: dict[str, Any] = {
        "block_size": BLOCK,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": 64,
        "swap_space": 0.0,
        "max_model_len": 256,
        "check_invariants": True,
        "seed": 0,
        **options,
    }
    return Runtime(
        parts=build_engine(EngineConfig(model.name, **settings), model=model, tokenizer=random_tokenizer(VOCAB))
    )


def greedy(length: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, **options)


def prompt(number: int, length: int = 12) -> list[int]:
    return [3 + (31 * number + 7 * i) % (VOCAB - 3) for i in range(length)]


def run(runtime: Runtime, *requests: tuple[list[int], SamplingParams]) -> list[list[int]]:
    """Tokens of requests that are submitted together."""
    items = [{"prompt": ids, "sampling_params": params} for ids, params in requests]
    outputs = [future.result(timeout=120).outputs[0] for future in runtime.submit_many(items)]
    assert runtime._engine.num_invariant_violations == 0
    assert [output.finish_reason for output in outputs] == ["length"] * len(requests)
    return [output.token_ids for output in outputs]


class TestPaddedBatches:
    """B25: batches of sizes that no graph has, in a pool whose every block is in use."""

    @pytest.fixture
    def model(self, device: str) -> LoadedModel:
        return random_model("tiny", dtype="float32", device=device)

    @pytest.mark.parametrize("size", [3, 5])
    def test_slots_of_others_keep_every_byte_with_the_last_block_in_use(self, model: LoadedModel, size: int) -> None:
        length = 3 * BLOCK
        need = size * -(-(12 + length) // BLOCK)
        with make(model, num_gpu_blocks_override=2 + need) as runtime:
            run(runtime, (prompt(0, 2 * BLOCK + 1), greedy(1)))  # two full blocks stay in the prefix cache
            engine = runtime._engine
            cached = list(engine.scheduler.prefix_cache.entries())
            assert len(cached) == 2
            store = engine.runner.cache.store  # type: ignore[attr-defined]
            before = store[:, :, cached].clone()
            used: set[int] = set()
            commit = engine.scheduler.commit

            def watched(plan, outcome, now):
                used.update(block for chunk in plan.prefills for block in chunk.block_table)
                used.update(slot // BLOCK for slot in plan.decodes.kv_slots)
                return commit(plan, outcome, now)

            engine.scheduler.commit = watched  # type: ignore[method-assign]
            run(runtime, *((prompt(7 + i), greedy(length)) for i in range(size)))
            assert used == set(range(2 + need)) - set(cached), "every block was in use, the last one too"
            assert torch.equal(store[:, :, cached], before)

    def test_identical_prompts_give_identical_rows_and_those_of_launching_kernel_by_kernel(
        self, model: LoadedModel
    ) -> None:
        found = {}
        for eager in (True, False):
            with make(model, enforce_eager=eager, enable_prefix_caching=False) as runtime:
                found[eager] = run(runtime, *((prompt(3), greedy(20)) for _ in range(5)))
        assert all(tokens == found[False][0] for tokens in found[False])
        assert found[True] == found[False]

    def test_batches_that_grow_and_shrink_give_the_tokens_of_each_alone(self, model: LoadedModel) -> None:
        lengths = (40, 8, 24, 8, 24, 40, 40, 16)
        with make(model, enable_prefix_caching=False) as runtime:
            alone = [run(runtime, (prompt(i), greedy(n)))[0] for i, n in enumerate(lengths)]
            for order in ((0, 1, 2, 3, 4, 5, 6, 7), (7, 2, 5, 0, 6, 1, 4, 3)):  # block tables in other places
                together = run(runtime, *((prompt(i), greedy(lengths[i])) for i in order))
                assert together == [alone[i] for i in order]


class TestNumbersThatAreNotFinite:
    """B33: one row of a batch of four."""

    BAD = 77

    @pytest.fixture
    def model(self, device: str) -> LoadedModel:
        model = random_model("tiny", dtype="float32", device=device)
        model.decoder.embedding[self.BAD] = torch.nan  # the head has a weight of its own
        return model

    def outputs(self, runtime: Runtime, bad: tuple[list[int], SamplingParams]) -> tuple[Any, list[list[int]]]:
        """The bad request's output and the tokens of three others in the same batch."""
        good = [(prompt(i), greedy(16, logit_bias={self.BAD: -100})) for i in range(1, 4)]
        items = [{"prompt": ids, "sampling_params": params} for ids, params in (bad, *good)]
        done = [future.result(timeout=120) for future in runtime.submit_many(items)]
        assert runtime._engine.num_invariant_violations == 0
        assert all(output.outputs[0].finish_reason == "length" for output in done[1:])
        return done[0], [output.outputs[0].token_ids for output in done[1:]]

    @pytest.mark.parametrize("when", ["in the prompt", "while decoding"])
    def test_that_row_alone_ends_with_an_error_and_nothing_of_it_is_published(
        self, model: LoadedModel, when: str
    ) -> None:
        ids = prompt(0, 2 * BLOCK + 3)
        with make(model) as runtime:
            healthy, wanted = self.outputs(runtime, (ids, greedy(6, logit_bias={self.BAD: -100})))
            assert healthy.outputs[0].finish_reason == "length"
            runtime.reset_prefix_cache()
            if when == "in the prompt":
                bad = ([*ids[:5], self.BAD, *ids[6:]], greedy(6))
            else:
                bad = (ids, greedy(30, logit_bias={self.BAD: 100}))  # what is sampled first is computed next
            output, others = self.outputs(runtime, bad)
            choice = output.outputs[0]
            assert choice.finish_reason == "error"
            assert "finite" in str(choice.error)
            assert len(choice.token_ids) == (0 if when == "in the prompt" else 1)
            assert others == wanted
            again, others = self.outputs(runtime, bad)
            assert again.outputs[0].finish_reason == "error" and others == wanted
            cached = again.metrics.num_cached_tokens
            assert cached == (0 if when == "in the prompt" else 2 * BLOCK), "only blocks of finite numbers are found"
            assert runtime._engine.runner.cache.store.isfinite().all()  # type: ignore[attr-defined]

    def test_float16_overflow_is_an_error_and_not_a_text(self, device: str) -> None:
        model = random_model("tiny", dtype="float16", device=device)
        model.decoder.embedding[self.BAD] = 6e4
        model.decoder.layers[0].down.weight.mul_(60)  # type: ignore[union-attr]
        model.decoder.layers[0].input_norm.weight.fill_(3e4)
        with make(model) as runtime:
            output = runtime.submit(prompt(1), greedy(4)).result(timeout=120).outputs[0]
            assert output.finish_reason == "error" and "finite" in str(output.error)
            assert output.text == "" and output.token_ids == []


class TestTinyTemperatures:
    """B44: next to greedy, in a batch with ordinary rows, on large logits in float16."""

    @pytest.fixture
    def model(self, device: str) -> LoadedModel:
        model = random_model("tiny", dtype="float16", device=device)
        head = model.decoder.head.weight  # type: ignore[union-attr]
        head.mul_(6e3)  # logits of some ten thousands
        assert head.isfinite().all()
        return model

    def test_are_greedy_and_leave_the_other_rows_alone(self, model: LoadedModel) -> None:
        tiny = [1e-8, 1e-5, 1e-4, 0.01]
        ordinary = SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=10, ignore_eos=True)
        with make(model, enable_prefix_caching=False) as runtime:
            (wanted,) = run(runtime, (prompt(1), greedy(10)))
            (alone,) = run(runtime, (prompt(2), ordinary))
            rows = [
                (prompt(1), SamplingParams(temperature=value, seed=1, max_tokens=10, ignore_eos=True)) for value in tiny
            ]
            rows.append(
                (prompt(1), SamplingParams(temperature=1.0, top_p=1e-4, seed=1, max_tokens=10, ignore_eos=True))
            )
            found = run(runtime, *rows, (prompt(2), ordinary))
        assert found[:-1] == [wanted] * len(rows)
        assert found[-1] == alone
        assert len(set(wanted)) > 1

    @pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
    def test_what_is_no_temperature_is_refused(self, value: float) -> None:
        with pytest.raises(InvalidParameterError, match="temperature"):
            SamplingParams(temperature=value)
