"""Draws the levels of the package, docs/architecture.svg, from its import statements.

python -m tests.draw_architecture
"""

from pathlib import Path

from tests.test_imports import LEVELS, PACKAGE, imported_packages

PICTURE = PACKAGE.parent / "docs" / "architecture.svg"
WIDTH, LEVEL_HEIGHT, BOX = 960, 96, (132, 40)
LINE = '<line x1="{:.0f}" y1="{:.0f}" x2="{:.0f}" y2="{:.0f}" stroke="#8a94a6" stroke-opacity="0.6"/>'
RECTANGLE = '<rect x="{:.0f}" y="{:.0f}" width="{}" height="{}" rx="6" fill="#eef3fb" stroke="#3b5b92"/>'
NAME = '<text x="{:.0f}" y="{:.0f}" text-anchor="middle" fill="#1c2b45">{}</text>'
HEAD = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0} {1}" font-family="sans-serif" font-size="15">\n'
    '<rect width="{0}" height="{1}" fill="white"/>'
)


def package_imports() -> dict[str, set[str]]:
    """Returns the packages that each package imports from."""
    imports: dict[str, set[str]] = {package: set() for package in LEVELS}
    for path in PACKAGE.rglob("*.py"):
        package = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if package in imports:
            imports[package] |= imported_packages(path)
    return imports


def direct_imports(imports: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Leaves out imports of packages that are reached by way of another imported package as well."""

    def reached(package: str) -> set[str]:
        return imports[package].union(*map(reached, imports[package]))

    indirect = {package: set().union(*map(reached, imports[package])) for package in imports}
    return [(package, other) for package in sorted(imports) for other in sorted(imports[package] - indirect[package])]


def draw(imports: dict[str, set[str]]) -> str:
    """Draws an SVG with a row of boxes for each level, and a line for each direct import."""
    highest = max(LEVELS.values())
    rows = [[package for package in LEVELS if LEVELS[package] == level] for level in range(highest + 1)]
    rows.append(["tools"])
    centers = {
        package: (WIDTH * (position + 0.5) / len(packages), LEVEL_HEIGHT * (len(rows) - level - 0.5))
        for level, packages in enumerate(rows)
        for position, package in enumerate(packages)
    }
    width, height = BOX
    return "\n".join(
        [
            HEAD.format(WIDTH, LEVEL_HEIGHT * len(rows)),
            *(LINE.format(*centers[package], *centers[other]) for package, other in direct_imports(imports)),
            *(RECTANGLE.format(x - width / 2, y - height / 2, width, height) for x, y in centers.values()),
            *(NAME.format(x, y + 5, package) for package, (x, y) in centers.items()),
            "</svg>\n",
        ]
    )


def main(picture: Path = PICTURE) -> None:
    """Writes the picture."""
    picture.write_text(draw(package_imports()))


if __name__ == "__main__":
    main()
