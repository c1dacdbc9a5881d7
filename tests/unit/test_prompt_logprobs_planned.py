"""Log-probabilities through the planner: each position once, whoever shares, parks, moves or restarts meanwhile."""

from dataclasses import replace

import pytest

from microtome.actors.wire import plan_to_message
from microtome.planner.config import PlannerConfig
from microtome.planner.errors import BadInput
from microtome.planner.events import Cancel, Deliver, DeliverPrompt, StepDone
from microtome.planner.notes import decode_note
from microtome.planner.types import (
    Annotate,
    FinishReason,
    GenerationId,
    InputFlag,
    SamplingParams,
    SetSampling,
    TokenLogprobs,
    WorkerId,
)
from tests.support.fake_model import content, generate, logprobs_of
from tests.support.small_cluster import VOCAB, SmallCluster

ASKS = SamplingParams(logprobs=1, prompt_logprobs=2)
PROMPT = tuple(range(3, 43))


def likely(tokens: list[int], count: int | None, first: int = 1) -> list[TokenLogprobs | None]:
    """Of the tokens from position `first` on, each behind all before it."""
    sums = [0]
    for position, token in enumerate(tokens):
        sums.append(sums[-1] + content(token, position, sums[-1]))
    return [logprobs_of(tokens[at], at, sums[at], count) for at in range(first, len(tokens))]


def of_prompt(cluster: SmallCluster, name: str) -> list[TokenLogprobs | None]:
    found: list[TokenLogprobs | None] = []
    for one in cluster.told:
        if isinstance(one, DeliverPrompt) and one.generation == name:
            assert one.offset == len(found)
            assert name not in cluster.tokens or not any(
                isinstance(d, Deliver) and d.generation == name and d.tokens
                for d in cluster.told[: cluster.told.index(one)]
            )
            found += one.logprobs
    return found


def of_tokens(cluster: SmallCluster, name: str) -> list[TokenLogprobs | None]:
    return [one for d in cluster.told if isinstance(d, Deliver) and d.generation == name for one in d.logprobs]


def check_all(
    cluster: SmallCluster, name: str, prompt: tuple[int, ...] = PROMPT, history: tuple[int, ...] = ()
) -> None:
    everything = [*history, *prompt, *cluster.tokens[name]]
    known = likely(everything, 2, max(1, len(history)))
    expected = ([] if history else [None]) + known
    assert of_prompt(cluster, name) == expected[: len(prompt)]
    assert of_tokens(cluster, name) == likely(everything, 1, len(history) + len(prompt))


@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("chunk", [None, 5, 16])
def test_every_token_of_the_prompt_is_told_once_in_order_and_in_front(rows: int, chunk: int | None) -> None:
    """Few logits rows a step: chunks are cut to them, and decodes beside them take their part."""
    config = PlannerConfig(max_prefill_tokens=chunk) if chunk else PlannerConfig()
    cluster = SmallCluster(config, max_sequences=rows)
    if rows > 1:
        cluster.submit((7, 8, 9), 60, name="beside")
    name = cluster.submit(PROMPT, 5, sampling=ASKS)
    cluster.run()
    check_all(cluster, name)
    assert all(
        sum(
            width if flags & InputFlag.PROMPT_LOGPROBS else bool(flags & InputFlag.WANTS_OUTPUT)
            for width, flags in zip(plan.widths, plan.flags, strict=True)
        )
        <= rows
        for plan in cluster.sent
    )


def test_a_prompt_that_is_asked_about_takes_nothing_from_the_cache_and_gives_to_it() -> None:
    cluster = SmallCluster()
    first = cluster.submit(PROMPT, 2)
    cluster.run()
    asking = cluster.submit(PROMPT, 2, sampling=ASKS)
    cluster.run()
    assert cluster.usage(asking).cached_tokens == 0
    check_all(cluster, asking)
    again = cluster.submit(PROMPT, 2)
    cluster.run()
    assert cluster.usage(again).cached_tokens == len(PROMPT) - 1
    assert cluster.tokens[first] == cluster.tokens[asking] == cluster.tokens[again]


def test_two_that_ask_about_one_prompt_at_once_both_run_it() -> None:
    cluster = SmallCluster()
    names = [cluster.submit(PROMPT, 3, sampling=ASKS) for _ in range(2)]
    cluster.run()
    for name in names:
        check_all(cluster, name)


def test_behind_a_sessions_history_only_the_new_tokens_are_told() -> None:
    cluster = SmallCluster()
    session = cluster.open()
    cluster.submit((5, 6, 7), 4, session=session)
    cluster.run()
    history = tuple(cluster.transcript(session))
    name = cluster.submit((20, 21, 22), 3, session=session, sampling=ASKS)
    cluster.run()
    check_all(cluster, name, (20, 21, 22), history)
    cluster.rewind(session, 4)  # nothing is pending: the last token of the history is run again
    history = tuple(cluster.transcript(session))
    name = cluster.submit((30, 31), 3, session=session, sampling=ASKS)
    cluster.run()
    check_all(cluster, name, (30, 31), history)
    assert cluster.usage(name).cached_tokens == 0


def test_a_prompt_of_one_token_has_one_entry_of_which_nothing_is_known() -> None:
    cluster = SmallCluster()
    name = cluster.submit((9,), 2, sampling=ASKS)
    cluster.run()
    assert of_prompt(cluster, name) == [None]


@pytest.mark.parametrize("steps", range(7))
def test_whoever_moves_in_the_middle_goes_on_telling_where_it_was(steps: int) -> None:
    cluster = SmallCluster(PlannerConfig(max_prefill_tokens=16), workers=2)
    name = cluster.submit(PROMPT, 6, sampling=ASKS)
    for _ in range(steps):
        home = next((w for w, plans in cluster.plans.items() if plans), None)
        if home is not None:
            cluster.answer(home)
    home = next((w for w, plans in cluster.plans.items() if plans), "w0")
    cluster.plans[home].clear()
    cluster.lose(home)
    cluster.run()
    check_all(cluster, name)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_restarted_driver_tells_what_the_worker_has_kept(steps: int) -> None:
    cluster = SmallCluster(PlannerConfig(max_prefill_tokens=16))
    name = cluster.submit(PROMPT, 6, sampling=ASKS)
    for _ in range(steps):
        cluster.answer()
    while cluster.plans["w0"]:  # what was under way is run, and its answers are lost with the driver
        cluster.executors["w0"].run(cluster.plans["w0"].popleft())
    cluster.told.clear()
    cluster.restart_driver()
    cluster.run()
    check_all(cluster, name)


def test_an_answer_with_other_than_the_prompts_rows_gives_the_worker_up() -> None:
    cluster = SmallCluster()
    cluster.submit(PROMPT, 3, sampling=ASKS)
    result = cluster.executors["w0"].run(cluster.plans["w0"][0])
    short = replace(result, prompt_logprobs=result.prompt_logprobs[:-1])
    cluster.handle(StepDone(at_us=0, worker=WorkerId("w0"), result=short))
    assert not cluster.control.status().workers


def test_of_several_completions_the_first_tells_of_the_prompt() -> None:
    cluster = SmallCluster()
    sampling = replace(ASKS, temperature=1.0)
    names = [cluster.submit(PROMPT, 3, sampling=sampling), "s1"]
    cluster.run()
    assert len(of_prompt(cluster, names[0])) == len(PROMPT)
    told = cluster.told
    cluster.submit(PROMPT, 3, name="lead", siblings=[("s1", 4)])
    cluster.run()
    assert not [one for one in told if isinstance(one, DeliverPrompt) and one.generation == "s1"]


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_more_than_twenty_likeliest_are_refused(field: str) -> None:
    cluster = SmallCluster()
    name = cluster.submit(PROMPT, 3, sampling=replace(ASKS, **{field: 21}))
    assert isinstance(cluster.error(name), BadInput)
    assert str(cluster.error(name)) == f"{field} 21 is not in 0 to 20"


# --- where the generated part begins, for penalties and for the least number of tokens ---


def test_what_an_earlier_call_has_delivered_counts_as_generated() -> None:
    cluster = SmallCluster()
    cluster.submit(PROMPT, 3, delivered_before=5, sampling=SamplingParams(min_new_tokens=7))
    policy = next(op.sampling for plan in cluster.plans["w0"] for op in plan.ops if isinstance(op, SetSampling))
    assert policy.prompt_tokens == len(PROMPT) - 5


@pytest.mark.parametrize("restart", [False, True])
def test_the_generated_part_begins_where_it_began_after_a_move_and_after_a_restart(restart: bool) -> None:
    cluster = SmallCluster(workers=2)
    name = cluster.submit(PROMPT, 9, delivered_before=5, sampling=SamplingParams(frequency_penalty=0.5))
    home = next(w for w, plans in cluster.plans.items() if plans)
    for _ in range(3):
        cluster.answer(home)
    if restart:
        cluster.restart_driver()
    before = len(cluster.sent)
    cluster.plans[home].clear()
    cluster.lose(home)
    ops = [op for plan in cluster.sent[before:] for op in plan.ops]
    policies = [op.sampling for op in ops if isinstance(op, SetSampling)]
    assert [policy.prompt_tokens for policy in policies] == [len(PROMPT) - 5]
    assert policies[0].frequency_penalty == 0.5
    cluster.run()
    assert len(cluster.tokens[name]) == 9


# --- texts to stop at: found on the text side, ended here ---


def test_a_generation_ends_behind_the_token_that_completed_a_stop() -> None:
    cluster = SmallCluster()
    name = cluster.submit(PROMPT, 50)
    for _ in range(9):
        cluster.answer()
    assert len(cluster.tokens[name]) > 4
    told = cluster.handle(Cancel(at_us=0, generation=GenerationId(name), keep=4))
    (end,) = [one for one in told if isinstance(one, Deliver)]
    assert (end.finish, end.offset, end.tokens) == (FinishReason.STOP, 4, ())
    assert end.usage is not None
    assert end.usage.output_tokens == 4


def test_a_session_keeps_nothing_behind_a_stop() -> None:
    cluster = SmallCluster()
    session = cluster.open()
    name = cluster.submit(PROMPT, 50, session=session)
    for _ in range(9):
        cluster.answer()
    kept = cluster.tokens[name][:4]
    cluster.handle(Cancel(at_us=0, generation=GenerationId(name), keep=4))
    cluster.run()
    assert cluster.transcript(session) == [*PROMPT, *kept]
    assert cluster.length(session) == len(PROMPT) + 3  # the last one is pending, as ever
    following = cluster.submit((77,), 3, session=session)
    cluster.run()
    assert cluster.tokens[following] == generate([*PROMPT, *kept, 77], SamplingParams(), 3, (), VOCAB)


def test_a_stop_that_is_found_after_the_end_still_ends_the_sessions_history() -> None:
    cluster = SmallCluster()
    session = cluster.open()
    name = cluster.submit(PROMPT, 9, session=session, stop_texts=("x",))
    cluster.run()
    kept = cluster.tokens[name][:4]
    cluster.handle(Cancel(at_us=0, generation=GenerationId(name), keep=4))
    cluster.run()
    assert cluster.transcript(session) == [*PROMPT, *kept]
    assert cluster.length(session) == len(PROMPT) + 3
    following = cluster.submit((77,), 3, session=session)
    cluster.handle(Cancel(at_us=0, generation=GenerationId(name), keep=1))  # too late to mean anything
    cluster.run()
    assert cluster.tokens[following] == generate([*PROMPT, *kept, 77], SamplingParams(), 3, (), VOCAB)
    cluster.close(session)
    assert not cluster.control._stoppable


def test_one_that_waits_for_another_place_can_be_stopped() -> None:
    cluster = SmallCluster()
    name = cluster.submit(PROMPT, 50)
    for _ in range(6):
        cluster.answer()
    cluster.plans["w0"].clear()
    cluster.lose()
    cluster.handle(Cancel(at_us=0, generation=GenerationId(name), keep=2))
    assert cluster.finish(name) is FinishReason.STOP
    assert cluster.control.status().waiting == 0
    cluster.join("w1")
    other = cluster.submit(PROMPT, 3)
    cluster.run()
    assert len(cluster.tokens[other]) == 3


def test_texts_to_stop_at_are_in_the_note_for_the_next_driver() -> None:
    cluster = SmallCluster()
    cluster.submit(PROMPT, 3, stop_texts=("\n\n", "END"))
    (note,) = [decode_note(op.note) for plan in cluster.plans["w0"] for op in plan.ops if isinstance(op, Annotate)]
    assert note.stop_texts == ("\n\n", "END")
    assert note.options(SamplingParams()).stop_texts == ("\n\n", "END")


def test_plans_of_those_who_ask_nothing_are_as_they_were() -> None:
    cluster = SmallCluster()
    cluster.submit(PROMPT, 3)
    cluster.run()
    assert not any(plan.next_tokens for plan in cluster.sent)
    assert {flags & InputFlag.PROMPT_LOGPROBS for plan in cluster.sent for flags in plan.flags} == {0}


def test_many_that_start_at_once_with_large_policies_come_in_plans_that_fit_a_message() -> None:
    large = SamplingParams(banned_tokens=tuple(range(100, 900)), logit_bias=tuple((t, 1.0) for t in range(300)))
    cluster = SmallCluster(max_sequences=1024, usable_cells=8192)
    names = [f"g{n}" for n in range(900)]
    first = cluster.submit(PROMPT, 2)  # the others are in line while it runs
    for name in names:
        cluster.submit((3, 4), 2, name=name, sampling=large, stop_texts=("\u20ac" * 256,) * 16)
    cluster.run(5000)
    assert all(len(cluster.tokens[name]) == 2 for name in [first, *names])
    sizes = [plan_to_message(plan).ByteSize() for plan in cluster.sent]
    assert max(sizes) < 6 << 20
    assert sum(sizes) > 20 << 20
