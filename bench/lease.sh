#!/usr/bin/env bash
# What to run on a device that is lent for half an hour, in three commands of less than ten minutes each, or for less:
#
#   bash bench/lease.sh 0 250     # a look, within so many seconds: checks, the first of each section, some surveys
#   bash bench/lease.sh 1         # checks, squares, prefill, attention, fp8, int8, surveys of schedules
#   bash bench/lease.sh 2         # decode, W4A16, epilogues, grouped, tf32, f32, rows, conv, more surveys
#   bash bench/lease.sh 3         # compute-sanitizer, and counters of single kernels by ncu
#   bash bench/lease.sh --dry-run # all of them on a device that computes nothing: for CI
#
# It needs a Python with NumPy, PyTorch and CuPy, and nothing else: no network, no pip, no C compiler, no cffi.
# Results are in $OUT (or ./lease-out): lease-N.json, written after each row, and lease-N.log.
set -uo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
out="${OUT:-$PWD/lease-out}"
limit=590 # seconds; a command of a lease has 600

more=() modules=(numpy torch cupy)
commands=("${1:-}")
if [[ "${1:-}" == --dry-run ]]; then
  more=(--dry-run --seconds "${2:-180}")
  modules=(numpy)
  commands=(0 1 2 3)
elif [[ -n "${2:-}" ]]; then
  more=(--seconds "$2")
fi
case "${commands[*]}" in
  0 | 1 | 2 | 3 | "0 1 2 3") ;;
  *) sed -n '2,11s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 2 ;;
esac

# The Python that has PyTorch; looking for a module costs nothing, importing it seconds.
python=""
wanted='import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, sys.argv[1:])))'
for one in "${PYTHON:-python3}" python3 /opt/torch/.venv/bin/python3 python; do
  command -v "$one" >/dev/null || continue
  python="${python:-$one}"
  if "$one" -c "$wanted" "${modules[@]}"; then
    python="$one"
    break
  fi
done
[[ -n "$python" ]] || { echo "there is no Python"; exit 1; }

# kernels/ and targets/ are packages of portmm once it is installed; here a copy stands in for that.
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/site" "$out"
cp -R "$root/portmm" "$work/site/portmm"
rm -f "$work/site/portmm/kernels" "$work/site/portmm/targets" # links, where there are such
cp -R "$root/kernels" "$root/targets" "$work/site/portmm/"

# What is compiled outlives a command, so that the next one finds it while the machine is warm.
kept="${TMPDIR:-/tmp}/portmm-lease-$(id -u)"
if ! mkdir -p -m 700 "$kept" || [[ ! -O "$kept" ]]; then kept="$work"; fi
export PYTHONPATH="$work/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export PORTMM_CACHE="${PORTMM_LEASE_CACHE:-$kept/cache}" PORTMM_TUNED=off
export TORCHINDUCTOR_CACHE_DIR="$kept/inductor" TRITON_CACHE_DIR="$kept/triton" CUPY_CACHE_DIR="$kept/cupy"
# Its pool of compiling processes would outlive a worker that is killed.
export TORCHINDUCTOR_COMPILE_THREADS=1
unset PORTMM_TARGET

status=0
for number in "${commands[@]}"; do
  echo "== lease $number: $("$python" -V 2>&1), $(nproc) cores, results in $out"
  timeout --kill-after=5 "$((limit - 5))" "$python" "$root/bench/lease.py" "$number" --out "$out" "${more[@]}" \
    2>&1 | tee "$out/lease-$number.log" || status=1
done
exit "$status"
