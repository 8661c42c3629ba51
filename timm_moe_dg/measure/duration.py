"""How long something still takes, in words."""


def duration(seconds: float) -> str:
    """Formats a time that is an estimate: two units at most."""
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if seconds < 90:
        return f"about {seconds:.0f} s"
    return f"about {minutes} min" if minutes < 120 else f"about {hours} h"
