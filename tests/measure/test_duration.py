"""Times as people say them."""

from timm_moe_dg.measure.duration import duration


def test_estimates_have_the_unit_that_fits():
    words = [duration(seconds) for seconds in (0, 89, 90, 3600, 7200)]
    assert words == ["about 0 s", "about 89 s", "about 2 min", "about 60 min", "about 2 h"]
