"""A request is checked whole before anything changes, and what is wrong with it is one sentence with both numbers."""

import pytest

from microtome.actors.requests import (
    DEFAULT_NEW_TOKENS,
    Completion,
    ServedModel,
    check_numbers,
    check_prompt,
    completions_of,
    finished_before,
    generation_options,
    resume_offsets,
    seed_of,
    text_prompt,
)
from microtome.actors.text import Message
from microtome.planner.errors import BadInput
from microtome.planner.types import FinishReason, SamplingParams
from microtome.v1 import generation_pb2 as pb

MODEL = ServedModel(
    name="toy",
    fingerprint="f" * 64,
    vocab_size=100,
    context_tokens=64,
    end_token_ids=(2, 7),
    has_chat_template=True,
    architecture="llama",
)


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (pb.GenerateRequest(max_new_tokens=0), "max_new_tokens 0 is below 1"),
        (pb.GenerateRequest(temperature=-0.5), "temperature -0.5 is not a number of 0 or more"),
        (pb.GenerateRequest(temperature=float("nan")), "temperature nan is not a number of 0 or more"),
        (pb.GenerateRequest(temperature=float("inf")), "temperature inf is not a number of 0 or more"),
        (pb.GenerateRequest(top_k=101), "top_k 101 is above the vocabulary size 100"),
        (pb.GenerateRequest(top_p=0), "top_p 0 is not above 0 and at most 1"),
        (pb.GenerateRequest(top_p=1.5), "top_p 1.5 is not above 0 and at most 1"),
        (pb.GenerateRequest(top_p=float("nan")), "top_p nan is not above 0 and at most 1"),
        (pb.GenerateRequest(min_p=-0.1), "min_p -0.1 is not in 0 to 1"),
        (pb.GenerateRequest(min_p=float("nan")), "min_p nan is not in 0 to 1"),
        (
            pb.GenerateRequest(stop_token_ids=[1, 100]),
            "stop token id 100 (number 2) is not below the vocabulary size 100",
        ),
        (pb.GenerateRequest(repetition_penalty=0), "repetition_penalty 0 is not above 0 and at most 1000"),
        (pb.GenerateRequest(repetition_penalty=1001), "repetition_penalty 1001 is not above 0 and at most 1000"),
        (pb.GenerateRequest(presence_penalty=float("nan")), "presence_penalty nan is not in -1000 to 1000"),
        (pb.GenerateRequest(frequency_penalty=-1e9), "frequency_penalty -1e+09 is not in -1000 to 1000"),
        (
            pb.GenerateRequest(logit_bias=dict.fromkeys(range(301), 1.0)),
            "301 logit biases are given, and 300 is the limit",
        ),
        (pb.GenerateRequest(logit_bias={7: float("inf")}), "the bias inf of token 7 is not in -1000 to 1000"),
        (
            pb.GenerateRequest(logit_bias={3: 1.0, 100: 1.0}),
            "biased token id 100 (number 2) is not below the vocabulary size 100",
        ),
        (
            pb.GenerateRequest(allowed_token_ids=pb.TokenIds(ids=[1] * 2000), banned_token_ids=[2] * 49),
            "2000 allowed and 49 banned token ids are given, and 2048 together is the limit",
        ),
        (
            pb.GenerateRequest(allowed_token_ids=pb.TokenIds(ids=[200])),
            "allowed token id 200 (number 1) is not below the vocabulary size 100",
        ),
        (
            pb.GenerateRequest(banned_token_ids=[200]),
            "banned token id 200 (number 1) is not below the vocabulary size 100",
        ),
        (
            pb.GenerateRequest(allowed_token_ids=pb.TokenIds(ids=[4, 5]), banned_token_ids=[5, 4, 6]),
            "no token is left: 2 are allowed, and 3 banned",
        ),
        (pb.GenerateRequest(allowed_token_ids=pb.TokenIds()), "no token is left: 0 are allowed, and 0 banned"),
        (pb.GenerateRequest(min_new_tokens=257), "min_new_tokens 257 is above max_new_tokens 256"),
        (
            pb.GenerateRequest(min_new_tokens=5, max_new_tokens=4),
            "min_new_tokens 5 is above max_new_tokens 4",
        ),
        (pb.GenerateRequest(stop=["x"] * 17), "17 texts to stop at are given, and 16 is the limit"),
        (pb.GenerateRequest(stop=["a", ""]), "the stop '' has 0 characters, not 1 to 256"),
        (pb.GenerateRequest(stop=["x" * 257]), f"the stop '{'x' * 40}' has 257 characters, not 1 to 256"),
        (pb.GenerateRequest(logprobs=21), "logprobs 21 is not in 0 to 20"),
        (pb.GenerateRequest(prompt_logprobs=21), "prompt_logprobs 21 is not in 0 to 20"),
        (pb.GenerateRequest(generation_id="a\nb"), "generation id 'a\\nb' is not at most 128 printable characters"),
        (
            pb.GenerateRequest(generation_id="x" * 129),
            f"generation id '{'x' * 40}' is not at most 128 printable characters",
        ),
        (pb.GenerateRequest(n=0), "n 0 is not in 1 to 128"),
        (pb.GenerateRequest(n=129), "n 129 is not in 1 to 128"),
        (pb.GenerateRequest(ttft_target_ms=0), "ttft_target_ms 0 is below 1"),
        (pb.GenerateRequest(tenant="a\nb"), "tenant 'a\\nb' is not at most 128 printable characters"),
        (
            pb.GenerateRequest(cache_salt="x" * 129),
            f"cache_salt '{'x' * 40}' is not at most 128 printable characters",
        ),
        (
            pb.GenerateRequest(session_id="5", tenant="acme"),
            "tenant 'acme' is given, and a session_id: the session has its own",
        ),
        (
            pb.GenerateRequest(session_id="5", cache_salt="s"),
            "cache_salt 's' is given, and a session_id: the session has its own",
        ),
        (pb.GenerateRequest(stop_token_ids=[1] * 1025), "1025 stop token ids are given, and 1024 is the limit"),
        (
            # As many as a message can hold: none of them is looked at, nor is the one out of range.
            pb.GenerateRequest(generated_token_ids=[1000] * 64),
            "64 generated tokens are given, and 63 is the limit: the context holds 64, the prompt among them",
        ),
        (
            pb.GenerateRequest(n=2, generated_token_ids=[1]),
            "generated_token_ids are of 1 completion, and 2 are asked for: tell what is begun of each",
        ),
        (
            pb.GenerateRequest(n=2, begun=[pb.BegunCompletion(index=2)]),
            "begun completion 2 is not below the 2 that are asked for",
        ),
        (
            pb.GenerateRequest(n=2, begun=[pb.BegunCompletion(index=1), pb.BegunCompletion(index=1)]),
            "begun completion 1 is given twice",
        ),
        (
            pb.GenerateRequest(begun=[pb.BegunCompletion(), pb.BegunCompletion(index=1)]),
            "2 begun completions are given, and 1 are asked for",
        ),
        (
            pb.GenerateRequest(n=2, session_id="5", begun=[pb.BegunCompletion()]),
            "begun completions are given, and a session_id: the session has what was generated in it",
        ),
        (
            pb.GenerateRequest(n=2, begun=[pb.BegunCompletion(token_ids=[5] * 64)]),
            "64 generated tokens are given, and 63 is the limit: the context holds 64, the prompt among them",
        ),
        (
            pb.GenerateRequest(n=2, begun=[pb.BegunCompletion(token_ids=[5, 100])]),
            "generated token id 100 (number 2) is not below the vocabulary size 100",
        ),
        (
            pb.GenerateRequest(n=2, temperature=1, begun=[pb.BegunCompletion(token_ids=[5])]),
            "a sampled generation that goes on needs the seed that was in force",
        ),
    ],
)
def test_number_out_of_range_is_refused_with_value_and_limit(request_: pb.GenerateRequest, sentence: str) -> None:
    with pytest.raises(BadInput) as refused:
        check_numbers(request_, MODEL)
    assert str(refused.value) == sentence


def test_numbers_at_their_limits_are_taken() -> None:
    check_numbers(pb.GenerateRequest(), MODEL)
    check_numbers(
        pb.GenerateRequest(
            max_new_tokens=1,
            temperature=0,
            top_k=100,
            top_p=1,
            min_p=1,
            stop_token_ids=[99] * 1024,
            generation_id="x" * 128,
            n=128,
            tenant="t" * 128,
            cache_salt="s" * 128,
            ttft_target_ms=1,
            begun=[pb.BegunCompletion(index=index, token_ids=[99] * 63) for index in range(128)],
        ),
        MODEL,
    )


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (pb.GenerateRequest(), "the request has no prompt: give it text, a chat or token ids"),
        (pb.GenerateRequest(text=""), "the prompt is empty: it needs 1 character or more"),
        (pb.GenerateRequest(chat=pb.Chat()), "the chat is empty: it needs 1 message or more"),
    ],
)
def test_prompt_that_holds_nothing_is_refused(request_: pb.GenerateRequest, sentence: str) -> None:
    with pytest.raises(BadInput) as refused:
        text_prompt(request_)
    assert str(refused.value) == sentence


def test_prompt_forms_are_told_apart() -> None:
    assert text_prompt(pb.GenerateRequest(text="a")) == "a"
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    assert text_prompt(pb.GenerateRequest(chat=chat)) == [Message("user", "hi")]
    assert text_prompt(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[]))) is None


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ([], "the prompt is empty: it needs 1 token or more"),
        (
            [1] * 64,
            "the prompt has 64 tokens, and 63 is the limit: the context holds 64, one of them generated",
        ),
        ([1, 2, 100], "token id 100 (number 3) is not below the vocabulary size 100"),
    ],
)
def test_prompt_outside_context_or_vocabulary_is_refused(prompt: list[int], sentence: str) -> None:
    with pytest.raises(BadInput) as refused:
        check_prompt(prompt, MODEL)
    assert str(refused.value) == sentence


def test_prompt_that_leaves_room_for_one_token_is_taken() -> None:
    check_prompt([99] * 63, MODEL)
    assert generation_options(pb.GenerateRequest(), MODEL, 63, 0, None).max_new_tokens == 1


# holds B6
def test_output_is_bounded_by_default_and_by_the_context() -> None:
    wide = ServedModel(
        name="toy",
        fingerprint="f",
        vocab_size=100,
        context_tokens=1000,
        end_token_ids=(),
        has_chat_template=False,
        architecture="",
    )
    assert generation_options(pb.GenerateRequest(), wide, 10, 0, None).max_new_tokens == DEFAULT_NEW_TOKENS
    assert generation_options(pb.GenerateRequest(), MODEL, 10, 0, None).max_new_tokens == 54
    assert generation_options(pb.GenerateRequest(max_new_tokens=500), MODEL, 10, 0, None).max_new_tokens == 54
    assert generation_options(pb.GenerateRequest(max_new_tokens=5), MODEL, 10, 0, None).max_new_tokens == 5


def test_models_own_end_tokens_stop_unless_they_are_ignored() -> None:
    both = pb.GenerateRequest(stop_token_ids=[9, 2])
    assert generation_options(both, MODEL, 1, 0, None).stop_token_ids == (2, 7, 9)
    both.ignore_eos = True
    assert generation_options(both, MODEL, 1, 0, None).stop_token_ids == (2, 9)


def test_sampling_is_handed_on_as_it_was_asked_for() -> None:
    request = pb.GenerateRequest(
        temperature=0.5, top_k=3, top_p=0.25, min_p=0.125, priority=-2, tenant="acme", cache_salt="s", ttft_target_ms=40
    )
    options = generation_options(request, MODEL, 4, 2**64 - 1, 12345)
    assert (options.tenant, options.cache_salt, options.ttft_target_us) == ("acme", "s", 40_000)
    assert generation_options(pb.GenerateRequest(), MODEL, 4, 0, None).ttft_target_us is None
    sampling = options.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 3, 0.25, 0.125)
    assert (sampling.seed, options.priority, options.deadline_us) == (2**64 - 1, -2, 12345)
    greedy = generation_options(pb.GenerateRequest(), MODEL, 4, 0, None).sampling
    assert (greedy.temperature, greedy.top_k, greedy.top_p, greedy.min_p) == (0.0, 0, 1.0, 0.0)


def test_what_was_generated_already_counts_towards_the_limit() -> None:
    going_on = pb.GenerateRequest(max_new_tokens=10, generated_token_ids=[5, 6, 8])
    options = generation_options(going_on, MODEL, 4, 0, None, 3)
    assert (options.max_new_tokens, options.delivered_before) == (7, 3)
    assert finished_before(options, (5, 6, 8)) is None
    assert finished_before(options, (5, 6, 2)) is FinishReason.STOP
    full = generation_options(pb.GenerateRequest(max_new_tokens=3), MODEL, 4, 0, None, 3)
    assert finished_before(full, (5, 6, 8)) is FinishReason.LENGTH
    # The context is the same one as before: 64 tokens, of which the prompt has 60.
    near_its_end = generation_options(pb.GenerateRequest(), MODEL, 60, 0, None, 1)
    assert near_its_end.max_new_tokens == 3


def test_more_generated_tokens_than_were_asked_for_are_refused() -> None:
    with pytest.raises(BadInput) as refused:
        generation_options(pb.GenerateRequest(max_new_tokens=1), MODEL, 4, 0, None, 2)
    assert str(refused.value) == "2 generated tokens are given, and 1 is the limit of this generation"


def test_sampled_generation_cannot_go_on_under_another_seed() -> None:
    with pytest.raises(BadInput) as refused:
        check_numbers(pb.GenerateRequest(temperature=1.0, generated_token_ids=[5]), MODEL)
    assert str(refused.value) == "a sampled generation that goes on needs the seed that was in force"
    check_numbers(pb.GenerateRequest(temperature=1.0, seed=0, generated_token_ids=[5]), MODEL)
    check_numbers(pb.GenerateRequest(generated_token_ids=[5]), MODEL)


def test_completions_have_seeds_of_their_own_and_the_first_one_has_the_callers() -> None:
    seeds = [one.seed for one in completions_of(pb.GenerateRequest(n=128), 7)]
    assert seeds[0] == 7
    assert seeds == [seed_of(7, index) for index in range(128)]
    # A neighbouring seed's completions are others, too, and all are 64 bits.
    neighbours = [seed_of(seed, index) for seed in (0, 7, 8, 2**64 - 1) for index in range(128)]
    assert len(set(neighbours)) == 4 * 128
    assert all(0 <= seed < 2**64 for seed in neighbours)
    assert completions_of(pb.GenerateRequest(), 9) == [Completion(0, 9, ())]


def test_begun_completions_go_on_with_their_own_seeds_and_those_not_named_are_left_out() -> None:
    request = pb.GenerateRequest(
        n=4, begun=[pb.BegunCompletion(index=3, seed=5, token_ids=[8, 9]), pb.BegunCompletion(index=1)]
    )
    assert completions_of(request, 7) == [Completion(3, 5, (8, 9)), Completion(1, seed_of(7, 1), ())]
    assert completions_of(pb.GenerateRequest(generated_token_ids=[4]), 7) == [Completion(0, 7, (4,))]


def test_offsets_are_one_for_all_or_each_completions_own() -> None:
    assert resume_offsets(pb.ResumeRequest(offset=5)) == 5
    places = [pb.CompletionOffset(index=2, offset=9), pb.CompletionOffset(index=0)]
    assert resume_offsets(pb.ResumeRequest(offsets=places)) == {2: 9, 0: 0}
    with pytest.raises(BadInput, match="offset 3 is given, and offsets: each completion has its own"):
        resume_offsets(pb.ResumeRequest(offset=3, offsets=places))
    with pytest.raises(BadInput, match="the offset of completion 2 is given twice"):
        resume_offsets(pb.ResumeRequest(offsets=[places[0], places[0]]))


def test_every_word_of_a_policy_reaches_the_planner() -> None:
    asked = pb.GenerateRequest(
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias={9: -1.5, 3: 2.0},
        allowed_token_ids=pb.TokenIds(ids=[5, 3, 3]),
        banned_token_ids=[8, 4, 4],
        min_new_tokens=2,
        stop=["END", "\n", "END"],
        stop_token_ids=[9],
        logprobs=0,
        prompt_logprobs=3,
    )
    check_numbers(asked, MODEL)
    options = generation_options(asked, MODEL, 10, 77, None)
    assert options.sampling == SamplingParams(
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        seed=77,
        repetition_penalty=1.2,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias=((3, 2.0), (9, -1.5)),
        allowed_tokens=(3, 5),
        banned_tokens=(4, 8),
        min_new_tokens=2,
        logprobs=0,
        prompt_logprobs=3,
        prompt_tokens=10,
    )
    assert options.stop_texts == ("END", "\n")
    assert options.stop_token_ids == (2, 7, 9)
    # Whoever has tokens of it already has been told of the prompt, and so has the caller of the first completion.
    for before, index in ((1, 0), (0, 1)):
        options = generation_options(asked, MODEL, 10, 77, None, before, index)
        assert options.sampling.prompt_logprobs is None
        assert options.sampling.logprobs == 0


def test_a_request_that_says_nothing_is_greedy_and_asks_nothing() -> None:
    assert generation_options(pb.GenerateRequest(), MODEL, 10, 0, None).sampling == SamplingParams(prompt_tokens=10)
