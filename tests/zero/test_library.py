"""`dt.shard` on other people's modules: a convolutional net, a diffusion UNet, a BERT and a module of odd parameters.

Each trains at every stage on one to four ranks, in several micro-batches whose sizes differ between ranks, and is held against
one process that knows only torch: a plain loop over the whole batch with torch.optim. Losses, gradient norms and weights agree
within 1e-5, and each weight within 1e-3 of how far it moved.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import dist_train as dt
from dist_train import checkpoint
from tests.ranks import run_ranks
from tests.zero.helpers import distance, gathered, max_of, weights

ROWS, STEPS = 13, 3  # no number of ranks divides the rows
# Ours, and torch's. Adam has a large eps: gradients that are zero but for rounding, as those of a key's bias, must not decide.
OPTIMIZERS = {
    "sgd": (dt.SGD(0.1, momentum=0.9), functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
    "adamw": (
        dt.AdamW(3e-3, eps=1e-4, weight_decay=0.1),
        functools.partial(torch.optim.AdamW, lr=3e-3, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.1),
    ),
}


class ConvNet(nn.Module):
    """Batch norm after each convolution, one of them strided and grouped; classifies 10 × 10 pixels.

    Its activations are smooth: at the kink of a ReLU a rounding decides between two gradients."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.SiLU(),
            nn.Conv2d(6, 14, 3, stride=2, padding=1, groups=2, bias=False), nn.BatchNorm2d(14), nn.SiLU(),
            nn.Conv2d(14, 5, 1, bias=False), nn.BatchNorm2d(5),
        )  # fmt: skip
        self.head = nn.Linear(5, 11)
        for norm in self.modules():
            if isinstance(norm, nn.BatchNorm2d):  # as if trained before
                norm.running_mean.normal_(0, 0.3), norm.running_var.uniform_(0.5, 2)

    def forward(self, x):
        return self.head(F.silu(self.layers(x)).mean((2, 3)))


class Residual(nn.Module):
    """Group norm and convolution twice, with the embedding of time added in between."""

    def __init__(self, before, after, time):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(2, before), nn.Conv2d(before, after, 3, padding=1)
        self.time = nn.Linear(time, after)
        self.norm2, self.conv2 = nn.GroupNorm(2, after), nn.Conv2d(after, after, 3, padding=1)
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x, time):
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class PixelAttention(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm, self.qkv = nn.GroupNorm(2, channels), nn.Conv2d(channels, 3 * channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).flatten(2).transpose(1, 2).chunk(3, dim=-1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))


class UNet(nn.Module):
    """The noise in an image, given the image and the time (DDPM, arXiv:2006.11239)."""

    def __init__(self, widths=(6, 10), time=9):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, time), nn.SiLU(), nn.Linear(time, time))
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        for before, after in zip((widths[0], *widths), widths):
            halve = nn.Conv2d(after, after, 3, stride=2, padding=1)
            self.down.append(nn.ModuleDict({"block": Residual(before, after, time), "halve": halve}))
        low = widths[-1]
        self.middle = nn.ModuleList([Residual(low, low, time), PixelAttention(low), Residual(low, low, time)])
        for width, after in zip(reversed(widths), (*reversed(widths[:-1]), widths[0])):
            widen = nn.Conv2d(width, width, 3, padding=1)
            self.up.append(nn.ModuleDict({"widen": widen, "block": Residual(2 * width, after, time)}))
        self.out = nn.Sequential(nn.GroupNorm(2, widths[0]), nn.SiLU(), nn.Conv2d(widths[0], 3, 3, padding=1))

    def forward(self, x, time):
        angles = time[:, None] * torch.exp(torch.arange(4) * -2.0)
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        x, skips = self.stem(x), []
        for level in self.down:
            x = level["block"](x, time)
            skips.append(x)
            x = level["halve"](x)
        first, attention, last = self.middle
        x = last(attention(first(x, time)), time)
        for level in self.up:
            skip = skips.pop()
            x = level["widen"](F.interpolate(x, size=skip.shape[-2:]))
            x = level["block"](torch.cat([x, skip], dim=1), time)
        return self.out(x)


VOCAB, LENGTH = 53, 9


class Bert(nn.Module):
    """Logits of every token, from torch's own encoder; the output's weight is the embedding's, its bias is its own."""

    def __init__(self, width=14):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, width, padding_idx=0), nn.Embedding(LENGTH, width)
        self.types, self.norm = nn.Embedding(2, width), nn.LayerNorm(width)
        layer = nn.TransformerEncoderLayer(width, 2, 22, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, VOCAB))
        for param in self.parameters():  # torch copies one layer; and zeros train slowly
            nn.init.normal_(param, std=0.2)
        self.head[-1].weight = self.tokens.weight

    def forward(self, tokens, types):
        places = torch.arange(tokens.shape[1])
        x = self.norm(self.tokens(tokens) + self.places(places) + self.types(types))
        return self.head(self.encoder(x, src_key_padding_mask=tokens == 0))


class Odd(nn.Module):
    """Parameters of awkward shapes, dtypes, strides and uses. The loss is a sum over rows, so any split of them will do."""

    def __init__(self):
        super().__init__()
        self.values = nn.ParameterList(torch.randn(shape) for shape in [(8,), (0,), (24,), (1,), (3,), (), (2, 0), (2, 1)])
        self.transposed = nn.Parameter(torch.randn(5, 3).t())
        self.narrow, self.narrow_scale = nn.Linear(3, 5).bfloat16(), nn.Parameter(torch.tensor(0.5, dtype=torch.bfloat16))
        self.twice, self.never, self.sometimes = (nn.Linear(3, 3) for _ in range(3))
        self.branch = nn.Parameter(torch.randn(3, 3))
        self.also_transposed = self.transposed
        self.frozen = nn.ParameterList(torch.full(shape, 0.3) for shape in [(7,), (0,), ()])
        self.frozen.append(nn.Parameter(torch.tensor([2.0, 0.5], dtype=torch.bfloat16)))
        self.frozen.requires_grad_(False)

    def forward(self, x, chosen, now):
        """`chosen`: rows that meet `branch`, on some ranks none at all; `now`: every row passes through `sometimes`."""
        each = sum(value.square().sum() * (index + 1) for index, value in enumerate(self.values)) * x[:, 0].square()
        each = each + (x @ self.transposed + 1).square().sum(1) + (x @ self.also_transposed).sum(1)
        each = each + self.narrow(x.bfloat16()).float().square().sum(1) * self.narrow_scale.float()
        each = each + self.twice(self.twice(x).tanh()).square().sum(1) * sum(value.float().sum() for value in self.frozen)
        total = each.sum()
        if chosen.any():
            total = total + (x[chosen] @ self.branch).square().sum()
        if now.any():
            total = total + self.sometimes(x).square().sum()
        return total


def draw(step):
    return torch.Generator().manual_seed(100 + step)


def images(step):
    return torch.randn(ROWS, 3, 10, 10, generator=draw(step)), torch.randint(11, (ROWS,), generator=draw(step))


def classify(model, images, labels):
    return F.cross_entropy(model(images), labels, reduction="sum"), len(labels)


def noisy(step):
    generator = draw(step)
    image, noise = torch.randn(2, ROWS, 3, 7, 7, generator=generator)
    time = torch.rand(ROWS, generator=generator)
    return image * (1 - time)[:, None, None, None] + noise * time[:, None, None, None], time * 1000, noise


def denoise(model, image, time, noise):
    return (model(image, time) - noise).square().sum(), noise.numel()


MASKED = [3, 0, 8, 1, 0, 5, 2, 7, 1, 4, 0, 0, 6]  # tokens to predict of each row


def masked(step):
    tokens = torch.randint(2, VOCAB, (ROWS, LENGTH), generator=draw(step))
    labels = torch.full_like(tokens, -100)
    for row, count in enumerate(MASKED):
        tokens[row, LENGTH - row % 2 :] = 0  # padding
        labels[row, :count], tokens[row, :count] = tokens[row, :count].clone(), 1
    types = (torch.arange(LENGTH) >= 4).long().expand(ROWS, LENGTH)
    return tokens, types, labels


def fill_in(model, tokens, types, labels):
    logits = model(tokens, types)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), int((labels != -100).sum())


def odd_rows(step):
    now = torch.full((ROWS,), step % 2 == 1)
    return torch.randn(ROWS, 3, generator=draw(step)), torch.arange(ROWS) % 5 == step % 3, now


def odd_loss(model, *rows):
    return model(*rows), len(rows[0])


# By name: the module, the batch of a step, the sum of a micro-batch's losses and of how many; and the norm to clip at, which
# lies between those of the steps.
TASKS = {
    "convnet": (ConvNet, images, classify, 0.25),
    "unet": (UNet, noisy, denoise, 0.9),
    "bert": (Bert, masked, fill_in, 0.35),
    "odd": (Odd, odd_rows, odd_loss, 28.0),
}
MODELS = ("convnet", "unet", "bert")


def make(task, seed=0):
    torch.manual_seed(seed)
    return TASKS[task][0]()


def slices(batch, ranks, micro):
    """By rank the micro-batches of a batch; their sizes differ where numbers do not divide."""
    mine = zip(*(part.tensor_split(ranks) for part in batch))
    return [list(zip(*(part.tensor_split(micro) for part in rank))) for rank in mine]


def train(mesh, comm, task, stage, micro, optimizer, steps=range(STEPS), frozen=False, load=None, save=None):
    """Losses and norms of the steps, the loss of an evaluation, and the whole state at the end."""
    _, batch_of, objective, clip = TASKS[task]
    model = make(task, seed=0 if load is None else 1 + mesh.rank)
    model.train(not frozen)
    engine = dt.shard(model, OPTIMIZERS[optimizer][0], mesh, stage=stage, clip_norm=clip, bucket_bytes=8000)
    if load is not None:
        checkpoint.load(load, engine.pieces())
        engine.restored()
    log = []
    for step in steps:
        total, count = 0.0, 0
        for rows in slices(batch_of(step), mesh.data.size, micro)[mesh.data.index]:
            loss, counted = objective(engine.module, *rows)
            engine.backward(loss)
            total, count = total + loss.item(), count + counted
        report = engine.step(weight=count, sums=(total, count))
        log.append((float(report.sums[0] / report.sums[1]), float(report.grad_norm)))
        if step == 1:  # in the middle of training
            model.eval()
            with torch.no_grad():
                log.append(float(objective(engine.module, *batch_of(99))[0]))
            model.train(not frozen)
    if save is not None:
        checkpoint.save(save, steps[-1] + 1, engine.pieces(), {}, comm, mesh.world)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return log, gathered(engine, mesh, comm), buffers


@functools.cache
def one_process(task, optimizer, splits=((1, 1),) * STEPS, frozen=False):
    """The same in torch alone: (log, buffers) of every rank, and weights. `splits`: (ranks, micro-batches) of every step.

    With one of each it is a plain loop over whole batches. With more it takes their slices of a batch one by one, with
    buffers for each rank, and adds up the gradients in fp32. The optimizer updates fp32 copies of the parameters, which makes
    no difference where they are fp32."""
    _, batch_of, objective, clip = TASKS[task]
    model = make(task)
    model.train(not frozen)
    buffers = [{name: buffer.clone() for name, buffer in model.named_buffers()} for _ in range(max(splits)[0])]
    logs = [[] for _ in buffers]
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    masters = {name: param.detach().float().clone() for name, param in params.items()}
    decayed, spared = ([p for p in masters.values() if (p.ndim >= 2) == wide] for wide in (True, False))
    stepper = OPTIMIZERS[optimizer][1]([{"params": decayed}, {"params": spared, "weight_decay": 0.0}])

    def loss_of(rank, rows):
        return objective(lambda *inputs: functional_call(model, buffers[rank], inputs), *rows)

    for step, (ranks, micro) in enumerate(splits):
        total, count = 0.0, 0
        stepper.zero_grad()
        for rank, mine in enumerate(slices(batch_of(step), ranks, micro)):
            for rows in mine:
                loss, counted = loss_of(rank, rows)
                loss.backward()
                total, count = total + loss.item(), count + counted
                for name, param in params.items():
                    if param.grad is not None:
                        seen = masters[name].grad
                        masters[name].grad = param.grad.float() if seen is None else seen + param.grad
                    param.grad = None
        gradients = [master.grad for master in masters.values() if master.grad is not None]
        norm = nn.utils.get_total_norm(gradients).item() / count
        for gradient in gradients:
            gradient *= min(1.0, clip / norm) / count
        stepper.step()
        for name, param in params.items():
            param.data.copy_(masters[name])
        for log in logs:
            log.append((total / count, norm))
        if step == 1:
            model.eval()
            for rank, log in enumerate(logs):
                with torch.no_grad():
                    log.append(float(loss_of(rank, batch_of(99))[0]))
            model.train(not frozen)
    whole = {name: masters.get(name, param.detach()) for name, param in model.named_parameters()}
    return logs, {f"model/{name}": value for name, value in whole.items()}, buffers


def assert_alike(found, expected, start):
    """Two trained models, by the size of each tensor and by how far it moved from where it started."""
    assert distance({name: found[name] for name in expected}, expected) <= 1e-5
    for name, value in expected.items():
        error, moved = (max_of(x.abs().flatten().tolist() or [0.0]) for x in (found[name] - value, value - start[name]))
        assert error <= 1e-3 * moved, f"{name} moved by {moved} and is wrong by {error}"


def assert_logs(log, expected):
    for found, exact in zip(log, expected, strict=True):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(exact), rtol=1e-5, atol=0)


def start_of(task):
    return {f"model/{name}": param.detach() for name, param in make(task).named_parameters()}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("ranks", "optimizer"), [(1, "adamw"), (2, "sgd"), (3, "adamw"), (4, "sgd")])
@pytest.mark.parametrize("task", MODELS)
def test_F05_F07_F43_a_module_trains_as_in_one_process_on_the_whole_batch(task, ranks, optimizer):
    """The convolutional net with the statistics of its batch norms frozen; those of a batch are the next test's."""
    frozen = task == "convnet"
    (expected,), exact, _ = one_process(task, optimizer, frozen=frozen)
    for stage in {1: (0, 3), 4: (1, 3)}.get(ranks, range(4)):
        for log, state, _ in run_ranks(ranks, train, task, stage, 2, optimizer, range(STEPS), frozen):
            assert_logs(log, expected)
            assert_alike(state, exact, start_of(task))


@pytest.mark.parametrize(("ranks", "micro"), [(1, 3), (2, 1), (3, 2), (4, 3)])
def test_batch_norm_normalises_each_micro_batch_of_each_rank_and_keeps_its_statistics_there(ranks, micro):
    """Batch norm computes from the rows that it is given, so here the layout is part of the mathematics: one process comes to the
    same when it takes the same micro-batches one by one and adds up their gradients. Running statistics do not train. They
    are each rank's own, of the micro-batches that this rank saw: no rank is sent another's, and evaluations differ by them.
    """
    logs, exact, buffers = one_process("convnet", "sgd", ((ranks, micro),) * STEPS)
    for stage in (0, 3):
        results = run_ranks(ranks, train, "convnet", stage, micro, "sgd")
        for (log, state, found), expected_log, expected in zip(results, logs, buffers, strict=True):
            assert_logs(log, expected_log)
            assert_alike(state, exact, start_of("convnet"))
            assert found.keys() == expected.keys() and len(found) == 9
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
        means = [found["layers.1.running_mean"] for *_, found in results]
        assert ranks == 1 or not torch.equal(means[0], means[1])


# A run goes through these stages and numbers of ranks, one step and one checkpoint on each.
JOURNEY = [(3, 4), (1, 3), (0, 1), (2, 2), (3, 3), (0, 2)]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:no gradient in this backward")
@pytest.mark.parametrize("task", TASKS)
def test_F04_F21_a_checkpoint_moves_between_stages_and_numbers_of_ranks(tmp_path, task):
    frozen, last = task == "convnet", None
    splits = tuple((ranks, 2) if task == "odd" else (1, 1) for _, ranks in JOURNEY)
    (expected, *_), exact, _ = one_process(task, "adamw", splits, frozen)
    log = []
    for step, (stage, ranks) in enumerate(JOURNEY):
        steps = range(step, step + 1)
        (part, state, _), *_ = run_ranks(ranks, train, task, stage, 2, "adamw", steps, frozen, last, str(tmp_path))
        log, last = log + part, str(tmp_path / f"step_{step + 1:08d}")
        assert checkpoint.verify(last) == []
    assert_logs(log, expected)
    assert_alike(state, exact, start_of(task))


@pytest.mark.filterwarnings("ignore:no gradient in this backward")
@pytest.mark.parametrize(("ranks", "optimizer"), [(1, "adamw"), (2, "adamw"), (3, "sgd"), (4, "adamw")])
def test_F04_F05_F08_F09_F47_parameters_of_every_kind_train_as_in_one_process(ranks, optimizer):
    """One process takes the same micro-batches: in bf16 each of them rounds its gradient, and their sum is fp32."""
    (expected, *_), exact, _ = one_process("odd", optimizer, ((ranks, 3),) * STEPS)
    for stage in range(4):
        for log, state, _ in run_ranks(ranks, train, "odd", stage, 3, optimizer):
            assert_logs(log, expected)
            assert_alike(state, exact, start_of("odd"))


def _weights_only(mesh, comm, stage, root):
    """What was saved, what another engine has after it loaded the weights and stepped without a learning rate, both losses."""
    rows = slices(odd_rows(7), mesh.data.size, 1)[mesh.data.index][0]
    engines = [dt.shard(make("odd", seed), dt.AdamW(1e-2), mesh, stage=stage) for seed in (1, 2)]
    for step in range(2):
        engines[0].backward(engines[0].module(*slices(odd_rows(step), mesh.data.size, 1)[mesh.data.index][0]))
        engines[0].step()
    path = checkpoint.save(root, stage, engines[0].pieces(), {}, comm, mesh.world)
    checkpoint.load(path, [piece for piece in engines[1].pieces() if piece.name.startswith("model/")])
    engines[1].restored()
    losses = [engine.module(*rows) for engine in engines]
    engines[1].backward(losses[1])
    engines[1].step(lr=0.0)
    return [weights(gathered(engine, mesh, comm)) for engine in engines], [loss.item() for loss in losses]


@pytest.mark.filterwarnings("ignore:no gradient in this backward")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_F13_weights_loaded_alone_reach_masters_and_modules_of_every_dtype(tmp_path, stage):
    for (saved, loaded), losses in run_ranks(3, _weights_only, stage, str(tmp_path)):
        assert losses[0] == losses[1]
        assert saved.keys() == loaded.keys() and all(torch.equal(loaded[name], value) for name, value in saved.items())
