# Sourced by tools/test and tools/quickstart: one environment in the clone, made once and reused.
# Expects: root (the clone), say_as (the name that messages carry). Sets: venv.
# shellcheck shell=bash disable=SC2154

venv="$root/.venv"
torch_floor=2.11
torch_for_cpu=2.13.0

say() { printf '%s: %s\n' "$say_as" "$*" >&2; }

die() {
    say "$@"
    exit 2
}

fits() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }

find_python() {
    local name found=""
    for name in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
        if fits "$name"; then
            command -v "$name"
            return
        fi
        found+="${found:+, }$("$name" --version 2>/dev/null || echo "no $name")"
    done
    die "Python 3.10 or newer is needed, found: $found. Install one, with its venv module."
}

# What decides whether the environment is up to date: where the clone lies and everything metadata is made of.
fingerprint() {
    printf '%s\n' "$root"
    cat -- "$root/pyproject.toml" "$root"/packages/*/pyproject.toml "$root/tools/editable_hook.py" | cksum
}

# Whether this interpreter sees a torch that is recent enough.
has_torch() {
    "$1" - "$torch_floor" <<'PY' 2>/dev/null
import sys
from importlib.metadata import version

def release(text):
    return [int(part) for part in text.split("+")[0].split(".")[:2]]

sys.exit(release(version("torch")) < release(sys.argv[1]))
PY
}

make_venv() {
    local python options=()
    python=$(find_python)
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        die "$("$python" --version) at $python has no venv module. On Debian and Ubuntu: apt install python3-venv"
    # A virtual environment made from another one sees the base interpreter's packages, never that other one's.
    if has_torch "$python" && "$python" -c 'import sys; sys.exit(sys.prefix != sys.base_prefix)'; then
        options+=(--system-site-packages)
        say "using the torch that $python already has"
    fi
    say "making .venv with $("$python" --version), $python"
    "$python" -m venv --clear ${options[@]+"${options[@]}"} "$venv"
}

install() {
    "$venv/bin/python" -m pip install "$@" ||
        die "pip could not install $*. Without a network, install torch and the packages into an environment of yours" \
            "and run this with --here"
}

install_torch() {
    local wanted="torch==$torch_for_cpu" why="no NVIDIA GPU here"
    if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
        wanted="torch>=$torch_floor" why="an NVIDIA GPU is here"
    fi
    say "installing $wanted ($why): a download of about 0.2 GB for a CPU build, 3 GB for the CUDA build that" \
        "Linux gets by default; an extra index or find-links folder set for pip is honoured"
    install "$wanted"
}

# prepare EXTRA SIZE: the environment with the three packages, editable, and one extra of the root; SIZE for the message.
prepare() {
    local stamp="$venv/dmuon-fingerprint-$1"
    if [[ -f $stamp && $(<"$stamp") == "$(fingerprint)" ]] && "$venv/bin/python" -c ""; then
        return
    fi
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 || make_venv
    has_torch "$venv/bin/python" || install_torch
    say "installing the three packages, editable, and the extra '$1' ($2)"
    # From inside, so that the path may hold any character that has a meaning in a requirement.
    (cd -- "$root" && install --quiet -e ".[$1]")
    fingerprint >"$stamp"
}
