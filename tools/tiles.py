r"""Cuts a georeferenced scene into tiles of one label each.

    timm-moe-dg tiles SCENE.tif LABELS.geojson --size 224 --output DATA
    timm-moe-dg finetune --dataset place_folder --data-dir DATA

The labels are polygons, or a GeoTIFF whose values are classes. A tile has the
label that covers most of it. Whole blocks of tiles are drawn for validation
and test. Each further scene adds a group to the same folder; --split ood_test
holds it out. Reading scenes needs `pip install 'timm_moe_dg[geo]'`.
"""

import io
import shutil
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from timm_moe_dg.cli.tool import ToolParser, tool, tool_parser
from timm_moe_dg.cli.values import fraction_to_1, non_negative_int, positive_int
from timm_moe_dg.data.rasters import HEADER, TileOptions, cut_tiles
from timm_moe_dg.data.readers.places import PARTS
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.storage.files import replaced, write_rows, write_text


def build_parser() -> ToolParser:
    """Builds the command line."""
    parser = tool_parser("tiles.py", __doc__, "SCENE LABELS --output DIR [options]")
    add = parser.add_argument
    add("scene", metavar="SCENE", help="GeoTIFF")
    add("labels", metavar="LABELS", help="GeoJSON of polygons, or a GeoTIFF of classes, in any CRS")
    add("--size", type=positive_int, default=224, metavar="PIXELS", help="side of a tile (default: %(default)s)")
    add("--column", default="label", metavar="NAME", help="property that names the label (default: %(default)s)")
    cover = "least share of a tile that its label covers (default: %(default)s)"
    add("--cover", type=fraction_to_1, default=0.5, metavar="SHARE", help=cover)
    block = "side of the blocks that are drawn for a split (default: %(default)s)"
    add("--block", type=positive_int, default=8, metavar="TILES", help=block)
    add("--seed", type=non_negative_int, default=0, metavar="N", help="random split (default: %(default)s)")
    add("--split", choices=PARTS, help="split of all tiles (default: by blocks)")
    add("--output", type=Path, required=True, metavar="DIR", help="folder to add tiles to, with its metadata.csv")
    return parser


@tool
def main(argv: Sequence[str]) -> None:
    """Runs the command line."""
    args = build_parser().parse_args(argv)
    group, table = args.output / Path(args.scene).stem, args.output / "metadata.csv"
    if group.exists():
        raise ArgumentError.of("output", str(args.output), f"holds {group.name} already; choose another, or remove it")
    text = io.StringIO((table.read_text() if table.exists() else ",".join(HEADER)).rstrip("\n") + "\n")
    is_new = not args.output.exists()
    if text.readline() != ",".join(HEADER) + "\n":
        raise ArgumentError.of("output", str(args.output), "holds a metadata.csv with other columns; choose another")
    options = TileOptions(**{field.name: vars(args)[field.name] for field in fields(TileOptions)})
    try:
        with replaced(group) as folder:
            rows, counts = cut_tiles(args.scene, args.labels, folder, options)
    except BaseException:
        if is_new:
            shutil.rmtree(args.output, ignore_errors=True)
        raise
    text.seek(0, io.SEEK_END)
    write_rows(text, rows)
    write_text(table, text.getvalue())
    print("\n".join(f"{name}: {count} tiles" for name, count in counts.items() if count))
    print(f"written: {group}, {table}")


if __name__ == "__main__":
    main()
