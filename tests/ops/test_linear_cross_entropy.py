"""Linear layer and cross entropy in chunks = the two apart, for every reduction, upstream gradient and chunk."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dist_train.ops import library
from dist_train.ops.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_sum

FUSED = [pytest.param(True, marks=pytest.mark.skipif(not library.loaded, reason=library.missing)), False]


def draw(tokens: tuple[int, ...] = (2, 11), width: int = 8, vocabulary: int = 53, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(*tokens, width, generator=generator).to(dtype)
    weight, bias = (
        torch.randn(vocabulary, width, generator=generator).to(dtype),
        torch.randn(vocabulary, generator=generator).to(dtype),
    )
    labels = torch.randint(vocabulary, tokens, generator=generator)
    labels.view(-1)[0] = -100
    return hidden, weight, bias, labels


def unfused(hidden: Tensor, weight: Tensor, labels: Tensor, z_loss: float, bias: Tensor | None, reduction: str) -> Tensor:
    logits = F.linear(hidden, weight, bias).flatten(0, -2)
    live = labels.flatten() != -100
    losses = F.cross_entropy(logits, labels.flatten(), reduction="none")
    losses = (losses + z_loss * logits.logsumexp(-1).square()).where(live, 0.0).view_as(labels)
    return losses if reduction == "none" else losses.sum() / (live.sum() if reduction == "mean" else 1)


def run(function, inputs: list[Tensor | None], upstream: Tensor) -> list[Tensor]:
    leaves = [None if each is None else each.detach().requires_grad_() for each in inputs]
    objective = function(*leaves)
    wanted = [each for each in leaves if each is not None]
    return [objective.detach(), *torch.autograd.grad(objective, wanted, upstream.to(objective.dtype))]


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("with_bias", [False, True])
def test_F46_fused_is_unfused_for_any_upstream_gradient(reduction, z_loss, with_bias, fused):
    hidden, weight, bias, labels = draw()
    inputs = [hidden, weight, bias if with_bias else None]
    upstream = torch.linspace(-1, 2, 22).view(2, 11) if reduction == "none" else torch.tensor(-1.7)
    exact = run(
        lambda h, w, b: unfused(h, w, labels, z_loss, b, reduction), [x if x is None else x.double() for x in inputs], upstream
    )
    for chunk in (0, 1, 5, 22, 100):
        got = run(
            lambda h, w, b, c=chunk: linear_cross_entropy(h, w, labels, z_loss, b, reduction, fused, c)[0], inputs, upstream
        )
        for mine, true in zip(got, exact, strict=True):
            torch.testing.assert_close(mine.double(), true, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fused", FUSED)
def test_F46_weights_of_tokens_stay_apart_when_the_first_is_ignored(fused):
    hidden, weight, bias, labels = draw(tokens=(4,))
    weights = torch.tensor([0.0, 2.0, -1.0, 0.5])
    got = run(
        lambda h, w, b: (linear_cross_entropy(h, w, labels, 0.0, b, "none", fused, 3)[0] * weights).sum(),
        [hidden, weight, bias],
        torch.tensor(1.0),
    )
    exact = run(
        lambda h, w, b: (unfused(h, w, labels, 0.0, b, "none") * weights).sum(), [hidden, weight, bias], torch.tensor(1.0)
    )
    torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-5)
    assert got[1][1].abs().sum() > 0


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_F46_gradcheck(reduction):
    hidden, weight, bias, labels = draw(tokens=(4,), width=10, vocabulary=15, dtype=torch.float64)
    leaves = [each.requires_grad_() for each in (hidden, weight, bias)]
    upstream = torch.tensor([0.0, 2.0, -1.0, 0.5], dtype=torch.float64) if reduction == "none" else 1.3
    assert torch.autograd.gradcheck(
        lambda h, w, b: linear_cross_entropy(h, w, labels, 1e-2, b, reduction, chunk=3)[0] * upstream, leaves
    )


@pytest.mark.parametrize("fused", FUSED)
def test_F46_non_contiguous_input(fused):
    hidden, weight, _, labels = draw(width=16)
    views = [hidden.transpose(0, 1)[..., ::2], weight.t().contiguous().t()[:, ::2], None]
    for reduction in ("none", "sum"):
        upstream = torch.linspace(-1, 2, 22).view(11, 2) if reduction == "none" else torch.tensor(0.3)
        got = run(lambda h, w, b, r=reduction: linear_cross_entropy(h, w, labels.t(), 0.0, b, r, fused, 7)[0], views, upstream)
        exact = run(lambda h, w, b, r=reduction: unfused(h, w, labels.t(), 0.0, b, r), views, upstream)
        torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fused", FUSED)
def test_only_what_is_wanted_is_computed_and_entropy_is_reported(fused):
    hidden, weight, _, labels = draw()
    hidden.requires_grad_()
    objective, entropy = linear_cross_entropy_sum(hidden, weight, labels, 1e-2, fused=fused)
    objective.backward()
    assert hidden.grad is not None and not entropy.requires_grad
    torch.testing.assert_close(entropy, unfused(hidden, weight, labels, 0.0, None, "sum").detach())
    with torch.no_grad():
        assert not linear_cross_entropy_sum(hidden, weight, labels, fused=fused)[0].requires_grad


@pytest.mark.parametrize("fused", FUSED)
def test_F12_no_live_token(fused):
    hidden, weight, bias, labels = draw()
    for some, names in ((hidden, torch.full_like(labels, -100)), (hidden[:0], labels[:0])):
        got = run(
            lambda h, w, b, n=names: linear_cross_entropy_sum(h, w, n, 1e-2, b, fused)[0], [some, weight, bias], torch.tensor(1.0)
        )
        assert all((each == 0).all() for each in got)


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_bfloat16_sums_the_weight_gradient_in_fp32(fused, reduction):
    hidden, weight, bias, labels = draw(tokens=(1000,), dtype=torch.bfloat16)
    upstream = torch.ones(1000) if reduction == "none" else torch.tensor(1.0)
    exact = run(lambda h, w, b: unfused(h, w, labels, 0.0, b, reduction), [x.double() for x in (hidden, weight, bias)], upstream)
    eager = run(lambda h, w, b: unfused(h, w, labels, 0.0, b, reduction), [hidden, weight, bias], upstream)
    chunked = run(
        lambda h, w, b: linear_cross_entropy(h, w, labels, 0.0, b, reduction, fused, 10)[0], [hidden, weight, bias], upstream
    )
    for mine, their, true in zip(chunked, eager, exact, strict=True):
        assert (mine - true).abs().max() <= 2 * (their - true).abs().max() + 1e-6


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_autocast_computes_in_its_dtype_and_returns_each_gradient_in_its_own(fused, reduction):
    hidden, weight, bias, labels = draw()
    upstream = torch.ones(2, 11) if reduction == "none" else torch.tensor(1.0)
    wanted = run(
        lambda h, w, b: linear_cross_entropy(h, w, labels, 0.0, b, reduction, fused)[0],
        [each.bfloat16() for each in (hidden, weight, bias)],
        upstream,
    )

    def under_autocast(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return linear_cross_entropy(h, w, labels, 0.0, b, reduction, fused)[0]

    got = run(under_autocast, [hidden, weight, bias], upstream)
    assert torch.equal(got[0], wanted[0])
    for mine, true in zip(got[1:], wanted[1:], strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, true.float(), rtol=1e-2, atol=1e-2)


class Products(TorchDispatchMode):
    """The dtypes in which matrices are multiplied inside."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.overloadpacket.__name__ in ("mm", "addmm", "addmm_"):
            self.dtypes.add(args[-1].dtype)
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cpu_multiplies_in_a_dtype_that_it_has(monkeypatch, dtype, reduction, fused):
    hidden, weight, bias, labels = draw(tokens=(40,), dtype=dtype)
    upstream = torch.linspace(-1, 2, 40) if reduction == "none" else torch.tensor(-1.7)

    def function(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return linear_cross_entropy(h, w, labels, 1e-2, b, reduction, fused, 7)[0]

    exact = run(function, [each.double() for each in (hidden, weight, bias)], upstream)
    for native in (True, False):
        monkeypatch.setattr("dist_train.ops.native.MULTIPLIES_BF16", native)
        with Products() as products:
            got = run(function, [hidden, weight, bias], upstream)
        assert products.dtypes == {dtype if native and dtype == torch.bfloat16 else torch.float32}
        assert [each.dtype for each in got[1:]] == [dtype] * 3
        for mine, true in zip(got, exact, strict=True):
            torch.testing.assert_close(mine.double(), true, rtol=2e-2, atol=5e-2)


class Peak(TorchDispatchMode):
    """The most bytes that tensors made inside held at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, tuple[object, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(each, Tensor):
                storage = each.untyped_storage()
                self.held[storage.data_ptr()] = (torch.multiprocessing.reductions.StorageWeakRef(storage), storage.nbytes())
        self.held = {key: value for key, value in self.held.items() if not value[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.held.values()))
        return result


@pytest.mark.parametrize("fused", FUSED)
def test_peak_memory_is_an_eighth_of_the_unfused(fused):
    hidden, weight, _, labels = draw(tokens=(1024,), width=4, vocabulary=50_000)

    def peak(function) -> int:
        with Peak() as meter:
            run(function, [hidden, weight], torch.tensor(1.0))
        return meter.most

    eager = peak(lambda h, w: F.cross_entropy(F.linear(h, w), labels, reduction="sum"))
    assert eager >= 2 * 1024 * 50_000 * 4  # logits and their gradient at least: the meter sees them
    assert peak(lambda h, w: linear_cross_entropy_sum(h, w, labels, fused=fused)[0]) <= eager / 8


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_compiles_without_a_break(fused, reduction):
    hidden, weight, bias, labels = draw()
    upstream = torch.ones(2, 11) if reduction == "none" else torch.tensor(1.0)

    def function(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return linear_cross_entropy(h, w, labels, 1e-2, b, reduction, fused, 9)[0]

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    got, wanted = (run(each, [hidden, weight, bias], upstream) for each in (compiled, function))
    torch.testing.assert_close(got, wanted)


def test_wrong_arguments_are_told():
    hidden, weight, _, labels = draw()
    with pytest.raises(ValueError, match="reduction='average': choose"):
        linear_cross_entropy(hidden, weight, labels, reduction="average")
    with pytest.raises(ValueError, match="do not fit"):
        linear_cross_entropy_sum(hidden, weight, labels[:1])
    labels[1, 1] = 53
    with pytest.raises(RuntimeError, match="out of bounds"):
        linear_cross_entropy_sum(hidden, weight, labels)
