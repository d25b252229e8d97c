"""A client's own data, as its method sees them."""

import torch

from fl_lightning.core.method import Method
from fl_lightning.core.term import Term


def test_own_data_are_the_clients(mlp, make_client, data):
    bound = make_client(Method(mlp())).bound(data.clients[1])
    assert (bound.client, bound.num_train) == (1, 13)
    assert bound.class_counts.tolist() == data.clients[1].class_counts.tolist()
    assert bound.held_classes.tolist() == [True, True, True, False]
    assert torch.equal(next(bound.batches())[0], next(data.clients[1].batches("train"))[0])
    assert bound.are_floats
    assert [float(number) for number in bound.pixel_mean_and_std()] == [0.0, 1.0]


def test_whole_training_part_is_collected_in_eval_mode(conv_net, make_client, data, assert_identical):
    client = make_client(Method(conv_net())).train()
    before = {name: tensor.clone() for name, tensor in client.entries.items()}
    seen = client.bound(data.clients[0]).collected()
    assert client.training
    assert client.method.training
    assert_identical(dict(client.entries), before)
    client.eval()
    x, y = data.store.gather(data.clients[0].train)
    assert torch.equal(seen.y, y)
    torch.testing.assert_close(seen.z, client.method.model.embed(x))
    torch.testing.assert_close(seen.logits, client.method.model(x))
    assert not seen.z.requires_grad


def test_the_training_part_is_collected_once_for_all_terms_of_a_send_and_anew_for_the_next(mlp, make_client, data):
    calls = []

    class Looks(Term):
        def forward(self, host, out):
            return out.z.sum()

        def send(self, host, data):
            calls.append(data.collected())
            return {}

    class LooksToo(Looks):
        pass

    client = make_client(Method(mlp(), terms=[Looks(), LooksToo()]))
    client.send(data.clients[0])
    client.send(data.clients[0])
    assert calls[0] is calls[1]
    assert calls[2] is calls[3]
    assert calls[0] is not calls[2]


def test_own_steps_follow_the_global_stream_and_repeat_themselves(conv_net, make_client, data):
    own = make_client(Method(conv_net())).bound(data.clients[1])
    torch.manual_seed(0)
    one, other = own.steps(), own.steps()
    torch.manual_seed(0)
    again = own.steps()
    ys = [[step.y.tolist() for step in steps] for steps in (one, one, again, other)]
    assert ys[0] == ys[1] == ys[2]
    assert ys[0] != ys[3]
    assert [len(y) for y in ys[0]] == [4, 4, 4]  # 13 samples; batch norm cannot train on a batch of one
    assert len(one) == 3
    assert [step.y.tolist() for step in one[1:]] == ys[0][1:]


def test_own_steps_leave_a_last_batch_of_one_where_nothing_forbids_it(mlp, make_client, data):
    client = make_client(Method(mlp()))
    assert [len(step.y) for step in client.bound(data.clients[1]).steps()] == [4, 4, 4, 1]
    client.drop_last = True
    assert [len(step.y) for step in client.bound(data.clients[1]).steps()] == [4, 4, 4]


def test_own_steps_of_a_share_are_of_so_many_samples(mlp, make_client, data):
    own = make_client(Method(mlp())).bound(data.clients[1])
    assert [len(step.y) for step in own.steps(0.5)] == [4, 2]


def test_own_steps_are_outside_the_fit(mlp, make_client, sgd, data):
    """All terms, weights of the present round, and nothing that is logged."""
    client = make_client(Method(mlp()), sgd(), round=3)
    step = next(iter(client.bound(data.clients[0]).steps()))
    values = step.values(step.forward())
    before = {name: tensor.clone() for name, tensor in client.entries.items()}
    step.log(values)
    assert step.round == 3
    assert list(values) == ["cross_entropy"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in client.entries.items())
    assert all(parameter.grad is None for parameter in client.parameters())
    assert client.meter.num_steps == 0
