import itertools

import pytest
from core_driver import make_request

from minillm.core.config import SchedulerConfig
from minillm.core.errors import ConfigError, IllegalTransitionError
from minillm.core.request import ENDED, LEGAL_TRANSITIONS, RequestState


@pytest.mark.parametrize(("old", "new"), list(itertools.product(RequestState, RequestState)))
def test_only_legal_transitions_are_taken(old, new):
    r = make_request("a", 3)
    r.state = old
    if new in LEGAL_TRANSITIONS[old]:
        r.transition(new, 1.5, 7, "why")
        assert r.state is new and r.history[-1] == (1.5, 7, new, "why")
    else:
        with pytest.raises(IllegalTransitionError, match="a: "):
            r.transition(new, 1.5, 7, "why")
        assert r.state is old and len(r.history) == 1


def test_every_live_state_can_end_and_ends_are_final():
    for state, following in LEGAL_TRANSITIONS.items():
        assert following >= ENDED if state not in ENDED else not following


def test_token_ids_span_prompt_and_output():
    r = make_request("a", [10, 11, 12])
    r.generated_ids += [20, 21, 22]
    full = [10, 11, 12, 20, 21, 22]
    for start, end in itertools.combinations(range(7), 2):
        assert r.token_ids(start, end) == full[start:end]
    assert r.num_tokens == 6


def test_stop_ids_join_eos_and_own_ids_unless_eos_is_ignored():
    assert make_request("a", 1, stop_token_ids=[5], eos_token_ids=[2, 7]).stop_ids == {2, 5, 7}
    assert make_request("a", 1, stop_token_ids=[5], ignore_eos=True, eos_token_ids=[2, 7]).stop_ids == {5}


def test_fork_copies_identity_and_limits_not_progress():
    parent = make_request("a", 5, n=3, priority=2, user="u", cache_salt="s", seed=9)
    parent.arrival_seq, parent.max_tokens, parent.last_position = 4, 8, 11
    child = parent.fork(2)
    assert (child.request_id, child.choice, child.child_of) == ("a#2", 2, parent)
    same = ("input_ids", "priority", "user", "cache_salt", "seed", "arrival_seq", "max_tokens", "last_position")
    assert all(getattr(child, name) == getattr(parent, name) for name in same)
    assert child.members == [child] and child.generated_ids == [] and child.block_table == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_blocks", 0),
        ("block_size", 0),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0),
        ("num_swap_blocks", -1),
        ("max_prefill_tokens_per_step", 0),
        ("max_swapped_requests", -1),
        ("max_waiting", 0),
        ("ageing_interval", 0.0),
        ("ageing_interval", float("nan")),
        ("preemption_mode", "hope"),
        ("user_weights", {"u": 0.0}),
        ("user_weights", {"u": "2"}),
        ("user_weights", {"u": float("inf")}),
    ],
)
def test_scheduler_config_names_what_is_wrong(field, value):
    with pytest.raises(ConfigError, match=field):
        SchedulerConfig(**{"num_blocks": 10, field: value})


def test_token_budget_must_carry_every_sequence():
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens=8.*max_num_seqs=9"):
        SchedulerConfig(num_blocks=10, max_num_seqs=9, max_num_batched_tokens=8)


def test_max_model_len_is_reduced_to_the_pool():
    config = SchedulerConfig(num_blocks=10, block_size=16, max_model_len=1000)
    assert config.effective_max_model_len == 160 and config.max_model_len_reduced
    config = SchedulerConfig(num_blocks=100, block_size=16, max_model_len=1000)
    assert config.effective_max_model_len == 1000 and not config.max_model_len_reduced
