"""The optimizer of tests that train every method: small steps whatever the scale of a method's losses."""

import torch


def adam(parameters, lr=1e-3):
    """Adam in one operation a step, not in ten a parameter."""
    return torch.optim.Adam(parameters, lr=lr, fused=True)
