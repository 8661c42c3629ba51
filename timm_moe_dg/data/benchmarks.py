"""Benchmarks by name. Images are read only when a row's `read` is called.

Rows made of scikit-learn's digits need no download. Those from MNIST's and Fashion-MNIST's files are DomainBed's, with
its learning rate, batch, numbers of steps and evaluations, and no augmentation. Their images have 28 x 28 pixels, which
patches of 16 do not divide: give `--model-kwargs patch_size=7`, or 4 or 14, or `--img-size 32`.

Learning rates and weight decays of photographs are those of GMoE (ICLR 2023), Table 8, where it has the benchmark,
otherwise DomainBed's. Numbers of images are those of the sets as DomainBed prepares them (their sums are in its paper,
Gulrajani and Lopez-Paz, 2021).

Images from places or cameras have official splits, or DomainBed's form. WILDS's protocol and DomainBed's give different
numbers, so they have different names here.
"""

from collections.abc import Collection, Mapping
from functools import partial
from types import MappingProxyType

from ..errors import ArgumentError, choices
from .benchmark import DEFAULTS, Benchmark
from .readers import digits, wilds
from .readers.blue_marble import SIDE, blue_marble
from .readers.digits import FASHION_MNIST, MNIST, IdxRelease
from .readers.folders import read_folder
from .readers.hub_data import HUB, read_hub
from .readers.places import read_place_folder

_DIGITS = "scikit-learn's load_digits (UCI, test part)"
_HPARAMS = {**DEFAULTS, "lr": 3e-4, "batch_size": 16}


def _images_dealt_in_turn(domains: Collection[object]) -> dict[str, int]:
    # MNIST and Fashion-MNIST have 70,000 images each.
    return {str(name): len(range(position, 70_000, len(domains))) for position, name in enumerate(domains)}


def _domainbed(release: IdxRelease, prefix: str, source: str, license: str) -> tuple[Benchmark, Benchmark]:
    """DomainBed's two benchmarks from one set of files."""
    row = partial(
        Benchmark,
        hparams={**DEFAULTS, "lr": 1e-3, "batch_size": 64},
        search_space="small_images",
        checkpoint_freq=100,
        augmentation="none",
        image_size=digits.MNIST_SIDE,
        eval_train=True,
        source=source,
        license=license,
        layout="four IDX files",
    )
    rotated = row(
        name=f"Rotated{prefix}",
        reader=partial(digits.read_rotated, release=release),
        classes=release.classes,
        images=_images_dealt_in_turn(digits.ANGLES),
    )
    colored = row(
        name=f"Colored{prefix}",
        reader=partial(digits.read_colored, release=release),
        classes=digits.COLORED_CLASSES,
        images=_images_dealt_in_turn(digits.COLOR_NOISE),
    )
    return rotated, colored


_handwritten = partial(
    Benchmark,
    classes=digits.CLASSES,
    hparams=_HPARAMS,
    search_space="digits",
    steps=501,
    checkpoint_freq=100,
    augmentation="digit",
    image_size=digits.STORED_SIZE,
    source=_DIGITS,
    license="CC BY 4.0",
    layout="no folder",
    takes_data_dir=False,
)

DIGIT_ROWS = (
    _handwritten(
        name="rotated_digits",
        reader=lambda data_dir: digits.rotated_digits(),
        domains=tuple(f"rot_{angle}" for angle in digits.ANGLES),
    ),
    _handwritten(
        name="colored_digits",
        reader=lambda data_dir: digits.colored_digits(),
        domains=tuple(digits.COLOR_NOISE),
        classes=digits.COLORED_CLASSES,
        augmentation="none",
    ),
    _handwritten(
        name="geo_digits",
        reader=lambda data_dir: digits.geo_digits(),
        hparams={**_HPARAMS, "lr": 1e-3},
        steps=601,
        checkpoint_freq=200,
        source=f"{_DIGITS}, placed on {len(digits.CONTINENTS)} continents",
    ),
    *_domainbed(MNIST, "MNIST", "LeCun et al., 1998, divided as in DomainBed", "CC BY-SA 3.0"),
    *_domainbed(FASHION_MNIST, "FashionMNIST", "Xiao et al., 2017, divided as in DomainBed", "MIT"),
)


_published = partial(Benchmark, reader=read_folder, eval_train=True, upright=False)

PHOTOGRAPH_ROWS = (
    Benchmark(
        name="folder",
        reader=read_folder,
        source="your own images",
        license="that of your images",
        takes_evaluating=True,
    ),
    Benchmark(
        name="emoji_styles",
        reader=read_folder,
        aliases=("emoji_styles",),
        classes=(
            *("building", "clothing", "face", "hand", "mammal", "meal", "person", "plant_and_fruit"),
            *("small_animal", "tool", "vehicle", "weather"),
        ),
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
        num_classes=7,
        images={"art_painting": 2048, "cartoon": 2344, "photo": 1670, "sketch": 3929},
        hparams={**DEFAULTS, "lr": 3e-5},
        source="Li et al., ICCV 2017",
        license="not stated",
    ),
    _published(
        name="VLCS",
        aliases=("VLCS", "vlcs"),
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
        aliases=("domain_net", "DomainNet", "domainnet"),
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


_WILDS = {**DEFAULTS, "lr": 1e-4, "batch_size": 64}

_release = partial(Benchmark, upright=False, license="FMoW Challenge Public License", layout="`fmow_v1.1`")
_fmow_domains = partial(_release, num_classes=62, checkpoint_freq=100, eval_train=True)
_fmow = partial(_release, hparams=_WILDS, steps=60_001, checkpoint_freq=2000, published={"classes": 62})
_earth = partial(
    Benchmark,
    reader=lambda data_dir: blue_marble(),
    hparams={**DEFAULTS, "lr": 1e-3, "batch_size": 16},
    search_space="digits",
    steps=601,
    checkpoint_freq=200,
    augmentation="none",
    image_size=SIDE,
    license="public domain (picture), BSD (map)",
    layout="no folder",
    takes_data_dir=False,
    published={"images": 10_561},
)
_iwildcam = partial(
    Benchmark,
    steps=97_001,
    checkpoint_freq=5000,
    image_size=448,
    upright=False,
    published={"classes": 182, "images": 203_029},
    license="CDLA-Permissive-1.0",
    layout="`iwildcam_v2.0`",
)

PLACE_ROWS = (
    Benchmark(
        name="WILDSCamelyon",
        upright=False,
        reader=wilds.read_camelyon,
        num_classes=2,
        images=dict(zip(wilds.HOSPITALS, (59436, 34904, 85054, 129838, 146722), strict=True)),
        checkpoint_freq=100,
        eval_train=True,
        source="WILDS camelyon17_v1.0, a domain for each hospital",
        license="CC0",
        layout="`camelyon17_v1.0`",
    ),
    _fmow_domains(
        name="WILDSFMoW",
        reader=wilds.read_fmow_by_region,
        domains=wilds.SIX_REGIONS,
        source="WILDS fmow_v1.1, DomainBed's six domains: five regions and the other images",
    ),
    _fmow_domains(
        name="WILDSFMoW_five_regions",
        reader=partial(wilds.read_fmow_by_region, domains=wilds.REGIONS),
        domains=wilds.REGIONS,
        source="WILDS fmow_v1.1, its five regions alone; does not compare with DomainBed's numbers",
    ),
    _earth(name="blue_marble", num_classes=5, source="NASA's Blue Marble and the Koeppen-Geiger map, main climates"),
    _earth(
        name="blue_marble_12",
        reader=lambda data_dir: blue_marble(level=2),
        num_classes=12,
        source="the same, climates of the second level",
    ),
    Benchmark(
        name="place_folder",
        reader=read_place_folder,
        takes_metadata_columns=True,
        takes_evaluating=True,
        source="your own images",
        license="that of your images",
        layout="`metadata.csv` and its images",
    ),
    _fmow(
        name="FMoW",
        published={"classes": 62, "images": 141_696},
        reader=wilds.read_fmow,
        source="WILDS fmow_v1.1, split by time, regions pooled",
    ),
    _fmow(
        name="FMoW_regions",
        reader=partial(wilds.read_fmow, pooled=False),
        hparams={**_WILDS, "batch_size": 32},
        source="WILDS fmow_v1.1, split by time, a domain for each region",
    ),
    _fmow(name="FMoW_LAO", reader=wilds.read_fmow_lao, source="WILDS fmow_v1.1, tested on Asia, regions pooled"),
    _fmow(
        name="FMoW_LAO_regions",
        reader=partial(wilds.read_fmow_lao, pooled=False),
        hparams={**_WILDS, "batch_size": 32},
        source="WILDS fmow_v1.1, tested on Asia, a domain for each region",
    ),
    _iwildcam(
        name="iWildCam",
        reader=wilds.read_iwildcam,
        hparams={**DEFAULTS, "lr": 3e-5, "batch_size": 16},
        source="WILDS iwildcam_v2.0, split by camera trap",
    ),
    _iwildcam(
        name="iWildCam_locations",
        reader=partial(wilds.read_iwildcam, pooled=False),
        hparams={**DEFAULTS, "lr": 3e-5, "batch_size": 8},
        domains_per_step=2,
        source="WILDS iwildcam_v2.0, split by camera trap, a domain for each trap",
    ),
)


_ROWS: dict[str, Benchmark] = {row.name: row for row in (*DIGIT_ROWS, *PHOTOGRAPH_ROWS, *PLACE_ROWS)}
BENCHMARKS: Mapping[str, Benchmark] = MappingProxyType(_ROWS)


def register_benchmark(row: Benchmark) -> Benchmark:
    """Adds a row to `BENCHMARKS`, in the module that defines it. Its name has no slash or colon, and is not taken.

    >>> from timm_moe_dg.data import Benchmark, read_folder, register_benchmark
    >>> row = register_benchmark(Benchmark(name="mine", reader=read_folder, source="my camera", license="mine"))
    """
    if not row.name or not set("/\\:").isdisjoint(row.name):
        remedy = "give a name without slashes and colons; run folders are named after it"
        raise ArgumentError.of("name", row.name, remedy)
    # Registering the same row again is no error.
    if _ROWS.setdefault(row.name, row) is not row:
        raise ArgumentError.of("name", row.name, "is the name of another benchmark; choose another")
    return row


def get_benchmark(name: str) -> Benchmark:
    """Looks up a name in `BENCHMARKS`, or makes a benchmark of hub:OWNER/NAME, which is downloaded when it is read."""
    if name in BENCHMARKS:
        return BENCHMARKS[name]
    path = name.removeprefix(HUB)
    if not path:
        raise ArgumentError.of("dataset", name, f"give {HUB}OWNER/NAME, such as {HUB}flwrlabs/pacs")
    if path == name:
        raise ArgumentError.of("dataset", name, choices([*BENCHMARKS, f"{HUB}OWNER/NAME"]))
    source = f"the Hub's data set {path}"
    return Benchmark(
        name=name, reader=lambda data_dir: read_hub(path), source=source, license="see its card", takes_data_dir=False
    )
