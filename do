#!/usr/bin/env bash
# The one door to every chore: ./do CHORE [ARGS]. Each sets up what it needs in .venv, once.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

export DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}"                          # DeepSpeed would look for a GPU
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"                          # bitwise needs equal thread counts
export TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$PWD/.cache/torch-extensions}"
export PIP_DISABLE_PIP_VERSION_CHECK=1

venv="$PWD/.venv"
floor=(tests/test_surface.py tests/test_imports.py tests/test_sizes.py tests/test_layers.py)

usage() {
    cat <<'END'
usage: ./do CHORE [ARGS]

  demo      verify real distributed steps against one process, then find a live fault
  test      run the tests (ARGS go to pytest)
  check     lint, types, docs, and the tests of surface, imports, sizes and layers
  lint      ruff, and the contracts of import-linter
  types     mypy, strict
  docs      run every example in README.md, docs/ and docstrings
  bench     run the benchmarks (ARGS: names of files in benchmarks/)
  matrix    verify the full product of factors then, without ARGS, do `who`; resumable, one JSON line a cell
  who       predict every optimizer class on every backend, measure some, write docs/matrix.md; resumable
  setup     only set up
END
}

say() { printf '[do] %s\n' "$*" >&2; }

# The stamps hold a hash of what they were made from: a changed pin, or a set-up that was killed, is set up again.
setup() {
    local wanted python packages="$venv/truestep-setup" op="$TORCH_EXTENSIONS_DIR/truestep-setup"
    wanted="$(cat pyproject.toml constraints.txt | cksum) $PWD"
    export PATH="$venv/bin:$PATH"  # DeepSpeed looks for ninja there
    mkdir -p .cache "$TORCH_EXTENSIONS_DIR"
    exec 9>.cache/setup.lock
    if command -v flock >/dev/null && ! flock -n 9; then  # two chores at once set up once
        say "waiting for another ./do that is setting up"
        flock 9
    fi
    if [[ "$(cat "$packages" 2>/dev/null)" != "$wanted" ]]; then
        python="${PYTHON:-python3}"
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || {
            say "expected Python 3.10 or newer, found $("$python" -V 2>/dev/null || echo none). Set PYTHON to one: PYTHON=python3.12 ./do setup"
            exit 2
        }
        say "setting up .venv (once)"
        [[ -x "$venv/bin/pip" ]] || "$python" -m venv "$venv"
        "$venv/bin/python" -m pip install "$(grep '^torch==' constraints.txt)"  # alone and first: a CPU build is kept
        "$venv/bin/python" -m pip install -c constraints.txt -e '.[all]'
        echo "$wanted" >"$packages"
    fi
    if [[ "$(cat "$op" 2>/dev/null)" != "$wanted" ]]; then
        say "compiling DeepSpeed's op (once)"
        "$venv/bin/python" -m truestep.backends.zero_ops
        echo "$wanted" >"$op"
    fi
    exec 9>&-
}

lint() {
    ruff check .
    ruff format --check .
    lint-imports --no-logo
}

types() { mypy; }

docs() { python -m pytest -q --doctest-modules src tests/test_docs.py "$@"; }

check() {
    lint
    types
    docs
    python -m pytest -q "${floor[@]}"
}

bench() {
    local names=("$@") name
    (($#)) || names=(benchmarks/*.py)
    for name in "${names[@]}"; do
        name="benchmarks/$(basename "$name" .py).py"
        [[ -f "$name" ]] || { say "no benchmark $name"; exit 2; }
        python "$name"
    done
}

chore="${1:-help}"
(($# == 0)) || shift
case "$chore" in
    demo | test | check | lint | types | docs | bench | matrix | who | setup) ;;
    help | -h | --help) usage && exit ;;
    *)
        say "no chore $chore: expected one of demo test check lint types docs bench matrix who setup"
        exit 2
        ;;
esac

setup
case "$chore" in
    demo) exec python -m truestep demo "$@" ;;
    test) exec python -m pytest "$@" ;;  # without ARGS: testpaths
    matrix)
        python -m truestep.verification.matrix "$@"
        (($#)) || python tests/accumulate/matrix.py
        (($#)) || exec python -m truestep.verification.who
        ;;
    who) exec python -m truestep.verification.who "$@" ;;
    setup) say "ready" ;;
    *) "$chore" "$@" ;;
esac
