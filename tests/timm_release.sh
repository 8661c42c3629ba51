#!/usr/bin/env bash
# Runs timm's own tests of models, as the installed release was published with them, for the models of this package.
#
#   bash tests/timm_release.sh                # all that need no weights from the Hub; about ten minutes on one core
#   bash tests/timm_release.sh default_cfgs   # those whose names an expression of pytest's -k selects
#
# They come in timm's source distribution. It tells families without a grid of features by lists of name patterns and of
# modules, and those that torch.jit.script cannot read by another; ours are added to these lists in the unpacked copy, and
# nothing else is changed.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

version=$(python -c 'import timm; print(timm.__version__)')
pip download --quiet --no-deps --no-binary timm --dest "$work" "timm==$version"
tar -xzf "$work/timm-$version.tar.gz" -C "$work" --strip-components 1 --wildcards '*/tests/*' '*/pyproject.toml'
sed -i \
  -e "s/^NON_STD_FILTERS = \[/&'gmoe*', 'moge*', 'sfmoe*', 'hybrid_sfmoe*', 'erm_le*', 'd3g*',/" \
  -e "s/^EXCLUDE_JIT_FILTERS = \[/&'gmoe*', 'moge*', 'sfmoe*', 'hybrid_sfmoe*', 'erm_le*', 'd3g*',/" \
  -e "s/^FEAT_INTER_FILTERS = \[/&'gmoe', 'moge', 'backbone', 'erm_le', 'd3g',/" \
  "$work/tests/test_models.py"
[[ $(grep -c "'moge" "$work/tests/test_models.py") == 3 ]] || {
  echo "timm_release.sh: timm $version has no such lists any more; look at its tests/test_models.py" >&2
  exit 1
}

cd "$work"
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
python -m pytest -p timm_moe_dg -q --disable-warnings --durations=5 tests/test_models.py \
  -k "(gmoe or moge or sfmoe or erm_le or d3g) and not pretrained${1:+ and ($1)}"
