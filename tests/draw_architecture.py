"""Draws the package's floors, docs/architecture.svg, from its import statements.

python -m tests.draw_architecture
"""

from pathlib import Path

from tests.test_imports import LEVELS, PACKAGE, imported_packages

PICTURE = PACKAGE.parent / "docs" / "architecture.svg"
WIDTH, FLOOR, BOX = 960, 96, (132, 40)
BELOW_ALL = "errors"  # imported by nearly every room: its lines would hide the others
LINE = '<line x1="{:.0f}" y1="{:.0f}" x2="{:.0f}" y2="{:.0f}" stroke="#8a94a6" stroke-opacity="0.6"/>'
ROOM = '<rect x="{:.0f}" y="{:.0f}" width="{}" height="{}" rx="6" fill="#eef3fb" stroke="#3b5b92"/>'
NAME = '<text x="{:.0f}" y="{:.0f}" text-anchor="middle" fill="#1c2b45">{}</text>'
HEAD = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0} {1}" font-family="sans-serif" font-size="15">\n'
    '<rect width="{0}" height="{1}" fill="white"/>'
)


def room_imports() -> dict[str, set[str]]:
    """The rooms that each room imports from."""
    found: dict[str, set[str]] = {room: set() for room in LEVELS}
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room in found:
            found[room] |= imported_packages(path)
    return found


def places(floors: list[list[str]]) -> dict[str, tuple[float, float]]:
    """The center of each room; the floor that imports from all others is on top."""
    return {
        room: (WIDTH * (position + 0.5) / len(rooms), FLOOR * (len(floors) - level - 0.5))
        for level, rooms in enumerate(floors)
        for position, room in enumerate(rooms)
    }


def draw(imports: dict[str, set[str]]) -> str:
    """The picture as SVG: a row of boxes per floor, a line wherever a room imports from one below."""
    highest = max(LEVELS.values())
    floors = [sorted(room for room in LEVELS if LEVELS[room] == level) for level in range(highest + 1)]
    at, (width, height) = places([*floors, ["tools"]]), BOX
    lines = [(room, other) for room in sorted(imports) for other in sorted(imports[room] - {BELOW_ALL})]
    return "\n".join(
        [
            HEAD.format(WIDTH, FLOOR * (highest + 2)),
            *(LINE.format(*at[room], *at[other]) for room, other in lines),
            *(ROOM.format(x - width / 2, y - height / 2, width, height) for x, y in at.values()),
            *(NAME.format(x, y + 5, room) for room, (x, y) in at.items()),
            "</svg>\n",
        ]
    )


def main(picture: Path = PICTURE) -> None:
    """Writes the picture."""
    picture.write_text(draw(room_imports()))


if __name__ == "__main__":
    main()
