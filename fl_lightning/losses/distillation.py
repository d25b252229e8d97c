"""Distilling a client's last own extractor into the extractor that it has just received.

Jin, Xu, Wang, Hsieh, Wu, Lin, "FedCPD: Personalized Federated Learning with Prototype-Enhanced Representation and
Memory Distillation", IJCAI 2025, section 3.3: CBAM attention, cross-layer fusion of the student's maps, squared
distances to the teacher's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from fl_lightning.core.forward import Forward
from fl_lightning.core.freezing import frozen_copy, set_modes
from fl_lightning.core.precision import widened
from fl_lightning.core.term import Term, require_whole_model
from fl_lightning.errors import ConfigError, require, require_choices
from fl_lightning.models.cbam import CBAM
from fl_lightning.models.small_maps import convolution, convolved, reached
from fl_lightning.models.split import Body, SplitModel
from fl_lightning.shapes import checked

if TYPE_CHECKING:
    from fl_lightning.core.host import Host

Reduction = Literal["mean", "sum"]
Target = Literal["fused", "raw"]
Attention = Literal["side", "inline"]
Tap = Literal["block", "preact"]
Parameters = Literal["private", "shared"]


@dataclass(frozen=True)
class Distillation:
    """How feature maps are attended to, fused and compared.

    Args:
        feature_target: ``fused`` compares fused student maps F* with the teacher's; ``raw`` the maps themselves.
        mid_channels: channels to which the fusion brings all levels, >= 1.
        smooth_convs: 3x3 convolutions after the fusion's sum, 1 or 2.
        recursive: fuse with the fused map of the level above.
        tie_fusion: one set of fusion convolutions for attention and feature maps.
        reduction: ``mean`` over all of a map's values; ``sum`` over them, mean over the batch.
        attention: ``side`` keeps CBAM out of the classification path; ``inline`` puts it into the body after every
            block, so that predictions pass through it and it travels with the body.
        tap: ``block`` takes a block's output, ``preact`` what enters its last ReLU.
        parameters: attention and fusion stay with the client (``private``) or are averaged, too (``shared``).
    """

    feature_target: Target = "fused"
    mid_channels: int = 64
    smooth_convs: int = 1
    recursive: bool = False
    tie_fusion: bool = False
    reduction: Reduction = "mean"
    attention: Attention = "side"
    tap: Tap = "block"
    parameters: Parameters = "private"

    def __post_init__(self) -> None:
        require_choices(
            "Distillation",
            feature_target=(self.feature_target, Target),
            reduction=(self.reduction, Reduction),
            attention=(self.attention, Attention),
            tap=(self.tap, Tap),
            parameters=(self.parameters, Parameters),
        )
        require(self.mid_channels >= 1, "Distillation.mid_channels", "must be >= 1", self.mid_channels)
        require(self.smooth_convs in (1, 2), "Distillation.smooth_convs", "must be 1 or 2", self.smooth_convs)

    def fusion(self, channels: Sequence[int]) -> CrossLayerFusion:
        """A fusion of maps with so many channels each."""
        return CrossLayerFusion(channels, self.mid_channels, self.smooth_convs, self.recursive)


class CrossLayerFusion(nn.Module):
    """Fuses every level's map with the one above it, top-down (FedCPD, section 3.3: "from the bottom up").

    A^{l,*} = Cv2_l( up(Cv1_{l+1}(A^{l+1})) + Cv1_l(A^l) + Cv3_l(A^l) ), without the first summand at the top level. Cv1
    is 1x1, C_l → M; Cv3 3x3, C_l → M; Cv2 3x3, M → C_l; up is bilinear to level l's size, corners not aligned. Biases,
    no norms, no activations.

    Args:
        channels: C_l of each level, first to last.
        mid_channels: M, to which all levels are brought.
        smooth_convs: 3x3 convolutions in Cv2, 1 or 2.
        recursive: fuse with the fused map above, A^{l+1,*}, instead of A^{l+1}.
    """

    def __init__(
        self, channels: Sequence[int], mid_channels: int = 64, smooth_convs: int = 1, recursive: bool = False
    ) -> None:
        super().__init__()
        require(len(channels) >= 1, "CrossLayerFusion.channels", "must name one level or more", list(channels))
        require(mid_channels >= 1, "CrossLayerFusion.mid_channels", "must be >= 1", mid_channels)
        require(smooth_convs in (1, 2), "CrossLayerFusion.smooth_convs", "must be 1 or 2", smooth_convs)
        self.recursive = recursive
        self.lateral = nn.ModuleList(nn.Conv2d(size, mid_channels, 1) for size in channels)  # Cv1
        self.smooth = nn.ModuleList(_smoothing(mid_channels, size, smooth_convs) for size in channels)  # Cv2
        self.enhance = nn.ModuleList(nn.Conv2d(size, mid_channels, 3, padding=1) for size in channels)  # Cv3

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Fuse maps [B, C_l, H_l, W_l]; each result has its level's shape.

        Raises:
            ValueError: if there are more or fewer maps than levels.
        """
        if len(maps) != len(self.lateral):
            raise ValueError(f"CrossLayerFusion: made for {len(self.lateral)} levels, got {len(maps)} maps")
        fused: list[Tensor] = [None] * len(maps)  # type: ignore[list-item]
        above: Tensor | None = None  # Cv1 of the level above
        for level in reversed(range(len(maps))):
            own = None if level == 0 or self.recursive else convolved(self.lateral[level], maps[level])
            total = self._sum(level, maps[level]) if own is None else own + convolved(self.enhance[level], maps[level])
            if above is not None:
                total = total + _enlarged(above, maps[level].shape[2:])
            smooth = self.smooth[level]
            for layer in smooth if isinstance(smooth, nn.Sequential) else [smooth]:
                total = convolved(layer, total)
            fused[level] = total
            above = convolved(self.lateral[level], fused[level]) if self.recursive and level else own
        return fused

    def _sum(self, level: int, own: Tensor) -> Tensor:
        """Cv1 + Cv3 of a level's map where nothing else needs Cv1 of it: one convolution by the sum of both kernels."""
        narrow, wide = self.lateral[level], self.enhance[level]
        assert isinstance(narrow, nn.Conv2d)
        assert isinstance(wide, nn.Conv2d)
        assert narrow.bias is not None
        assert wide.bias is not None
        kernel = reached(wide.weight, own)
        rows, columns = (size // 2 for size in kernel.shape[2:])
        return convolution(own, kernel + F.pad(narrow.weight, (columns, columns, rows, rows)), wide.bias + narrow.bias)


def _enlarged(above: Tensor, size: torch.Size) -> Tensor:
    same = above.shape[2:] == size
    return above if same else F.interpolate(above, size, mode="bilinear", align_corners=False)


def _smoothing(mid_channels: int, channels: int, convs: int) -> nn.Module:
    last = nn.Conv2d(mid_channels, channels, 3, padding=1)
    return last if convs == 1 else nn.Sequential(nn.Conv2d(mid_channels, mid_channels, 3, padding=1), last)


@checked
def feature_distillation_loss(
    student_features: Sequence[Float[Tensor, "B ..."]],
    teacher_features: Sequence[Float[Tensor, "B ..."]],
    reduction: str = "mean",
) -> Float[Tensor, ""]:
    """Squared distances between two lists of feature maps, summed over levels: FedCPD's L_fd for one kind of map.

    L = Σ_l mean (student_l − teacher_l)²; ``sum`` sums over channels and positions and takes the mean over the batch.
    The whole L_fd is this for the attention maps plus this for the feature maps.

    Args:
        student_features: maps [B, C_l, H_l, W_l], one a level.
        teacher_features: maps of the same shapes, constants.
        reduction: ``mean`` or ``sum``.

    Returns:
        Scalar, float32.

    Raises:
        ValueError: if levels or shapes differ, for no level at all, or for an unknown reduction.

    >>> student, teacher = torch.tensor([[[[4., 6.], [8., 10.]]]]), torch.tensor([[[[1., 2.], [3., 4.]]]])
    >>> float(feature_distillation_loss([student], [teacher]))
    21.5
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"feature_distillation_loss: `reduction` must be 'mean' or 'sum', got {reduction!r}")
    ours, theirs = [tuple(f.shape) for f in student_features], [tuple(f.shape) for f in teacher_features]
    if ours != theirs or not ours:
        raise ValueError(f"feature_distillation_loss: needs levels of equal shapes, got {ours} and {theirs}")
    levels = []
    for student, teacher in zip(student_features, teacher_features, strict=True):
        distance = F.mse_loss(widened(student), widened(teacher).detach(), reduction=reduction)
        levels.append(distance if reduction == "mean" else distance / max(len(student), 1))
    return torch.stack(levels).sum()


class FeatureDistillation(Term):
    """Keep what the client's own last extractor saw, while the received one is trained (FedCPD's L_fd).

    The teacher is the client's extractor as its last local fit left it, with its attention, frozen and in eval mode; a
    client that never took part has none, and the term is 0. Student and teacher are compared at every feature map of
    the body, in their attention maps (CBAM) and in the maps themselves, after the student's maps were fused across
    levels. Vectors count as 1x1 maps, sequences [T, E] as Tx1 maps of E channels.

    Args:
        weight: γ, >= 0.
        distillation: how maps are attended to, fused and compared.
    """

    paper = "Jin et al., IJCAI 2025"
    reaches = ("model.body",)

    def __init__(self, weight: float = 1.0, distillation: Distillation = Distillation()) -> None:
        super().__init__(weight)
        self.options = distillation
        self.inline = distillation.attention == "inline"
        self.preact = distillation.tap == "preact"
        if distillation.parameters == "shared":
            fused = ("feature_fusion",) if distillation.feature_target == "fused" else ()
            self.shared = ("cbam", "attention_fusion", *fused)  # type: ignore[misc]
        self._taught = False

    has_teacher: Tensor  # bool, whether the client has finished a local fit

    def alter(self, model: SplitModel) -> None:
        """Cut the body into finer stages where maps are tapped inside a block, or attention stands between two."""
        if self.weight and (self.inline or self.preact):
            self._restage(model.body, model.feature_shapes())

    @override
    def setup(self, host: Host) -> None:
        if not self.weight:  # the method without the term: no parameters, no state
            return
        require_whole_model(self, host)
        body = host.model.body
        self.step = 2 if self.inline or self.preact else 1
        shapes = host.model.feature_shapes()
        if self.preact:  # (before ReLU, after it), with attention in between where it is inline
            self.step = 3 if self.inline else 2
        channels = [_map_channels(shape) for shape in shapes[:: self.step]]
        where = f"{type(host.model).__name__} has no feature map to distil; set the weight (gamma) to 0"
        require(bool(channels), "model", where)
        self.cbam = nn.ModuleList() if self.inline else nn.ModuleList(CBAM(size) for size in channels)
        self.attention_fusion = self.options.fusion(channels)
        if self.options.feature_target == "fused":
            tied = self.options.tie_fusion
            self.feature_fusion = self.attention_fusion if tied else self.options.fusion(channels)
        self.teacher = frozen_copy(body)
        if type(body) is Body:
            self.teacher.neck = nn.Identity()  # only maps are compared
        self.teacher_cbam = frozen_copy(self.cbam)
        self.register_buffer("has_teacher", torch.zeros((), dtype=torch.bool))

    def _restage(self, body: Body, shapes: Sequence[tuple[int, ...]]) -> None:
        """Cut the body's stages into finer ones, so that every tapped map is the output of a stage."""
        staged = 0 < len(shapes) == len(body.stages)  # a module of one's own gives maps, and has no stages
        require(staged, "FeatureDistillation.distillation", "inline and preact need a body made of stages")
        stages: list[nn.Module] = []
        for stage, shape in zip(body.stages, shapes, strict=True):
            tail: list[nn.Module] = []
            rule = "inline needs feature maps [C, H, W], which this model's are not; use side"
            require(not self.inline or len(shape) == 3, "FeatureDistillation.attention", rule, "inline")
            if self.preact:
                ends = isinstance(stage, nn.Sequential) and isinstance(stage[-1], nn.ReLU)
                if not ends:
                    rule = "preact needs stages that end in a ReLU, which this model's do not; use block"
                    raise ConfigError("FeatureDistillation.distillation.tap", rule, self.options.tap)
                assert isinstance(stage, nn.Sequential)
                stage, tail = stage[:-1], [nn.ReLU()]  # not in place: the tapped map must stay
            attention = [CBAM(_map_channels(shape))] if self.inline else []
            stages += [stage, *attention, *tail]
        body.stages = nn.ModuleList(stages)

    def train(self, mode: bool = True) -> FeatureDistillation:
        """The teacher stays in eval mode."""
        set_modes(self, mode, (self.teacher, self.teacher_cbam) if self.weight else ())
        return self

    @override
    def receive(self, host: Host, message: object) -> None:
        self._taught = bool(self.has_teacher)  # once a round: reading it in every step would wait for the device

    @override
    def forward(self, host: Host, out: Forward) -> Tensor:
        if not self._taught:
            return torch.zeros((), dtype=torch.float32, device=out.z.device)
        target_maps, target_attention = out.told(self._teach, self.teacher, self.teacher_cbam)
        maps, attention = out.through(self._maps, out.features, self.cbam)
        fused_attention = out.through(self.attention_fusion, attention)
        fused_maps = out.through(self.feature_fusion, maps) if self.options.feature_target == "fused" else maps
        of_attention = feature_distillation_loss(fused_attention, target_attention, self.options.reduction)
        return of_attention + feature_distillation_loss(fused_maps, target_maps, self.options.reduction)

    def _teach(self, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        return self._maps(self.teacher.forward_features(x)[0], self.teacher_cbam)

    def _maps(self, features: Sequence[Tensor], cbam: nn.ModuleList) -> tuple[list[Tensor], list[Tensor]]:
        """F^l and A^l of every level."""
        maps = [_as_map(feature) for feature in features[:: self.step]]
        if self.inline:
            return maps, [_as_map(feature) for feature in features[1 :: self.step]]
        return maps, [attend(feature) for attend, feature in zip(cbam, maps, strict=True)]

    @torch.no_grad()
    def after_fit(self, host: Host) -> None:
        """Remember the extractor as the next round's teacher."""
        for student, teacher in ((host.model.body, self.teacher), (self.cbam, self.teacher_cbam)):
            entries = student.state_dict()
            for name, tensor in teacher.state_dict().items():
                tensor.copy_(entries[name])
        self.has_teacher.fill_(True)


def _map_channels(shape: tuple[int, ...]) -> int:
    """Channels of the map that a feature of one sample (without the batch axis) is."""
    return shape[-1] if len(shape) == 2 else shape[0]


def _as_map(feature: Tensor) -> Tensor:
    """[B, C, H, W] as it is; a vector [B, C] as a 1x1 map, a sequence [B, T, C] as a Tx1 map."""
    if feature.ndim == 2:
        return feature[:, :, None, None]
    return feature.transpose(1, 2)[..., None] if feature.ndim == 3 else feature
