"""What is known of images without torchvision is what torchvision says."""

from torchvision.datasets.folder import IMG_EXTENSIONS

from timm_moe_dg.data.pixels import IMAGE_EXTENSIONS


def test_the_same_files_are_images():
    assert IMAGE_EXTENSIONS == IMG_EXTENSIONS
