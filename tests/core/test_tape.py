"""Operations that were taken down are done again, on the same memory, with the same bits."""

import gc

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import vmap

from fl_lightning.core.reads import Unrecordable
from fl_lightning.core.recording import can_record, record
from fl_lightning.core.tape import Program, Taker, taped


@pytest.fixture
def numbers():
    return torch.arange(6.0).reshape(2, 3)


def replayed(work, known, change=None):
    """What work returns after a replay, with what it reads changed meanwhile."""
    made = []

    def run():
        made[:] = work()
        return made

    tape = record(run, known)
    if change is not None:
        with torch.no_grad():
            change()
    tape.replay()
    return made


def test_cpus_and_gpus_record():
    assert can_record(torch.device("cpu"))
    assert can_record(torch.device("cuda"))
    assert not can_record(torch.device("meta"))


def test_nothing_is_done_while_it_is_taken_down(numbers):
    before = numbers.clone()
    tape = taped(lambda: [numbers.add_(1)], [numbers])
    assert torch.equal(numbers, before)
    tape.replay()
    tape.replay()
    assert torch.equal(numbers, before + 2)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))


def descend(model, x, y):
    """A step of SGD; returns its loss."""
    loss, parameters = nn.functional.cross_entropy(model(x), y), list(model.parameters())
    gradients = torch.autograd.grad(loss, parameters)
    with torch.no_grad():
        torch._foreach_add_(parameters, gradients, alpha=-0.1)
    return loss.detach()


def test_a_training_step_is_the_same_to_the_last_bit():
    one, other = net(), net()
    images, classes = torch.randn(5, 8, 1, 8, 8), torch.randint(3, (5, 8))
    x, y, losses = images[0].clone(), classes[0].clone(), []

    def work():
        losses[:] = [descend(other, x, y)]
        return losses

    tape = taped(work, [x, y, *other.state_dict().values()])
    for own, labels in zip(images, classes, strict=True):
        x.copy_(own)
        y.copy_(labels)
        tape.replay()
        assert torch.equal(descend(one, own, labels), losses[0])
    assert all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


def test_views_of_what_is_made_on_the_way_show_what_is_made_then(numbers):
    def work():
        made = numbers * 2
        part = made.t()[1:]
        part.add_(1)  # shows in `made`
        made.unsqueeze_(0)
        return [made.sum((0, 1)), part.clone()]

    total, part = replayed(work, [numbers], lambda: numbers.mul_(10))
    assert total.tolist() == [60.0, 102.0, 142.0]
    assert part.tolist() == [[21.0, 81.0], [41.0, 101.0]]


def test_what_is_no_number_is_left_alone_too(numbers):
    numbers[0, 0] = torch.nan
    version = numbers._version
    taped(lambda: [numbers.sum()], [numbers])
    assert numbers._version == version


def test_results_may_be_views_and_what_is_known(numbers):
    shown, row = replayed(lambda: [numbers, (numbers + 1)[1]], [numbers], lambda: numbers.zero_())
    assert shown is numbers
    assert not numbers.any()
    assert row.tolist() == [1.0, 1.0, 1.0]


def test_numbers_keep_to_the_types_that_they_had(numbers):
    total, half = replayed(lambda: [numbers.sum() * 0.1, numbers.half() * 0.1], [numbers], lambda: numbers.add_(1))
    assert total.dtype == torch.float32
    assert total == numbers.sum() * 0.1
    assert half.dtype == torch.float16


def test_what_rests_on_shapes_alone_is_made_once_unless_it_is_changed(numbers):
    def work():
        still, counter = torch.ones_like(numbers), torch.zeros_like(numbers)
        counter.add_(numbers)
        return [still + counter]

    taker = Taker([numbers])
    with taker:
        result = work()
    program = Program(taker.calls, result)
    names = [call.func._schema.name for call in program.needed]
    assert names == ["aten::zeros_like", "aten::add_", "aten::add"]
    for _ in range(2):
        assert torch.equal(program.function()()[0], numbers + 1)


def test_what_nobody_reads_is_left_out(numbers):
    def work():
        numbers.exp().log()
        return [numbers.sum()]

    taker = Taker([numbers])
    with taker:
        result = work()
    assert [call.func._schema.name for call in Program(taker.calls, result).needed] == ["aten::sum"]


def test_random_numbers_are_drawn_anew(numbers):
    torch.manual_seed(1)
    tape = taped(lambda: [numbers.copy_(torch.rand(2, 3))], [numbers])
    torch.manual_seed(2)
    tape.replay()
    torch.manual_seed(2)
    assert torch.equal(numbers, torch.rand(2, 3))


def test_lists_and_stacked_clients(numbers):
    weights = torch.randn(4, 3, 2)

    def work():
        def one(weight, x):
            return (x @ weight).square().mean()

        losses = vmap(one, in_dims=(0, None))(weights, numbers)
        torch._foreach_mul_([weights], 0.5)
        return [losses]

    (losses,) = replayed(work, [numbers, weights], lambda: weights.mul_(2))
    torch.testing.assert_close(losses, torch.stack([(numbers @ (2 * own)).square().mean() for own in weights]))


def test_what_was_done_outside_mixed_precision_is_so_within_it(numbers):
    def work():
        with torch.autocast("cpu", enabled=False):
            precise = numbers @ numbers.t()
        return [precise, (numbers @ numbers.t()).float()]

    with torch.autocast("cpu", torch.bfloat16):
        precise, rounded = replayed(work, [numbers], lambda: numbers.add_(0.001))
    assert torch.equal(precise, numbers @ numbers.t())
    near = numbers.bfloat16() @ numbers.bfloat16().t()
    assert torch.equal(rounded, near.float())


def test_numbers_that_python_has_made_begin_anew_at_every_replay(numbers):
    before = numbers.clone()

    def work():
        total, still = torch.tensor(0.0), torch.tensor(2.0)
        total += numbers.sum()
        return [total * still]

    tape = taped(work, [numbers])
    (total,) = replayed(work, [numbers], lambda: numbers.mul_(2))
    assert total == 4 * before.sum()
    tape.replay()
    (total,) = replayed(work, [numbers])
    assert total == 4 * before.sum()


def test_batch_norms_statistics_move_where_nobody_reads_what_they_make(numbers):
    layer = nn.BatchNorm1d(3)

    def work():
        layer(numbers)
        return [numbers.sum()]

    replayed(work, [numbers, *layer.state_dict().values()], lambda: numbers.add_(1))
    assert layer.num_batches_tracked == 1
    torch.testing.assert_close(layer.running_mean, 0.1 * numbers.mean(0))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_in_single_precision_are_done_again(kind):
    layer, x, gradients = kind(8, 3, batch_first=True), torch.randn(4, 8, 8), []

    def work():
        return torch.autograd.grad(layer(x)[0].square().sum(), list(layer.parameters()))

    tape = taped(lambda: gradients.extend(work()) or gradients, [x, *layer.state_dict().values()])
    x.mul_(2)
    tape.replay()
    assert all(map(torch.equal, gradients, work()))


class Doubling(torch.autograd.Function):
    """A function whose derivative Python says."""

    @staticmethod
    def forward(context, x):
        return x * 2

    @staticmethod
    def backward(context, gradient):
        return gradient * 2


def test_derivatives_that_python_says_are_taken_down(numbers):
    def work():
        own = numbers.detach().requires_grad_()
        return list(torch.autograd.grad(Doubling.apply(own.square()).sum(), [own]))

    (gradient,) = replayed(work, [numbers], lambda: numbers.mul_(3))
    assert torch.equal(gradient, 4 * numbers)


STRANGE = torch.ones(3)


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        (lambda x: [x * x.sum().item()], "its step reads a number off a tensor"),
        (lambda x: [x * x.tolist()[0][1]], "its step reads a number off a tensor"),
        (lambda x: [x * x.numpy().sum().item()], "its step reads a number off a tensor"),
        (lambda x: [x * float(np.asarray(x).sum())], "its step reads a number off a tensor"),
        (lambda x: [torch.tensor_split(x, x[0, 1:2].long())[0] * 1], "its step reads a number off a tensor"),
        (lambda x: [torch.add(x, x, out=torch.empty(0))], "done again, its operations come to something else"),
        (lambda x: [torch.cat([x[0], x.sum().unsqueeze_(0)])], "done again, its operations come to something else"),
        (lambda x: [x * (2 if x.sum() > 1 else 3)], "its step reads a number off a tensor"),
        (lambda x: [x[x > 2].sum()], "shapes in its step rest on what is in a tensor"),
        (lambda x: [x.nonzero().float().sum()], "shapes in its step rest on what is in a tensor"),
        (lambda x: [x.clone().resize_(1)], "its step moves a tensor to other memory"),
        (lambda x: [x + STRANGE], r"its step reads a tensor \[3\] that is no parameter, buffer or attribute"),
        (lambda x: [(x * 2).view(torch.int32).float()], "its step shows torch.float32 memory as something else"),
        (lambda x: [x @ x], "mat1 and mat2 shapes cannot be multiplied"),
    ],
)
def test_what_cannot_be_done_again_is_named_and_leaves_things_alone(work, reason, numbers):
    before = numbers.clone()
    with pytest.raises(Unrecordable, match=reason):
        record(lambda: work(numbers.add_(1)), [numbers])
    assert torch.equal(numbers, before)


def test_vectors_of_classes_are_made_without_a_look_at_the_classes():
    classes = torch.tensor([2, 0])

    def work():
        return [nn.functional.one_hot(classes, 3), nn.functional.one_hot(classes, num_classes=4).float()]

    three, four = replayed(work, [classes], lambda: classes.fill_(1))
    assert three.tolist() == [[0, 1, 0]] * 2
    assert three.dtype == torch.int64
    assert four.tolist() == [[0.0, 1.0, 0.0, 0.0]] * 2
    with pytest.raises(Unrecordable, match="number off a tensor"):
        record(lambda: [nn.functional.one_hot(classes)], [classes])


def test_rows_by_their_numbers_are_no_shape_that_rests_on_them(numbers):
    rows = torch.tensor([1, 0])
    (picked,) = replayed(lambda: [numbers[rows] * 1], [numbers, rows], lambda: rows.zero_())
    assert torch.equal(picked, numbers[[0, 0]])


def test_functions_of_torch_that_do_something_else_are_not_taken(numbers, monkeypatch):
    plain = taped(lambda: [numbers.relu_()], [numbers])
    monkeypatch.setattr("fl_lightning.core.tape._swift", lambda func: torch.neg)
    other = taped(lambda: [numbers.add_(-1).relu_()], [numbers])
    other.replay()
    plain.replay()
    assert numbers.tolist() == [[0.0, 0.0, 1.0], [2.0, 3.0, 4.0]]


def test_a_tape_keeps_nothing_of_what_was_made_on_the_way(numbers):
    tape = taped(lambda: [(numbers * 2).sum()], [numbers])
    gc.collect()
    alike = [own for own in gc.get_objects() if isinstance(own, torch.Tensor) and own.shape == (2, 3)]
    assert {own.untyped_storage().data_ptr() for own in alike} == {numbers.untyped_storage().data_ptr()}
    tape.replay()
