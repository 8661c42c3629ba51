"""What an image is on its way from a file to the network."""

from collections.abc import Callable
from typing import TypeAlias

from PIL import Image
from torch import Tensor

Pixels: TypeAlias = Image.Image | Tensor  # RGB, or float (bands, height, width)
Transform: TypeAlias = Callable[[Pixels], Tensor]
RGB = 3  # bands that readers make of images by themselves
# torchvision's, by which its ImageFolder knows images
IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
