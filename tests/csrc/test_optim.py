"""Adam, AdamW, SGD, LAMB and AdamW with moments of 8 bits: on the CPU, and the CUDA kernels in the shim."""

from __future__ import annotations

import struct

import pytest
import torch
from torch import Tensor

from dist_train.ops import library
from dist_train.ops.optim import Run, adam_, join_master, lamb_, sgd_, split_master
from dist_train.optim.blocks import AdamW8bit, dequantize, quantize
from dist_train.zero.protocol import FlatSegment
from tests.csrc.harness import Kernels, build, error_check

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = (0, 1, 3, 53, 1000, 4097, 20011)
ADAM, ADAMW, SGD, MOMENTUM, LAMB = range(5)
KINDS = {"adam": ADAM, "adamw": ADAMW, "sgd": SGD, "momentum": MOMENTUM, "lamb": LAMB}
LR, BETAS, EPS = 0.02, (0.9, 0.95), 1e-8
WRONG_TAIL = ("optim/optim_kernels.cuh", "begin + (end - begin) / N * N", "begin + (end - begin + N - 1) / N * N")

needs_library = pytest.mark.skipif(not library.loaded, reason=library.missing)


def draw(kind: str, size: int, grad: torch.dtype = torch.float32, copy: torch.dtype | None = None, seed: int = 0) -> Run:
    generator = torch.Generator().manual_seed(seed)
    p, g, m, v = torch.randn(4, size, generator=generator).unbind()
    moments = [] if kind == "sgd" else [m * 0.1] if kind == "momentum" else [m * 0.1, v.square() * 0.01 + 1e-4]
    copied = None if copy is None else torch.full((size,), 7.0, dtype=copy)
    return Run(
        p.clone(),
        g.to(grad),
        [each.clone() for each in moments],
        torch.tensor(3.0 + seed),
        0.1 * (seed % 3),
        copied,
        None,
        seed != 1,
    )


def like(run: Run, dtype: torch.dtype | None = None, split: bool = False) -> Run:
    """A copy; of another dtype, or with its master split."""
    cast = [each.to(dtype or each.dtype, copy=True) for each in (run.master, run.grad, *run.moments)]
    copied = None if run.copy is None else run.copy.clone()
    new = run._replace(master=cast[0], grad=cast[1] if dtype else run.grad.clone(), moments=cast[2:], copy=copied)
    if not split:
        return new
    upper, remainder = split_master(new.master)
    return new._replace(master=upper.clone(), remainder=remainder.clone())


def step(kind: str, runs: list[Run], fused: bool, scale: float = 3.0, skip: float = 0.0) -> None:
    common = {"grad_scale": torch.tensor(scale), "found_inf": torch.tensor(skip), "lr": LR, "fused": fused}
    if kind in ("sgd", "momentum"):
        sgd_(runs, momentum=BETAS[0] if kind == "momentum" else 0.0, **common)
    elif kind == "lamb":
        lamb_(runs, beta1=BETAS[0], beta2=BETAS[1], eps=EPS, **common)
    else:
        adam_(runs, beta1=BETAS[0], beta2=BETAS[1], eps=EPS, decoupled=kind == "adamw", **common)


def exactly(kind: str, run: Run, scale: float = 3.0) -> list[Tensor]:
    """The formulas in fp64: what master and moments become."""
    p, g, *moments = (each.double() for each in (run.master, run.grad, *run.moments))
    g, decay = g / scale, run.weight_decay
    if kind in ("sgd", "momentum"):
        g = g + decay * p
        b = BETAS[0] * moments[0] + g if moments else g
        return [p - LR * b, *([b] if moments else [])]
    if kind == "adam":
        g = g + decay * p
    m, v = (beta * old + (1 - beta) * new for beta, old, new in zip(BETAS, moments, (g, g.square()), strict=True))
    count = float(run.step)
    u = m / (1 - BETAS[0] ** count) / ((v / (1 - BETAS[1] ** count)).sqrt() + EPS)
    if kind == "adamw":
        p = p * (1 - LR * decay)
    if kind == "lamb":
        u = u + decay * p
        u = u * (p.norm() / u.norm() if run.adapted and min(p.norm(), u.norm()) > 0 else 1.0)
    return [p - LR * u, m, v]


def table(runs: list[Run]) -> Tensor:
    """The rows of csrc/optim/optim.h: OptimRun."""
    rows = []
    for run in runs:
        first, second = (*run.moments, None, None)[:2]
        tensors = (run.master, run.remainder, run.grad, first, second, run.copy, run.step)
        (decay,) = struct.unpack("q", struct.pack("d", run.weight_decay))
        rows.append([*(0 if t is None else t.data_ptr() for t in tensors), run.master.numel(), decay, int(run.adapted)])
    return torch.tensor(rows, dtype=torch.int64)


def launch(kernels: Kernels, kind: str, runs: list[Run], scale: float = 3.0, skip: float = 0.0) -> None:
    grad, copy = runs[0].grad.dtype, torch.float32 if runs[0].copy is None else runs[0].copy.dtype
    sums = torch.zeros(2 * sum(run.master.numel() // 8192 + 1 for run in runs), dtype=torch.float64)
    split = runs[0].remainder is not None
    numbers = (LR, *BETAS, EPS, KINDS[kind], split, grad, copy)
    kernels.dt_optim_step(table(runs), len(runs), torch.tensor(scale), torch.tensor(skip), sums, *numbers)


def compare(kind: str, ours: list[Run], before: list[Run]) -> None:
    """`ours`, updated, against torch's kernels and fp64 from the state `before`."""
    theirs = [like(run, torch.float32)._replace(copy=None) for run in before]
    step(kind, theirs, fused=False)
    for mine, their, old in zip(ours, theirs, before, strict=True):
        master = mine.master if mine.remainder is None else join_master(mine.master, mine.remainder)
        for a, b, c in zip((master, *mine.moments), (their.master, *their.moments), exactly(kind, old), strict=True):
            error_check(a, b, c, floor=2e-7)
        if mine.copy is not None:
            assert torch.equal(mine.copy, mine.master.to(mine.copy.dtype))


def quick_check(kernels: Kernels) -> None:
    for kind in ("adamw", "momentum", "lamb"):
        before = [draw(kind, size, seed=seed) for seed, size in enumerate((9001, 53, 600))]
        ours = [like(run) for run in before]
        launch(kernels, kind, ours)
        compare(kind, ours, before)
    for seed in (0, 2):  # another count of updates and decay, so that what one launch leaves is wrong for the next
        run, codes = draw("adamw", 768, seed=seed), eight_bits(768)
        ours, theirs = (Eight(like(run), [each.clone() for each in codes]) for _ in range(2))
        ours.launch(kernels)
        theirs.plain()
        ours.compare(theirs)


class Eight:
    """A run of AdamW whose moments are codes and scales."""

    def __init__(self, run: Run, codes: list[Tensor]) -> None:
        self.run, self.codes = run._replace(moments=codes), codes

    def launch(self, kernels: Kernels, skip: float = 0.0) -> None:
        run = self.run
        copy = torch.bfloat16 if run.copy is None else run.copy.dtype
        scalars = (run.step, torch.tensor(3.0), torch.tensor(skip))
        numbers = (run.master.numel(), LR, *BETAS, EPS, run.weight_decay, run.grad.dtype, copy)
        kernels.dt_adam8bit_step(run.master, run.grad, *self.codes, run.copy, *scalars, *numbers)

    def fused(self, skip: float = 0.0) -> None:
        run = self.run
        tensors = (run.master, run.grad, *self.codes, run.copy, run.step, torch.tensor(3.0), torch.tensor(skip))
        torch.ops.dist_train.adamw8bit_(*tensors, LR, *BETAS, EPS, run.weight_decay)

    def plain(self) -> None:
        """The reference, and what its moments were before they were encoded."""
        recipe = AdamW8bit(LR, *BETAS, EPS, self.run.weight_decay, fused=False)
        bound = recipe.bind([FlatSegment("decay", self.run.master, self.run.grad, [])])
        bound._launch([self.run], LR, torch.tensor(3.0), torch.tensor(0.0))

    def compare(self, reference: Eight) -> None:
        torch.testing.assert_close(self.run.master, reference.run.master, rtol=2e-6, atol=1e-6)
        for at, bits in ((0, 8), (1, 16)):
            mine, theirs = (dequantize(each.codes[at], each.codes[at + 2]) for each in (self, reference))
            # An fp32 rounding moves the hash, and so the choice between two neighbouring codes.
            assert ((mine - theirs).abs() <= mine.abs().maximum(theirs.abs()) / bits + 1e-9).all()
            torch.testing.assert_close(self.codes[at + 2], reference.codes[at + 2], rtol=1e-6, atol=0)
            assert (self.codes[at] == reference.codes[at]).float().mean() > 0.6
        if self.run.copy is not None:
            assert torch.equal(self.run.copy, self.run.master.to(self.run.copy.dtype))


def eight_bits(size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    first, second = torch.randn(2, size, generator=generator).unbind()
    made = quantize(first * 0.1, torch.int8, torch.tensor(1.0)), quantize(second.square() * 0.01, torch.uint8, torch.tensor(1.0))
    return [made[0][0], made[1][0], made[0][1], made[1][1]]


@needs_library
@pytest.mark.parametrize("kind", KINDS)
def test_cpu(kind, isa):
    for grad in DTYPES:
        for copy in (None, torch.bfloat16, torch.float16):
            before = [draw(kind, size, grad, copy, seed) for seed, size in enumerate(SIZES)]
            ours = [like(run) for run in before]
            step(kind, ours, fused=True)
            compare(kind, ours, before)


@pytest.mark.parametrize("kind", KINDS)
def test_shim(kind):
    kernels = Kernels(build(only="optim"))
    for grad, copy in ((torch.float32, None), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)):
        before = [draw(kind, size, grad, copy, seed) for seed, size in enumerate((*SIZES[:-1], 9000, *[70] * 40))]
        ours = [like(run) for run in before]
        launch(kernels, kind, ours)
        compare(kind, ours, before)


@pytest.mark.parametrize("kind", KINDS)
def test_split_masters_are_those_of_the_whole(kind, isa):
    ways = [lambda runs: step(kind, runs, fused=False), lambda runs: launch(Kernels(build(only="optim")), kind, runs)]
    if library.loaded:
        ways.append(lambda runs: step(kind, runs, fused=True))
    for way in ways:
        for grad in (torch.float32, torch.bfloat16):
            whole = [draw(kind, size, grad, seed=seed) for seed, size in enumerate((53, 4097))]
            split = [like(run, split=True) for run in whole]
            way(whole), way(split)
            for a, b in zip(whole, split, strict=True):
                assert all(map(torch.equal, split_master(a.master), (b.master, b.remainder)))
                assert all(map(torch.equal, a.moments, b.moments))


def test_split_and_join_lose_nothing():
    bits = torch.cat((torch.arange(-70000, 70000), torch.randint(-(2**31), 2**31, (10000,)))).to(torch.int32)
    values = bits.view(torch.float32)
    upper, remainder = split_master(values)
    assert torch.equal(join_master(upper, remainder).view(torch.int32), bits)
    finite = values.isfinite() & upper.isfinite()
    errors = [(each.double() - values.double()).abs()[finite] for each in (upper, values.to(torch.bfloat16))]
    assert (errors[0] <= errors[1]).all()


@needs_library
@pytest.mark.parametrize("kind", ["adam", "adamw", "sgd", "momentum"])
def test_an_elements_bits_depend_neither_on_where_a_run_ends_nor_on_threads(kind, isa):
    whole = draw(kind, 20011, torch.bfloat16)
    parts = []
    for start, stop in ((0, 1), (1, 4), (4, 57), (57, 4000), (4000, 20011)):  # unaligned ones too
        tensors = [each[start:stop].clone() for each in (whole.master, whole.grad, *whole.moments)]
        parts.append(whole._replace(master=tensors[0], grad=tensors[1], moments=tensors[2:]))
    step(kind, [whole], fused=True)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        step(kind, parts, fused=True)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.cat([part.master for part in parts]), whole.master)
    for at, moment in enumerate(whole.moments):
        assert torch.equal(torch.cat([part.moments[at] for part in parts]), moment)


@needs_library
def test_lamb_does_not_depend_on_threads():
    runs = [[draw("lamb", 50000, seed=seed) for seed in (0, 2)] for _ in range(2)]
    threads = torch.get_num_threads()
    try:
        for count, some in zip((1, 3), runs, strict=True):
            torch.set_num_threads(count)
            step("lamb", some, fused=True)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a.master, b.master) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_found_inf_leaves_everything_as_it_is(kind):
    before = [draw(kind, 1000, copy=torch.bfloat16)]
    before[0].grad[7] = torch.nan
    ways = [lambda runs: launch(Kernels(build(only="optim")), kind, runs, skip=1.0)]
    if library.loaded:
        ways.append(lambda runs: step(kind, runs, fused=True, skip=1.0))
    for way in ways:
        ours = [like(run) for run in before]
        way(ours)
        assert torch.equal(ours[0].master, before[0].master) and torch.equal(ours[0].copy, before[0].copy)
        assert all(map(torch.equal, ours[0].moments, before[0].moments))


@needs_library
def test_unaligned_tensors_and_awkward_numbers():
    before = draw("adamw", 1001)
    before.grad[:6] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30, 1e-42, 0.0])
    before.moments[1][5:9] = 0.0
    odd = before._replace(master=before.master[1:], grad=before.grad[1:], moments=[each[1:] for each in before.moments])
    ours = like(odd)
    ours = ours._replace(master=torch.empty(1001)[1:].copy_(odd.master), grad=odd.grad)
    theirs = like(odd)
    step("adamw", [ours], fused=True)
    step("adamw", [theirs], fused=False)
    for mine, their in zip((ours.master, *ours.moments), (theirs.master, *theirs.moments), strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-5, atol=1e-7, equal_nan=True)
    assert ours.master[:2].isnan().all() and ours.master[6:].isfinite().all()


@needs_library
def test_masters_of_other_dtypes_take_torchs_kernels():
    for dtype in (torch.float64, torch.bfloat16):
        run = draw("adamw", 130)
        ours, theirs = (like(run, dtype) for _ in range(2))
        step("adamw", [ours], fused=True)
        step("adamw", [theirs], fused=False)
        assert torch.equal(ours.master, theirs.master) and not torch.equal(ours.master, run.master.to(dtype))


@needs_library
def test_wrong_lists_are_refused():
    run = draw("adamw", 10)
    lists = ([run.master], [], [run.grad[:9]], [run.moments[0]], [run.moments[1]], [], [run.step])
    scalars = (torch.tensor(1.0), torch.tensor(0.0), LR, *BETAS, EPS)
    with pytest.raises(RuntimeError, match=r"a gradient has 9 elements .* as long as its master \(10\)"):
        torch.ops.dist_train.adam_(*lists, *scalars, [0.1], True)
    with pytest.raises(RuntimeError, match="2 weight decays for 1 masters"):
        torch.ops.dist_train.adam_(*lists, *scalars, [0.1, 0.1], True)


@needs_library
def test_8_bits_are_the_reference(isa):
    for grad, copy in ((torch.float32, None), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)):
        run, codes = draw("adamw", 256 * 67, grad, copy), eight_bits(256 * 67)
        run.master[256:512], run.grad[256:512] = 0.0, 0.0
        for each in codes[:2]:
            each[256:512] = 0
        ours, theirs = (Eight(like(run), [each.clone() for each in codes]) for _ in range(2))
        ours.fused()
        theirs.plain()
        ours.compare(theirs)
        assert not ours.codes[0][256:512].any() and ours.codes[1][:256].all()
        before = [each.clone() for each in (ours.run.master, *ours.codes)]
        ours.fused(skip=1.0)
        assert all(map(torch.equal, before, (ours.run.master, *ours.codes)))


def test_8_bits_in_the_shim():
    kernels = Kernels(build(only="optim"))
    for grad, copy in ((torch.float32, None), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)):
        run, codes = draw("adamw", 256 * 19, grad, copy), eight_bits(256 * 19)
        ours, theirs = (Eight(like(run), [each.clone() for each in codes]) for _ in range(2))
        ours.launch(kernels)
        theirs.plain()
        ours.compare(theirs)


@needs_library
def test_opcheck():
    run = draw("adamw", 300, torch.bfloat16, torch.bfloat16)
    scalars = (torch.tensor(1.0), torch.tensor(0.0))
    lists = ([run.master], [], [run.grad], [run.moments[0]], [run.moments[1]], [run.copy], [run.step])
    torch.library.opcheck(torch.ops.dist_train.adam_.default, (*lists, *scalars, LR, *BETAS, EPS, [0.1], True))
    torch.library.opcheck(torch.ops.dist_train.lamb_.default, (*lists, *scalars, LR, *BETAS, EPS, [0.1], [1]))
    sgd = ([run.master], [], [run.grad], [run.moments[0]], [run.copy])
    torch.library.opcheck(torch.ops.dist_train.sgd_.default, (*sgd, *scalars, LR, 0.9, [0.1]))
    eight = (torch.randn(512), torch.randn(512), *eight_bits(512), torch.zeros(512, dtype=torch.bfloat16), run.step, *scalars)
    torch.library.opcheck(torch.ops.dist_train.adamw8bit_.default, (*eight, LR, *BETAS, EPS, 0.1))


@needs_library
def test_a_step_compiles():
    run, plain = draw("adamw", 300), draw("adamw", 300)
    torch.compile(lambda: step("adamw", [run], fused=True), fullgraph=True, backend="aot_eager")()
    step("adamw", [plain], fused=True)
    assert torch.equal(run.master, plain.master)
