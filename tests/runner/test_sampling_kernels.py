"""The sampling kernels against tensor operations: on a GPU, and emulated on the CPU (smaller, and slower).

The tokens must be the same. Both compute weights by one formula; only the exponential is the library's of each, and the
cases below have no weight whose last bit decides.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable

import numpy as np
import pytest
import torch
from sampling_emulation import EmulatedKernels, emulated_uniform, emulated_weights, library
from test_sampler_rows import MIXTURE
from test_sampler_statistics import DRAWS, exact_probabilities, upper_bound
from torch import Tensor

from minillm.core.sampling_params import SamplingParams
from minillm.runner.cuda_sampling import PARAMS_DTYPE, TILE, SamplingKernels, SlotParams, invalid_bitmap
from minillm.runner.philox import uniform
from minillm.runner.sampler import Sampler

PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.2, top_k=50, top_p=0.95),
    SamplingParams(min_p=0.05),
    SamplingParams(top_k=700, top_p=0.8, temperature=2.0),
    SamplingParams(top_k=20),
    SamplingParams(top_k=2500),
    SamplingParams(temperature=1e6, top_p=0.5),
    SamplingParams(temperature=1e6, top_p=0.5, top_k=2400),
    SamplingParams(top_k=1),
    SamplingParams(top_p=0.9, min_p=0.1, top_k=50),
    SamplingParams(temperature=0.01, top_p=0.99),
    SamplingParams(temperature=3.0, top_p=1e-9),
]
Make = Callable[[int], Tensor]


def normal(vocab: int, seed: int = 0) -> Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed))


LOGITS: dict[str, Make] = {
    "normal": lambda n: normal(n) * 3,
    "steps of one": lambda n: (normal(n) * 3).round(),
    "steps of bfloat16": lambda n: (normal(n) * 10).bfloat16().float(),
    "all equal": lambda n: torch.zeros(n),
    "zeros of both signs": lambda n: torch.where(normal(n) > 0, 0.0, -0.0),
    "two values": lambda n: (normal(n) > 0).float(),
    "nearly equal": lambda n: 4 + normal(n) * 1e-6,
    "mostly masked": lambda n: torch.where(normal(n, 1) < 1.3, -math.inf, normal(n)),
    "one token": lambda n: torch.full((n,), -math.inf).index_fill_(0, torch.tensor([n - 4]), 3.0),
    "huge": lambda n: normal(n) * 1e38,
    "nan": lambda n: normal(n).index_fill_(0, torch.tensor([n // 2]), math.nan),
    "inf": lambda n: normal(n).index_fill_(0, torch.tensor([7]), math.inf),
    "minus inf": lambda n: torch.full((n,), -math.inf),
}


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request) -> str:
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        return "cuda"
    skip_without_emulation()
    return "cpu"


def skip_without_emulation() -> None:
    if platform.machine() != "x86_64" or library() is None:
        pytest.skip("the emulation needs x86-64 and a C++ compiler")


@pytest.fixture
def gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda")


def samplers(
    params: list[SamplingParams], vocab: int, device: str, invalid: list[int] | None = None
) -> tuple[Sampler, Sampler]:
    """One that uses tensor operations, one that uses the kernels; slot i holds params[i] with seed 100 + i."""
    tensors = Sampler(len(params), vocab, device, [2], invalid or [])
    tensors.kernels = None
    make = EmulatedKernels if device == "cpu" else None
    kernels = Sampler(len(params), vocab, device, [2], invalid or [], make_kernels=make)
    assert kernels.kernels is not None
    for slot, each in enumerate(params):
        for sampler in (tensors, kernels):
            sampler.state.assign(slot, each, 100 + slot, slot % 3, range(slot, slot + 30), [slot, slot, 7])
    return tensors, kernels


def assert_same(tensors: Sampler, kernels: Sampler, logits: Tensor, slots: list[int], indices: list[int]) -> Tensor:
    right = tensors.sample(logits.clone(), slots, indices)
    found = kernels.sample(logits.clone(), slots, indices)
    assert found.failed.tolist() == right.failed.tolist()
    assert found.token_ids.tolist() == right.token_ids.tolist()
    return found.token_ids


@pytest.mark.parametrize("name", LOGITS)
def test_every_kind_of_row_gives_the_tensor_paths_token(device: str, name: str) -> None:
    """Padding, other invalid ids, and splits of one and of several tiles; a mixture of all kinds in each call."""
    for vocab in (3001,) if device == "cpu" else (3001, 49_152, 50_257, 151_936):
        invalid = [vocab - 1, vocab - 2, 77, 31, 0]
        tensors, kernels = samplers(PARAMS, vocab, device, invalid)
        logits = LOGITS[name](vocab).to(device).expand(len(PARAMS), -1).contiguous()
        logits[:, vocab - 1] = math.nan
        slots = list(range(len(PARAMS)))
        for step in range(1 if device == "cpu" else 8):
            assert_same(tensors, kernels, logits, slots, [5 + step] * len(slots))


def test_a_rows_token_does_not_depend_on_splits_and_mates(device: str) -> None:
    vocab = 3 * TILE + 5 if device == "cpu" else 151_936
    mix = PARAMS[:8] if device == "cpu" else PARAMS
    _, kernels = samplers(mix, vocab, device)
    logits = torch.stack([normal(vocab, i) for i in range(len(mix))]).to(device)
    slots = list(range(len(mix)))
    together = kernels.sample(logits, slots, slots).token_ids.tolist()
    for i in slots:
        assert kernels.sample(logits[i : i + 1], [i], [i]).token_ids.item() == together[i]
    if device == "cpu":
        assert isinstance(kernels.kernels, EmulatedKernels)
        kernels.kernels.force_tiles = 2
        assert kernels.sample(logits, slots, slots).token_ids.tolist() == together
    else:
        many = [i for i in slots for _ in range(20)]
        tokens = kernels.sample(logits[many], many, many).token_ids.tolist()
        assert tokens == [together[i] for i in many]
        assert kernels.kernels.split(len(many)) != kernels.kernels.split(1)


def test_edits_and_scores_come_before_the_kernels(device: str) -> None:
    """Bias, penalties, min_tokens, masks of both forms, logprobs; a NaN that an edit hides still fails its row."""
    tensors, kernels = samplers(MIXTURE, 2000, device, [1999, 31])
    logits = torch.stack([normal(2000, i) * 3 for i in range(len(MIXTURE))]).to(device)
    logits[len(MIXTURE) - 1, 11] = math.nan  # masked: a stop id before min_tokens
    slots = list(range(len(MIXTURE)))
    bits = torch.rand(len(slots), 2016, generator=torch.Generator().manual_seed(1)) < 0.5
    words = torch.from_numpy(np.packbits(bits.numpy(), axis=1, bitorder="little").view(np.int32)).to(device)
    for allowed in (None, bits[:, :2000].to(device), words):
        right = tensors.sample(logits.clone(), slots, slots, allowed)
        found = kernels.sample(logits.clone(), slots, slots, allowed)
        assert found.token_ids.tolist() == right.token_ids.tolist()
        assert found.failed.tolist() == right.failed.tolist() == [False] * (len(slots) - 1) + [True]
        assert found.logprob_rows == right.logprob_rows == [len(MIXTURE) - 1]


def test_scores_do_not_see_invalid_ids(device: str) -> None:
    tensors, kernels = samplers([SamplingParams(logprobs=5, temperature=0.0)], 3001, device, [3000, 9])
    logits = normal(3001)[None].to(device)
    logits[0, [9, 3000]] = math.inf
    right, found = (each.sample(logits.clone(), [0], [0]) for each in (tensors, kernels))
    assert found.logprobs is not None and right.logprobs is not None
    assert found.logprobs.to_list() == right.logprobs.to_list()


def test_only_the_launches_that_are_needed_are_made() -> None:
    skip_without_emulation()
    _, kernels = samplers(PARAMS[:3], 2000, "cpu")
    assert isinstance(kernels.kernels, EmulatedKernels)
    logits = torch.stack([normal(2000)] * 3)
    for slots in ([0], [0, 1], [0, 1, 2], [2]):
        kernels.sample(logits[: len(slots)], slots, [0] * len(slots))
    assert kernels.kernels.launches == [
        (1, False, False),
        (2, True, False),
        (3, True, True),
        (1, True, True),
    ]
    kernels.state.assign(2, SamplingParams(temperature=0.0, top_p=0.5), 0)  # greedy whatever the filter says
    kernels.sample(logits, [0, 1, 2], [0] * 3)
    assert kernels.kernels.launches[-1] == (3, True, False)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, 2**63, 2**64 - 5, 0x123456789ABCDEF])
def test_the_kernels_uniform_numbers_are_philoxs(seed: int) -> None:
    skip_without_emulation()
    signed = seed - 2**64 if seed >= 2**63 else seed
    for choice, index in ((0, 0), (1, 0), (0, 1), (77, 2**31 - 1), (2**32 - 1, 4095)):
        (expected,) = uniform(*(torch.tensor([value]) for value in (signed, choice, index))).tolist()
        assert emulated_uniform(seed, choice, index) == expected


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1e-4, 1.1e-4, 3.0, 123.456, 1e6, math.pi])
def test_the_quotient_is_correctly_rounded(temperature: float) -> None:
    """A weight is exp(q) for the float32 q = (l - max) / temperature: compared with numpy's division."""
    skip_without_emulation()
    logits = np.concatenate((normal(20_000).numpy() * 8 * temperature, [0.0, -0.0, -math.inf])).astype(np.float32)
    maximum = logits.max()
    quotient = (logits - maximum) / np.float32(temperature)
    assert quotient.dtype == np.float32
    found = emulated_weights(logits, float(maximum), temperature, 0.0)
    expected = emulated_weights(quotient, 0.0, 1.0, 0.0)
    assert (found == expected).all()
    assert (np.abs(found / 2**40 - np.exp(quotient.astype(np.float64))) < 1e-6).all()
    assert (emulated_weights(logits, float(maximum), temperature, 1.0) > 0).sum() == (found == 2**40).sum()


def test_parameters_are_sent_when_a_slot_is_assigned_and_only_then() -> None:
    sent: list[np.ndarray] = []

    def upload(array: np.ndarray) -> Tensor:
        sent.append(array.copy())
        return torch.from_numpy(array)

    params = SlotParams(5, torch.device("cpu"), upload)  # type: ignore[arg-type]
    params.host[3] = (0.5, 0.1, 0.9, 40, -7, 2, 0)
    params.changed(3)
    params.host[1] = (1.5, 0.0, 1.0, 99, 8, 0, 1)
    params.changed(1)
    on_device = params.on_device()
    assert [array[:2].tolist() for array in sent] == [[1, 3]]
    assert on_device.numpy().view(PARAMS_DTYPE)[[1, 3], 0].tolist() == [params.host[1].item(), params.host[3].item()]
    assert params.on_device().data_ptr() == on_device.data_ptr() and len(sent) == 1
    params.host[3]["seed"] = 11
    params.changed(3)
    assert params.on_device().numpy().view(PARAMS_DTYPE)["seed"][:, 0].tolist() == [0, 8, 0, 11, 0]
    assert params.on_device().numpy().view(PARAMS_DTYPE)["greedy"][:, 0].tolist() == [1, 1, 1, 0, 1]


def test_a_slot_that_is_assigned_again_draws_as_its_new_request() -> None:
    skip_without_emulation()
    tensors, kernels = samplers(PARAMS[:4], 2000, "cpu")
    logits = torch.stack([normal(2000)] * 4)
    for round_ in range(3):
        for sampler in (tensors, kernels):
            sampler.state.assign(round_, SamplingParams(temperature=5.0), 2**63 + round_, choice=round_)
        assert_same(tensors, kernels, logits, [0, 1, 2, 3], [round_] * 4)


def test_a_call_with_more_rows_than_slots_makes_room(device: str) -> None:
    tensors, kernels = samplers(PARAMS[:2], 500, device)
    slots = [0, 1, 1, 0, 1, 1, 1]
    tokens = assert_same(tensors, kernels, torch.stack([normal(500)] * 7).to(device), slots, list(range(7)))
    assert len(set(tokens.tolist())) > 3
    assert kernels.kernels is not None and kernels.kernels.max_rows >= 7


def test_a_cpu_uses_tensor_operations_and_bad_arguments_are_refused() -> None:
    sampler = Sampler(1, 100)
    assert sampler.kernels is None and sampler.state.slot_params is None
    sampler.state.assign(0, SamplingParams(), 0)
    with pytest.raises(ValueError, match="float32"):
        sampler.sample(torch.zeros(1, 100, dtype=torch.bfloat16), [0], [0])
    for end in (0, (1 << 20) + 1):
        with pytest.raises(ValueError, match="vocabulary"):
            SamplingKernels(1, end, None, torch.device("cpu"))


def test_bitmap_of_invalid_ids() -> None:
    bitmap = invalid_bitmap([0, 31, 32, 64], 65)
    assert bitmap.dtype == np.int32 and bitmap.view(np.uint32).tolist() == [0x80000001, 1, 1]


@pytest.mark.cuda
@pytest.mark.parametrize("params", [p for p in PARAMS if not p.is_greedy and p.top_k != 1])
def test_frequencies_fit_the_distribution_on_the_gpu(gpu: torch.device, params: SamplingParams) -> None:
    vocab, draws = 400, 4 * DRAWS
    row = normal(vocab, 2) * 1.5
    expected = exact_probabilities(row, params) * draws
    sampler = Sampler(1, vocab, gpu)
    sampler.state.assign(0, params, seed=12345)
    logits = row.to(gpu).expand(draws, -1)  # of row stride 0
    tokens = sampler.sample(logits, [0] * draws, range(draws)).token_ids
    counts = torch.bincount(tokens, minlength=vocab).cpu()
    assert counts[expected == 0].sum() == 0
    common = expected >= 5
    pooled = torch.cat((counts[common], counts[~common].sum()[None]))
    pooled_expected = torch.cat((expected[common], expected[~common].sum()[None]))
    if pooled_expected[-1] < 5:
        pooled, pooled_expected = pooled[:-1], pooled_expected[:-1]
    chi_square = ((pooled - pooled_expected) ** 2 / pooled_expected).sum().item()
    assert chi_square < upper_bound(max(1, len(pooled) - 1))


@pytest.mark.cuda
def test_thousands_of_draws_are_the_tensor_paths(gpu: torch.device) -> None:
    """At real widths; a weight's last bit may decide one in a thousand (none did on an H200)."""
    differing = total = 0
    for vocab in (49_152, 50_257, 151_936):
        tensors, kernels = samplers(PARAMS * 8, vocab, "cuda")
        slots = list(range(len(PARAMS) * 8))
        for step in range(6):
            logits = torch.randn(len(slots), vocab, device=gpu, generator=torch.Generator(gpu).manual_seed(step)) * 2.5
            right, found = (each.sample(logits, slots, [step] * len(slots)).token_ids for each in (tensors, kernels))
            differing += int((right != found).sum())
            total += len(slots)
    print(f"{differing} of {total} tokens differ")
    assert differing <= total // 1000


@pytest.mark.cuda
def test_bfloat16_logits_and_row_strides_on_the_gpu(gpu: torch.device) -> None:
    tensors, kernels = samplers(PARAMS, 50_257, "cuda", [50_256])
    wide = torch.stack([normal(50_300, i) for i in range(len(PARAMS))]).to(gpu)
    slots = list(range(len(PARAMS)))
    for dtype in (torch.float32, torch.bfloat16):
        logits = wide.to(dtype)[:, :50_257]
        right = tensors.sample(logits.float().contiguous(), slots, slots).token_ids
        assert kernels.sample(logits, slots, slots).token_ids.tolist() == right.tolist()


@pytest.mark.cuda
def test_launches_are_captured_in_a_graph_and_wait_for_nothing(gpu: torch.device) -> None:
    tensors, kernels = samplers(PARAMS, 49_152, "cuda")
    assert kernels.kernels is not None and kernels.state.slot_params is not None
    rows = len(PARAMS)
    logits = torch.randn(rows, 49_152, device=gpu)
    slots = torch.arange(rows, dtype=torch.int32, device=gpu)
    indices = torch.zeros_like(slots)
    tokens = torch.zeros(rows, dtype=torch.int64, device=gpu)
    failed = torch.zeros(rows, dtype=torch.bool, device=gpu)
    params = kernels.state.slot_params.on_device()

    def launch() -> None:
        kernels.kernels.sample(logits, slots, indices, params, tokens, failed, random=True, filtered=True)

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for step in range(5):
        logits.normal_()
        indices.fill_(step)
        graph.replay()
        assert tokens.tolist() == tensors.sample(logits, range(rows), [step] * rows).token_ids.tolist()
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernels.state.assign(3, SamplingParams(top_p=0.5), 1)
        found = kernels.sample(logits, list(range(rows)), [9] * rows).token_ids
    finally:
        torch.cuda.set_sync_debug_mode("default")
    tensors.state.assign(3, SamplingParams(top_p=0.5), 1)
    assert found.tolist() == tensors.sample(logits, range(rows), [9] * rows).token_ids.tolist()
