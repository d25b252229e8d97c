"""Where clients' networks look at test images of one class: Grad-CAM, as DRDFL's Figure 7.

Guo, Lv, Geng, "Harmonizing Generalization and Personalization in Ring-topology Decentralized Federated Learning", 2025,
Figure 7, after Selvaraju et al., "Grad-CAM: Visual Explanations from Deep Networks via Gradient-based Localization",
ICCV 2017, by the library Captum. The paper does not say which score an encoder's map follows: here ½‖e(x)‖² of its
output (of a variational one, the mean), and the class's logit where a network classifies.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_lightning.classifier import labels_of
from fl_lightning.errors import importing, require
from fl_lightning.models.split import SplitModel
from fl_lightning.rebuilding import first_runs, own_way, trained, with_models
from fl_lightning.report.page.figure import Figure, Rows, Spec, tips

if TYPE_CHECKING:
    from fl_lightning.core.method import Method
    from fl_lightning.federation.loop import FederatedLoop
    from fl_lightning.report.series import Series
    from fl_lightning.trust import Trust

OPTION = "--attention"
MOST_CLIENTS = 6
"""That are drawn, with an image each."""
SIDE = 96
"""Pixels of a picture."""
FINEST = 3
"""Places that a map has at least, each way, where a network has such a map: of 8x8 images the last one may have one."""
HEAT = 0.5
"""Share of the map in what is drawn over the image, where the map is hottest."""


class Attention(NamedTuple):
    """Maps of one run.

    Args:
        images: [M, H, W, 3] in [0, 1], an image of each drawn client's own test part.
        clients: [M] whose they are.
        maps: network -> client -> [M, H, W], what the client's network says of each image, each map's largest value 1
            (0: no heat). A client without such a network, or without a model, has none.
    """

    images: np.ndarray
    clients: Sequence[int]
    maps: dict[str, dict[int, np.ndarray]]


def attentions(lines: Sequence[Series], held: str, trust: Trust) -> Iterator[Figure]:
    """Images of a class from the test parts of each line's first run, and each network's map over them.

    Args:
        lines: what the page shows.
        held: the class, as the data set says it.
        trust: what the runs' configurations may import.

    Raises:
        ConfigError: if Captum is not installed, a run cannot be built again or keeps no models, its data are no images,
            or nobody has a test image of that class.
    """
    rows, picks, pictures = Rows("s", "pick", "client", "network", "src"), list[str](), list[str]()
    networks = ["image"]
    there, facts = first_runs(lines, OPTION)
    for place, picked in there:
        found = attend(lines[place].runs[0].path, held, trust)
        networks += [network for network in found.maps if network not in networks]
        picks.append(picked)
        if not found.maps:
            facts.append(f"{picks[-1]}: none of its networks has a convolution over images")
            continue
        for i, client in enumerate(found.clients):
            drawn = {"image": found.images[i]} | {
                n: _laid_over(found.images[i], m[client][i]) for n, m in found.maps.items() if client in m
            }
            for network, picture in drawn.items():
                values = {"client": client, "network": networks.index(network), "src": len(pictures)}
                rows.add(s=place, pick=len(picks) - 1, **values)
                pictures.append(_as_address(picture))
        facts += [f"{picks[-1]}, {network}: {_agreement([*own.values()])}" for network, own in found.maps.items()]
    nobody = "none of the methods' networks has a convolution over images"
    require(bool(len(rows)), OPTION, nobody, ", ".join(str(line.runs[0].path) for line in lines))
    text = (
        f"Test images of class {held}, one of each of the first {MOST_CLIENTS} clients that have one, and where its "
        "trained networks look at it (Grad-CAM at the "
        "last convolution): red is most. A classifier's map follows the class's logit, an encoder's half the squared "
        "norm of its output. Agreement is the mean correlation of two clients' maps of the same image."
    )
    heads = {"label": "run", "client": "client", "network": "network"}
    texts, title = {"network": networks, "src": pictures}, "Where networks look"
    yield Figure("attention", "Attention", title, text, _spec(networks), rows.columns, heads, texts, picks, facts)


def _spec(networks: Sequence[str]) -> Spec:
    across = {"labelAngle": 0, "orient": "top", "domain": False, "ticks": False}
    down = {"domain": False, "ticks": False}
    return {
        "width": {"step": SIDE + 14},
        "height": {"step": SIDE + 8},
        "mark": {"type": "image", "width": SIDE, "height": SIDE},
        "encoding": {
            "x": {"field": "network", "type": "nominal", "sort": list(networks), "title": None, "axis": across},
            "y": {"field": "client", "type": "ordinal", "title": "client", "axis": down},
            "url": {"field": "src", "type": "nominal"},
            "tooltip": tips(("client", "client"), ("network", "network")),
        },
    }


def attend(folder: Path, name: str, trust: Trust) -> Attention:
    """Ask every drawn client's networks about every drawn image of a class.

    Raises:
        ConfigError: as `attentions`.
    """
    _captum()
    loop = with_models(folder, trust, OPTION)
    classes = [str(each) for each in loop.data.arrays.classes]
    require(name in classes, OPTION, f"must be a class of {folder.name}: {', '.join(classes[:12])}", name)
    require(len(loop.data.spec.input_shape) == 3, OPTION, "needs images", str(folder))
    chosen = _images_of(loop, classes.index(name))
    require(bool(chosen), OPTION, f"no client of {folder.name} has a test image of that class", name)
    x, _ = loop.data.store.gather(torch.as_tensor([chosen[client] for client in chosen]))
    maps: dict[str, dict[int, np.ndarray]] = {}
    for client, method in trained(loop, folder, OPTION):
        if client in chosen:
            for network, score, layer in views(method, x, labels_of(loop, client)[classes.index(name)]):
                maps.setdefault(network, {})[client] = gradcam(score, layer, x).cpu().numpy()
    least, largest = loop.data.store.bounds()
    images = _as_colours(((x - least) / (largest - least)).clamp(0, 1).float()).permute(0, 2, 3, 1)
    return Attention(images.cpu().numpy(), list(chosen), maps)


def _as_colours(x: Tensor) -> Tensor:
    """Images [B, C, H, W] as [B, 3, H, W]: the first three channels, or the first one as grey where there are fewer."""
    return x[:, :3] if x.shape[1] >= 3 else x[:, :1].expand(-1, 3, -1, -1)


def _images_of(loop: FederatedLoop, of: int) -> dict[int, int]:
    """Client -> the first test image of that class, whatever its label there, of the first clients that have one."""
    labels = loop.data.arrays.y.cpu().numpy()
    found: dict[int, int] = {}
    for client in range(loop.num_clients):
        own = np.asarray(loop.data.clients[client].test)
        held = own[labels[own] == labels_of(loop, client)[of]]
        if len(held) and len(found) < MOST_CLIENTS:
            found[client] = int(held[0])
    return found


Score = Callable[[Tensor], Tensor]
"""From images [B, C, H, W] to what a map follows [B]."""


def views(method: Method, x: Tensor, label: int) -> Iterator[tuple[str, Score, nn.Module]]:
    """A method's networks that look at images: a name, the score to follow, and the last convolution that leaves a map.

    Where the client predicts by weights that several of them make together, the network of those, too: ``mixed``.

    Args:
        method: with trained weights, in evaluation mode.
        x: [B, C, H, W] normalised.
        label: the class that a classifier is asked for.
    """
    networks = dict(method.named_children())
    way = own_way(method)
    if way is not None and way.merged is not None:
        networks["mixed"] = way.merged().eval()
    for name, network in networks.items():
        convolutions = [layer for layer in network.modules() if isinstance(layer, nn.Conv2d)]
        if name == "terms" or not convolutions or convolutions[0].in_channels != x.shape[1]:
            continue
        layer = _last_map(network, convolutions, x)
        if layer is not None:
            yield name, _score(network, label if isinstance(network, SplitModel) else None), layer


def _score(network: nn.Module, label: int | None) -> Score:
    """The class's logit, or half the squared norm of what comes out (of the first of several)."""

    def score(x: Tensor) -> Tensor:
        out = network(x)
        out = (out[0] if isinstance(out, tuple) else out).flatten(1)
        return 0.5 * out.square().sum(1) if label is None else out[:, label]

    return score


@torch.no_grad()
def _last_map(network: nn.Module, convolutions: Sequence[nn.Conv2d], x: Tensor) -> nn.Conv2d | None:
    """The last convolution that was reached and whose map still says where: `FINEST` places or more each way.

    The one with the largest map where all are smaller; None where none was reached. One of a single channel is a gate
    (CBAM's), which is passed over where there are others: of one channel's logits Grad-CAM is mostly blank.
    """
    seen: list[tuple[int, nn.Conv2d]] = []

    def note(layer: Any, _: object, out: Tensor) -> None:
        seen.append((min(FINEST, *out.shape[2:]), layer))

    handles = [layer.register_forward_hook(note) for layer in convolutions]
    try:
        network(x[:1])
    except (RuntimeError, TypeError):  # it takes something else than an image
        return None
    finally:
        for handle in handles:
            handle.remove()
    seen = [own for own in seen if own[1].out_channels > 1] or seen
    largest = max((size for size, _ in seen), default=0)
    return next((layer for size, layer in reversed(seen) if size == largest), None)


def gradcam(score: Score, layer: nn.Module, x: Tensor) -> Tensor:
    """Grad-CAM: relu(Σ_c a_c A_c), a_c the mean gradient of the score by the layer's map A_c, at the images' size.

    Args:
        score: [B] of images [B, C, H, W].
        layer: a convolution that `score` goes through.
        x: [B, C, H, W].

    Returns:
        [B, H, W] in [0, 1]: every map over its largest value; zeros where nothing speaks for the score.
    """
    found = _captum()(score, layer).attribute(x, relu_attributions=True).detach().float()
    large = F.interpolate(found, x.shape[2:], mode="bilinear", align_corners=False)[:, 0]
    largest = large.amax((1, 2), keepdim=True)
    return torch.where(largest > 0, large / largest.clamp_min(torch.finfo(large.dtype).tiny), 0.0)


def _captum() -> Any:
    with importing("captum", OPTION, "needs the package captum: pip install 'fl-lightning[report]'"):
        from captum.attr import LayerGradCam
    return LayerGradCam


def _agreement(maps: Sequence[np.ndarray]) -> str:
    """The mean correlation of two clients' maps of the same image, of [M, H, W] of each client, in words."""
    flat = np.stack(maps).reshape(len(maps), len(maps[0]), -1)
    with np.errstate(invalid="ignore"):
        each = [
            np.corrcoef(flat[i, image], flat[j, image])[0, 1]
            for i, j in combinations(range(len(flat)), 2)
            for image in range(flat.shape[1])
        ]
    known = [value for value in each if np.isfinite(value)]  # a map without heat correlates with nothing
    return f"agreement {np.mean(known):.2f}" if known else "no two maps to compare"


def _laid_over(image: np.ndarray, heat: np.ndarray) -> np.ndarray:
    """An image [H, W, 3] under a map [H, W], the more of the map the hotter it is."""
    from matplotlib import colormaps

    share = HEAT * (0.35 + 0.65 * heat[..., None])
    return (1 - share) * image + share * colormaps["turbo"](heat)[..., :3]


def _as_address(image: np.ndarray) -> str:
    """A picture [H, W, 3] as a data: address of a PNG whose longer side is `SIDE` pixels or a little more."""
    from matplotlib.image import imsave

    times = max(1, -(-SIDE // max(image.shape[:2])))
    file = io.BytesIO()
    imsave(file, np.kron(np.clip(image, 0, 1), np.ones((times, times, 1))), format="png", origin="upper")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
