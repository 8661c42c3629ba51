#!/usr/bin/env bash
# Installs the package with different sets of versions, each in a fresh virtual environment that is removed afterwards,
# trains for a moment, and runs the fast tests. Packages are chosen by uv, since pip takes a quarter of an hour to find
# that the oldest ones go together.
#
#   bash tests/matrix.sh                 # everything: oldest pinned newest extras
#   bash tests/matrix.sh oldest extras   # some of it
#   bash tests/matrix.sh oldest -- tests/models -x   # pytest's arguments in place of the fast tests
#
# oldest: every lower bound that pyproject.toml names; pinned: torch 2.14.1 with torchvision 0.29.1; newest: whatever pip
# takes; extras: each extra alone, doing what it promises. One line per step with its seconds; the status is the number of
# steps that failed. An environment takes 5 GB below $TMPDIR, one at a time, and uv keeps what it has fetched.
set -uo pipefail
cd "$(dirname "$0")/.."
root=$PWD
unset PYTHONPATH
export PYTHONNOUSERSITE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 GOMP_SPINCOUNT=1000 MPLBACKEND=Agg UV_LINK_MODE=copy

sets=() tests=(-m "not slow")
while (($#)); do
  case $1 in
    --) tests=("${@:2}") && break ;;
    oldest | pinned | newest | extras) sets+=("$1") ;;
    *) echo "matrix.sh: '$1': choose from oldest, pinned, newest, extras" >&2 && exit 2 ;;
  esac
  shift
done
((${#sets[@]})) || sets=(oldest pinned newest extras)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/uv" && "$work/uv/bin/pip" install -q uv || exit 2
uv=$work/uv/bin/uv
failed=0
train=(tools/finetune.py --dataset rotated_digits --model gmoe_tiny_patch16 --img-size 32 --model-kwargs patch_size=8
  embed_dim=96 depth=4 "moe_layers=(2,3)" --steps 20 --checkpoint-freq 10 --batch-size 8)

step() { # step NAME COMMAND...: one line, and the end of the log where it failed
  local start=$SECONDS status=0
  "${@:2}" >"$work/log" 2>&1 || status=$?
  echo "$1: $([[ $status == 0 ]] && echo passed || echo "FAILED ($status)"), $((SECONDS - start)) s"
  if ((status)); then
    tail -n 40 "$work/log"
    failed=$((failed + 1))
  else
    tail -n 1 "$work/log"
  fi
  return $status
}

fresh() { # fresh NAME REQUIREMENTS...: a new environment, active
  rm -rf "$work/run"
  "$uv" venv -q --clear --seed --python python3 "$work/venv"
  # shellcheck disable=SC1091
  source "$work/venv/bin/activate"
  step "$1: install" "$uv" pip install -q "${@:2}"
}

whole() { # whole NAME REQUIREMENTS...: install, train, test
  fresh "$@" || return
  "$uv" pip list --format=freeze | grep -iE '^(torch|torchvision|timm|huggingface.hub|numpy|pillow|accelerate)=' | xargs
  step "$1: fine-tune" python "${train[@]}" --output "$work/run"
  step "$1: tests" python -m pytest --durations=20 "${tests[@]}"
}

lower_bounds() { # name==version of every lower bound in pyproject.toml
  python3 - <<'PYTHON'
import re, tomllib

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
listed = [*project["dependencies"], *sum(project["optional-dependencies"].values(), [])]
print(*(re.sub(">=", "==", one) for one in listed if ">=" in one), sep="\n")
PYTHON
}

extra() { # extra NAME COMMAND...: alone in an environment, it does what it is for
  fresh "[$1]" "$root[$1]" pytest hypothesis && step "[$1]: used" "${@:2}"
}

extras() {
  cp -r tests tools "$work" # the installed package is used, not this folder's
  cd "$work" || exit
  extra train bash -c "python ${train[*]@Q} --output $work/run && python tools/evaluate.py --model \
    local-dir:\$(dirname $work/run/*/best)/best --dataset rotated_digits --output $work/evaluated && ls $work/evaluated/*.png"
  extra plots python tools/benchmark.py models --models gmoe_tiny_patch16 --img-size 32 --rounds 2 --plot "$work/cost.png"
  python -c "from PIL import Image; Image.effect_mandelbrot((64, 64), (-2, -1, 1, 1), 9).convert('RGB').save('$work/a.png')"
  extra export python tools/export.py --model gmoe_tiny_patch16 --untrained --img-size 32 --images "$work/a.png"
  extra hub-data python -m pytest tests/data/readers/test_hub_data.py
  extra train,tiff python -m pytest tests/data/test_bands.py
  extra train,geo python -m pytest tests/data/readers/test_georeference.py tests/tools/test_tiles.py
  extra train,tracking python "${train[@]}" --output "$work/tracked" --log-tensorboard
  extra train,slurm python -m pytest tests/finetuning/test_jobs.py
  cd "$root" || exit
}

for set in "${sets[@]}"; do
  case $set in
    oldest)
      lower_bounds >"$work/oldest.txt"
      whole oldest -c "$work/oldest.txt" -e ".[dev]"
      ;;
    pinned) whole pinned -e ".[dev]" torch==2.14.1 torchvision==0.29.1 ;;
    newest) whole newest --upgrade -e ".[dev]" ;;
    extras) extras ;;
  esac
done
exit "$failed"
