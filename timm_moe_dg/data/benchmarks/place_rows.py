"""Benchmarks of images from places or cameras, with their official splits or in DomainBed's form.

WILDS's protocol and DomainBed's give different numbers, so they have different names here.
"""

from functools import partial

from ..readers.blue_marble import SIDE, blue_marble
from ..readers.places import read_place_folder
from ..readers.wilds import (
    HOSPITALS,
    REGIONS,
    SIX_REGIONS,
    read_camelyon,
    read_fmow,
    read_fmow_by_region,
    read_fmow_lao,
    read_iwildcam,
)
from .benchmark import DEFAULTS, Benchmark

_FMOW_LICENSE = "FMoW Challenge Public License"
_WILDS = {**DEFAULTS, "lr": 1e-4, "batch_size": 64}

_release = partial(Benchmark, upright=False, license=_FMOW_LICENSE, layout="`fmow_v1.1`")
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
        reader=read_camelyon,
        domains=HOSPITALS,
        num_classes=2,
        images=dict(zip(HOSPITALS, (59436, 34904, 85054, 129838, 146722), strict=True)),
        checkpoint_freq=100,
        eval_train=True,
        source="WILDS camelyon17_v1.0, a domain for each hospital",
        license="CC0",
        layout="`camelyon17_v1.0`",
    ),
    _fmow_domains(
        name="WILDSFMoW",
        reader=read_fmow_by_region,
        domains=SIX_REGIONS,
        source="WILDS fmow_v1.1, DomainBed's six domains: five regions and the other images",
    ),
    _fmow_domains(
        name="WILDSFMoW_five_regions",
        reader=partial(read_fmow_by_region, domains=REGIONS),
        domains=REGIONS,
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
        reader=read_fmow,
        source="WILDS fmow_v1.1, split by time, regions pooled",
    ),
    _fmow(
        name="FMoW_regions",
        reader=partial(read_fmow, pooled=False),
        hparams={**_WILDS, "batch_size": 32},
        source="WILDS fmow_v1.1, split by time, a domain for each region",
    ),
    _fmow(name="FMoW_LAO", reader=read_fmow_lao, source="WILDS fmow_v1.1, tested on Asia, regions pooled"),
    _fmow(
        name="FMoW_LAO_regions",
        reader=partial(read_fmow_lao, pooled=False),
        hparams={**_WILDS, "batch_size": 32},
        source="WILDS fmow_v1.1, tested on Asia, a domain for each region",
    ),
    _iwildcam(
        name="iWildCam",
        reader=read_iwildcam,
        hparams={**DEFAULTS, "lr": 3e-5, "batch_size": 16},
        source="WILDS iwildcam_v2.0, split by camera trap",
    ),
    _iwildcam(
        name="iWildCam_locations",
        reader=partial(read_iwildcam, pooled=False),
        hparams={**DEFAULTS, "lr": 3e-5, "batch_size": 8},
        domains_per_step=2,
        source="WILDS iwildcam_v2.0, split by camera trap, a domain for each trap",
    ),
)
