"""Spectral bands of images, by number or name, and those of RGB among them by wavelength.

A full name is that of a sensor's band with the sensor before it (sentinel2:B04, landsat:B4), a color (red, green, blue,
nir), or a wavelength in nanometers (665nm).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..errors import ArgumentError, ImageReadError, did_you_mean

RGB = 3  # bands
SHORTEST, LONGEST = 300, 15_000  # nanometers, from ultraviolet to thermal infrared
NEAR = 30  # nanometers from the center of a color

Value = TypeVar("Value")

COLORS = {"red": 665.0, "green": 560.0, "blue": 490.0}
_COLORS = {**COLORS, "nir": 850.0}
_NAIP = {"R": "red", "G": "green", "B": "blue", "N": "nir", "NIR": "nir"}
# Centers of the bands of Sentinel-2A (ESA), and of Landsat 8 and 9 (USGS)
_SENSORS = {
    "sentinel2": {
        **{"B01": 443.0, "B02": 492.0, "B03": 560.0, "B04": 665.0, "B05": 704.0, "B06": 740.0, "B07": 783.0},
        **{"B08": 833.0, "B8A": 865.0, "B09": 945.0, "B10": 1374.0, "B11": 1614.0, "B12": 2202.0},
    },
    "landsat": {
        **{"B1": 443.0, "B2": 482.0, "B3": 561.0, "B4": 655.0, "B5": 865.0, "B6": 1609.0, "B7": 2201.0},
        **{"B8": 590.0, "B9": 1373.0, "B10": 10895.0, "B11": 12005.0},
    },
}


@dataclass(frozen=True)
class Bands:
    """The bands of images in order: their number, and their full names if they have any."""

    count: int
    names: tuple[str, ...] = ()
    # Whether values are physical, by real numbers or a stated scale; None as long as no training images decided it
    physical: bool | None = field(default=None, compare=False)

    @classmethod
    def of(cls, bands: "Bands | int | Sequence[str]") -> "Bands":
        """Returns the bands of a number, or of full names."""
        if isinstance(bands, Bands):
            return bands
        return cls(bands) if isinstance(bands, int) else cls(len(bands), tuple(bands))

    @property
    def is_rgb(self) -> bool:
        """Whether files are read as RGB images: three bands without names."""
        return self.count == RGB and not self.names

    @property
    def scaling(self) -> str:
        """What the values of files are divided by, or multiplied with."""
        if self.physical:
            return "real numbers, or whole ones with the scale and offset that files state"
        return "whole numbers divided by their type's maximum"

    @property
    def option(self) -> tuple[str, object]:
        """Name and value of the option that gives these bands."""
        return ("bands", list(self.names)) if self.names else ("in_chans", self.count)

    @property
    def colors(self) -> list[int | None]:
        """Each band's position in RGB, or None: red, green and blue are the nearest bands within 30 nm."""
        positions: list[int | None] = [None] * self.count
        for color, center in enumerate(COLORS.values() if self.names else ()):
            distance, band = min((abs(wavelength(name) - center), band) for band, name in enumerate(self.names))
            if distance < NEAR:
                positions[band] = color
        return positions

    def from_rgb(self, values: Sequence[Value], other: Value) -> list[Value]:
        """Returns a value for each band: that of its color in RGB, or the `other`."""
        return [other if color is None else values[color % len(values)] for color in self.colors]

    def pick(self, path: str, descriptions: Sequence[str | None]) -> list[int]:
        """Returns the positions of these bands in a file with some descriptions: by name if both have names.

        Raises:
            ImageReadError: The file lacks a band, or has no names and another number of bands.
        """
        readings = [_readings(text or "") for text in descriptions] if self.names else []
        if not any(readings):
            if len(descriptions) == self.count:
                return list(range(self.count))
            remedy = f"or give --in-chans {len(descriptions)} if all files and the model have as many"
            if self.names:
                remedy = "or write the names of its bands into it, as descriptions"
            counts = f"has {len(descriptions)} bands, expected {self.count}"
            raise ImageReadError(f"image={path!r}: {counts}; leave the file out, {remedy}")
        if missing := [band for band in self.names if not any(band in names for names in readings)]:
            listed = ", ".join(text or "?" for text in descriptions)
            remedy = "leave the file out, or give --bands that all files and the model have"
            raise ImageReadError(f"image={path!r}: lacks the band {missing[0]}, its bands are {listed}; {remedy}")
        return [next(place for place, names in enumerate(readings) if band in names) for band in self.names]


RGB_BANDS = Bands(RGB)


def band_names(words: Sequence[str]) -> tuple[str, ...]:
    """Returns the full names of bands.

    A name that two sensors have, such as B11, belongs to the sensor of the other names. Names with a zero (B04) are
    Sentinel-2's, and those with SR or ST (SR_B4) are Landsat's.

    Raises:
        ArgumentError: A name is unknown, given twice, or of two sensors.

    >>> timm_moe_dg.data.bands.band_names(["B02", "B8A", "B11", "665"])
    ('sentinel2:B02', 'sentinel2:B8A', 'sentinel2:B11', '665nm')
    """
    readings = {word: _readings(word) for word in words}
    if unknown := [word for word in words if not readings[word]]:
        raise ArgumentError.of("bands", unknown[0], _remedy(unknown[0]))
    sensors = [{_sensor(name) for name in names} for word, names in readings.items() if ":" not in word]
    common = set.intersection(*([some for some in sensors if "" not in some] or [set()]))
    full = []
    for word in words:
        names = [name for name in readings[word] if len(readings[word]) == 1 or common == {_sensor(name)}]
        if not names:
            raise ArgumentError.of("bands", word, f"is a band of two sensors; write {' or '.join(readings[word])}")
        if names[0] in full:
            raise ArgumentError.of("bands", word, f"{names[0]} is named twice; name each band once")
        full += names
    return tuple(full)


def band_settings(bands: Sequence[str] | None, in_chans: int | None) -> dict[str, Any]:
    """Returns the options `bands` and `in_chans` that follow from --bands; none without it."""
    if not bands:
        return {}
    names = band_names(bands)
    if in_chans not in (None, RGB, len(names)):
        raise ArgumentError.of("in_chans", in_chans, f"--bands names {len(names)}; leave it out")
    return {"bands": list(names), "in_chans": len(names)}


def wavelength(name: str) -> float:
    """Returns the center of a band in nanometers, by its full name."""
    sensor, _, band = name.rpartition(":")
    return _SENSORS[sensor][band] if sensor else _COLORS.get(name) or float(name.removesuffix("nm"))


def describes_rgb(descriptions: Sequence[str]) -> bool:
    """Whether the descriptions of three bands are red, green and blue in this order, or no names of bands."""
    pairs = zip(COLORS.values(), map(_readings, descriptions), strict=True)
    return all(not names or any(abs(wavelength(name) - color) < NEAR for name in names) for color, names in pairs)


def _sensor(name: str) -> str:
    return name.rpartition(":")[0]


def _readings(word: str) -> list[str]:
    """The full names that a word may stand for, such as sentinel2:B04 and landsat:B4 for B4."""
    # GDAL describes a band as "B4, central wavelength 665 nm"
    sensor, _, name = word.partition(",")[0].strip().rpartition(":")
    if sensor.casefold() in ("", "naip") and (color := _NAIP.get(name.upper()) or name.casefold()) in _COLORS:
        return [color]
    if not sensor and (center := re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:nm)?", name)):
        return [f"{float(center[1]):g}nm"] if SHORTEST <= float(center[1]) <= LONGEST else []
    if not (match := re.fullmatch(r"(S[RT]_)?B(0?)(\d{1,2}|8A)", name.upper())):
        return []
    product, zero, number = match.groups()
    spelled = {"sentinel2": f"B{number:0>2}", "landsat": f"B{number}"}
    if sensor:
        possible = [sensor.casefold()]
    else:
        possible = ["landsat"] if product else ["sentinel2"] if zero else ["sentinel2", "landsat"]
    return [f"{one}:{spelled[one]}" for one in possible if spelled.get(one) in _SENSORS.get(one, ())]


def _remedy(word: str) -> str:
    if re.fullmatch(r"-?\d+(\.\d+)?(nm)?", word):
        return f"no wavelength from {SHORTEST} to {LONGEST} nm; give the band's center in nanometers"
    names = [*_COLORS, *(name for bands in _SENSORS.values() for name in bands)]
    question = did_you_mean(word, names, 3)
    return f"no such band; {question or 'give names such as B04, landsat:B4 or red, or wavelengths such as 665'}"
