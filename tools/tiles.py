r"""Cuts a georeferenced scene into tiles of one label each.

    timm-moe-dg tiles SCENE.tif LABELS.geojson --size 224 --output DATA
    timm-moe-dg finetune --dataset place_folder --data-dir DATA

The labels are polygons, or a GeoTIFF whose values are classes. A tile has the
label that covers most of it. Whole blocks of tiles are drawn for validation
and test. Each further scene adds a group to the same folder; --split ood_test
holds it out. Reading scenes needs `pip install 'timm_moe_dg[geo]'`.
"""

import shutil
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from timm_moe_dg.cli.tool import ToolParser, tool, tool_parser
from timm_moe_dg.cli.values import fraction_to_1, non_negative_int, positive_int
from timm_moe_dg.data.readers.csv_tables import read_csv
from timm_moe_dg.data.readers.places import PARTS
from timm_moe_dg.data.tiles import HEADER, TILE, TileOptions, cut_tiles
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.storage.files import owned, replaced, replaced_file, write_csv


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


def earlier_rows(table: Path) -> list[tuple[str, ...]]:
    """Reads the rows of scenes that were cut before, also from a table that a spreadsheet saved."""
    if not table.exists() or not table.read_text(encoding="utf-8-sig").partition("\n")[2].strip():
        return []
    columns = read_csv(table, HEADER)
    if set(columns) != set(HEADER):
        raise ArgumentError.of("output", str(table.parent), "holds a metadata.csv with other columns; choose another")
    return list(zip(*(columns[name] for name in HEADER), strict=True))


@tool
def main(argv: Sequence[str]) -> None:
    """Runs the command line."""
    args = build_parser().parse_args(argv)
    group, table = args.output / Path(args.scene).stem, args.output / "metadata.csv"
    options = TileOptions(**{field.name: vars(args)[field.name] for field in fields(TileOptions)})
    with owned(args.output):
        is_new = not args.output.exists()
        try:
            # A group has its rows once all of its tiles are written; tiles without rows are those of a killed command
            earlier = earlier_rows(table)
            others = [path for path in group.glob("*") if not TILE.fullmatch(path.name)]
            if others or any(row[-1] == group.name for row in earlier):
                remedy = f"holds {group.name} already; choose another, or remove its folder and rows"
                raise ArgumentError.of("output", str(args.output), remedy)
            with replaced(group) as folder:
                rows, counts = cut_tiles(args.scene, args.labels, folder, options)
            with replaced_file(table) as fresh:
                write_csv(fresh, [HEADER, *earlier, *rows])
        except BaseException:
            if is_new:
                shutil.rmtree(args.output, ignore_errors=True)
            raise
    print("\n".join(f"{name}: {count} tiles" for name, count in counts.items() if count))
    print(f"written: {group}, {table}")


if __name__ == "__main__":
    main()
