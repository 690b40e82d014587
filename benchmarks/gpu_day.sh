#!/usr/bin/env bash
# One command on a machine with a GPU: tests this checkout there and measures it, without network, in under ten minutes.
#
#   OUT=results bash benchmarks/gpu_day.sh [--dry] [--wheels FOLDER]
#
#   OUT       the folder for results, eight files (default: benchmarks/results/gpu); the page of them is printed
#   PYTHON    the interpreter, which has torch (default: python3)
#   --wheels  a folder of wheels, from which what benchmarks/gpu/wheels.txt names and the machine lacks is installed,
#             for this run alone
#   --dry     on the processor, with tiny shapes: whether all of it works, not how fast anything is
#
# Every stage has its own limit and keeps what it has so far, so that an interrupted run is still worth something.
# Exit status: 0 where every stage ended well and in time.
set -u
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3} OUT=${OUT:-benchmarks/results/gpu} DEVICE=cuda WHEELS='' DRY='' FACTOR=1
while [ $# -gt 0 ]; do
    case $1 in
        # A dry run is about whether things work, on however busy a machine.
        --dry) DRY=--dry DEVICE=cpu FACTOR=10 ;;
        --wheels) WHEELS=${2:?--wheels needs a folder}; shift ;;
        *) echo "gpu_day.sh: unknown argument $1" >&2; exit 2 ;;
    esac
    shift
done

mkdir -p "$OUT" || exit 2
OUT=$(cd "$OUT" && pwd)
rm -f "$OUT"/{machine,ops,steps,oracle,table,stages}.json "$OUT"/tests.xml "$OUT"/log.txt
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
export PYTHONPATH="$WORK/site:$PWD" PYTHONDONTWRITEBYTECODE=1 BLOCKYARD_TEST_DEVICE=$DEVICE
# What one stage compiles the next ones have.
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$WORK/triton}
[ -z "$DRY" ] || export TRITON_INTERPRET=1

failed=0 stages=''
# stage NAME SECONDS COMMAND…: runs it, and ends it as Ctrl-C would when its time is over.
stage() {
    local name=$1 limit=$(($2 * FACTOR)) begin=$SECONDS status=0 how
    shift 2
    echo "== $name: $*" >> "$OUT/log.txt"
    timeout --signal=INT --kill-after=20 "$limit" "$@" >> "$OUT/log.txt" 2>&1 || status=$?
    case $status in
        0) how=done ;;
        124 | 137) how='out of time' ;;
        *) how="failed with $status" ;;
    esac
    [ "$how" = done ] || failed=1
    echo "$name: $how, $((SECONDS - begin)) s of $limit"
    stages="$stages${stages:+, }{\"name\": \"$name\", \"outcome\": \"$how\", \"seconds\": $((SECONDS - begin)), \"limit\": $limit}"
    echo "[$stages]" > "$OUT/stages.json"
}

if [ -n "$WHEELS" ]; then
    WHEELS=$(cd "$WHEELS" && pwd) || exit 2
    missing=$("$PYTHON" -m benchmarks.gpu.stage --missing benchmarks/gpu/wheels.txt --wheels "$WHEELS")
    # Each is named, so nothing is taken that the machine has in a version of its own, torch for one.
    [ -z "$missing" ] || stage wheels 60 "$PYTHON" -m pip install --quiet --no-index --no-deps \
        --find-links "$WHEELS" --target "$WORK/site" $missing
fi
stage machine 25 "$PYTHON" -m benchmarks.gpu.machine $DRY --out "$OUT/machine.json"
stage tests 175 "$PYTHON" -m pytest -q -p no:cacheprovider -W default -m gpu \
    --timeout $((60 * FACTOR)) --junitxml "$OUT/tests.xml" tests/gpu tests/kernels/triton
stage ops 130 "$PYTHON" -m benchmarks.gpu.ops $DRY --out "$OUT/ops.json"
stage steps 140 "$PYTHON" -m benchmarks.gpu.steps $DRY --out "$OUT/steps.json"
stage oracle 70 "$PYTHON" -m benchmarks.gpu.oracle $DRY --out "$OUT/oracle.json"
stage table 30 "$PYTHON" -m benchmarks.gpu.table $DRY --out "$OUT/table.json"
"$PYTHON" -m benchmarks.gpu.report "$OUT" || failed=1
exit $failed
