"""Every form of activation that the sorted experts know, as a module."""

from torch import nn

from timm_moe_dg.layers.feed_forwards import GatedActivation

FORMS = {
    "gelu": nn.GELU(),
    "tanh": nn.GELU(approximate="tanh"),
    "silu": nn.SiLU(),
    "swiglu": GatedActivation(nn.SiLU()),
    "geglu": GatedActivation(nn.GELU()),
    "gate_last": GatedActivation(nn.GELU(approximate="tanh"), gate_last=True),
}
