"""Messages for hypothesis: whatever may be in one."""

import torch
from hypothesis import strategies as st

from fl_lightning.core.message import ClassMeans, Message

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
OTHERS = [torch.int64, torch.int32, torch.uint8, torch.bool]
SHAPES = [(), (0,), (1,), (5,), (40,), (3, 4), (2, 0, 3), (2, 3, 4)]
NAMES = ["a", "b.weight", "body.0.bias", "ä", "c/d", "0", "running_mean"]


@st.composite
def tensors(draw, dtypes=None, shapes=None, odd=True, spread=6):
    """A tensor of any kind: empty, a scalar, a transposed or strided view, with NaN and inf where `odd`."""
    shape = draw(st.sampled_from(SHAPES)) if shapes is None else draw(st.sampled_from(shapes))
    dtype = draw(st.sampled_from(dtypes or [*FLOATS, *OTHERS]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    exponents = torch.empty(shape).uniform_(-spread / 2, spread / 2, generator=generator)
    values = torch.randn(shape, generator=generator) * 10**exponents
    style = draw(st.sampled_from(["drawn", "drawn", "equal", "few", "zero"]))
    if style == "equal":
        values = torch.full(shape, float(values.reshape(-1)[0]) if values.numel() else 0.0)
    elif style == "few":
        values = values.sign()
    elif style == "zero":
        values = torch.zeros(shape)
    if dtype in FLOATS and odd and values.numel() and draw(st.integers(0, 3)) == 0:
        place = draw(st.integers(0, values.numel() - 1))
        values.view(-1)[place] = draw(st.sampled_from([float("nan"), float("inf"), -float("inf"), 3e38, -0.0]))
    if dtype in FLOATS and not odd:
        largest = min(torch.finfo(own).max for own in (dtype, torch.float32))
        values = values.clamp(-largest, largest)
    tensor = values.to(dtype) if dtype in FLOATS else values.nan_to_num().abs().clamp(max=200).to(dtype)
    return draw(st.sampled_from([_contiguous, _transposed, _strided]))(tensor)


def _contiguous(tensor):
    return tensor


def _transposed(tensor):
    return tensor.T.contiguous().T if tensor.ndim == 2 else tensor


def _strided(tensor):
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


@st.composite
def class_means(draw, odd=True, dtypes=(torch.float32,), classes=4, size=3):
    """Means of four classes, of which any may be absent."""
    mean = draw(tensors(list(dtypes), [(classes, size)], odd))
    count = torch.tensor(draw(st.lists(st.integers(0, 9), min_size=classes, max_size=classes)))
    mean = torch.where(count[:, None] > 0, mean, torch.zeros_like(mean))
    return ClassMeans(mean, count, draw(st.booleans()), draw(st.booleans()))


@st.composite
def messages(draw, dtypes=None, odd=True):
    """A message with any weights and artifacts."""
    names = draw(st.lists(st.sampled_from(NAMES), max_size=5, unique=True))
    weights = {name: draw(tensors(dtypes, odd=odd)) for name in names}
    artifacts = {}
    if draw(st.booleans()):
        artifacts["means"] = draw(class_means(odd))
    if draw(st.booleans()):
        artifacts["plain"] = draw(tensors(dtypes, odd=odd))
    return Message(weights, artifacts, draw(st.integers(0, 1000)))


@st.composite
def siblings(draw, message, odd=True):
    """A message of the same names, shapes and types with other values: what its sender had received."""
    weights = {
        name: draw(tensors([tensor.dtype], [tuple(tensor.shape)], odd)) for name, tensor in message.weights.items()
    }
    missing = draw(st.sampled_from([None, None, *weights]))
    return Message({name: tensor for name, tensor in weights.items() if name != missing})


def same(a, b):
    """Whether two tensors are alike in type, shape and every value, NaN in the same places."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(torch.nan_to_num(a.double(), 1e300), torch.nan_to_num(b.double(), 1e300)) and torch.equal(
        torch.isnan(a.double()), torch.isnan(b.double())
    )


def leaves(message):
    """Every tensor of a message by name."""
    found = {f"w/{name}": tensor for name, tensor in message.weights.items()}
    for name, value in message.artifacts.items():
        if isinstance(value, torch.Tensor):
            found[f"a/{name}"] = value
        else:
            found |= {f"a/{name}.{field}": tensor for field, tensor in value.tensors().items()}
    return found
