"""Benchmarks of folders: DomainBed's photographs, drawings and renderings, and the user's own images.

Learning rates and weight decays are those of GMoE (ICLR 2023), Table 8, where it has the benchmark, otherwise
DomainBed's. Numbers of images are those of the sets as DomainBed prepares them (their sums are in its paper, Gulrajani
and Lopez-Paz, 2021).
"""

from functools import partial

from ...errors import DataError
from ..domains import DataDir
from ..readers.folders import FolderDomain, read_domain_net, read_folder
from .benchmark import DEFAULTS, Benchmark


def _read_folder(data_dir: DataDir, evaluating: bool = False) -> list[FolderDomain]:
    if data_dir is None:
        raise DataError("data_dir=None: give --data-dir, the folder that holds DOMAIN/CLASS/IMAGE")
    return read_folder(data_dir, evaluating)


_published = partial(Benchmark, reader=_read_folder, eval_train=True, upright=False)

PHOTOGRAPH_ROWS = (
    Benchmark(
        name="folder",
        reader=_read_folder,
        source="your own images",
        license="that of your images",
        takes_evaluating=True,
    ),
    Benchmark(
        name="emoji_styles",
        reader=_read_folder,
        aliases=("emoji_styles",),
        domains=("fluent_flat", "fluent_high_contrast", "noto", "openmoji", "twemoji"),
        classes=(
            *("building", "clothing", "face", "hand", "mammal", "meal", "person", "plant_and_fruit"),
            *("small_animal", "tool", "vehicle", "weather"),
        ),
        num_classes=12,
        images={"fluent_flat": 1104, "fluent_high_contrast": 1104, "noto": 1158, "openmoji": 1158, "twemoji": 1158},
        hparams={**DEFAULTS, "lr": 1e-3, "batch_size": 16},
        search_space="digits",
        steps=1501,
        augmentation="digit",
        image_size=48,
        source="five sets of emoji, drawn by examples/emoji_styles/make_data.py",
        license="CC BY 4.0, CC BY-SA 4.0, Apache-2.0, MIT",
        shares_photographs=True,
        split_by_photograph=True,
    ),
    _published(
        name="PACS",
        aliases=("PACS", "pacs", "kfold"),
        domains=("art_painting", "cartoon", "photo", "sketch"),
        num_classes=7,
        images={"art_painting": 2048, "cartoon": 2344, "photo": 1670, "sketch": 3929},
        hparams={**DEFAULTS, "lr": 3e-5},
        source="Li et al., ICCV 2017",
        license="not stated",
    ),
    _published(
        name="VLCS",
        aliases=("VLCS", "vlcs"),
        domains=("Caltech101", "LabelMe", "SUN09", "VOC2007"),
        num_classes=5,
        images={"Caltech101": 1415, "LabelMe": 2656, "SUN09": 3282, "VOC2007": 3376},
        hparams={**DEFAULTS, "lr": 3e-5, "weight_decay": 1e-6},
        swad_hparams={"swad_tolerance_ratio": 0.2},
        swad_checkpoint_freq=50,
        source="Fang et al., ICCV 2013, five classes of four older sets",
        license="those of the four sets",
    ),
    _published(
        name="OfficeHome",
        aliases=("office_home", "OfficeHome", "Office-Home", "OfficeHomeDataset_10072016", "officehome"),
        domains=("Art", "Clipart", "Product", "Real World"),
        num_classes=65,
        images={"Art": 2427, "Clipart": 4365, "Product": 4439, "Real World": 4357},
        hparams={**DEFAULTS, "lr": 1e-5, "weight_decay": 1e-6},  # the authors later named 3e-5
        source="Venkateswara et al., CVPR 2017",
        license="non-commercial research and teaching",
    ),
    _published(
        name="TerraIncognita",
        aliases=("terra_incognita", "TerraIncognita", "Terra_Incognita", "terra"),
        domains=("location_100", "location_38", "location_43", "location_46"),
        num_classes=10,
        hparams={**DEFAULTS, "lr": 5e-5, "weight_decay": 1e-4},
        source="Beery et al., ECCV 2018, four locations chosen by DomainBed; numbers of images differ between copies",
        license="CDLA-Permissive-1.0",
    ),
    _published(
        name="DomainNet",
        reader=read_domain_net,
        aliases=("domain_net", "DomainNet", "domainnet"),
        domains=("clipart", "infograph", "painting", "quickdraw", "real", "sketch"),
        num_classes=345,
        images={
            "clipart": 48129,
            "infograph": 51605,
            "painting": 72266,
            "quickdraw": 172500,
            "real": 172947,
            "sketch": 69128,
        },
        search_space="domain_net",
        steps=15_001,
        checkpoint_freq=1000,
        swad_checkpoint_freq=500,
        source="Peng et al., ICCV 2019, without its duplicates",
        license="non-commercial research and teaching",
    ),
    _published(
        name="SVIRO",
        aliases=("sviro", "SVIRO", "SVIRO_DOMAINBED"),
        domains=("aclass", "escape", "hilux", "i3", "lexus", "tesla", "tiguan", "tucson", "x5", "zoe"),
        num_classes=7,
        source="Dias Da Cruz et al., WACV 2020, the subset for DomainBed",
        license="CC BY-NC-SA 4.0",
    ),
    _published(
        name="CUB_DG",
        aliases=("CUB_DG", "CUB-DG", "cub_dg"),
        domains=("Candy", "Mosaic", "Natural", "Udnie"),
        num_classes=200,
        images=dict.fromkeys(("Candy", "Mosaic", "Natural", "Udnie"), 11_788),
        source="Li et al., ICLR 2023 (GMoE), CUB-200-2011 and three restyled versions",
        license="non-commercial research and teaching",
        shares_photographs=True,
    ),
    _published(
        name="CUB_DG_paintings",  # also published as CUB-DG, but not what GMoE's and SF-MoE's tables are about
        aliases=("CUB_DG_paintings", "CUB-DG", "CUB_DG"),
        domains=("Art", "Cartoon", "Paint", "Photo"),
        num_classes=200,
        source="Min et al., ECCV 2022, CUB-200-2011 and three restyled versions",
        license="non-commercial research and teaching",
        shares_photographs=True,
    ),
)
