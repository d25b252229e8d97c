"""One local mini-batch as a method sees it, and the optimizers that step on it."""

import pytest
import torch
import torch.nn.functional as F

from fl_lightning.core.descent import Descent, FitSettings, Machine
from fl_lightning.core.devices import Part
from fl_lightning.core.facts import Phase
from fl_lightning.core.forward import Forward
from fl_lightning.core.freezing import batch_norms
from fl_lightning.core.meter import LossMeter
from fl_lightning.core.method import Method
from fl_lightning.core.step import Bench, Step
from fl_lightning.core.term import Term
from fl_lightning.errors import ConfigError

X, Y = torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3, 0, 1])


@pytest.fixture(autouse=True)
def drawn():
    """The same weights in every run: now and then all five features of a small network are dead, and nothing moves."""
    torch.manual_seed(0)


class Constant(Term):
    """A term whose value is known."""

    def forward(self, host, out):
        return torch.tensor(2.0)


class Returns(Term):
    """A term of somebody's own, that returns something."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, host, out):
        return self.value


class Backward:
    """Lightning's wrapper of an optimizer, as far as a descent knows it."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.num_steps = 0

    def step(self):
        self.num_steps += 1
        self.optimizer.step()

    def zero_grad(self):
        self.optimizer.zero_grad()


def in_a_fit(method, parts=("all",), lr=1.0, x=X, y=Y, weights=None, **settings):
    """A bench with plain SGD for each part, and what makes steps on it."""
    machine = Machine(backward=lambda loss, **options: loss.backward(**options))
    modules = {"all": method, "head": method.model.head, "body": method.model.body}
    optimizers = {name: Backward(torch.optim.SGD(modules[name].parameters(), lr=lr)) for name in parts}
    descent = Descent(machine, optimizers, FitSettings(None, **settings))
    weights = method.term_weights() if weights is None else weights
    bench = Bench(method, machine, batch_norms(method), Phase("all"), list(method.terms), weights, descent, LossMeter())
    return bench, lambda **options: Step(bench, Part.whole(x, y), **options)


def gradients(method, loss):
    return torch.autograd.grad(loss, list(method.parameters()), allow_unused=True)


def moved(method, before):
    return {n for n, p in method.named_parameters() if not torch.equal(p, before[n])}


def snapshot(method):
    return {name: p.detach().clone() for name, p in method.named_parameters()}


# --- forward ----------------------------------------------


def test_forward_pass_holds_what_terms_ask_for(mlp, make_client):
    client = make_client(Method(mlp()))
    out = client.step(X[:3], Y[:3]).forward()
    assert isinstance(out, Forward)
    assert [tuple(f.shape) for f in out.features] == [(3, 8)]
    assert (tuple(out.z.shape), tuple(out.logits.shape)) == ((3, 5), (3, 4))
    assert torch.equal(out.logits, client.method.model(X[:3]))


def test_forward_pass_may_be_of_other_samples_and_through_another_model(mlp, make_client):
    client, other = make_client(Method(mlp())), mlp()
    out = client.step(X, Y).forward(X[:2], Y[:2], other)
    assert torch.equal(out.logits, other(X[:2]))
    assert torch.equal(out.y, Y[:2])


def test_forward_pass_goes_through_the_phases_model(mlp):
    method = Method(mlp())
    method.copy = mlp()
    bench, _ = in_a_fit(method)
    bench.phase = Phase("copy", through="copy")
    assert torch.equal(Step(bench, Part.whole(X, Y)).forward().logits, method.copy(X))


def test_what_a_teacher_tells_is_a_constant_and_leaves_it_as_it_is(conv_net, make_client):
    client, teacher = make_client(Method(conv_net())).train(), conv_net()
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    told = client.step(X, Y).told_by(teacher)
    assert not told.logits.requires_grad
    assert teacher.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.state_dict().items())
    assert torch.equal(told.logits, teacher.eval()(X))


def test_pass_of_one_sample_leaves_batch_norm_in_peace(conv_net, make_client):
    client = make_client(Method(conv_net())).train()
    (norm,) = batch_norms(client.method)
    client.step(X, Y).forward(X[:1], Y[:1])
    assert norm.num_batches_tracked == 0
    client.step(X, Y).forward()
    assert norm.num_batches_tracked == 1


# --- values and their sum ----------------------------------------------


def test_loss_is_the_weighted_sum_of_the_terms(mlp, make_client):
    class Another(Constant):
        pass

    client = make_client(Method(mlp(), terms=[Constant(3.0)], extra_terms=[Another(0.0)]))
    assert client.loss_names == ("loss", "cross_entropy", "constant")
    step = client.step(X, Y)
    values = step.values(step.forward())
    assert values["constant"].item() == 2.0
    expected = F.cross_entropy(client.method.model(X), Y) + 6
    assert step.total(values).item() == pytest.approx(expected.item())
    assert list(step.values(step.forward(), [client.method.terms[1]])) == ["constant"]


def totalled(values, weights):
    return Step(Bench(None, Machine(), (), Phase("all"), (), weights), Part.whole(X, Y)).total(values)


def test_total_weighs_each_value_and_leaves_out_what_has_no_weight():
    values = {"a": torch.tensor(2.0), "b": torch.tensor(3.0), "logged": torch.tensor(7.0), "off": torch.tensor(9.0)}
    assert totalled(values, {"a": 1.0, "b": 0.5, "off": 0.0}).item() == 3.5


def test_total_leaves_a_lone_value_of_weight_one_alone():
    value = torch.tensor(2.0)
    assert totalled({"a": value}, {"a": 1.0}) is value


def test_total_of_nothing_is_zero():
    total = totalled({}, {})
    assert (total.item(), total.dtype) == (0.0, torch.float32)


def test_values_are_float32_whatever_the_precision(mlp, make_client):
    client = make_client(Method(mlp().bfloat16()))
    step = client.step(X.bfloat16(), Y)
    out = step.forward()
    assert out.logits.dtype == torch.bfloat16
    assert step.values(out)["cross_entropy"].dtype == torch.float32


# --- descending ----------------------------------------------


@pytest.mark.parametrize(
    ("value", "said"),
    [(torch.ones(6), r"a tensor \[6\]"), (0.5, "float"), ("a", "str")],
    ids=["vector", "float", "text"],
)
def test_a_term_that_returns_no_scalar_tensor_is_named(mlp, value, said):
    _, step = in_a_fit(Method(mlp(), extra_terms=[Returns(value)]))
    with pytest.raises(ConfigError, match=rf"^Returns: its forward must return a scalar tensor, not {said}$"):
        step().take()


def test_descend_steps_on_the_weighted_sum_and_logs_the_values(mlp):
    method = Method(mlp(), terms=[Constant(3.0)])
    bench, make = in_a_fit(method, lr=0.5)
    before, loss = snapshot(method), F.cross_entropy(method.model(X), Y)
    slopes = gradients(method, loss)
    make().take()
    for (name, parameter), slope in zip(method.named_parameters(), slopes, strict=True):
        assert torch.equal(parameter, before[name] - 0.5 * slope)
    assert bench.meter.means() == pytest.approx(
        {"loss": loss.item() + 6, "cross_entropy": loss.item(), "constant": 2.0}, rel=1e-6
    )
    assert all(parameter.grad is None for parameter in method.parameters())


def test_parts_step_alone_and_alone_get_a_gradient(mlp):
    class HeadOnly(Method):
        def local_step(self, step):
            step.descend(step.values(step.forward()), "head")

    method = HeadOnly(mlp())
    bench, make = in_a_fit(method, ("head", "body"))
    before = snapshot(method)
    make().take()
    assert moved(method, before) == {"model.head.weight", "model.head.bias"}
    assert all(parameter.grad is None for parameter in method.parameters())
    assert [optimizer.num_steps for optimizer in bench.descent.optimizers.values()] == [1, 0]


def test_parts_that_a_phase_lacks_do_not_step_and_are_logged_all_the_same(mlp):
    class Asks(Method):
        def local_step(self, step):
            step.descend(step.values(step.forward()), "absent")

    method = Asks(mlp())
    bench, make = in_a_fit(method)
    before = snapshot(method)
    make().take()
    assert moved(method, before) == set()
    assert set(bench.meter.means()) == {"loss", "cross_entropy"}


def test_every_part_steps_where_none_is_named(mlp):
    method = Method(mlp())
    bench, make = in_a_fit(method, ("head", "body"))
    make().take()
    assert [optimizer.num_steps for optimizer in bench.descent.optimizers.values()] == [1, 1]


@pytest.mark.parametrize("parts", [(), ("all",)])
def test_gradients_are_accumulated_until_it_is_time(mlp, parts):
    """Two mini-batches a step: the mean of both gradients, which is that of one on the same samples."""

    class Descends(Method):
        def local_step(self, step):
            step.descend(step.values(step.forward()), *parts)

    method = Descends(mlp())
    _, make = in_a_fit(method, accumulate=2)
    before = snapshot(method)
    slopes = gradients(method, F.cross_entropy(method.model(X), Y))
    make(steps_now=False).take()
    assert moved(method, before) == set()
    make(steps_now=True).take()
    for (name, parameter), slope in zip(method.named_parameters(), slopes, strict=True):
        torch.testing.assert_close(parameter, before[name] - slope)


def test_two_losses_on_one_part_keep_their_gradients_apart_while_they_accumulate(mlp):
    """Head and body together, then the head alone: what waits for the one must not be in the other's step.

    Steps are clipped, or two on one part would come to the same as one on the sum.
    """

    class Two(Method):
        def losses(self):
            return {"whole": 1.0, "push": 1.0}

        def local_step(self, step):
            step.descend({"whole": step.forward().logits.mean()}, "head", "body")
            step.descend({"push": self.model.head.bias.sum()}, "head")

    method, largest = Two(mlp()), 0.6
    clips = {"clip_value": largest, "clip_algorithm": "value"}
    _, make = in_a_fit(method, ("head", "body"), lr=0.1, accumulate=2, **clips)
    before, slopes = snapshot(method), gradients(method, method.model(X).mean())
    make(steps_now=False).take()
    make(steps_now=True).take()
    for (name, parameter), slope in zip(method.named_parameters(), slopes, strict=True):
        push = largest if name == "model.head.bias" else 0.0  # of a slope of 1
        torch.testing.assert_close(parameter, before[name] - 0.1 * (slope.clamp(-largest, largest) + push), msg=name)


@pytest.mark.parametrize(("algorithm", "largest"), [("norm", None), ("value", 0.01)])
def test_gradients_are_clipped_before_the_step(mlp, algorithm, largest):
    method = Method(mlp())
    _, make = in_a_fit(method, clip_value=0.01, clip_algorithm=algorithm)
    before = snapshot(method)
    make().take()
    step = torch.cat([(p.detach() - before[n]).flatten() for n, p in method.named_parameters()])
    assert float(step.norm() if largest is None else step.abs().max()) == pytest.approx(0.01, rel=1e-3)


def test_a_loss_without_a_gradient_steps_nowhere(mlp):
    class Still(Method):
        def local_step(self, step):
            step.descend({"cross_entropy": torch.ones(())})

    bench, make = in_a_fit(Still(mlp()))
    make().take()
    assert bench.descent.optimizers["all"].num_steps == 0
    assert bench.meter.means() == {"loss": 1.0, "cross_entropy": 1.0}


def test_several_descents_log_the_sum_of_all_that_has_a_weight(mlp):
    class Two(Method):
        def losses(self):
            return {"one": 1.0, "other": 2.0, "seen": 0.0}

        def local_step(self, step):
            step.descend({"one": torch.ones(()), "seen": torch.tensor(50.0)})
            step.descend({"other": torch.ones(())})

    bench, make = in_a_fit(Two(mlp()))
    make().take()
    assert bench.meter.means() == {"loss": 3.0, "one": 1.0, "other": 1.0, "seen": 50.0}


def test_values_that_are_logged_may_be_of_other_samples(mlp):
    class Logs(Method):
        def local_step(self, step):
            step.log({"own": step.x.sum() * 0 + len(step.y)}, size=len(step.y) // 2)

    bench, make = in_a_fit(Logs(mlp()))
    make().take()
    assert bench.meter.losses["own"][0][1] == 3
    assert bench.meter.means()["loss"] == 0.0


def test_a_step_that_logs_nothing_is_not_taken_down(mlp):
    class Rests(Method):
        def local_step(self, step):
            pass

    bench, make = in_a_fit(Rests(mlp()))
    make().take()
    assert bench.meter.num_steps == 0


# --- steps of a method's own ----------------------------------------------


def test_gradients_reach_the_parameters_asked_for_and_are_left_nowhere(mlp, make_client):
    client = make_client(Method(mlp()))
    model = client.method.model
    step, parameters = client.step(X[:3], Y[:3]), [model.head.bias, model.body.neck[0].weight]
    found = step.gradients(model.head(torch.zeros(3, 5)).sum(), parameters)
    assert found[0].tolist() == [3.0] * 4
    assert not found[1].any()  # not reached
    assert all(parameter.grad is None for parameter in client.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_under_autocast_are_those_of_the_loss(mlp, make_client, dtype):
    """A loss so small that float16 would lose its gradient."""
    client = make_client(Method(mlp()))
    with torch.autocast("cpu", dtype=dtype):
        loss = client.method.model.head(torch.ones(3, 5)).float().sum() * 2**-20
        found = client.step(X, Y).gradients(loss, [client.method.model.head.bias])
    torch.testing.assert_close(found[0], torch.full((4,), 3 * 2.0**-20), rtol=2e-2, atol=0)


@pytest.mark.parametrize("steps_now", [None, True, False])
def test_optimizers_follow_gradients_that_were_found_by_hand(mlp, steps_now):
    class Follows(Method):
        def local_step(self, step):
            parameters = list(self.parameters())
            step.follow([torch.ones_like(p) for p in parameters], parameters, steps_now)

    for time_to in (True, False):
        method = Follows(mlp())
        _, make = in_a_fit(method, lr=0.25)
        before = snapshot(method)
        make(steps_now=time_to).take()
        steps = time_to if steps_now is None else steps_now
        for name, parameter in method.named_parameters():
            assert torch.equal(parameter, before[name] - 0.25 if steps else before[name])
            assert parameter.grad is None or not steps


def test_gradients_found_by_hand_add_up_until_it_is_time(mlp):
    class Follows(Method):
        def local_step(self, step):
            step.follow([torch.ones(4)], [self.model.head.bias])

    method = Follows(mlp())
    _, make = in_a_fit(method)
    before = method.model.head.bias.detach().clone()
    make(steps_now=False).take()
    make().take()
    assert torch.equal(method.model.head.bias, before - 2)


def test_a_step_outside_a_fit_trains_nothing_and_says_so(mlp, make_client):
    client = make_client(Method(mlp()))
    step = client.step(X, Y)
    with pytest.raises(ConfigError, match=r"step.follow\(\) is for the local fit, and trains nothing outside it"):
        step.follow([torch.zeros(4)], [client.method.model.head.bias])
    with pytest.raises(ConfigError, match=r"step.descend\(\) is for the local fit, and trains nothing outside it"):
        step.descend(step.values(step.forward()))


def test_terms_that_exchange_observe_a_pass_outside_autocast(mlp):
    seen = []

    class Watches(Constant):
        def observe(self, host, out):
            seen.append((host, len(out.y), torch.is_autocast_enabled("cpu")))

    class Off(Watches):
        pass

    method = Method(mlp(), terms=[Watches(), Off(0.0)])
    _, make = in_a_fit(method)
    make().take()
    assert seen == [(method, 6, False)]


def test_what_is_drawn_without_other_devices_stays(mlp, make_client):
    drawn = torch.rand(3)
    assert make_client(Method(mlp())).step(X, Y).agreed(drawn) is drawn
