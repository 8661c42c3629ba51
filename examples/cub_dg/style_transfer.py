"""Fast style transfer: a feed-forward network that repaints a photograph in one learned style.

Johnson et al., Perceptual Losses for Real-Time Style Transfer, ECCV 2016, with instance normalization and nearest
upsampling before convolutions, as in PyTorch's fast-neural-style example. Parameters have that example's names, so that
its weights load.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

STRIDE = 4  # the product of the network's strides, of which the sides of its input are multiples


class PaddedConv(nn.Module):
    """A convolution with reflection padding, which keeps the size at stride 1, and optional upsampling before it."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int = 1, upsample: int = 1) -> None:
        super().__init__()
        self.upsample = upsample
        self.padding = kernel // 2
        self.conv2d = nn.Conv2d(in_channels, out_channels, kernel, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, out_channels, H * upsample / stride, W * upsample / stride)."""
        if self.upsample > 1:
            x = F.interpolate(x, scale_factor=self.upsample, mode="nearest")
        return self.conv2d(F.pad(x, [self.padding] * 4, mode="reflect"))


class ResidualBlock(nn.Module):
    """Two normalized 3 x 3 convolutions, added to their input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = PaddedConv(channels, channels, 3)
        self.in1 = nn.InstanceNorm2d(channels, affine=True)
        self.conv2 = PaddedConv(channels, channels, 3)
        self.in2 = nn.InstanceNorm2d(channels, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H, W)."""
        return x + self.in2(self.conv2(F.relu(self.in1(self.conv1(x)))))


class StyleTransferNetwork(nn.Module):
    """Repaints images: 9 x 9 to 32 channels, two halvings to 128, five residual blocks, two doublings, 9 x 9 to 3."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = PaddedConv(3, 32, 9)
        self.conv2 = PaddedConv(32, 64, 3, stride=2)
        self.conv3 = PaddedConv(64, 128, 3, stride=2)
        self.res1, self.res2, self.res3, self.res4, self.res5 = (ResidualBlock(128) for _ in range(5))
        self.deconv1 = PaddedConv(128, 64, 3, upsample=2)
        self.deconv2 = PaddedConv(64, 32, 3, upsample=2)
        self.deconv3 = PaddedConv(32, 3, 9)
        self.in1, self.in2, self.in3, self.in4, self.in5 = (
            nn.InstanceNorm2d(channels, affine=True) for channels in (32, 64, 128, 64, 32)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) values 0 to 255, H and W multiples of 4 -> the same shape, not limited to 0 to 255."""
        for conv, norm in ((self.conv1, self.in1), (self.conv2, self.in2), (self.conv3, self.in3)):
            x = F.relu(norm(conv(x)))
        for block in (self.res1, self.res2, self.res3, self.res4, self.res5):
            x = block(x)
        for conv, norm in ((self.deconv1, self.in4), (self.deconv2, self.in5)):
            x = F.relu(norm(conv(x)))
        return self.deconv3(x)

    @torch.inference_mode()
    def restyle(self, image: Tensor) -> Tensor:
        """Repaints one image of any size: (3, H, W) uint8 -> (3, H, W) uint8.

        The lower and right edges are extended by reflection to a multiple of 4, and cut off again.
        """
        _, height, width = image.shape
        x = F.pad(image.float()[None], (0, -width % STRIDE, 0, -height % STRIDE), mode="reflect")
        return self(x)[0, :, :height, :width].clamp(0, 255).round().to(torch.uint8)


def load_style(path: Path) -> StyleTransferNetwork:
    """Loads a style's network from a .safetensors or .pth file, in evaluation mode."""
    state = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    # Old files hold running statistics, which instance normalization no longer keeps.
    weights = {name: value for name, value in state.items() if not name.rpartition(".")[2].startswith("running_")}
    network = StyleTransferNetwork()
    network.load_state_dict(weights)
    return network.eval()
