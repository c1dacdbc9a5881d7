"""The kernel that draws without a sort, against torch's operators: the same token, whatever the shape of the logits."""

import pytest
import torch
from torch import Tensor

from microtome.cuda_runtime import native_library
from microtome.cuda_runtime.drawing import cpu_native, stock
from microtome.cuda_runtime.drawing.policies import DrawnRows
from microtome.cuda_runtime.log_probabilities import logprob_table

ROWS, VOCABULARY = 40, 5003  # no multiple of anything


def policies(seed: int, vocabulary: int = VOCABULARY, rows: int = ROWS) -> DrawnRows:
    """Of every kind, and several at once; coins at both ends, too."""
    generator = torch.Generator().manual_seed(seed)

    def pick(*values: float) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)[torch.randint(len(values), (rows,), generator=generator)]

    by_rank = pick(0, 1, 2, 40, vocabulary - 1, vocabulary).to(torch.int64)
    top_p = pick(float("inf"), 1e-9, 0.3, 0.9, 0.999, 1 - 1e-12)
    coin = torch.rand(rows, dtype=torch.float64, generator=generator)
    coin[:3] = torch.tensor([0.0, 1 - 2**-53, 0.5])
    return DrawnRows(
        temperature=pick(0.01, 0.5, 1.0, 1.7, 50.0),
        top_k=torch.where(by_rank == 0, vocabulary, by_rank),
        top_p=torch.where(by_rank == 0, top_p, float("inf")),
        min_p=pick(0.0, 0.0, 1e-6, 0.05, 1.0),
        coin=coin,
    )


def by_stock(logits_RV: Tensor, policy: DrawnRows) -> list[int]:
    """Row by row, each in the order that its policy asks for."""
    tokens = []
    for row in range(len(logits_RV)):
        fields = ("temperature", "top_k", "top_p", "min_p", "coin")
        own = DrawnRows(**{name: getattr(policy, name)[row : row + 1] for name in fields})
        restricted = int(own.top_k) < logits_RV.shape[-1] or bool(own.top_p.isfinite()) or float(own.min_p) > 0
        draw = stock.draw_by_rank if restricted else stock.draw_by_id
        tokens.append(int(draw(logits_RV[row : row + 1].to(torch.float32), own)))
    return tokens


def by_kernel(logits_RV: Tensor, policy: DrawnRows) -> list[int]:
    return cpu_native.draw(logits_RV, torch.arange(len(logits_RV)), policy).tolist()


def shaped(shape: str, seed: int) -> Tensor:
    logits_RV = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3
    match shape:
        case "nearly flat":
            return logits_RV * 0.001
        case "peaked":
            return logits_RV * 30
        case "all alike":
            return torch.zeros(ROWS, VOCABULARY)
        case "rounded":  # many ties
            return (logits_RV * 2).round() / 2
        case "mostly forbidden":
            generator = torch.Generator().manual_seed(seed)
            forbidden = torch.rand(ROWS, VOCABULARY, generator=generator) < 0.999
            forbidden[:, seed] = False  # never all: the sampler forbids nothing then
            return logits_RV.masked_fill(forbidden, float("-inf"))
        case "far away":
            return logits_RV + 3e4
        case _:
            return logits_RV


# holds I2, I3, I4, I5, L3
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "shape", ["like a model's", "nearly flat", "peaked", "all alike", "rounded", "mostly forbidden", "far away"]
)
def test_kernel_and_stock_operators_draw_the_same_token(shape: str, seed: int) -> None:
    logits_RV, policy = shaped(shape, seed), policies(seed)
    assert by_kernel(logits_RV, policy) == by_stock(logits_RV, policy)


def test_bfloat16_logits_are_drawn_from_as_they_are() -> None:
    logits_RV, policy = shaped("like a model's", 9).to(torch.bfloat16), policies(9)
    assert by_kernel(logits_RV, policy) == by_stock(logits_RV, policy)


# holds I9
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_neither_company_nor_threads_change_a_rows_token(threads: int) -> None:
    logits_RV, policy = shaped("rounded", 5), policies(5)
    together = by_kernel(logits_RV, policy)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        some = torch.tensor([7, 3, 30, 11])
        own = DrawnRows(**{name: getattr(policy, name)[some] for name in DrawnRows.__dataclass_fields__})
        assert cpu_native.draw(logits_RV, some, own).tolist() == [together[row] for row in some.tolist()]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("vocabulary", [1, 2, 17, 512, 513])
def test_small_vocabularies_are_drawn_from_whole(vocabulary: int) -> None:
    logits_RV = torch.randn(ROWS, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    policy = policies(3, vocabulary)
    assert by_kernel(logits_RV, policy) == by_stock(logits_RV, policy)


def test_a_row_with_a_nan_gives_some_token_and_its_neighbours_theirs() -> None:
    logits_RV, policy = shaped("like a model's", 2), policies(2)
    expected = by_kernel(logits_RV, policy)
    logits_RV[4, 100] = float("nan")
    logits_RV[6] = float("nan")
    tokens = by_kernel(logits_RV, policy)
    assert all(0 <= token < VOCABULARY for token in tokens)
    assert [t for row, t in enumerate(tokens) if row not in (4, 6)] == [
        t for row, t in enumerate(expected) if row not in (4, 6)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 7, 20])
@pytest.mark.parametrize("shape", ["like a model's", "nearly flat", "peaked", "all alike", "rounded", "far away"])
def test_the_likeliest_tokens_and_their_numbers_are_those_of_stock_operators(
    shape: str, count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits_RV = shaped(shape, 3).to(dtype)
    tokens_R = torch.arange(ROWS) * 7
    ours = logprob_table(logits_RV, tokens_R, count)
    monkeypatch.setattr(cpu_native, "operators", lambda: None)
    theirs = logprob_table(logits_RV, tokens_R, count)
    assert torch.equal(ours[:, 1 : 1 + count], theirs[:, 1 : 1 + count])
    assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-7)
    assert torch.equal(ours[:, 0], ours[:, 0].float().double())


def test_numbers_are_nan_where_a_logit_is_and_a_rows_own_in_any_company() -> None:
    logits_RV, tokens_R = shaped("like a model's", 3), torch.arange(ROWS)
    together = logprob_table(logits_RV, tokens_R, 5)
    alone = [logprob_table(logits_RV[row : row + 1], tokens_R[row : row + 1], 5) for row in range(ROWS)]
    assert torch.equal(together, torch.cat(alone))
    logits_RV[9, 4000] = float("nan")
    table = logprob_table(logits_RV, tokens_R, 5)
    assert table[9, 0].isnan()
    assert not table[:9].isnan().any()
    assert not table[10:].isnan().any()


def test_more_likeliest_tokens_than_there_are_are_all_of_them() -> None:
    assert logprob_table(torch.randn(3, 4), torch.zeros(3, dtype=torch.int64), 20).shape == (3, 9)


def test_rows_that_are_not_there_are_refused() -> None:
    with pytest.raises(IndexError, match="row 40 is not in"):
        cpu_native.draw(shaped("peaked", 0), torch.tensor([0, 40, 1]), policies(0, rows=3))


def test_without_a_compiler_the_stock_operators_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library, "find_compiler", lambda: None)
    cpu_native.operators.cache_clear()
    try:
        assert not cpu_native.serves(torch.zeros(1, 4))
    finally:
        cpu_native.operators.cache_clear()
